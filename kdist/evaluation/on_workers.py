"""Evaluation and prediction on the workers: each has a part of the data, and every example is used exactly once.

Metrics are exact: a worker starts from zero and returns its sums, which the chief adds up (see `kdist.model.metrics`).
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from kdist._compat.first_call_lock import fetch
from kdist._compat.keras import call, global_seed, metrics_are_built
from kdist._compat.tensorflow import function_for_tasks
from kdist.data.base import call_with
from kdist.data.batch_source import has_sparse_matrix
from kdist.data.columns import Share, received, without_copies
from kdist.data.file_column import columns_of
from kdist.data.serialization import dataset_graph, dataset_of_graph
from kdist.data.sources import as_tuples, has_labels, preprocessed
from kdist.errors import ConfigError
from kdist.model.embedding_lookup import RowLookups
from kdist.model.forward import SeededScope, batch_size_of, forward, update_metrics
from kdist.model.logs import Logs
from kdist.model.lookup_rounds import LookupRounds
from kdist.model.metrics import MetricReader, metric_variables, rules_of
from kdist.model.names import is_seed
from kdist.model.source import overrides_of, preprocessing_of
from kdist.model.state import parameter_names, stateful_layers, variables_of
from kdist.strategies.base import PresentValues


class Parts(abc.ABC):
    """Data split into parts, one per worker."""

    @abc.abstractmethod
    def specs(self) -> list[tf.TensorSpec]:
        """What `dataset` takes as `arguments`."""

    def trace_transfer(self) -> None:  # noqa: B027 - not every kind of data needs it
        """Traces what sending the arguments needs."""

    @abc.abstractmethod
    def arguments(self, part: int) -> list[tf.Tensor | Share]:
        """The arguments of `dataset` for a part."""

    @abc.abstractmethod
    def dataset(self, part: tf.Tensor, *arguments: tf.Tensor) -> tf.data.Dataset:
        """The batches of a part, each once; traced once for all parts."""


class _ArrayParts(Parts):
    """Arrays, split between batches, so that the batches are those of a single reader."""

    def __init__(self, arrays: Any, batch_size: int, num_parts: int) -> None:
        self._structure = tf.nest.map_structure(type, arrays)
        self._columns = columns_of(arrays)
        self._batch_size = batch_size
        num_examples = len(self._columns[0].values)
        num_batches = -(-num_examples // batch_size)
        self._cuts = [min(num_examples, i * num_batches // num_parts * batch_size) for i in range(num_parts)]
        self._cuts.append(num_examples)

        self._max_rows = max(stop - start for start, stop in pairwise(self._cuts))

    def specs(self) -> list[tf.TensorSpec]:
        return [spec for column in self._columns for spec in column.specs(self._max_rows)]

    def trace_transfer(self) -> None:
        for column in self._columns:
            column.trace_transfer(self._max_rows)

    def arguments(self, part: int) -> list[tf.Tensor | Share]:
        rows = slice(self._cuts[part], self._cuts[part + 1])
        return [column.share(rows, self._max_rows) for column in self._columns]

    def dataset(self, part: tf.Tensor, *arguments: tf.Tensor) -> tf.data.Dataset:
        shares = received(self._columns, self._max_rows, arguments)
        batches = (
            tf.data.Dataset.range(shares[0].num_rows)
            .batch(self._batch_size)
            .map(lambda chosen: tf.nest.pack_sequence_as(self._structure, [share.take(chosen) for share in shares]))
        )
        is_large = any(column.is_large(self._max_rows) for column in self._columns)
        return without_copies(batches) if is_large else batches


class _DatasetParts(Parts):
    """A finite `tf.data.Dataset` of batches; a part is every n-th batch."""

    def __init__(self, dataset: tf.data.Dataset, num_parts: int) -> None:
        self._graph, self._spec, self._num_parts = dataset_graph(dataset, num_parts), dataset.element_spec, num_parts

    def specs(self) -> list[tf.TensorSpec]:
        return [tf.TensorSpec([], tf.string)]

    def arguments(self, part: int) -> list[tf.Tensor | Share]:
        return [self._graph]

    def dataset(self, part: tf.Tensor, *arguments: tf.Tensor) -> tf.data.Dataset:
        return dataset_of_graph(arguments[0], self._spec).shard(self._num_parts, part)


def parts_of(x: Any, y: Any, sample_weight: Any, batch_size: int | None, num_parts: int) -> Parts | None:
    """The data in parts; None if it cannot be split, or is too small."""
    if isinstance(x, tf.data.Dataset):
        # An unknown or infinite length is negative; some datasets exist in this process only.
        with suppress(ConfigError):
            return _DatasetParts(x, num_parts) if int(x.cardinality().numpy()) >= num_parts else None
    if has_labels(x) or hasattr(x, "__next__") or has_sparse_matrix(x, y, sample_weight):
        return None
    arrays = keras.utils.pack_x_y_sample_weight(*map(as_tuples, (x, y, sample_weight)))
    lengths = {array.shape[0] if getattr(array, "shape", ()) else 0 for array in tf.nest.flatten(arrays)}
    # At least one batch per worker.
    is_enough = len(lengths) == 1 and min(lengths) >= num_parts * (batch_size or 32)
    return _ArrayParts(arrays, batch_size or 32, num_parts) if is_enough else None


def parts_for(model: keras.Model, data: tuple[Any, Any, Any], batch_size: int | None, num_parts: int) -> Parts | None:
    """The same, of x, y and sample_weight as a model's own `evaluate` prepares them, if it has one."""
    if (preprocess := preprocessing_of(model)) is None:
        return parts_of(*data, batch_size, num_parts)
    x = preprocessed(preprocess, *data, batch_size)
    return parts_of(x, None, None, None, num_parts)


