"""Models and data that are too large to pass through the chief; here the limits are made small."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import in_short
from keras import layers

import kdist
from kdist._compat import first_call_lock
from kdist.data.columns import Column
from kdist.hooks import CheckpointSaver, Hook
from kdist.hooks.base import RunContext, RunValues
from kdist.parameters.placement.blocks import StoredShard
from kdist.parameters.placement.messages import Wire
from kdist.parameters.values.named_values import NamedValues
from kdist.parameters.values.slices import WritePlan
from kdist.parameters.values.value_files import ValueFiles
from kdist.run.checkpoint import Checkpoints

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("tasks_prepared")]

ROWS, DIM = 1000, 8


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StoredShard, "slice_bytes", 1 << 12)
    monkeypatch.setattr("kdist.layers.initial_rows._BLOCK_BYTES", 1 << 11)
    # Kernel and bias travel apart.
    monkeypatch.setattr(Wire, "max_bytes", 64)
    # The arrays of a worker travel in several chunks.
    monkeypatch.setattr(Column, "chunk_bytes", 1 << 9)


def build() -> keras.Model:
    keras.utils.set_random_seed(4)
    model = keras.Sequential(
        [layers.Input((2,), dtype="int64"), kdist.layers.Embedding(ROWS, DIM), layers.Flatten(), layers.Dense(1)]
    )
    model.compile(keras.optimizers.Adam(0.1), "mse")
    return model


def ids() -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(3).integers(0, ROWS, (256, 2))
    return x, (x.sum(1) % 7).astype(np.float32)


def train(run_dir: Path, cluster: str, steps: int, **options: Any) -> dict[str, np.ndarray]:
    trainer = kdist.Trainer(build, cluster=cluster, run_dir=run_dir, hooks=[CheckpointSaver(every_steps=10)], **options)
    trainer.fit(*ids(), batch_size=16, steps=steps, verbose=0, shuffle=False)
    saved = Checkpoints(run_dir / "checkpoints").read(steps)
    assert saved is not None
    return saved


@pytest.mark.long
def test_servers_save_their_rows_and_any_number_of_them_restores_them(run_dir: Path) -> None:
    trained = train(run_dir, "2ps1w", 20)
    # Each server has written files of its own.
    files = list((run_dir / "checkpoints").glob("ckpt-20.data-*"))
    assert len(files) >= 5
    reader = tf.train.load_checkpoint(str(run_dir / "checkpoints" / "ckpt-20"))
    table = reader.get_tensor("parameters/embedding/embeddings")
    assert table.shape == (ROWS, DIM)
    # What is resumed elsewhere comes to what an uninterrupted run comes to.
    resumed = train(run_dir, "3ps1w", 30)
    whole = train(run_dir.with_name("whole"), "local", 30)
    assert trained.keys() == resumed.keys() == whole.keys()
    for name, value in whole.items():
        np.testing.assert_allclose(resumed[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.long
def test_servers_with_disks_of_their_own_save_and_restore_through_the_chief(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look_for(files: ValueFiles, path: Path) -> None:
        files._whole[0].through_chief = True

    monkeypatch.setattr(ValueFiles, "_look_for", look_for)
    train(run_dir, "2ps1w", 20)
    resumed = train(run_dir, "3ps1w", 30)
    whole = train(run_dir.with_name("whole"), "local", 30)
    for name, value in whole.items():
        np.testing.assert_allclose(resumed[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


class StepsMeanwhile(Hook):
    """Holds back what servers write at a step, until ten steps later."""

    def __init__(self, save_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self._save_at, self._step, self._may_write = save_at, 0, threading.Event()
        self.was_late = False
        write = WritePlan.write

        def late(*arguments: Any) -> None:
            if self._step >= self._save_at:
                assert self._may_write.wait(60)
            write(*arguments)

        monkeypatch.setattr(WritePlan, "write", late)

    def after_run(self, context: RunContext, values: RunValues) -> None:
        self._step = values.global_step
        if self._step >= self._save_at + 10 and not self._may_write.is_set():
            self.was_late = not context.session.finish_save(keep=5, wait=False)
            self._may_write.set()


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["parameter_server", "sync_replicas"])
def test_training_continues_while_servers_write(
    strategy: str, run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Only the first call of a function may keep others waiting.
    monkeypatch.setattr(first_call_lock, "_BEGUN_SECS", 120.0)
    hook = StepsMeanwhile(40, monkeypatch)
    hooks = [CheckpointSaver(every_steps=20, background=True), hook]
    trainer = kdist.Trainer(build, cluster="2ps1w", strategy=strategy, run_dir=run_dir, hooks=hooks, steps_per_call=1)
    trainer.fit(*ids(), batch_size=16, steps=70, verbose=2, shuffle=False)
    # Step 40 was written after step 50; what was due later waited for it.
    assert hook.was_late
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[3] for line in lines if line.startswith("save ")] == ["0", "20", "40", "60", "70"]
    in_time = train(run_dir.with_name("in_time"), "2ps1w", 40, strategy=strategy)
    saved = Checkpoints(run_dir / "checkpoints").read(40)
    assert saved is not None
    for name, value in in_time.items():
        np.testing.assert_allclose(saved[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.long
def test_a_damaged_file_of_one_server_damages_its_checkpoint_alone(run_dir: Path) -> None:
    before = train(run_dir, "2ps1w", 20)
    largest = max((run_dir / "checkpoints").glob("ckpt-20.data-*"), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 0xFF
    largest.write_bytes(content)
    with pytest.warns(UserWarning, match="ckpt-20 is damaged; skipped"):
        again = train(run_dir, "2ps1w", 20)
    for name, value in before.items():
        np.testing.assert_allclose(again[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.long
def test_any_number_of_servers_draws_the_same_values_and_comes_to_the_same(tmp_path: Path) -> None:
    clusters = {"local": {}, "1ps1w": {}, "2ps1w": {}, "3ps1w": {}}
    for strategy in ({}, {"strategy": "sync_replicas"}):
        initial, trained = [], []
        for cluster in clusters:
            folder = tmp_path / f"{cluster}-{len(strategy)}"
            trained.append(train(folder, cluster, 20, **(strategy if cluster != "local" else {})))
            first = Checkpoints(folder / "checkpoints").read(0)
            assert first is not None
            initial.append(first)
        for other in initial[1:]:
            for name, value in initial[0].items():
                np.testing.assert_array_equal(other[name], value, err_msg=name)
        for other in trained[1:]:
            for name, value in trained[0].items():
                np.testing.assert_allclose(other[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


#: The jobs in which `of_tensorflow` was called.
drawn_by: list[str | None] = []


def of_tensorflow(shape: tuple[int, ...], dtype: Any = None) -> tf.Tensor:
    value = tf.reshape(tf.range(float(np.prod(shape))), shape) / 1000
    # Keras also traces it, to find shapes.
    if tf.executing_eagerly():
        drawn_by.append(tf.DeviceSpec.from_string(value.device).job)
    return value


def of_numpy(shape: tuple[int, ...], dtype: Any = None) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape) / 1000


class Wide(keras.Model):
    """Has all kinds of variables that are too large for the chief."""

    def __init__(self) -> None:
        super().__init__()
        self.table = kdist.layers.Embedding(150, DIM)
        self.plain = layers.Embedding(200, DIM)
        self.hidden = [
            layers.Dense(80, "tanh", kernel_initializer=keras.initializers.Orthogonal(seed=1)),
            layers.Dense(80, "tanh"),
            layers.Dense(80, "tanh", kernel_initializer=of_tensorflow),
            layers.Dense(80, "tanh", kernel_initializer=of_numpy),
        ]
        self.head = layers.Dense(1)
        self.bias = self.add_weight(shape=(900,), name="bias", initializer="random_normal", trainable=False)

    def call(self, ids: Any) -> Any:
        x = keras.ops.concatenate([self.table(ids % 150), self.plain(ids % 200)], -1)
        x = keras.ops.reshape(x, (-1, 4 * DIM))
        for layer in self.hidden:
            x = layer(x)
        return self.head(x) + keras.ops.mean(self.bias)


def build_wide() -> keras.Model:
    keras.utils.set_random_seed(4)
    model = Wide()
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


@pytest.mark.long
def test_servers_make_all_large_variables_whatever_their_initializers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The kernels are cut into two, and not at all.
    monkeypatch.setattr(Wire, "max_bytes", 80 * 80 * 4 - 4)
    clusters = [
        ("local", {}),
        ("1ps1w", {}),
        ("2ps1w", {}),
        ("3ps1w", {"placement": "partitioned", "partition_min_bytes": 1000}),
    ]
    saved = []
    for number, (cluster, options) in enumerate(clusters):
        drawn_by.clear()
        run_dir = tmp_path / str(number)
        trainer = kdist.Trainer(build_wide, cluster=cluster, run_dir=run_dir, **options)
        trainer.fit(*ids(), batch_size=16, steps=10, verbose=0, shuffle=False)
        assert drawn_by == ["localhost" if cluster == "local" else "ps"]
        saved.append([Checkpoints(run_dir / "checkpoints").read(step) for step in (0, 10)])
        kernel = saved[-1][1]["parameters/dense_2/kernel"]
        np.testing.assert_array_equal(trainer.model.hidden[2].kernel, kernel)
    for initial, trained in saved[1:]:
        for name, value in saved[0][0].items():
            np.testing.assert_array_equal(initial[name], value, err_msg=name)
        for name, value in saved[0][1].items():
            np.testing.assert_allclose(trained[name], value, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.long
def test_an_initializer_with_values_of_another_shape_is_named(run_dir: Path) -> None:
    def build_wrong() -> keras.Model:
        wrong = layers.Dense(1000, kernel_initializer=lambda shape, dtype: tf.zeros([3]))
        model = keras.Sequential([layers.Input((2,)), wrong, layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    trainer = kdist.Trainer(build_wrong, cluster="1ps1w", run_dir=run_dir)
    with pytest.raises(kdist.ConfigError, match=r"parameters/dense/kernel returned values of shape \(3,\); the vari"):
        trainer.fit(*ids(), batch_size=16, steps=1, verbose=0)


@pytest.mark.long
def test_a_model_that_is_too_large_stays_on_the_servers(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = kdist.Trainer(build, cluster="2ps1w", run_dir=run_dir, export_max_bytes=1000, use_default_hooks=False)
    trainer.fit(*ids(), batch_size=16, steps=20, verbose=2)
    assert "more than run.export_max_bytes" in capsys.readouterr().out
    assert not (run_dir / "model.keras").exists()
    # No hook saves, but nothing is lost.
    assert Checkpoints(run_dir / "checkpoints").steps() == [20]
    with pytest.raises(kdist.ConfigError, match="embeddings are on the parameter servers and in checkpoints"):
        trainer.model(ids()[0])
    with pytest.raises(kdist.ConfigError, match="embeddings are on the parameter servers and in checkpoints"):
        trainer.model.layers[0].get_weights()
    for use in (trainer.evaluate, trainer.predict, trainer.model.predict, trainer.model.save):
        with pytest.raises(kdist.ConfigError, match="more than export_max_bytes=1000, so its trained values are in"):
            use(ids()[0])
    logs = trainer.evaluate(*ids(), on_workers=True, return_dict=True)
    outputs = trainer.predict(ids()[0], on_workers=True)
    with pytest.raises(kdist.ConfigError, match="were on parameter servers only"):
        kdist.Trainer(trainer.model)
    elsewhere = run_dir.with_name("elsewhere")
    (run_dir / "checkpoints").rename(elsewhere)
    with pytest.raises(kdist.KdistError, match="there is no checkpoint in .*, where the trained values were"):
        trainer.evaluate(*ids(), on_workers=True)
    elsewhere.rename(run_dir / "checkpoints")
    # The next fit continues from what was saved; one that may bring it here does.
    trainer.fit(*ids(), batch_size=16, steps=30, verbose=0)
    assert Checkpoints(run_dir / "checkpoints").steps() == [30]
    brought = kdist.Trainer(build, cluster="1ps1w", run_dir=run_dir)
    brought.fit(*ids(), batch_size=16, steps=40, verbose=0)
    saved = Checkpoints(run_dir / "checkpoints").read(40)
    assert saved is not None
    np.testing.assert_array_equal(brought.model.layers[0].embeddings.numpy(), saved["parameters/embedding/embeddings"])
    assert trainer.evaluate(*ids(), on_workers=True) == pytest.approx(brought.evaluate(*ids()), rel=1e-5)
    assert logs != pytest.approx(brought.evaluate(*ids(), return_dict=True), rel=1e-3)
    np.testing.assert_allclose(
        trainer.predict(ids()[0], on_workers=True), brought.predict(ids()[0]), rtol=1e-5, atol=1e-6
    )
    assert outputs.shape == (256, 1)
    assert keras.saving.load_model(run_dir / "model.keras").layers[0].embeddings.shape == (ROWS, DIM)


@pytest.mark.long
def test_training_may_end_with_the_best_values_which_never_come_here(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NamedValues, "_read_large", None)
    x, y = ids()
    hooks = [kdist.hooks.EarlyStopping(patience=2, restore_best=True)]
    trainer = kdist.Trainer(build, cluster="2ps1w", run_dir=run_dir, hooks=hooks, export_max_bytes=1000)
    # What is learned is wrong sooner or later.
    history = trainer.fit(x, y, 16, epochs=40, validation_data=(x, y + 3), verbose=0, shuffle=False).history["val_loss"]
    assert (trainer.result.stopped_by, trainer.result.global_step) == ("EarlyStopping", 16 * len(history))
    best = int(np.argmin(history))
    assert best == len(history) - 3
    last = Checkpoints(run_dir / "checkpoints").read(16 * len(history))
    kept = Checkpoints(run_dir / "early_stopping").read(16 * (best + 1))
    assert last is not None
    assert kept is not None
    assert (last.pop("global_step"), kept.pop("global_step")) == (16 * len(history), 16 * (best + 1))
    for name, value in kept.items():
        np.testing.assert_array_equal(last[name], value, err_msg=name)
    assert trainer.result.metrics["validation"]["loss"] == pytest.approx(history[best])
    stops = keras.callbacks.EarlyStopping(restore_best_weights=True)
    with pytest.raises(kdist.ConfigError, match=r"kdist\.hooks\.EarlyStopping\(restore_best=True\) keeps them"):
        trainer.fit(x, y, 16, epochs=60, validation_data=(x, y), verbose=0, callbacks=stops)


class LooksAt(keras.callbacks.Callback):
    """Sets a bias, and reads a variable of a model."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.layers[-1].bias.assign([5.0 + epoch])
        self.model.layers[self.layer].get_weights()


