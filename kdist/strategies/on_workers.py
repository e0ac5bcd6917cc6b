"""Evaluating and predicting on the workers: each has a part of the data, and every example is seen exactly once.

Metrics are exact: a worker starts from zero and returns its sums, which the chief adds (see `kdist.metrics`).
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.random.seed_generator import global_seed_generator

from kdist.cluster.coordinator import fetch
from kdist.data import as_tuples, is_whole
from kdist.dataset_graph import dataset_graph, dataset_of_graph
from kdist.errors import ConfigError
from kdist.metrics import MetricReader
from kdist.parameters.local import parameter_names
from kdist.parameters.names import is_seed
from kdist.replica import batch_size_of

_SUMMED = ("sum", "none")


class Parts(abc.ABC):
    """Data in parts, one for each worker, that together are the whole of it."""

    @abc.abstractmethod
    def arguments(self, part: int) -> Sequence[Any]:
        """What is sent to a worker for `dataset`."""

    @abc.abstractmethod
    def dataset(self, part: tf.Tensor, *arguments: tf.Tensor) -> tf.data.Dataset:
        """The batches of a part, each once; traced once for all parts."""


class _ArrayParts(Parts):
    """Arrays, cut where a batch ends, so that batches are those of one reader."""

    def __init__(self, arrays: Any, batch_size: int, num_parts: int) -> None:
        self._arrays = tf.nest.map_structure(np.asarray, arrays)
        self._batch_size = batch_size
        num_examples = len(tf.nest.flatten(self._arrays)[0])
        num_batches = -(-num_examples // batch_size)
        self._cuts = [min(num_examples, i * num_batches // num_parts * batch_size) for i in range(num_parts)]
        self._cuts.append(num_examples)

    def arguments(self, part: int) -> Sequence[Any]:
        chosen = slice(self._cuts[part], self._cuts[part + 1])
        return [_as_keras_feeds(array[chosen]) for array in tf.nest.flatten(self._arrays)]

    def dataset(self, part: tf.Tensor, *arguments: tf.Tensor) -> tf.data.Dataset:
        arrays = tf.nest.pack_sequence_as(self._arrays, arguments)
        return tf.data.Dataset.from_tensor_slices(arrays).batch(self._batch_size)


class _DatasetParts(Parts):
    """A finite `tf.data.Dataset` of batches: every n-th of them."""

    def __init__(self, dataset: tf.data.Dataset, num_parts: int) -> None:
        self._graph, self._spec, self._num_parts = dataset_graph(dataset), dataset.element_spec, num_parts

    def arguments(self, part: int) -> Sequence[Any]:
        return [self._graph]

    def dataset(self, part: tf.Tensor, *arguments: tf.Tensor) -> tf.data.Dataset:
        return dataset_of_graph(arguments[0], self._spec).shard(self._num_parts, part)


def parts_of(x: Any, y: Any, sample_weight: Any, batch_size: int | None, num_parts: int) -> Parts | None:
    """The data in parts; None if it cannot be cut so, or is not worth it."""
    if isinstance(x, tf.data.Dataset):
        # An unknown length, or none, is less than 0; some live in this process only.
        with suppress(ConfigError):
            return _DatasetParts(x, num_parts) if int(x.cardinality().numpy()) >= num_parts else None
    if is_whole(x) or isinstance(x, keras.utils.PyDataset) or hasattr(x, "__next__"):
        return None
    arrays = keras.utils.pack_x_y_sample_weight(*map(as_tuples, (x, y, sample_weight)))
    arrays = arrays if isinstance(arrays, tuple) else (arrays,)
    lengths = {array.shape[0] if getattr(array, "shape", ()) else 0 for array in tf.nest.flatten(arrays)}
    # Each worker has a batch at least.
    is_enough = len(lengths) == 1 and min(lengths) >= num_parts * (batch_size or 32)
    return _ArrayParts(arrays, batch_size or 32, num_parts) if is_enough else None


class WorkerJob(abc.ABC):
    """Something that each worker does with its part of the data.

    Args:
        model: built; it gives the function, and stays as it is.
        parts: the data.
        num_parts: of how many parts.

    Attributes:
        values: of the model's variables, by their names in a checkpoint; set before it runs.
    """

    def __init__(self, model: keras.Model, parts: Parts, num_parts: int) -> None:
        self.num_parts = num_parts
        self.values: Mapping[str, np.ndarray] = {}
        self._model = model
        self._parts = parts
        self._names = parameter_names(model)
        self._variables = list(self._names.values())
        self._seeds = [*filter(is_seed, model.non_trainable_variables), global_seed_generator().state]

    def trace(self) -> tuple[Any, Any]:
        """The functions for the workers: the one that makes a part's dataset, and the one that goes through it."""
        arguments = [tf.convert_to_tensor(argument) for argument in self._parts.arguments(0)]
        specs = [tf.TensorSpec([None, *a.shape[1:]] if a.shape.rank else [], a.dtype) for a in arguments]
        make = tf.function(self._parts.dataset, autograph=False).get_concrete_function(
            tf.TensorSpec([], tf.int64), *specs
        )
        values = [tf.TensorSpec(v.shape, v.dtype) for v in self._variables]
        through = tf.function(self._through, autograph=False)
        return make, through.get_concrete_function(make.structured_outputs, values)

    def place(self, functions: tuple[Any, Any], part: int) -> Any:
        """A part's dataset, where it is called."""
        return functions[0](tf.constant(part, tf.int64), *map(tf.constant, self._parts.arguments(part)))

    def run(self, functions: tuple[Any, Any], dataset: Any) -> Any:
        """What the worker brings of its part."""
        values = [tf.constant(self.values[name], v.dtype) for name, v in self._names.items()]
        return tf.nest.map_structure(fetch, functions[1](dataset, values))

    @abc.abstractmethod
    def _through(self, dataset: tf.data.Dataset, values: Sequence[tf.Tensor]) -> Any:
        """Goes through a part; traced."""

    def _scope(self, values: Sequence[tf.Tensor], others: Sequence[tuple[Any, Any]] = ()) -> keras.StatelessScope:
        # What a model draws at random when it is evaluated is the same for every batch.
        seeds = [(seed, tf.zeros(seed.shape, seed.dtype)) for seed in self._seeds]
        return keras.StatelessScope([*zip(self._variables, values), *seeds, *others], collect_losses=True)

    def _outputs(self, x: Any) -> Any:
        return self._model(x, training=False) if self._model._call_has_training_arg else self._model(x)


