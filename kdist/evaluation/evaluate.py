"""Evaluating and predicting: in this process, as Keras does, or on the workers of a cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from kdist._compat.keras import main_optimizer
from kdist.data.base import TrainingData
from kdist.data.sources import arrays_for_keras, has_labels, read_locally, training_data
from kdist.dispatch.connection import reserved
from kdist.errors import ConfigError
from kdist.evaluation.on_workers import (
    MetricsOnWorkers,
    NeedsWholeTable,
    OutputsOnWorkers,
    can_evaluate,
    can_predict,
    shards_for,
    shards_of,
)
from kdist.hooks.keras_callbacks import Callbacks
from kdist.model.logs import Logs, as_logs
from kdist.model.source import ModelSource, overrides_of, preprocessing_of
from kdist.model.state import finalize_ema, read_from_model, rows_cannot_be_sent, write_to_model
from kdist.run.checkpoint import Checkpoints
from kdist.strategies.base import TrainingSpec
from kdist.strategies.prepared_training import prepare

if TYPE_CHECKING:
    from kdist.hooks.base import Session
    from kdist.strategies.base import Strategy


def evaluations(
    source: ModelSource, arguments: ValidationArguments, checkpoints: Checkpoints, after: int = -1
) -> Iterator[tuple[int, Logs] | None]:
    """Evaluates the newest checkpoint of a run, again and again, each one once; that of step `after` was.

    Yields:
        The step, and loss and metrics; None if the newest checkpoint was evaluated before, or cannot be read.
    """
    model = source.model
    # It gets its variables, as for training.
    data = arguments.training_data(preprocessing_of(model))
    prepare(TrainingSpec(model, data, arguments.batch_size, None, 0, Path()), 1)
    validator = Validator(model, arguments, Callbacks([], model))
    while True:
        newest = max(checkpoints.steps(), default=-1)
        # A run that starts over has smaller steps.
        values = None if newest in (-1, after) else checkpoints.read(newest)
        if values is None:
            # One may be deleted meanwhile, or damaged, which is for the chief to report; a newer one will come.
            yield None
            continue
        after, logs = newest, validator.of_values(values)
        # Otherwise they would be in memory beside those of the next one.
        del values
        yield newest, logs


#: x, y and sample_weight.
Data: TypeAlias = tuple[Any, Any, Any]


def evaluate(
    model: keras.Model, data: Data, *, batch_size: int | None = None, verbose: int | str = 0, **options: Any
) -> Logs:
    """Evaluates as `keras.Model.evaluate` with its other options, loss first; x may also be a dataset function."""
    x, y, sample_weight = data
    x = read_locally(x, batch_size)
    if not overrides_of(model, "evaluate"):
        x, y, sample_weight = map(arrays_for_keras, (x, y, sample_weight))
    options |= {"batch_size": batch_size, "verbose": verbose, "return_dict": True}
    logs = model.evaluate(x=x, y=y, sample_weight=sample_weight, **options)
    # A `test_step` of the user's may report no loss.
    return as_logs({**({"loss": logs["loss"]} if "loss" in logs else {}), **logs})


def predict(
    model: keras.Model, x: object, *, batch_size: int | None = None, verbose: int | str = 0, **options: Any
) -> Any:
    """Predicts as `keras.Model.predict` with its other options; `x` may also be a dataset function."""
    x = read_locally(x, batch_size)
    if not overrides_of(model, "predict"):
        x = arrays_for_keras(x)
    return model.predict(x=x, batch_size=batch_size, verbose=verbose, **options)


@dataclass(frozen=True)
class WorkerPool:
    """A cluster that is started for one evaluation.

    Attributes:
        make_strategy: makes a strategy with parameter servers, not started.
        grace_secs: seconds that an interrupted evaluation has to end.
        training: starts a strategy with the values that are evaluated on its servers, if the model does not have them.
    """

    make_strategy: Callable[[], Any]
    num_workers: int
    log_dir: Path
    grace_secs: float
    training: Callable[[Strategy], None] | None = None

    def evaluate(
        self, model: keras.Model, data: Data, batch_size: int | None, callbacks: Sequence[keras.callbacks.Callback] = ()
    ) -> Logs | None:
        """Does the same as `evaluate`; None if the workers cannot. Callbacks see the begin and the end."""
        can = can_evaluate(model) and self._can_give(model)
        shards = shards_for(model, data, batch_size, self.num_workers) if can else None
        if shards is None:
            return None
        listed = keras.callbacks.CallbackList(list(callbacks), model=model)
        listed.on_test_begin()
        if (logs := self._run(model, MetricsOnWorkers(model, shards))) is not None:
            listed.on_test_end(dict(logs))
        return logs

    def predict(
        self, model: keras.Model, x: Any, batch_size: int | None, callbacks: Sequence[keras.callbacks.Callback] = ()
    ) -> Any:
        """Does the same as `keras.Model.predict`; None if the workers cannot. Callbacks see the begin and the end."""
        # The shards of a dataset are not in its order.
        can = can_predict(model) and self._can_give(model) and not isinstance(x, tf.data.Dataset)
        shards = shards_of(x, None, None, batch_size, self.num_workers) if can else None
        if shards is None:
            return None
        listed = keras.callbacks.CallbackList(list(callbacks), model=model)
        listed.on_predict_begin()
        if (outputs := self._run(model, OutputsOnWorkers(model, shards))) is not None:
            listed.on_predict_end()
        return outputs

    def _can_give(self, model: keras.Model) -> bool:
        """True if workers can get all values of the model."""
        return self.training is not None or not rows_cannot_be_sent(model)

    def _run(self, model: keras.Model, evaluation: MetricsOnWorkers | OutputsOnWorkers) -> Any:
        with reserved():
            strategy = self.make_strategy()
            try:
                if self.training is not None:
                    self.training(strategy)
                else:
                    evaluation.values = read_from_model(model)
                    strategy.start_tasks(self.log_dir, self.grace_secs)
                results = strategy.on_workers(evaluation)
                return None if results is None else evaluation.join(results)
            except NeedsWholeTable:
                return None
            finally:
                strategy.stop()


@dataclass(frozen=True)
class ValidationArguments:
    """The arguments of `fit` for validation.

    Attributes:
        data: as in Keras; None for no validation.
        batch_size: examples per batch; 32 if None.
        steps: batches to evaluate; all if None.
        with_ema: validate the moving averages of the parameters.
    """

    data: Any
    batch_size: int | None = None
    steps: int | None = None
    with_ema: bool = False

    @property
    def parts(self) -> Data:
        """The data as x, y and sample_weight."""
        return (self.data, None, None) if has_labels(self.data) else keras.utils.unpack_x_y_sample_weight(self.data)

    def training_data(self, preprocess: Callable[..., Any] | None) -> TrainingData:
        """The same data as training data: a model is built for its batches."""
        return training_data(*self.parts, batch_size=self.batch_size, shuffle=False, seed=0, preprocess=preprocess)


class Validator:
    """Evaluates the model of a `fit` on its validation data, during training and after it.

    Args:
        model: gets the values that are validated.
        stays_on_servers: tells if the model, built, is too large for this process.

    Raises:
        ConfigError: moving averages are to be validated, and the optimizer keeps none.
    """

    def __init__(
        self,
        model: keras.Model,
        arguments: ValidationArguments,
        callbacks: Callbacks,
        stays_on_servers: Callable[[], bool] = lambda: False,
    ) -> None:
        self._model = model
        self._stays_on_servers = stays_on_servers
        #: The evaluation that workers run; None if they cannot, once that has been determined.
        self._on_workers: MetricsOnWorkers | None = None
        self._has_looked = False
        #: The workers need the values of the model: averages, or whole tables.
        self._model_is_used = arguments.with_ema
        self._callbacks = callbacks
        self._arguments = arguments
        if arguments.with_ema and not main_optimizer(model).use_ema:
            raise ConfigError(
                "validate_with_ema: the optimizer keeps no moving averages; set its use_ema (optimizer.use_ema=true)"
            )

    @property
    def has_data(self) -> bool:
        return self._arguments.data is not None

    def __call__(self, session: Session) -> Logs:
        """Loss and metrics of a session's present parameters, or of their averages if `with_ema`.

        With several workers, they compute it, and pull from the servers what they need for it.

        Raises `ConfigError` if the model stays on the servers, and the workers cannot compute it.
        """
        logs = self._by_workers(session) if session.strategy.has_workers else None
        if logs is not None or session.interrupted:
            return logs or {}
        self._bring(session)
        self._callbacks.see(session)
        logs = self.evaluate(self._callbacks.of_validation)
        self._callbacks.push(session)
        return logs

    def of_values(self, values: Mapping[str, np.ndarray]) -> Logs:
        """Loss and metrics of other values, by their names in a checkpoint; computed in this process."""
        write_to_model(self._model, values)
        if self._arguments.with_ema:
            finalize_ema(self._model)
        return self.evaluate()

    def evaluate(self, callbacks: keras.callbacks.CallbackList | None = None) -> Logs:
        """Loss and metrics of the model as it is; none without validation data."""
        arguments = self._arguments
        if arguments.data is None:
            return {}
        options: dict[str, Any] = {"batch_size": arguments.batch_size, "steps": arguments.steps, "callbacks": callbacks}
        return evaluate(self._model, arguments.parts, **options)

    def _bring(self, session: Session) -> None:
        """Gives the model the values that are validated."""
        if self._stays_on_servers():
            raise ConfigError(
                f"validation_data: model {self._model.name} is larger than run.export_max_bytes and stays on its "
                "servers; its workers validate arrays or finite datasets with a batch for each of them, with the "
                "test_step of Keras, metrics that add up and tables that are looked up by rows, and without "
                "validation_steps and validate_with_ema"
            )
        session.read_into(partial(write_to_model, self._model))
        if self._arguments.with_ema:
            finalize_ema(self._model)

    def _by_workers(self, session: Session) -> Logs | None:
        """Loss and metrics by the workers; None if they were interrupted, or cannot compute them."""
        if not self._has_looked:
            self._has_looked, self._on_workers = True, self._evaluation_for(session.strategy.num_replicas)
        evaluation, callbacks = self._on_workers, self._callbacks
        if evaluation is None or (self._model_is_used and rows_cannot_be_sent(self._model)):
            return None
        evaluation.values = self._brought_values(session) if self._model_is_used else None
        (callbacks.see if self._model_is_used else callbacks.pull)(session)
        events = callbacks.of_validation
        events.on_test_begin()
        callbacks.push(session)
        try:
            results = session.strategy.on_workers(evaluation)
        except NeedsWholeTable:
            self._model_is_used = True
            evaluation.values = self._brought_values(session)
            results = session.strategy.on_workers(evaluation)
        if results is None:
            return None
        logs = evaluation.join(results)
        events.on_test_end(dict(logs))
        callbacks.push(session)
        return logs

    def _brought_values(self, session: Session) -> dict[str, np.ndarray]:
        self._bring(session)
        return read_from_model(self._model)

    def _evaluation_for(self, num_workers: int) -> MetricsOnWorkers | None:
        arguments = self._arguments
        acts_on_batches = self._callbacks.acts_on_test_batches
        at_least = 1 if self._stays_on_servers() else 2
        if num_workers < at_least or arguments.steps is not None or acts_on_batches or not can_evaluate(self._model):
            return None
        shards = shards_for(self._model, arguments.parts, arguments.batch_size, num_workers)
        return None if shards is None else MetricsOnWorkers(self._model, shards)
