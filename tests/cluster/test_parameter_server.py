"""Asynchronous training on real TensorFlow servers."""

import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import keras
import models
import numpy as np
import pytest
import tensorflow as tf
from helpers import delayed, loopback_bytes, result_of, tags_of, toy_data

import kdist
from kdist.cluster.local import LocalCluster
from kdist.cluster.spec import Task
from kdist.data.base import DataContext
from kdist.hooks import CheckpointSaver, Hook
from kdist.parameters.values.value_files import ValueFiles
from kdist.run.checkpoint import Checkpoints
from kdist.strategies import parameter_server

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("tasks_prepared")]


class StepNotes(Hook):
    """Notes staleness and example counts as they come."""

    def __init__(self) -> None:
        self.staleness: list[int] = []
        self.totals: Any = None

    def after_run(self, context: Any, values: Any) -> None:
        self.staleness += values.staleness.tolist()
        self.totals = values.totals if self.totals is None else self.totals + values.totals


def run_to_the_end(session: kdist.TrainSession) -> None:
    while not session.should_stop():
        session.run()


class NaiveReader(Hook):
    """Reads the values after every run and thinks of nothing else."""

    def __init__(self) -> None:
        self.read: list[tuple[int, dict[str, np.ndarray]]] = []

    def after_run(self, context: Any, values: Any) -> None:
        self.read.append((values.global_step, context.session.read()))


def counting_model() -> keras.Model:
    """Each update adds 1 to the kernel and to the bias, which live on different servers."""
    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    model.compile(keras.optimizers.SGD(1.0), loss=lambda y, y_pred: -keras.ops.sum(y_pred, -1))
    return model


def test_a_hook_that_only_reads_gets_values_of_one_step(run_dir: Path) -> None:
    hook = NaiveReader()
    trainer = kdist.Trainer(counting_model, "2ps2w", run_dir=run_dir, hooks=[hook], steps_per_call=4)
    trainer.fit(np.ones((40, 1), np.float32), np.ones((40, 1), np.float32), batch_size=4, steps=300, verbose=0)
    assert trainer.result.global_step == trainer.result.gradients.applied == 300
    assert trainer.result.extra_steps == 0
    for seen, values in hook.read:
        step = int(values["global_step"])
        # Workers went on while the hooks before this one were called.
        assert step >= seen
        assert float(values["parameters/dense/kernel"][0, 0]) == float(values["parameters/dense/bias"][0]) == step
    assert hook.read[-1][0] == 300


@pytest.mark.long
def test_a_hook_that_only_writes_loses_no_step(run_dir: Path) -> None:
    class Writer(Hook):
        def after_run(self, context: Any, values: Any) -> None:
            context.session.write({"learning_rate": 1.0})

    trainer = kdist.Trainer(counting_model, "2ps2w", run_dir=run_dir, hooks=[Writer()], steps_per_call=4)
    trainer.fit(np.ones((40, 1), np.float32), np.ones((40, 1), np.float32), batch_size=4, steps=300, verbose=0)
    assert trainer.result.global_step == trainer.result.gradients.applied == 300
    assert trainer.result.extra_steps == 0
    assert float(trainer.model.get_weights()[0][0, 0]) == 300


def test_steps_metrics_and_iterations_are_exact_with_four_workers(run_dir: Path) -> None:
    x, y = toy_data()
    notes = StepNotes()
    trainer = kdist.Trainer(models.mlp, cluster="1ps4w", run_dir=run_dir, hooks=[notes], steps_per_call=7)
    trainer.fit(x, y, batch_size=8, steps=500, verbose=0)

    result = result_of(run_dir)
    assert result["status"] == "done"
    assert result["stopped_by"] == "StopAtStep"
    assert result["global_step"] == result["gradients"]["applied"] == 500
    assert result["examples"] == 500 * 8
    assert int(trainer.model.optimizer.iterations) == 500
    counts = [
        v for v, variable in zip(notes.totals.values, trainer.model.metrics_variables) if variable.name == "count"
    ]
    assert [float(count) for count in counts] == [500 * 8, 500 * 8]
    # With four workers some gradient was computed from parameters that had changed meanwhile, and that is seen.
    assert len(notes.staleness) == 500
    assert min(notes.staleness) >= 0
    assert result["gradients"]["staleness_max"] == max(notes.staleness) > 0
    assert result["gradients"]["staleness_mean"] == pytest.approx(np.mean(notes.staleness))


