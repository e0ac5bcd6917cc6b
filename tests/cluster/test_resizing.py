"""Clusters that change while they train: workers and servers join, leave and move, and no number is another one."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from commands import Command
from helpers import environment, free_addresses, result_of, wait_until
from keras import layers

import kdist
from kdist.cluster.spec import Task
from kdist.errors import ConfigError, ResizeError
from kdist.hooks import Hook, RunContext, RunValues, Session
from kdist.layers import DynamicEmbedding
from kdist.parameters.store import ParameterStore
from kdist.run.checkpoint import Checkpoints
from kdist.run.resizes import Resize

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("tasks_prepared")]

NUM_IDS, BATCH = 600, 5


class Resizes(Hook):
    """Asks for changes one after the other, each some steps after the one before."""

    def __init__(self, changes: list[dict[str, Any]], every: int = 30) -> None:
        self._changes, self._every = list(changes), every
        self._asked: Future[Resize] | None = None
        self._next = every
        self.done: list[Resize] = []
        self.errors: list[BaseException] = []

    def after_run(self, context: RunContext, values: RunValues) -> None:
        if self._asked is not None and self._asked.done():
            error = self._asked.exception()
            if error is None:
                self.done.append(self._asked.result())
            else:
                self.errors.append(error)
            self._asked, self._next = None, values.global_step + self._every
        if self._asked is not None:
            # The steps of most models take longer; this run is not to end before the tasks have started.
            time.sleep(0.02)
        if self._asked is None and self._changes and values.global_step >= self._next:
            change = self._changes.pop(0)
            if (task := change.get("sigterm")) is None:
                self._asked = context.session.resize(**change)
            else:
                os.kill(context.session.strategy.pids[task], signal.SIGTERM)
                self._next += 2 * self._every

    def after_resize(self, session: Session, resize: Resize) -> None:
        if resize.change.startswith("leave="):
            self.done.append(resize)

    def due_in(self, step: int) -> int | None:
        # Short runs: a change is made between two of them.
        return 10 - step % 10 if self._changes or self._asked else None


@keras.saving.register_keras_serializable("tests")
class CountsIds(layers.Layer):
    """Counts how often it has seen each id."""

    def build(self, shape: Any) -> None:
        del shape
        self.weight = self.add_weight(shape=(NUM_IDS, 1), initializer="zeros", name="weight")
        self.seen = self.add_weight((NUM_IDS,), "zeros", trainable=False, aggregation="sum", name="seen")

    def call(self, ids: Any, training: bool = False) -> Any:
        if training:
            self.seen.assign(self.seen + keras.ops.sum(keras.ops.one_hot(ids, NUM_IDS), 0))
        return tf.gather(self.weight, ids)[..., 0]


def counting_model() -> keras.Model:
    ids = layers.Input((), dtype="int32")
    model = keras.Model(ids, CountsIds()(ids))
    model.compile("sgd", "mse")
    return model


def seen_by(cluster: str, changes: list[dict[str, Any]], run_dir: Path, **options: Any) -> tuple[np.ndarray, Resizes]:
    hook = Resizes(changes)
    trainer = kdist.Trainer(counting_model, cluster, run_dir=run_dir, hooks=[hook], seed=3, **options)
    trainer.fit(np.arange(NUM_IDS), np.zeros(NUM_IDS), batch_size=BATCH, epochs=8, verbose=0)
    assert not hook.errors
    assert trainer.result.gradients.applied == trainer.result.global_step
    assert trainer.result.restarts == {"worker": 0, "cluster": 0}
    assert [r["to"] for r in result_of(run_dir)["resizes"]] == [resize.after for resize in hook.done]
    return trainer.model.get_weights()[1], hook


@pytest.mark.parametrize(
    ("strategy", "cluster", "changes"),
    [
        ("parameter_server", "1ps2w", [{"workers": 3}, {"ps": 2, "workers": 1}, {"workers": 2}, {"move": "ps:0"}]),
        ("sync_replicas", "2ps3w", [{"sigterm": Task("worker", 0)}, {"workers": 4}, {"ps": 1}]),
    ],
)
def test_each_example_is_read_once_in_every_epoch_whoever_reads(
    strategy: str, cluster: str, changes: list[dict[str, Any]], run_dir: Path
) -> None:
    seen, hook = seen_by(cluster, changes, run_dir, strategy=strategy)

    assert len(hook.done) == len(changes)
    assert set(seen) == {8.0}


def test_all_reduce_workers_read_each_example_once_in_every_epoch(run_dir: Path) -> None:
    seen, hook = seen_by("2w", [{"workers": 3}, {"workers": 2}], run_dir, strategy="multi_worker_mirrored")

    assert [resize.after for resize in hook.done] == ["3w", "2w"]
    # The last step of all may need one more batch.
    assert set(seen) <= {8.0, 9.0}
    assert sum(seen == 9.0) in {0, BATCH}


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """All values before and after each move, from the servers themselves."""
    found: list[tuple[dict[str, Any], dict[str, Any]]] = []
    take_over = ParameterStore.take_over

    def values_of(store: ParameterStore) -> dict[str, Any]:
        values = dict(store.values.read())
        for rows in store.dynamic.read():
            ids = next(value for name, value in rows.items() if name.endswith("ids"))
            values |= {name: value[np.argsort(ids)] for name, value in rows.items()}
        return values

    def look(self: ParameterStore, other: ParameterStore) -> None:
        before = values_of(other)
        take_over(self, other)
        found.append((before, values_of(self)))

    monkeypatch.setattr(ParameterStore, "take_over", look)
    return found


def model_of_all_kinds() -> keras.Model:
    """A dynamic table, a table by rows, dense layers, and state; Adam has slots of all of them."""
    ids, number = layers.Input((2,), dtype="int64"), layers.Input((), dtype="int32")
    rows = [
        layers.Flatten()(DynamicEmbedding(4, name="dynamic")(ids)),
        layers.Flatten()(kdist.layers.Embedding(1000, 4)(number[:, None])),
    ]
    hidden = layers.BatchNormalization()(layers.Dense(300)(layers.Concatenate()(rows)))
    model = keras.Model([ids, number], layers.Dense(1)(hidden))
    model.compile("adam", "mse")
    return model


MOVES: list[dict[str, Any]] = [{"ps": 3}, {"move": "ps:0"}, {"ps": 1}, {"ps": 2}]


@pytest.mark.parametrize(
    ("strategy", "changes"),
    [
        ("parameter_server", MOVES[:1]),
        pytest.param("parameter_server", MOVES, marks=pytest.mark.long),
        pytest.param("sync_replicas", MOVES, marks=pytest.mark.long),
    ],
)
def test_values_are_the_same_bit_for_bit_on_other_servers(
    strategy: str, changes: list[dict[str, Any]], moves: list[tuple[dict[str, Any], dict[str, Any]]], run_dir: Path
) -> None:
    rng = np.random.default_rng(2)
    x = [rng.integers(0, 2**60, (200, 2)), rng.integers(0, 1000, 200)]
    hook = Resizes(changes)
    options: dict[str, Any] = {"placement": "partitioned", "partition_min_bytes": 1 << 12, "steps_per_call": 1}
    trainer = kdist.Trainer(model_of_all_kinds, "2ps1w", strategy, run_dir=run_dir, hooks=[hook], seed=3, **options)
    trainer.fit(x, rng.normal(size=200), batch_size=10, steps=20 + 60 * len(changes), verbose=0)

    assert [resize.after for resize in hook.done] == ["3ps1w", "3ps1w", "1ps1w", "2ps1w"][: len(changes)]
    assert len(moves) == len(changes)
    for before, after in moves:
        assert before.keys() == after.keys()
        for name, value in before.items():
            assert value.dtype == after[name].dtype
            np.testing.assert_array_equal(value, after[name], err_msg=name)


def deterministic_model() -> keras.Model:
    init = keras.initializers.GlorotUniform(5)
    model = keras.Sequential([layers.Input((6,)), layers.Dense(8, "tanh", kernel_initializer=init)])
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


def test_synchronous_training_is_as_if_nothing_had_changed(run_dir: Path) -> None:
    x = np.ones((120, 6), np.float32)

    def train(folder: Path, hooks: list[Hook]) -> list[np.ndarray]:
        trainer = kdist.Trainer(deterministic_model, "2ps2w", "sync_replicas", run_dir=folder, hooks=hooks, seed=3)
        trainer.fit(x, np.ones((120, 8), np.float32), batch_size=5, steps=120, verbose=0)
        return trainer.model.get_weights()

    hook = Resizes([{"workers": 3}, {"workers": 1, "ps": 1}])
    resized, undisturbed = train(run_dir / "resized", [hook]), train(run_dir / "undisturbed", [])

    assert [resize.after for resize in hook.done] == ["2ps3w", "1ps1w"]
    for one, other in zip(resized, undisturbed):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


class Kills(Hook):
    """Kills a random worker each time when so many steps have passed."""

    def __init__(self, every: int) -> None:
        self._every, self._chance = every, random.Random(7)
        self.number = 0

    def after_run(self, context: RunContext, values: RunValues) -> None:
        workers = [pid for task, pid in context.session.strategy.pids.items() if task.job == "worker"]
        if values.global_step >= self._every * (self.number + 1) and len(workers) > 1:
            os.kill(self._chance.choice(workers), signal.SIGKILL)
            self.number += 1


def twenty_changes() -> list[dict[str, Any]]:
    chance = random.Random(41)
    kinds = [lambda: {"workers": chance.randint(1, 4)}, lambda: {"ps": chance.randint(1, 3)}]
    return [{"move": "ps:0"}, *(chance.choice(kinds)() for _ in range(19))]


@pytest.mark.long
@pytest.mark.parametrize("kills", [False, True], ids=["resized", "and killed"])
def test_twenty_random_resizes_of_asynchronous_training_read_each_example_once(kills: bool, run_dir: Path) -> None:
    hook, killer = Resizes(twenty_changes(), every=500), Kills(every=2000)
    hooks: list[Hook] = [hook, killer] if kills else [hook]
    trainer = kdist.Trainer(counting_model, "2ps2w", "parameter_server", run_dir=run_dir, hooks=hooks, seed=3)
    epochs = 170
    with pytest.warns(UserWarning, match=r"worker:\d died") if kills else nullcontext():
        trainer.fit(np.arange(NUM_IDS), np.zeros(NUM_IDS), batch_size=BATCH, epochs=epochs, verbose=0)

    result, seen = trainer.result, trainer.model.get_weights()[1]
    assert len(hook.done) + len(hook.errors) == 20
    assert kills or not hook.errors
    last_step = epochs * NUM_IDS // BATCH
    assert result.gradients.applied == result.global_step
    if kills:
        assert killer.number >= 5
        # A call that was repeated at the end is beyond it; the largest has 64 steps.
        assert last_step <= result.global_step <= last_step + min(result.extra_steps, 64)
        # Some calls of lost workers are repeated that had been applied; the last epoch ends as many steps earlier.
        assert (seen >= epochs - 1).all()
    else:
        assert (result.global_step, result.extra_steps) == (last_step, 0)
        assert set(seen) == {float(epochs)}


@pytest.mark.long
def test_twenty_random_resizes_of_synchronous_training_change_no_number(run_dir: Path) -> None:
    x = np.ones((120, 6), np.float32)

    def train(folder: Path, hooks: list[Hook]) -> list[np.ndarray]:
        trainer = kdist.Trainer(deterministic_model, "2ps2w", "sync_replicas", run_dir=folder, hooks=hooks, seed=3)
        trainer.fit(x, np.ones((120, 8), np.float32), batch_size=5, steps=20_000, verbose=0)
        assert trainer.result.gradients.dropped == 0
        return trainer.model.get_weights()

    hook = Resizes(twenty_changes(), every=500)
    resized, undisturbed = train(run_dir / "resized", [hook]), train(run_dir / "undisturbed", [])

    assert (len(hook.done), hook.errors) == (20, [])
    for one, other in zip(resized, undisturbed):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_all_reduce_workers_join_and_leave_in_the_same_fit(run_dir: Path) -> None:
    events: list[str] = []

    class Tells(Hook):
        def after_resize(self, session: Session, resize: Resize) -> None:
            events.append(f"{resize.before} {resize.after} {session.strategy.num_replicas}")

    hook = Resizes([{"workers": 2}, {"workers": 1}], every=10)
    x = np.random.default_rng(1).normal(size=(60, 6)).astype(np.float32)
    build = keras.Sequential([layers.Input((6,)), layers.Dense(1)])
    build.compile("adam", "mse")

    class Slow(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            del batch, logs
            # So that the run does not end before the others have started.
            if len(events) < 2:
                threading.Event().wait(0.05)

    trainer = kdist.Trainer(build, "1w", "multi_worker_mirrored", run_dir=run_dir, hooks=[hook, Tells()], seed=3)
    history = trainer.fit(x, x[:, :1], batch_size=5, steps=600, callbacks=[Slow()], verbose=0)

    assert events == ["1w 2w 2", "2w 1w 1"]
    assert trainer.result.global_step == 600
    assert history.history["loss"][-1] < history.history["loss"][0]


def test_a_server_that_dies_while_it_joins_leaves_the_run_as_it_was(
    monkeypatch: pytest.MonkeyPatch, run_dir: Path
) -> None:
    pids: list[int] = []
    take_over = ParameterStore.take_over

    def kill_first(self: ParameterStore, other: ParameterStore) -> None:
        if not pids:
            pids.append(max(holder[0].strategy.pids.items(), key=lambda each: (each[0].job == "ps", each[0].index))[1])
            os.kill(pids[0], signal.SIGKILL)
        take_over(self, other)

    holder: list[Session] = []

    class Holds(Hook):
        def begin(self, session: Session) -> None:
            holder.append(session)

    monkeypatch.setattr(ParameterStore, "take_over", kill_first)
    hook = Resizes([{"ps": 2}, {"ps": 2}])
    trainer = kdist.Trainer(counting_model, "1ps2w", run_dir=run_dir, hooks=[hook, Holds()], seed=3)
    trainer.fit(np.arange(NUM_IDS), np.zeros(NUM_IDS), batch_size=BATCH, epochs=8, verbose=0)

    assert len(hook.errors) == 1
    assert isinstance(hook.errors[0], ResizeError)
    assert re.search(r"ps=2: ps:1 died .* while it joined; training continues on 1ps2w", str(hook.errors[0]))
    assert [resize.after for resize in hook.done] == ["2ps2w"]
    assert trainer.result.restarts == {"worker": 0, "cluster": 0}
    assert set(trainer.model.get_weights()[1]) == {8.0}


def test_a_change_that_fails_without_a_loss_leaves_the_run_as_it_was(
    monkeypatch: pytest.MonkeyPatch, run_dir: Path
) -> None:
    take_over, failures = ParameterStore.take_over, [tf.errors.ResourceExhaustedError(None, None, "no memory here")]

    def fail_first(self: ParameterStore, other: ParameterStore) -> None:
        if failures:
            raise failures.pop()
        take_over(self, other)

    monkeypatch.setattr(ParameterStore, "take_over", fail_first)
    hook = Resizes([{"ps": 2, "workers": 3}, {"ps": 2, "workers": 3}])
    trainer = kdist.Trainer(counting_model, "1ps2w", run_dir=run_dir, hooks=[hook], seed=3)
    trainer.fit(np.arange(NUM_IDS), np.zeros(NUM_IDS), batch_size=BATCH, epochs=8, verbose=0)

    assert [str(error) for error in hook.errors] == ["workers=3 ps=2: no memory here; training continues on 1ps2w"]
    assert [resize.after for resize in hook.done] == ["2ps3w"]
    assert set(trainer.model.get_weights()[1]) == {8.0}


def test_what_cannot_be_done_is_refused_and_the_run_goes_on(run_dir: Path) -> None:
    changes: list[dict[str, Any]] = [{"workers": 1}, {"ps": 0}, {"move": "ps:4"}, {"workers": 2}]
    hook = Resizes(changes, every=5)
    cluster = kdist.ClusterConfig("1ps2w", min_workers=2)
    trainer = kdist.Trainer(counting_model, cluster, run_dir=run_dir, hooks=[hook], seed=3)
    with pytest.raises(ConfigError, match="no fit is running"):
        trainer.resize(workers=3)
    trainer.fit(np.arange(NUM_IDS), np.zeros(NUM_IDS), batch_size=BATCH, steps=150, verbose=0)

    assert [str(error).partition(";")[0] for error in hook.errors] == [
        "workers=1: fewer than cluster.min_workers=2",
        "ps=0: must be at least 1",
        "move=ps:4: there is no such task",
    ]
    # It has this shape already.
    assert [resize.after for resize in hook.done] == ["1ps2w"]
    assert result_of(run_dir)["resizes"] == []


def workers_in(said: str) -> list[int]:
    """The process ids of the workers that the last table of tasks has."""
    return [int(pid) for pid in re.findall(r"task  \| worker:\d +\| pid +(\d+)", said.rpartition("resize |")[2])]


def resize(run_dir: Path, *words: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "kdist", "resize", str(run_dir), *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=environment(),
    )
    return done.returncode, done.stdout + done.stderr


def test_another_process_resizes_a_run_and_a_worker_leaves_at_sigterm(run_dir: Path) -> None:
    console = run_dir.with_name("console")
    console.touch()
    words = ["+recipe=linear", "cluster=1ps2w", "train.steps=1000000", "run.verbose=3", f"run.dir={run_dir}"]
    process = Command(*words, "cluster.patience_for_workers=2", cwd=run_dir.parent, stdout=console)
    said = console.read_text
    try:
        wait_until(lambda: "train |" in said(), 60, said)
        folder = run_dir / ".resize"
        assert folder.stat().st_mode & 0o777 == 0o700
        code, line = resize(run_dir, "2ps3w")
        assert (code, "1ps2w -> 2ps3w" in line) == (0, True), line
        answers: list[tuple[int, str]] = []
        askers = [threading.Thread(target=lambda n=n: answers.append(resize(run_dir, f"workers={n}"))) for n in (2, 3)]
        for asker in askers:
            asker.start()
        for asker in askers:
            asker.join()
        assert [code for code, _ in answers] == [0, 0]
        assert resize(run_dir, "workers=1")[0] == resize(run_dir, "workers=3")[0] == 0
        assert resize(run_dir, "workers=0") == (2, "kdist: error: workers=0: fewer than cluster.min_workers=1\n")
        assert not list(folder.iterdir())
        # One after the other, until none is left.
        for number in (2, 1, 0):
            wait_until(lambda n=number: len(workers_in(said())) == n + 1, 30, said)
            os.kill(workers_in(said())[-1], signal.SIGTERM)
            wait_until(lambda n=number: f"-> 2ps{n}w" in said().rpartition("resize |")[2], 30, said)
        assert process.wait(60) == 75
    finally:
        process.kill()
    assert "lost" not in said()
    result = result_of(run_dir)
    assert result["status"] == "failed"
    assert "no other one has joined within 2 s (cluster.patience_for_workers)" in result["error"]
    assert result["cluster"] == "2ps0w"
    assert result["restarts"] == {"worker": 0, "cluster": 0}
    steps = [int(path.name.split("-")[1].partition(".")[0]) for path in (run_dir / "checkpoints").glob("ckpt-*.index")]
    assert max(steps) == result["global_step"]
    assert result["resizes"][-1]["why"].endswith("was told to leave (SIGTERM)")
    assert resize(run_dir, "workers=2")[0] == 2
    rows = (run_dir / "metrics.csv").read_text().splitlines()
    assert sum(",resize," in row for row in rows) == len(result["resizes"])


def test_tasks_join_by_the_address_of_the_chief_alone_and_leave_at_sigterm(run_dir: Path) -> None:
    ps, worker, chief = free_addresses(3)
    recipe = ["+recipe=linear", "cluster=hosts", "train.steps=1000000", f"run.dir={run_dir}"]
    listed = [f"cluster.ps=[{ps}]", f"cluster.worker=[{worker}]", f"cluster.chief={chief}"]
    started: list[Command] = []

    def start(*words: str) -> tuple[Command, Callable[[], str]]:
        console = run_dir.with_name(f"console {len(started)}")
        console.touch()
        started.append(Command(*recipe, *words, cwd=run_dir.parent, stdout=console))
        return started[-1], console.read_text

    try:
        tasks = [start(*listed, f"cluster.job={job}") for job in ("ps", "worker", "chief")]
        said = tasks[-1][1]
        wait_until(lambda: "train |" in said(), 90, said)
        another, _ = start("cluster.job=worker", f"cluster.chief={chief}")
        wait_until(lambda: "1ps1w -> 1ps2w" in said(), 60, said)
        other, told = start("cluster.job=worker", f"cluster.join={run_dir}", "train.batch_size=7")
        assert other.wait(60) == 2
        wait_until(lambda: "worker:2: differs from the chief" in told(), 5, told)
        server, _ = start("cluster.job=ps", f"cluster.join={run_dir}")
        wait_until(lambda: "1ps2w -> 2ps2w" in said(), 60, said)
        code, line = resize(run_dir, "workers=4")
        assert (code, "others start the tasks of this cluster" in line) == (2, True)
        # Those that somebody has started leave, also one with values.
        for process, after in ((another, "2ps1w"), (tasks[0][0], "1ps1w")):
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
            assert f"-> {after}" in said()
        # One that is started again as before has its place again, and one that the cluster gives up ends.
        again, _ = start(*listed, "cluster.job=ps")
        wait_until(lambda: "1ps1w -> 2ps1w" in said(), 60, said)
        assert resize(run_dir, "ps=1")[0] == 0
        assert server.wait(60) == 0
        tasks[-1][0].send_signal(signal.SIGTERM)
        assert tasks[-1][0].wait(60) == 143
        for process in (again, tasks[1][0]):
            assert process.wait(60) == 0
    finally:
        for process in started:
            process.kill()
    result = result_of(run_dir)
    assert [each["to"] for each in result["resizes"]] == ["1ps2w", "2ps2w", "2ps1w", "1ps1w", "2ps1w", "1ps1w"]
    assert result["restarts"] == {"worker": 0, "cluster": 0}


@pytest.mark.parametrize("cluster", ["1ps2w", "2w"])
def test_a_resumed_run_reads_the_rest_of_the_epoch_once(cluster: str, run_dir: Path) -> None:
    def fit(epochs: int, hooks: list[Hook]) -> kdist.Trainer:
        trainer = kdist.Trainer(counting_model, cluster, run_dir=run_dir, hooks=hooks, seed=3)
        trainer.fit(np.arange(NUM_IDS), np.zeros(NUM_IDS), batch_size=BATCH, epochs=epochs, verbose=0)
        return trainer

    class Stops(Hook):
        """Ends the run after the change, long before the end of the data."""

        def after_run(self, context: RunContext, values: RunValues) -> None:
            if not resizes.done:
                # Few steps, while a worker starts.
                threading.Event().wait(0.2)
            elif values.global_step >= 150:
                context.request_stop("the test")

        def due_in(self, step: int) -> int | None:
            return 150 - step if resizes.done and step < 150 else 1

    resizes = Resizes([{"workers": 3}], every=10)
    fit(4, [resizes, Stops()])
    assert result_of(run_dir)["stopped_by"] == "the test"
    checkpoints = Checkpoints(run_dir / "checkpoints")
    state = json.loads(checkpoints.data_state(result_of(run_dir)["global_step"]) or "{}")
    assert state["found"][0] == 2
    trainer = fit(4, [])

    seen = trainer.model.get_weights()[1]
    # The last step of all-reduce workers may need more batches.
    assert set(seen) <= {4.0, 5.0 if cluster == "2w" else 4.0}
    assert sum(seen == 5.0) <= BATCH