@pytest.mark.long
def test_callbacks_see_what_of_a_large_model_is_here(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    monkeypatch.setattr(NamedValues, "_read_large", lambda values, *arguments: read.append(arguments))
    rate = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.1 / (epoch + 1))
    early = keras.callbacks.EarlyStopping("loss", patience=9)
    # It acts on the batches of a validation only with another `update_freq`: the workers validate.
    board = keras.callbacks.TensorBoard(run_dir.with_name("board"))
    x, y = ids()
    for number, callbacks in enumerate([[rate, early], [LooksAt(2), rate, early, board]]):
        folder = run_dir.with_name(str(number))
        trainer = kdist.Trainer(build, cluster="2ps2w", run_dir=folder, export_max_bytes=1000)
        history = trainer.fit(x, y, 16, epochs=2, validation_data=(x, y), verbose=0, callbacks=callbacks)
        assert history.history["learning_rate"] == pytest.approx([0.1, 0.05])
        saved = Checkpoints(folder / "checkpoints").read(32)
        assert saved is not None
        assert (saved["parameters/dense/bias"][0] == 6.0) == bool(number)
    assert not read
    with pytest.raises(kdist.ConfigError, match="embeddings are on the parameter servers and in checkpoints"):
        trainer.fit(x, y, 16, epochs=3, verbose=0, callbacks=LooksAt(0))