def test_checkpoints_go_from_strategy_to_strategy_and_server_to_server(run_dir: Path) -> None:
    x, y = toy_data()
    steps = 0
    for cluster in ("1ps1w", "local", "2ps1w"):
        steps += 20
        trainer = kdist.Trainer(models.mlp, cluster=cluster, run_dir=run_dir, hooks=[CheckpointSaver(every_steps=10)])
        before = Checkpoints(run_dir / "checkpoints").newest()
        with trainer.session(x, y, batch_size=8, steps=steps, verbose=0) as session:
            assert session.first_step == steps - 20
            if before is not None:
                reader = tf.train.load_checkpoint(str(before))
                for name, value in session.strategy.values.read().items():
                    np.testing.assert_array_equal(value, reader.get_tensor(name), err_msg=name)
            while not session.should_stop():
                session.run()
        assert result_of(run_dir)["global_step"] == steps
    assert Checkpoints(run_dir / "checkpoints").steps() == [20, 30, 40, 50, 60]


def test_the_run_dir_is_complete_and_verbose_0_prints_nothing(run_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    x, y = toy_data()
    trainer = kdist.Trainer(models.mlp, cluster="1ps2w", run_dir=run_dir)
    trainer.fit(x, y, batch_size=8, steps=200, validation_data=(x, y), verbose=0)
    assert capfd.readouterr().out == ""
    found = {str(path.relative_to(run_dir)) for path in run_dir.rglob("*") if "tfevents" not in path.name}
    assert found == {
        "checkpoints",
        "checkpoints/checkpoint",
        *(f"checkpoints/ckpt-{step}.{end}" for step in (0, 200) for end in ("index", "data-00000-of-00001")),
        "logs",
        "metrics.csv",
        *(f"logs/{task}.log" for task in ("ps-0", "worker-0", "worker-1")),
        "model.keras",
        "placement.png",
        "placement.txt",
        "result.json",
        "tb",
        "tb/train",
        "tb/validation",
    }
    assert tags_of(run_dir / "tb" / "train") == {
        "loss",
        "accuracy",
        "updates/learning_rate",
        "epoch_loss",
        "epoch_accuracy",
        "perf/steps_per_sec",
        "perf/examples_per_sec",
        *(f"perf/{what}_per_sec/worker_{i}" for what in ("steps", "examples") for i in (0, 1)),
        "keras",
        "updates/staleness",
        "placement",
        "placement/picture",
    }
    assert tags_of(run_dir / "tb" / "validation") == {"loss", "accuracy", "epoch_loss", "epoch_accuracy"}
    loaded = keras.saving.load_model(run_dir / "model.keras")
    validation = result_of(run_dir)["metrics"]["validation"]
    assert loaded.evaluate(x, y, batch_size=8, verbose=0, return_dict=True) == pytest.approx(validation, rel=1e-5)


def test_slots_live_beside_their_parameter_and_one_tensor_travels_each_way(run_dir: Path) -> None:
    x, y = toy_data()
    trainer = kdist.Trainer(models.mlp, cluster="2ps1w", run_dir=run_dir, steps_per_call=1, placement="round_robin")
    with trainer.session(x, y, batch_size=8, steps=2, verbose=0) as session:
        session.run()
        store = session.strategy._store  # type: ignore[attr-defined]
        devices = {each.name: each.variable.device for each in store.values.slices()}
        parameters = {name.removeprefix("parameters/") for name in devices if name.startswith("parameters/")}
        for name in parameters:
            slots = [device for key, device in devices.items() if key.startswith(f"slots/{name}/")]
            assert set(slots) == {devices[f"parameters/{name}"]}
            assert len(slots) == 2
        assert {d.split("/device")[0] for d in devices.values()} == {
            "/job:ps/replica:0/task:0",
            "/job:ps/replica:0/task:1",
        }
        graph = session.strategy._calls.function(1).graph  # type: ignore[attr-defined]
        floats = [
            (source.device, op.device)
            for op in graph.get_operations()
            for source in op.inputs
            # A variable is read where it is, whatever device its read asks for.
            if source.dtype == tf.float32 and source.op.type not in ("Placeholder", "ReadVariableOp")
        ]
        crossing = [edge for edge in floats if ("/job:ps" in edge[0]) != ("/job:ps" in edge[1])]
        # Two servers: one fused tensor down from each, one fused tensor up to each.
        assert len(crossing) == 4


def test_state_goes_back_as_a_sum_of_changes(run_dir: Path) -> None:
    x, y = toy_data()
    trainer = kdist.Trainer(models.batch_normalized, cluster="1ps2w", run_dir=run_dir)
    trainer.fit(x + 5.0, y, batch_size=32, steps=300, verbose=0)
    normalization = trainer.model.layers[1]
    expected = (trainer.model.layers[0](x + 5.0)).numpy().mean(0)
    assert np.isfinite(normalization.moving_variance.numpy()).all()
    assert np.abs(normalization.moving_mean.numpy() - expected).max() < 0.5 * np.abs(expected).max() + 0.5


@pytest.mark.long
def test_workers_read_different_parts(run_dir: Path) -> None:
    """Each worker's own feature is all ones: only if both shards are read do both weights move."""

    def function(context: kdist.DataContext) -> tf.data.Dataset:
        x = tf.one_hot(context.worker_index, context.num_workers)
        return tf.data.Dataset.from_tensors((x[None, :], tf.ones([1, 1])))

    def build() -> keras.Model:
        model = keras.Sequential(
            [keras.layers.Input((2,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")]
        )
        model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
        return model

    trainer = kdist.Trainer(build, cluster="1ps2w", run_dir=run_dir)
    trainer.fit(function, steps=200, verbose=0)
    assert (trainer.model.get_weights()[0] > 0.05).all()


@pytest.mark.long
def test_a_dataset_object_reaches_the_workers(run_dir: Path) -> None:
    x, y = toy_data()
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(256).batch(8)
    history = kdist.Trainer(models.mlp, cluster="1ps2w", run_dir=run_dir).fit(dataset, epochs=8, verbose=0)
    assert result_of(run_dir)["global_step"] == 8 * 32
    assert history.history["accuracy"][-1] > history.history["accuracy"][0]


def test_labels_outside_the_classes_name_the_worker(run_dir: Path) -> None:
    x, y = toy_data()
    trainer = kdist.Trainer(models.mlp, cluster="1ps2w", run_dir=run_dir)
    with pytest.raises(kdist.TaskError, match=r"^worker:\d: .*label value") as error:
        trainer.fit(x, y + 7, batch_size=8, steps=20, verbose=0)
    assert error.value.exit_code == 1
    assert result_of(run_dir)["status"] == "failed"
    assert "label value" in result_of(run_dir)["error"]


def test_a_call_that_only_says_that_it_was_cancelled_is_asked_again_for_the_reason(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorFlow often says no more, when one of the steps of a call has failed on a worker."""
    fetched, num_cancelled = parameter_server._fetched, 0

    def fetched_or_cancelled(function: Any, iterator: Any) -> np.ndarray:
        nonlocal num_cancelled
        try:
            return fetched(function, iterator)
        except (tf.errors.InvalidArgumentError, tf.errors.CancelledError):
            if function is session.strategy._calls.function(1):  # type: ignore[attr-defined]
                raise
            num_cancelled += 1
            raise tf.errors.CancelledError(None, None, "RecvFromRemoteAsync is cancelled") from None

    monkeypatch.setattr(parameter_server, "_fetched", fetched_or_cancelled)
    x, y = toy_data(256)
    y[201] = 99
    trainer = kdist.Trainer(models.mlp, "1ps1w", run_dir=run_dir, steps_per_call=8)
    with (
        pytest.raises(kdist.TaskError, match="worker:0.*label value"),
        trainer.session(x, y, batch_size=8, steps=200, shuffle=False, verbose=0) as session,
    ):
        run_to_the_end(session)
    assert num_cancelled == 1


@pytest.mark.parametrize("local_steps", [1, 2])
def test_what_a_cancelled_call_has_read_is_read_again(
    local_steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = parameter_server._fetched
    x, y = toy_data(96)

    def trained(name: str) -> list[np.ndarray]:
        keras.utils.set_random_seed(1)
        trainer = kdist.Trainer(
            lambda: models.mlp(keras.optimizers.SGD(0.1)),
            "1ps1w",
            run_dir=tmp_path / name,
            steps_per_call=2,
            local_steps=local_steps,
        )
        trainer.fit(x, y, batch_size=8, steps=20, shuffle=False, verbose=0)
        weights: list[np.ndarray] = trainer.model.get_weights()
        return weights

    num_calls = 0

    def fetched_or_cancelled(function: Any, iterator: Any) -> np.ndarray:
        nonlocal num_calls
        num_calls += 1
        # At the second of them, the iterator is one that did not begin with the data.
        if num_calls in (3, 6):
            next(iterator)
            raise tf.errors.CancelledError(None, None, "RecvFromRemoteAsync is cancelled")
        return fetched(function, iterator)

    expected = trained("undisturbed")
    monkeypatch.setattr(parameter_server, "_fetched", fetched_or_cancelled)
    for found, wanted in zip(trained("cancelled"), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-7)
    assert num_calls > 6


def test_an_optimizer_that_cannot_be_shared_is_refused(run_dir: Path) -> None:
    class Counting(keras.optimizers.SGD):
        def build(self, variables: list[keras.Variable]) -> None:
            super().build(variables)
            self.calls = self.add_variable((), name="calls")

    x, y = toy_data()
    trainer = kdist.Trainer(lambda: models.mlp(Counting(0.1)), cluster="1ps1w", run_dir=run_dir)
    with pytest.raises(
        kdist.ConfigError, match="optimizer Counting: it keeps state that belongs to no single parameter"
    ):
        trainer.fit(x, y, steps=2, verbose=0)


def test_a_second_cluster_beside_an_open_one_is_refused(tmp_path: Path) -> None:
    x, y = toy_data()
    first = kdist.Trainer(models.mlp, cluster="1ps1w", run_dir=tmp_path / "1")
    with first.session(x, y, steps=4, verbose=0) as session:
        session.run()
        second = kdist.Trainer(models.mlp, cluster="1ps1w", run_dir=tmp_path / "2")
        with ThreadPoolExecutor(2) as pool:
            for refused in (
                pool.submit(second.fit, x, y, steps=4, verbose=0),
                pool.submit(first.evaluate, x, y, on_workers=True),
            ):
                with pytest.raises(kdist.ConfigError, match="using a cluster already"):
                    refused.result(timeout=60)
        # At once: no task was started.
        assert not (tmp_path / "2").exists()
        run_to_the_end(session)
    assert session.global_step == 4
    second.fit(x, y, steps=4, verbose=0)
    assert second.result.global_step == 4


def test_a_server_that_is_lost_before_it_is_connected_to_ends_the_run(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = LocalCluster.wait

    def wait_and_strike(cluster: LocalCluster) -> None:
        wait(cluster)
        os.kill(cluster.pids[Task("ps", 0)], signal.SIGKILL)

    x, y = toy_data()
    trainer = kdist.Trainer(models.mlp, cluster="1ps1w", run_dir=run_dir)
    with monkeypatch.context() as patch:
        patch.setattr(LocalCluster, "wait", wait_and_strike)
        with pytest.raises(kdist.ClusterError, match="ps:0 died"):
            trainer.fit(x, y, steps=5, verbose=0)
    trainer.fit(x, y, steps=5, verbose=0)
    assert trainer.result.global_step == 5


@pytest.mark.parametrize(
    ("blow", "saves"), [(signal.SIGKILL, False), pytest.param(signal.SIGSTOP, True, marks=pytest.mark.long)]
)
def test_a_server_that_is_killed_or_stopped_ends_the_run(blow: signal.Signals, saves: bool, run_dir: Path) -> None:
    x, y = toy_data()
    trainer = kdist.Trainer(models.mlp, cluster="2ps1w", run_dir=run_dir, step_timeout=3, max_restarts=0)
    pids: dict[Task, int] = {}

    def strike_and_go_on() -> None:
        with trainer.session(x, y, steps=99_999, verbose=0) as session:
            session.run()
            pids.update(session.strategy.pids)
            os.kill(pids[Task("ps", 1)], blow)
            if saves:
                session.save(keep=1)
            run_to_the_end(session)

    told = pytest.warns(
        UserWarning, match=r"ps:1 did not respond (for 3 s .cluster.step_timeout.|within 10 s); killing it"
    )
    started = time.monotonic()
    lost = pytest.raises(kdist.ClusterError, match=r"ps:1 died \(signal 9")
    with lost, told if blow is signal.SIGSTOP else nullcontext():
        strike_and_go_on()
    assert time.monotonic() - started < 30
    assert result_of(run_dir)["status"] == "failed"
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids.values())
    # The process is whole: the next fit resumes from the last checkpoint, on a new cluster.
    trainer.fit(x, y, steps=10, verbose=0)
    assert result_of(run_dir)["gradients"]["applied"] == 10


@pytest.mark.long
def test_the_process_stays_whole_beside_several_clusters(tmp_path: Path) -> None:
    """A plain Keras model is trained before, between and after; variables, datasets, functions and seeds live on.

    Each cluster leaves few threads behind, as all have the server of the first one.
    """
    x, y = toy_data()
    keras.utils.set_random_seed(1)
    plain, twin = models.mlp("sgd"), models.mlp("sgd")
    twin.set_weights(plain.get_weights())
    variable = tf.Variable([1.0, 2.0])
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(32)
    doubled = tf.function(lambda: variable.assign(variable * 2))
    losses = [plain.fit(dataset, verbose=0).history["loss"][0]]
    num_threads = []
    for number, cluster in enumerate(("1ps1w", "2ps2w")):
        trainer = kdist.Trainer(models.mlp, cluster=cluster, run_dir=tmp_path / str(number))
        with trainer.session(x, y, batch_size=8, steps=30, verbose=0) as session:
            while not session.should_stop():
                session.run()
                variable.assign_add([1.0, 1.0])
                variable.assign(variable - 1.0)
            during = plain.evaluate(x, y, verbose=0, return_dict=True)
        losses.append(plain.fit(dataset, verbose=0).history["loss"][0])
        assert plain.evaluate(x, y, verbose=0, return_dict=True)["loss"] < during["loss"]
        doubled()
        assert trainer.evaluate(x, y, return_dict=True)["loss"] > 0
        num_threads.append(len(os.listdir("/proc/self/task")))
    assert num_threads[1] - num_threads[0] < 40
    np.testing.assert_allclose(variable.numpy(), [4.0, 8.0])
    # The same model trained with no cluster beside it.
    expected = [twin.fit(dataset, verbose=0).history["loss"][0] for _ in range(3)]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    gc.collect()


@pytest.mark.alone
def test_only_parameters_and_gradients_cross_the_network(run_dir: Path) -> None:
    def build() -> keras.Model:
        model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(4000), keras.layers.Dense(200)])
        model.compile(optimizer="adam", loss="mse")
        return model

    x, _ = toy_data()
    trainer = kdist.Trainer(build, cluster="2ps1w", run_dir=run_dir, steps_per_call=5)
    parameter_bytes = 4 * trainer.model.count_params()
    with trainer.session(x, np.zeros([256, 200], np.float32), batch_size=8, steps=60, verbose=0) as session:
        while session.global_step < 20:
            session.run()
        # Workers are ahead of what the session has reported; now they rest.
        steps_before, bytes_before = session.strategy.values.global_step(), loopback_bytes()
        while not session.should_stop():
            session.run()
        num_steps, num_bytes = session.global_step - steps_before, loopback_bytes() - bytes_before
    # Adam's slots would be twice as much again.
    assert 2 * parameter_bytes <= num_bytes / num_steps <= 1.05 * 2 * parameter_bytes


@pytest.mark.long
def test_schedules_and_bias_correction_follow_the_exact_global_step(run_dir: Path) -> None:
    """With a gradient of one in every step, what a parameter comes to is known, whoever computed which step."""
    steps = 400
    decay = keras.optimizers.schedules.ExponentialDecay(0.01, decay_steps=50, decay_rate=0.5)
    expected = -sum(0.01 * 0.5 ** (step / 50) for step in range(steps))

    def build(optimizer: keras.optimizers.Optimizer) -> keras.Model:
        model = keras.Sequential(
            [keras.layers.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")]
        )
        model.compile(optimizer, loss=lambda y, prediction: prediction)
        return model

    ones = np.ones((64, 1), np.float32)
    # Adam's step is the learning rate, too, if its moments are corrected for the right number of steps.
    trainer = kdist.Trainer(
        lambda: build(keras.optimizers.Adam(decay, epsilon=1e-12)), cluster="1ps4w", run_dir=run_dir, steps_per_call=4
    )
    trainer.fit(ones, ones, batch_size=4, steps=steps, verbose=0)
    assert trainer.model.get_weights()[0].item() == pytest.approx(expected, rel=0.02)


def test_slots_that_are_assigned_lose_no_update_of_two_workers(run_dir: Path) -> None:
    """With the same gradient in every step, the order of the updates does not matter, but each counts."""

    def build() -> keras.Model:
        layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
        model = keras.Sequential([keras.layers.Input((1,)), layer])
        optimizer = keras.optimizers.RMSprop(0.01, rho=0.99, momentum=0.9, use_ema=True, ema_momentum=0.995)
        model.compile(optimizer, loss=lambda y, prediction: prediction)
        return model

    ones = np.ones((64, 1), np.float32)
    model = build()
    model.fit(ones, ones, batch_size=8, epochs=50, verbose=0)
    trainer = kdist.Trainer(build, cluster="1ps2w", run_dir=run_dir, steps_per_call=10)
    trainer.fit(ones, ones, batch_size=8, steps=400, verbose=0)
    assert trainer.model.get_weights()[0].item() == pytest.approx(model.get_weights()[0].item(), rel=1e-4)


@pytest.mark.alone
def test_of_an_embedding_only_the_rows_of_the_batch_travel(run_dir: Path) -> None:
    rows, dim, batch, ids = 100_000, 16, 8, 4
    table_bytes = rows * dim * 4

    def build() -> keras.Model:
        model = keras.Sequential(
            [
                keras.layers.Input((ids,), dtype="int32"),
                kdist.layers.Embedding(rows, dim),
                keras.layers.GlobalAveragePooling1D(),
                keras.layers.Dense(1),
            ]
        )
        model.compile("adam", "mse")
        return model

    x = np.random.default_rng(0).integers(0, rows, (256, ids)).astype(np.int32)
    trainer = kdist.Trainer(build, cluster="2ps1w", run_dir=run_dir)
    with trainer.session(x, np.ones((256, 1), np.float32), batch_size=batch, steps=60, verbose=0) as session:
        session.run()
        before, first = loopback_bytes(), session.global_step
        while session.global_step < 60:
            session.run()
        per_step = (loopback_bytes() - before) / (60 - first)
    assert per_step < table_bytes / 100


def test_a_last_save_may_take_most_of_the_time_that_a_signal_leaves(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_save = ValueFiles.begin_save

    def slowly(self: ValueFiles, *args: Any, **options: Any) -> Any:
        time.sleep(3)
        return begin_save(self, *args, **options)

    class Stopped(Hook):
        def after_run(self, context: kdist.hooks.RunContext, values: kdist.hooks.RunValues) -> None:
            monkeypatch.setattr(ValueFiles, "begin_save", slowly)
            context.session.interrupt("SIGTERM")

    trainer = kdist.Trainer(models.mlp, cluster="1ps1w", run_dir=run_dir, hooks=[Stopped()], grace_secs=4)
    trainer.fit(*toy_data(), batch_size=8, steps=100_000, verbose=0)
    assert trainer.result.status == "preempted"
    assert Checkpoints(run_dir / "checkpoints").newest() == run_dir / f"checkpoints/ckpt-{trainer.result.global_step}"


def waits_for_batches(step_secs: float) -> Callable[[DataContext], tf.data.Dataset]:
    """Data that takes so long for each step; workers do not end their steps at the same time."""

    def slow(context: DataContext) -> tf.data.Dataset:
        batches = tf.data.Dataset.from_tensors(toy_data(8))
        first = delayed(batches, step_secs * (1 + tf.cast(context.worker_index, tf.float64) / 2))
        return first.concatenate(delayed(batches.repeat(), step_secs))

    return slow


def test_a_save_waits_for_the_calls_that_run_and_not_for_those_that_wait(run_dir: Path) -> None:
    step_secs = 0.25

    class Saves(Hook):
        begun_at = 0
        saved: Path | None = None

        def after_run(self, context: kdist.hooks.RunContext, values: kdist.hooks.RunValues) -> None:
            # What the datasets have prefetched is read by then.
            if values.global_step >= 12 and not self.begun_at:
                # Each worker runs a call, and others wait.
                self.begun_at = values.global_step
                context.session.save(keep=1)
                self.saved = context.session.checkpoints.newest()

        def due_in(self, step: int) -> int:
            return 1

    saves = Saves()
    trainer = kdist.Trainer(models.mlp, "1ps2w", run_dir=run_dir, hooks=[saves], steps_per_call=1)
    trainer.fit(waits_for_batches(step_secs), steps=20, verbose=0)
    assert saves.saved
    assert saves.begun_at < int(saves.saved.name.removeprefix("ckpt-")) <= saves.begun_at + 2


def test_at_a_signal_a_call_that_only_waits_does_not_begin(tmp_path: Path) -> None:
    """One waits for each worker, so that it need not wait for the chief."""
    step_secs = 1.0

    class Interrupts(Hook):
        step = 0

        def after_run(self, context: Any, values: Any) -> None:
            # What its dataset has prefetched is read by then.
            if values.global_step >= 5 and not self.step:
                self.step = values.global_step
                # Then a call runs, and another one waits.
                threading.Timer(step_secs / 3, context.session.interrupt, ["a signal"]).start()

        def due_in(self, step: int) -> int:
            # Until then, a run has one step; that one has others as well.
            return 1 if step < 5 else 100

    interrupts = Interrupts()
    trainer = kdist.Trainer(models.mlp, "1ps1w", run_dir=tmp_path, hooks=[interrupts], steps_per_call=1)
    with trainer.session(waits_for_batches(step_secs), steps=1000) as session:
        run_to_the_end(session)
    assert session.global_step == interrupts.step + 1
