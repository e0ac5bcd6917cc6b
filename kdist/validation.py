"""Validation during and after training: the model gets the present values and is evaluated as Keras does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import keras
import tensorflow as tf

from kdist.data import is_dataset_function, read_locally
from kdist.errors import ConfigError
from kdist.parameters.local import write_to_model

if TYPE_CHECKING:
    from kdist.fit_arguments import FitArguments
    from kdist.session import TrainSession


class Validator:
    """Evaluates `model` on the validation data of a `fit`.

    Args:
        model: the trainer's own.
        arguments: of the fit; without `validation_data` there is nothing to evaluate.
        callbacks: called at the events of an evaluation.

    Raises:
        ConfigError: `validate_with_ema` without moving averages.
    """

    def __init__(
        self, model: keras.Model, arguments: FitArguments, callbacks: keras.callbacks.CallbackList | None = None
    ) -> None:
        self._model = model
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
        """Loss and metrics of a session's present parameters, or of their averages if `validate_with_ema`."""
        write_to_model(self._model, session.strategy.read())
        if self._arguments.validate_with_ema:
            self._model.optimizer.finalize_variable_values(self._model.trainable_variables)
        return self.evaluate()

    def evaluate(self) -> dict[str, float]:
        """Loss and metrics of the model as it is; none without validation data."""
        given, data = self._arguments, self._arguments.validation_data
        if data is None:
            return {}
        if isinstance(data, tf.data.Dataset) or is_dataset_function(data):
            x, y, sample_weight = data, None, None
        else:
            x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        return evaluate(
            self._model,
            x,
            y,
            batch_size=given.validation_batch_size or given.batch_size,
            sample_weight=sample_weight,
            steps=given.validation_steps,
            callbacks=self._callbacks,
        )


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