@pytest.mark.long
def test_moving_averages_are_what_is_evaluated_of_a_model_that_stayed(run_dir: Path) -> None:
    def build_with_averages() -> keras.Model:
        model = build()
        model.compile(keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9), "mse")
        return model

    logs, reported = [], []
    for limit in (1000, 1 << 30):
        folder = run_dir.with_name(str(limit))
        trainer = kdist.Trainer(build_with_averages, cluster="2ps1w", run_dir=folder, export_max_bytes=limit)
        trainer.fit(*ids(), batch_size=16, steps=20, validation_data=ids(), verbose=0, shuffle=False)
        logs.append(trainer.evaluate(*ids(), on_workers=True, return_dict=True))
        reported.append(trainer.result.metrics["validation"])
    assert logs[0] == pytest.approx(logs[1], rel=1e-5)
    # Of the one that came here, the averages were validated, too.
    assert logs[1] == pytest.approx(reported[1], rel=1e-5)
    assert logs[0] != pytest.approx(reported[0], rel=1e-3)


@pytest.mark.long
def test_values_of_the_users_own_travel_to_the_servers(run_dir: Path) -> None:
    mine = np.arange(ROWS * DIM, dtype=np.float32).reshape(ROWS, DIM)

    def build_with_mine() -> keras.Model:
        model = build()
        model.layers[0].embeddings.assign(mine)
        return model

    trainer = kdist.Trainer(build_with_mine, cluster="2ps1w", run_dir=run_dir)
    trainer.fit(*ids(), batch_size=16, steps=1, verbose=0)
    first = Checkpoints(run_dir / "checkpoints").read(0)
    assert first is not None
    np.testing.assert_array_equal(first["parameters/embedding/embeddings"], mine)


