"""Evaluating and predicting outside training: here, as Keras does, or on a cluster that is started for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from kdist.data import read_locally
from kdist.parameters.local import read_from_model
from kdist.strategies.on_workers import EvaluationJob, PredictionJob, WorkerJob, can_evaluate, can_predict, parts_of

if TYPE_CHECKING:
    from kdist.trainer import Trainer


def evaluate(
    model: keras.Model,
    x: object,
    y: object = None,
    *,
    batch_size: int | None = None,
    verbose: int | str = 0,
    sample_weight: object = None,
    steps: int | None = None,
    callbacks: object = None,
) -> dict[str, float]:
    """`keras.Model.evaluate` as a dict, loss first; `x` may also be a dataset function."""
    logs = model.evaluate(
        read_locally(x, batch_size),
        y,
        batch_size=batch_size,
        verbose=verbose,
        sample_weight=sample_weight,
        steps=steps,
        callbacks=callbacks,
        return_dict=True,
    )
    return {"loss": logs.pop("loss"), **logs}


def evaluate_on_workers(
    trainer: Trainer, x: Any, y: Any, sample_weight: Any, batch_size: int | None
) -> dict[str, float] | None:
    """What `evaluate` returns, by a cluster of the trainer's; None if that cannot be done."""
    num_workers = _num_workers(trainer)
    if not num_workers or not can_evaluate(trainer.model):
        return None
    parts = parts_of(x, y, sample_weight, batch_size, num_workers)
    if parts is None:
        return None
    job = EvaluationJob(trainer.model, parts, num_workers)
    brought = _brought(trainer, job)
    return None if brought is None else job.logs(brought)


def predict_on_workers(trainer: Trainer, x: Any, batch_size: int | None) -> Any:
    """What `keras.Model.predict` returns, by a cluster of the trainer's; None if that cannot be done."""
    num_workers = _num_workers(trainer)
    # The parts of a dataset are not in its order.
    if not num_workers or not can_predict(trainer.model) or isinstance(x, tf.data.Dataset):
        return None
    parts = parts_of(x, None, None, batch_size, num_workers)
    if parts is None:
        return None
    job = PredictionJob(trainer.model, parts, num_workers)
    brought = _brought(trainer, job)
    return None if brought is None else job.outputs(brought)


def _num_workers(trainer: Trainer) -> int:
    """Of the cluster that can be started for it; 0 if there is none."""
    return trainer.shape.num_workers if trainer.shape.num_ps and trainer.membership is None else 0


def _brought(trainer: Trainer, job: WorkerJob) -> list[Any] | None:
    job.values = read_from_model(trainer.model)
    strategy: Any = trainer.make_strategy()
    try:
        strategy.start_tasks(trainer.files.logs, trainer.grace_secs)
        return strategy.on_workers(job)
    finally:
        strategy.stop()
