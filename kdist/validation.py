"""Validation during and after training: the model gets the present values and is evaluated as Keras does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from kdist.data import is_whole
from kdist.errors import ConfigError
from kdist.evaluation import evaluate
from kdist.parameters.local import read_from_model, write_to_model
from kdist.strategies.on_workers import EvaluationJob, can_evaluate, parts_of

if TYPE_CHECKING:
    from kdist.callbacks import Callbacks
    from kdist.fit_arguments import FitArguments
    from kdist.session import TrainSession
    from kdist.strategies.base import Strategy


class Validator:
    """Evaluates `model` on the validation data of a `fit`.

    Args:
        model: the trainer's own.
        arguments: of the fit; without `validation_data` there is nothing to evaluate.
        callbacks: called at the events of an evaluation.

    Raises:
        ConfigError: `validate_with_ema` without moving averages.
    """

    def __init__(self, model: keras.Model, arguments: FitArguments, callbacks: Callbacks | None = None) -> None:
        self._model = model
        #: What the workers are asked to do; None if they are not, once that was looked at.
        self._job: EvaluationJob | None = None
        self._has_looked = False
        self._callbacks = callbacks
        self._arguments = arguments
        if arguments.validate_with_ema and not model.optimizer.use_ema:
            raise ConfigError(
                "validate_with_ema: the optimizer keeps no moving averages; set its use_ema (optimizer.use_ema=true)"
            )

    @property
    def has_data(self) -> bool:
        return self._arguments.validation_data is not None

    def __call__(self, session: TrainSession) -> dict[str, float]:
        """Loss and metrics of a session's present parameters, or of their averages if `validate_with_ema`.

        Where there are several workers, they do it.
        """
        self._set(session.strategy.read())
        return self._on_workers(session.strategy) or self.evaluate()

    def of_values(self, values: Mapping[str, np.ndarray]) -> dict[str, float]:
        """The same of other parameters, by their names in a checkpoint, here."""
        self._set(values)
        return self.evaluate()

    def _set(self, values: Mapping[str, np.ndarray]) -> None:
        write_to_model(self._model, values)
        if self._arguments.validate_with_ema:
            self._model.optimizer.finalize_variable_values(self._model.trainable_variables)

    def _on_workers(self, strategy: Strategy) -> dict[str, float] | None:
        """What the workers found; None if they cannot be asked."""
        if not strategy.has_workers:
            return None
        if not self._has_looked:
            self._has_looked, self._job = True, self._job_for(strategy.num_replicas)
        if self._job is None:
            return None
        self._job.values = read_from_model(self._model)
        if self._callbacks is not None:
            self._callbacks.list.on_test_begin()
        brought = strategy.on_workers(self._job)
        if brought is None:
            return None
        logs = self._job.logs(brought)
        if self._callbacks is not None:
            self._callbacks.list.on_test_end(dict(logs))
        return logs

    def _job_for(self, num_parts: int) -> EvaluationJob | None:
        given = self._arguments
        acts_on_batches = self._callbacks is not None and self._callbacks.acts_on_test_batches
        if num_parts < 2 or given.validation_steps is not None or acts_on_batches or not can_evaluate(self._model):
            return None
        x, y, sample_weight = self._data()
        parts = parts_of(x, y, sample_weight, given.validation_batch_size or given.batch_size, num_parts)
        return None if parts is None else EvaluationJob(self._model, parts, num_parts)

    def evaluate(self) -> dict[str, float]:
        """Loss and metrics of the model as it is; none without validation data."""
        given, data = self._arguments, self._arguments.validation_data
        if data is None:
            return {}
        x, y, sample_weight = self._data()
        return evaluate(
            self._model,
            x,
            y,
            batch_size=given.validation_batch_size or given.batch_size,
            sample_weight=sample_weight,
            steps=given.validation_steps,
            callbacks=None if self._callbacks is None else self._callbacks.list,
        )

    def _data(self) -> tuple[Any, Any, Any]:
        data = self._arguments.validation_data
        return (data, None, None) if is_whole(data) else keras.utils.unpack_x_y_sample_weight(data)