class NeedsWholeTable(Exception):
    """An evaluation uses a table otherwise than training does, which looks up rows."""


#: What is computed with some values of the model's variables: its scope, nested tensors -> nested tensors.
_Body: TypeAlias = "Callable[..., Any]"


@dataclass(frozen=True)
class _Given:
    """Values of variables that were sent to the worker."""

    variables: Sequence[keras.Variable]
    values: Sequence[tf.Tensor]

    def run(self, body: _Body, arguments: Sequence[Any]) -> Any:
        with SeededScope(zip(self.variables, self.values), collect_losses=True) as scope:
            return body(scope, *arguments)


class _Pulled:
    """The present values of a training, which the worker pulls once, but rows of tables when it needs them."""

    def __init__(self, training: PresentValues) -> None:
        self._training = training
        self._values, self._rows = training.pull()

    def run(self, body: _Body, arguments: Sequence[Any]) -> Any:
        """What `body` makes of `arguments`.

        Raises:
            NeedsWholeTable: it reads more of a table than rows.
        """
        if self._rows is None:
            return _Given(self._training.variables, self._values).run(body, arguments)

        def with_rows(*given: Any) -> tuple[Any, RowLookups]:
            return self._with_rows(body, given)

        specs = tf.nest.map_structure(tf.type_spec_from_value, arguments)
        training = self._training
        rounds = LookupRounds.of_function(with_rows, specs, training.tables, training.table_groups)
        return rounds.run(arguments, self._rows)[0]

    def _with_rows(self, body: _Body, arguments: Sequence[Any]) -> tuple[Any, RowLookups]:
        training = self._training
        pairs = [pair for pair in zip(training.variables, self._values) if pair[1] is not None]
        with SeededScope(pairs, collect_losses=True) as scope:
            empty = {i: tf.zeros([0, layer.output_dim]) for i, layer in training.tables.items()}
            scope.state_mapping |= {id(training.variables[i]): table for i, table in empty.items()}
            lookups = RowLookups(training.tables.values())
            with lookups.active():
                outputs = body(scope, *arguments)
        if lookups.hidden or any(table.consumers() for table in empty.values()):
            raise NeedsWholeTable
        return outputs, lookups


class _OnWorkers(abc.ABC):
    """A computation that each worker runs on its part of the data.

    Args:
        model: built; the source of the function, not changed.
        parts: the data.
        num_parts: number of parts.

    Attributes:
        values: of the model's variables, by their names in a checkpoint; set before each run. None: workers pull the
            present ones of the training from the servers, of tables the rows that their examples need.
    """

    def __init__(self, model: keras.Model, parts: Parts, num_parts: int) -> None:
        self.num_parts = num_parts
        self.values: Mapping[str, np.ndarray] | None = None
        self._model = model
        self._parts = parts
        self._names = parameter_names(model)
        self._variables = list(self._names.values())
        self._seeds = [*filter(is_seed, variables_of(model)[1]), global_seed()]

    def trace(self, training: PresentValues | None) -> tuple[Any, Any]:
        """The functions for the workers: one creates a part's dataset, one iterates over it.

        Raises:
            NeedsWholeTable: an evaluation that pulls needs more of a table than rows.
        """
        self._parts.trace_transfer()
        make = function_for_tasks(self._parts.dataset, tf.TensorSpec([], tf.int64), *self._parts.specs())
        if self.values is None:
            assert training is not None
            through = function_for_tasks(
                lambda dataset: self._through(dataset, _Pulled(training)), make.structured_outputs
            )
            return make, through
        values = [tf.TensorSpec(v.shape, v.dtype) for v in self._variables]
        through = function_for_tasks(
            lambda dataset, given: self._through(dataset, _Given(self._variables, given)),
            make.structured_outputs,
            values,
        )
        return make, through

    def place(self, functions: tuple[Any, Any], part: int) -> Any:
        """A part's dataset, on the worker that this is called for."""
        return call_with(functions[0], tf.constant(part, tf.int64), *self._parts.arguments(part))

    def run(self, functions: tuple[Any, Any], dataset: Any) -> Any:
        """What the worker brings of its part."""
        arguments = [dataset]
        if self.values is not None:
            arguments.append([tf.constant(self.values[name], v.dtype) for name, v in self._names.items()])
        return tf.nest.map_structure(fetch, functions[1](*arguments))

    @abc.abstractmethod
    def _through(self, dataset: tf.data.Dataset, values: _Given | _Pulled) -> Any:
        """Iterates over a part; traced."""

    def _set(self, scope: keras.StatelessScope, variables: Sequence[keras.Variable], values: Sequence[Any]) -> None:
        """Sets the values of variables in a scope, and those of seeds."""
        # Random numbers during evaluation are the same for every batch.
        scope.state_mapping |= {id(seed): tf.zeros(seed.shape, seed.dtype) for seed in self._seeds}
        scope.state_mapping |= {id(variable): value for variable, value in zip(variables, values)}