class EvaluationJob(WorkerJob):
    """Loss and metrics of a part; returns the metric variables, flattened into one float64 vector."""

    def __init__(self, model: keras.Model, parts: Parts, num_parts: int) -> None:
        super().__init__(model, parts, num_parts)
        self._reader = MetricReader(model)

    def logs(self, brought: Sequence[np.ndarray]) -> dict[str, float]:
        """Loss and metrics of the whole, loss first."""
        rows = np.stack(brought)
        sizes = np.cumsum([initial.size for initial in self._reader.initial_values])
        shapes = [initial.shape for initial in self._reader.initial_values]
        split = np.split(rows, sizes[:-1], axis=1)
        logs = self._reader.logs(
            self._reader.total([part.reshape(len(rows), *shape) for part, shape in zip(split, shapes)])
        )
        return {"loss": logs.pop("loss"), **logs}

    def _through(self, dataset: tf.data.Dataset, values: Sequence[tf.Tensor]) -> tf.Tensor:
        metrics = self._model.metrics_variables
        iterator = iter(dataset)

        def step(optional: Any, *totals: tf.Tensor) -> Any:
            x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(optional.get_value())
            with self._scope(values, list(zip(metrics, totals))) as scope:
                y_pred = self._outputs(x)
                loss = self._model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=False)
                if loss is not None:
                    self._model._loss_tracker.update_state(loss, sample_weight=batch_size_of((x,)))
                self._model.compute_metrics(x, y, y_pred, sample_weight)
            return (iterator.get_next_as_optional(), *(scope.get_current_value(metric) for metric in metrics))

        initial = [tf.constant(value, v.dtype) for value, v in zip(self._reader.initial_values, metrics)]
        _, *totals = tf.while_loop(
            lambda optional, *_: optional.has_value(), step, [iterator.get_next_as_optional(), *initial]
        )
        return tf.concat([tf.reshape(tf.cast(total, tf.float64), [-1]) for total in totals], 0)


class PredictionJob(WorkerJob):
    """The outputs of a part, in its order."""

    @staticmethod
    def outputs(brought: Sequence[Any]) -> Any:
        """The outputs of the whole."""
        return tf.nest.map_structure(lambda *parts: np.concatenate(parts), *brought)

    def _through(self, dataset: tf.data.Dataset, values: Sequence[tf.Tensor]) -> Any:
        def predict(batch: Any) -> Any:
            x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
            with self._scope(values):
                return self._outputs(x)

        like = tf.function(predict, autograph=False).get_concrete_function(dataset.element_spec).structured_outputs
        iterator = iter(dataset)
        arrays = [
            tf.TensorArray(spec.dtype, 0, dynamic_size=True, infer_shape=False, element_shape=[None, *spec.shape[1:]])
            for spec in tf.nest.flatten(like)
        ]

        def step(number: tf.Tensor, optional: Any, *written: tf.TensorArray) -> Any:
            outputs = tf.nest.flatten(predict(optional.get_value()))
            more = [array.write(number, output) for array, output in zip(written, outputs)]
            return (number + 1, iterator.get_next_as_optional(), *more)

        _, _, *written = tf.while_loop(
            lambda _, optional, *_arrays: optional.has_value(), step, [0, iterator.get_next_as_optional(), *arrays]
        )
        return tf.nest.pack_sequence_as(like, [array.concat() for array in written])


def can_evaluate(model: keras.Model) -> bool:
    """Whether workers can evaluate a model: it is built, does so as Keras does, and its metrics add up."""
    metrics = model._compile_metrics
    if not model.built or model._loss_tracker is None or (metrics is not None and not metrics.built):
        return False
    adds_up = all(variable.aggregation in _SUMMED for variable in model.metrics_variables)
    return type(model).test_step is keras.Model.test_step and adds_up


def can_predict(model: keras.Model) -> bool:
    """Whether workers can predict: the model is built, and does so as Keras does."""
    return model.built and type(model).predict_step is keras.Model.predict_step


def _as_keras_feeds(array: np.ndarray) -> np.ndarray:
    return array.astype(keras.config.floatx(), copy=False) if array.dtype.kind == "f" else array