@pytest.mark.long
def test_workers_validate_with_what_they_pull(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = ids()
    trainer = kdist.Trainer(build, cluster="2ps2w", strategy="sync_replicas", run_dir=run_dir)
    history = trainer.fit(x, y, batch_size=16, epochs=2, validation_data=(x, y), verbose=0)
    expected = trainer.model.evaluate(x, y, batch_size=32, verbose=0)
    assert history.history["val_loss"][-1] == pytest.approx(expected, rel=1e-5)

    def read(values: NamedValues) -> None:
        raise AssertionError("the model came to the chief")

    monkeypatch.setattr(NamedValues, "portions", read)
    for cluster in ("2ps2w", "1ps1w"):
        large = kdist.Trainer(build, cluster=cluster, run_dir=run_dir.with_name(cluster), export_max_bytes=1000)
        losses = large.fit(x, y, batch_size=16, epochs=2, validation_data=(x, y), verbose=0).history["val_loss"]
        assert losses[1] < losses[0]
    other = kdist.Trainer(build, cluster="2ps1w", run_dir=run_dir.with_name("other"), export_max_bytes=1000)
    with pytest.raises(kdist.ConfigError, match="stays on its servers; its workers validate arrays or finite datasets"):
        other.fit(x, y, batch_size=16, epochs=1, validation_data=(x, y), validation_steps=2, verbose=0)


class WholeWhenEvaluated(keras.Model):
    """Reads its whole table in evaluations only."""

    def __init__(self) -> None:
        super().__init__()
        self.table = kdist.layers.Embedding(ROWS, DIM)
        self.head = layers.Dense(1)

    def call(self, x: Any, training: bool = False) -> Any:
        rows = keras.ops.mean(self.table(x), 1)
        if not training:
            rows = rows - keras.ops.mean(self.table.embeddings, 0)
        return self.head(rows)


@pytest.mark.long
def test_an_evaluation_that_needs_a_whole_table_gets_it(run_dir: Path) -> None:
    def build_it() -> keras.Model:
        keras.utils.set_random_seed(4)
        model = WholeWhenEvaluated()
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    begun = []
    counts = keras.callbacks.LambdaCallback()
    counts.on_test_begin = lambda logs=None: begun.append(1)
    x, y = ids()
    trainer = kdist.Trainer(build_it, cluster="2ps2w", strategy="sync_replicas", run_dir=run_dir)
    history = trainer.fit(x, y, batch_size=16, epochs=1, validation_data=(x, y), verbose=0, callbacks=counts)
    assert begun == [1]
    expected = trainer.model.evaluate(x, y, batch_size=32, verbose=0)
    assert history.history["val_loss"][-1] == pytest.approx(expected, rel=1e-5)
    large = kdist.Trainer(build_it, cluster="2ps2w", run_dir=run_dir.with_name("large"), export_max_bytes=1000)
    with pytest.raises(kdist.ConfigError, match="tables that are looked up by rows"):
        large.fit(x, y, batch_size=16, epochs=1, validation_data=(x, y), verbose=0)


@pytest.mark.long
@pytest.mark.parametrize("wrong", in_short([ROWS + 3, -1], {-1}))
def test_an_id_that_no_server_has_is_named_with_its_table(wrong: int, run_dir: Path) -> None:
    x, y = ids()
    x[7, 1] = wrong
    trainer = kdist.Trainer(build, cluster="3ps1w", run_dir=run_dir)
    with pytest.raises(kdist.TaskError, match=rf"worker:0: .*id {wrong} is not in table embedding/embeddings"):
        trainer.fit(x, y, batch_size=16, epochs=1, verbose=0)


TABLE = """
import sys
from pathlib import Path
import keras, kdist, numpy as np
rows, cluster, steps, optimizer, run_dir = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), *sys.argv[4:]

def build():
    model = keras.Sequential([
        keras.layers.Input((8,), dtype="int64"), kdist.layers.Embedding(rows, 64), keras.layers.Flatten(),
        keras.layers.Dense(1)])
    model.compile(optimizer, "mse")
    return model

class Peaks(kdist.hooks.Hook):
    def end(self, session):
        for task, pid in (("chief", "self"), *session.strategy.pids.items()):
            status = Path(f"/proc/{pid}/status").read_text()
            print(task, int(status.split("VmHWM:")[1].split()[0]) * 1024)

x = np.random.default_rng(0).integers(0, rows, (20000, 8))
hooks = [Peaks(), kdist.hooks.CheckpointSaver(keep=1)]
trainer = kdist.Trainer(build, cluster=cluster, run_dir=run_dir, hooks=hooks, export_max_bytes=0)
trainer.fit(x, (x.sum(1) % 7).astype("float32"), batch_size=64, steps=steps, verbose=0)
"""


def peaks(run_dir: Path, *arguments: object) -> dict[str, int]:
    """The most memory that each task has had, in bytes, in a run with a table of rows of 64 values."""
    done = subprocess.run(
        [sys.executable, "-c", TABLE, *map(str, arguments), str(run_dir)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return {task: int(size) for task, size in (line.split() for line in done.stdout.splitlines())}


@pytest.fixture
def large_run_dir(run_dir: Path) -> Iterator[Path]:
    """A run dir that leaves no gigabytes behind."""
    yield run_dir
    shutil.rmtree(run_dir, ignore_errors=True)


@pytest.mark.long
@pytest.mark.alone
def test_a_table_of_10_million_rows_is_trained_saved_and_resumed_elsewhere(large_run_dir: Path, tmp_path: Path) -> None:
    state = 2 * 10_000_000 * 64 * 4
    small = peaks(tmp_path / "small", 1_000_000, "2ps2w", 50, "adagrad")
    large = peaks(large_run_dir, 10_000_000, "2ps2w", 50, "adagrad")
    resumed = peaks(large_run_dir, 10_000_000, "3ps2w", 100, "adagrad")
    assert Checkpoints(large_run_dir / "checkpoints").steps() == [100]
    for run, num_servers in ((large, 2), (resumed, 3)):
        assert run["chief"] < small["chief"] + (100 << 20)
        assert run["chief"] < 1_200_000_000
        for server in range(num_servers):
            # What a process of TensorFlow takes in any case comes on top.
            assert run[f"ps:{server}"] - (350 << 20) < 1.3 * state / num_servers


@pytest.mark.long
@pytest.mark.alone
def test_slots_of_more_than_2_gib_on_one_server(large_run_dir: Path) -> None:
    assert peaks(large_run_dir, 4_000_000, "1ps1w", 20, "adam")["chief"] < 1_200_000_000
    assert Checkpoints(large_run_dir / "checkpoints").steps() == [20]


#: Trains on 1 000 000 x 784 float32, and prints the most memory that the chief has had, in bytes.
ARRAYS = """
import sys
from pathlib import Path
import keras
import numpy as np
import kdist

cluster, path, run_dir = sys.argv[1:]
x = np.load(path, mmap_mode="r") if path else np.ones((1_000_000, 784), np.float32)
model = keras.Sequential([keras.layers.Input((784,)), keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(1e-5), "mse")
kdist.Trainer(model, cluster, run_dir=run_dir).fit(x, np.zeros(len(x), np.float32), batch_size=64, steps=200, verbose=0)
print(int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024)
"""


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.parametrize(("cluster", "in_file"), [("2ps2w", False), ("1ps1w", False), ("2ps2w", True)])
def test_arrays_of_3_gb_are_not_copied_on_the_chief(cluster: str, in_file: bool, run_dir: Path, tmp_path: Path) -> None:
    size = 1_000_000 * 784 * 4
    path = tmp_path / "x.npy"
    if in_file:
        np.lib.format.open_memmap(path, "w+", np.float32, (1_000_000, 784)).flush()
    arguments = [cluster, str(path) if in_file else "", str(run_dir)]
    done = subprocess.run([sys.executable, "-c", ARRAYS, *arguments], capture_output=True, text=True, check=False)
    path.unlink(missing_ok=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < (1_000_000_000 if in_file else 1.3 * size)