class MetricsOnWorkers(_OnWorkers):
    """Loss and metrics of a part; returns the metric variables, flattened into one float64 vector."""

    def __init__(self, model: keras.Model, parts: Parts, num_parts: int) -> None:
        super().__init__(model, parts, num_parts)
        self._reader = MetricReader(model)

    def logs(self, results: Sequence[np.ndarray]) -> Logs:
        """Loss and metrics of the whole, loss first."""
        rows = np.stack(results)
        sizes = np.cumsum([initial.size for initial in self._reader.initial_values])
        shapes = [initial.shape for initial in self._reader.initial_values]
        split = np.split(rows, sizes[:-1], axis=1)
        logs = self._reader.logs(
            self._reader.total([part.reshape(len(rows), *shape) for part, shape in zip(split, shapes)])
        )
        return {"loss": logs["loss"], **logs}

    def _through(self, dataset: tf.data.Dataset, values: _Given | _Pulled) -> tf.Tensor:
        metrics = metric_variables(self._model)
        iterator = iter(dataset)

        def add(scope: keras.StatelessScope, batch: Any, totals: Sequence[tf.Tensor]) -> list[Any]:
            self._set(scope, metrics, totals)
            x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
            y_pred, loss = forward(self._model, x, y, sample_weight, training=False)
            update_metrics(self._model, x, y, y_pred, sample_weight, loss, batch_size_of((x,)))
            return [scope.get_current_value(metric) for metric in metrics]

        def step(optional: Any, *totals: tf.Tensor) -> Any:
            return (iterator.get_next_as_optional(), *values.run(add, [optional.get_value(), list(totals)]))

        initial = [tf.constant(value, v.dtype) for value, v in zip(self._reader.initial_values, metrics)]
        _, *totals = tf.while_loop(
            lambda optional, *_: optional.has_value(), step, [iterator.get_next_as_optional(), *initial]
        )
        return tf.concat([tf.reshape(tf.cast(total, tf.float64), [-1]) for total in totals], 0)


class OutputsOnWorkers(_OnWorkers):
    """The outputs of a part, in its order."""

    @staticmethod
    def outputs(results: Sequence[Any]) -> Any:
        """The outputs of the whole."""
        return tf.nest.map_structure(lambda *parts: np.concatenate(parts), *results)

    def _through(self, dataset: tf.data.Dataset, values: _Given | _Pulled) -> Any:
        def predict_on(scope: keras.StatelessScope, x: Any) -> Any:
            self._set(scope, [], [])
            return call(self._model, x, training=False)

        def predict(batch: Any) -> Any:
            x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
            return values.run(predict_on, [x])

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
    """Whether workers can: the model is built, has no stateful layer, nothing of its own that evaluates or counts, but
    preprocessing, and its metrics need no order.
    """
    if not model.built or not metrics_are_built(model) or stateful_layers(model):
        return False
    is_in_order = not {"mean", "last"} & set(rules_of(model.metrics, metric_variables(model)))
    own = overrides_of(model, "test_step", "compute_metrics", "make_test_function", "evaluate")
    return own in ([], ["evaluate"] if preprocessing_of(model) is not None else []) and is_in_order


def can_predict(model: keras.Model) -> bool:
    """Whether workers can predict: the model is built, stateless, and has nothing of its own that predicts."""
    own = overrides_of(model, "predict_step", "make_predict_function", "predict")
    return model.built and not stateful_layers(model) and not own
