"""Evaluating and predicting beside training: by the workers, and by an evaluator."""

import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import keras
import models
import numpy as np
import pytest
import tensorflow as tf
from helpers import tags_of, toy_data, wait_until

import kdist
from kdist.evaluation import on_workers
from kdist.strategies import on_servers

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("tasks_prepared")]


class Seen(keras.metrics.Metric):
    """The number of examples that it has seen."""

    def __init__(self, name: str = "seen") -> None:
        super().__init__(name=name)
        self._count = self.add_variable((), "zeros", name="count")

    def update_state(self, y: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self._count.assign_add(keras.ops.cast(keras.ops.shape(y)[0], "float32"))

    def result(self) -> Any:
        return self._count.value


def build() -> keras.Model:
    model = models.batch_normalized()
    top_2 = keras.metrics.SparseTopKCategoricalAccuracy(2, name="top_2")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, metrics=["accuracy", top_2, Seen()])
    return model


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [("parameter_server", "dataset"), pytest.param("sync_replicas", "arrays", marks=pytest.mark.long)],
)
def test_workers_validate_what_keras_would(
    strategy: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = toy_data(1003)
    weights = np.linspace(0, 2, len(x)).astype(np.float32)
    validation: Any = (x, y, weights)
    if kind == "dataset":
        validation = tf.data.Dataset.from_tensor_slices((x, y, weights)).batch(50)
    asked: list[int] = []
    ask = on_servers.ServersStrategy.on_workers
    monkeypatch.setattr(on_servers.ServersStrategy, "on_workers", lambda *a: asked.append(1) or ask(*a))
    options: dict[str, Any] = {"backup_workers": 1} if strategy == "sync_replicas" else {}
    trainer = kdist.Trainer(build, "1ps2w" if kind == "dataset" else "2ps3w", strategy, run_dir=tmp_path, **options)
    history = trainer.fit(x, y, batch_size=50, epochs=2, validation_data=validation, verbose=0)
    assert len(asked) == 2
    # The same as Keras makes of the model that came out.
    if kind == "dataset":
        expected = trainer.model.evaluate(validation, verbose=0, return_dict=True)
    else:
        expected = trainer.model.evaluate(x, y, 50, sample_weight=weights, verbose=0, return_dict=True)
    assert trainer.result.metrics["validation"] == pytest.approx(expected, rel=1e-5)
    assert trainer.result.metrics["validation"]["seen"] == 1003
    assert history.history["val_loss"][-1] == pytest.approx(expected["loss"], rel=1e-5)


def test_evaluate_and_predict_on_workers_see_each_example_once(tmp_path: Path) -> None:
    x, y = toy_data(515)
    trainer = kdist.Trainer(build, "1ps2w", run_dir=tmp_path)
    trainer.model.fit(x, y, verbose=0)
    here = trainer.evaluate(x, y, return_dict=True)
    seen: list[Any] = []
    note = keras.callbacks.LambdaCallback()
    note.on_test_begin = lambda logs: seen.append("begin")
    note.on_test_end = seen.append
    assert trainer.evaluate(x, y, on_workers=True, return_dict=True) == pytest.approx(here, rel=1e-5)
    listed = trainer.model.evaluate(x, y, verbose=0)
    assert trainer.evaluate(x, y, on_workers=True, callbacks=note) == pytest.approx(listed, rel=1e-5)
    assert seen == ["begin", pytest.approx(here, rel=1e-5)]
    assert here["seen"] == 515
    np.testing.assert_allclose(trainer.predict(x, on_workers=True), trainer.predict(x), rtol=1e-5, atol=1e-6)


@pytest.mark.long
def test_a_worker_that_is_lost_while_it_validates_leaves_its_part_to_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = toy_data(512)
    trainer = kdist.Trainer(build, "1ps2w", run_dir=tmp_path, max_worker_restarts=0)
    place = on_workers._OnWorkers.place
    killed: list[int] = []

    def kill_first(job: Any, functions: Any, part: int) -> Any:
        placed = place(job, functions, part)
        if part == 1 and not killed:
            (pid,) = (pid for task, pid in session.strategy.pids.items() if str(task) == "worker:1")
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)
        return placed

    monkeypatch.setattr(on_workers._OnWorkers, "place", kill_first)
    with trainer.session(x, y, batch_size=32, steps=20, validation_data=(x, y), verbose=0) as session:
        while not session.should_stop():
            session.run()
    assert killed
    assert trainer.result.metrics["validation"]["seen"] == 512
    assert trainer.result.global_step == 20


@pytest.mark.long
def test_an_evaluator_evaluates_each_new_checkpoint_and_comes_back(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    x, y = toy_data(512)

    class Waits(kdist.hooks.Hook):
        """Kills the evaluator once, and waits until it has evaluated what was saved then."""

        def __init__(self) -> None:
            self.said = ""

        def _has_evaluated(self, session: Any, evaluator: Any, step: int) -> bool:
            evaluator.after_run(type("Context", (), {"session": session})(), None)
            self.said += capfd.readouterr().out
            return f"eval  | step {step:>6}/60" in self.said

        def after_run(self, context: Any, values: Any) -> None:
            evaluator = context.session.hooks[-1]
            if values.global_step == 20:
                os.kill(evaluator._process.pid, signal.SIGKILL)
            if values.global_step == 40:
                wait_until(lambda: self._has_evaluated(context.session, evaluator, 20), 60, "step 20 is evaluated")

        def due_in(self, step: int) -> int | None:
            return 20 - step % 20

    waits = Waits()
    saver = kdist.hooks.CheckpointSaver(every_steps=20)
    trainer = kdist.Trainer(build, "1ps1w1e", run_dir=tmp_path, hooks=[waits, saver])
    with pytest.warns(UserWarning, match=r"evaluator died \(signal 9, SIGKILL\); .*restarting"):
        trainer.fit(x, y, batch_size=32, steps=60, validation_data=(x, y))
    said = waits.said + capfd.readouterr().out
    assert trainer.result.cluster == "1ps1w1e"
    evaluated = [int(step) for step in re.findall(r"^eval  \| step +(\d+)/60", said, re.MULTILINE)]
    assert evaluated == sorted(evaluated)
    assert {20, 60} <= set(evaluated)
    (last,) = re.findall(r"^eval  \| step +60/60 \| loss ([\d.]+)", said, re.MULTILINE)
    assert float(last) == pytest.approx(trainer.result.metrics["validation"]["loss"], abs=1e-4)
    assert {"loss", "accuracy", "epoch_loss"} <= tags_of(tmp_path / "tb" / "evaluator")
    assert (tmp_path / "logs" / "evaluator-0.log").exists()


@pytest.mark.long
def test_an_evaluator_that_fails_costs_a_warning(tmp_path: Path) -> None:
    x, y = toy_data(64)

    def build_here_only() -> keras.Model:
        if "evaluator_main" in sys.argv[0]:
            raise ValueError("not here")
        return models.mlp()

    class Waits(kdist.hooks.Hook):
        def after_run(self, context: Any, values: Any) -> None:
            process = context.session.hooks[-1]._process
            wait_until(lambda: process is None or process.poll() is not None, 60, "it has failed")

    trainer = kdist.Trainer(build_here_only, "1ps1w1e", run_dir=tmp_path, hooks=[Waits()])
    with pytest.warns(UserWarning, match=r"evaluator died \(exit code 1\); .*training continues without it"):
        trainer.fit(x, y, steps=20, validation_data=(x, y), verbose=0)
    assert "ValueError: not here" in (tmp_path / "logs" / "evaluator-0.log").read_text()
    assert trainer.result.status == "done"
