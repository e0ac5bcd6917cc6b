"""Evaluation and prediction on the workers: each has a shard of the data, and every example is used exactly once.

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
from kdist._compat.tensorflow import argument_for_task, function_for_tasks
from kdist.data.base import call_with
from kdist.data.batch_source import has_sparse_matrix
from kdist.data.columns import WorkerArgument, arrived_shares, without_copies
from kdist.data.file_column import columns_of
from kdist.data.files import Files
from kdist.data.serialization import dataset_graph, dataset_of_graph
from kdist.data.sources import as_tuples, has_labels, has_ragged_tensor, preprocess_batches
from kdist.errors import ConfigError
from kdist.model.embedding_lookup import RowLookups
from kdist.model.forward import SeededScope, batch_size_of, forward, update_metrics
from kdist.model.logs import Logs
from kdist.model.lookup_rounds import LookupRounds
from kdist.model.metrics import MetricReader, MetricRows, metric_variables, rules_of
from kdist.model.names import is_seed
from kdist.model.source import overrides_of, preprocessing_of
from kdist.model.state import parameter_names, stateful_layers, variables_of
from kdist.strategies.base import PresentValues


@dataclass(frozen=True)
class EvaluationShards:
    """The data of an evaluation in shards, one per worker; every example is in one of them.

    Attributes:
        number: of the shards.
        specs: of the `arguments` of `dataset`.
        arguments: shard -> the arguments of `dataset`.
        dataset: `(shard, *arguments)` -> its batches, each once; traced once for all shards.
        trace_transfer: traces what sending the arguments needs.
    """

    number: int
    specs: Sequence[tf.TensorSpec]
    arguments: Callable[[int], list[WorkerArgument]]
    dataset: Callable[..., tf.data.Dataset]
    trace_transfer: Callable[[], None] = lambda: None


def _shards_of_arrays(arrays: Any, batch_size: int, number: int) -> EvaluationShards:
    """Splits arrays between batches, so that the batches are those of a single reader."""
    structure, columns = tf.nest.map_structure(type, arrays), columns_of(arrays)
    num_examples = len(columns[0].values)
    num_batches = -(-num_examples // batch_size)
    cuts = [min(num_examples, i * num_batches // number * batch_size) for i in range(number)] + [num_examples]
    max_rows = max(stop - start for start, stop in pairwise(cuts))

    def trace_transfer() -> None:
        for column in columns:
            column.trace_transfer(max_rows)

    def arguments(shard: int) -> list[WorkerArgument]:
        return [column.share(slice(cuts[shard], cuts[shard + 1]), max_rows) for column in columns]

    # TensorFlow warns of an argument called `_`. AutoGraph would take half a second.
    @tf.autograph.experimental.do_not_convert
    def dataset(shard: tf.Tensor, *arguments: tf.Tensor) -> tf.data.Dataset:  # noqa: ARG001
        arrived = arrived_shares(columns, max_rows, arguments)
        numbers = tf.data.Dataset.range(arrived[0].num_rows).batch(batch_size)
        batches = numbers.map(lambda chosen: tf.nest.pack_sequence_as(structure, [a.take(chosen) for a in arrived]))
        return without_copies(batches) if any(column.is_large(max_rows) for column in columns) else batches

    specs = [spec for column in columns for spec in column.specs(max_rows)]
    return EvaluationShards(number, specs, arguments, dataset, trace_transfer)


def _shards_of_dataset(dataset: tf.data.Dataset, number: int) -> EvaluationShards:
    """Splits a finite dataset of batches; a shard is every n-th batch."""
    graph, spec = dataset_graph(dataset, number), dataset.element_spec
    return EvaluationShards(
        number,
        [tf.TensorSpec([], tf.string)],
        lambda _: [graph],
        lambda shard, graph: dataset_of_graph(graph, spec).shard(number, shard),
    )


def _shards_of_files(files: Files, batch_size: int, number: int) -> EvaluationShards:
    """Splits the records of files between batches."""
    num_batches = -(-files.num_records // batch_size)
    cuts = [min(files.num_records, i * num_batches // number * batch_size) for i in range(number + 1)]
    return EvaluationShards(
        number,
        [tf.TensorSpec([2], tf.int64)],
        lambda shard: [argument_for_task([cuts[shard], cuts[shard + 1]], tf.int64)],
        # TensorFlow warns of an argument called `_`.
        lambda shard, cuts: files.read(cuts[0], cuts[1], batch_size),  # noqa: ARG005
    )


def shards_of(x: Any, y: Any, sample_weight: Any, batch_size: int | None, number: int) -> EvaluationShards | None:
    """The data in shards; None if it cannot be split, or is too small."""
    if isinstance(x, tf.data.Dataset):
        # An unknown or infinite length is negative; some datasets exist in this process only.
        with suppress(ConfigError):
            return _shards_of_dataset(x, number) if int(x.cardinality().numpy()) >= number else None
    if isinstance(x, Files):
        return _shards_of_files(x, batch_size or 32, number) if x.num_records >= number * (batch_size or 32) else None
    data = x, y, sample_weight
    if has_labels(x) or hasattr(x, "__next__") or has_sparse_matrix(data) or has_ragged_tensor(data):
        return None
    arrays = keras.utils.pack_x_y_sample_weight(*map(as_tuples, data))
    lengths = {array.shape[0] if getattr(array, "shape", ()) else 0 for array in tf.nest.flatten(arrays)}
    # At least one batch per worker.
    is_enough = len(lengths) == 1 and min(lengths) >= number * (batch_size or 32)
    return _shards_of_arrays(arrays, batch_size or 32, number) if is_enough else None


def shards_for(
    model: keras.Model, data: tuple[Any, Any, Any], batch_size: int | None, number: int
) -> EvaluationShards | None:
    """The shards of x, y and sample_weight as a model's own `evaluate` prepares them, if it has one."""
    if (preprocess := preprocessing_of(model)) is None:
        return shards_of(*data, batch_size, number)
    return shards_of(preprocess_batches(preprocess, *data, batch_size), None, None, None, number)


class NeedsWholeTable(Exception):
    """An evaluation uses a table otherwise than training does, which looks up rows."""


#: Computes with values of the model's variables: `(their scope, *nested tensors)` -> nested tensors.
_Body: TypeAlias = "Callable[..., Any]"
#: Runs a body with such values: `(body, its arguments)` -> its outputs.
_Run: TypeAlias = "Callable[[_Body, Sequence[Any]], Any]"


def _with_given(variables: Sequence[keras.Variable], values: Sequence[tf.Tensor]) -> _Run:
    """Runs with values of variables that were sent to the worker."""

    def run(body: _Body, arguments: Sequence[Any]) -> Any:
        with SeededScope(zip(variables, values), collect_losses=True) as scope:
            return body(scope, *arguments)

    return run


def _with_pulled(training: PresentValues) -> _Run:
    """Runs with the present values of a training, which the worker pulls once, but rows of tables when it needs them.

    A run raises `NeedsWholeTable` if the body reads more of a table than rows.
    """
    values, rows = training.pull()
    if rows is None:
        return _with_given(training.variables, values)

    def with_rows(body: _Body, arguments: Sequence[Any]) -> tuple[Any, RowLookups]:
        pairs = [pair for pair in zip(training.variables, values) if pair[1] is not None]
        with SeededScope(pairs, collect_losses=True) as scope:
            empty = {i: tf.zeros([0, layer.output_dim]) for i, layer in training.tables.items()}
            scope.state_mapping |= {id(training.variables[i]): table for i, table in empty.items()}
            lookups = RowLookups(training.tables.values())
            with lookups.active():
                outputs = body(scope, *arguments)
        if lookups.hidden or any(table.consumers() for table in empty.values()):
            raise NeedsWholeTable
        return outputs, lookups

    def run(body: _Body, arguments: Sequence[Any]) -> Any:
        specs = tf.nest.map_structure(tf.type_spec_from_value, arguments)
        rounds = LookupRounds.of_function(
            lambda *given: with_rows(body, given), specs, training.tables, training.table_groups
        )
        return rounds.run(arguments, rows)[0]

    return run


class _OnWorkers(abc.ABC):
    """A computation with a built model that each worker runs on its shard of the data.

    Attributes:
        values: of the model's variables, by their names in a checkpoint; set before each run. None: workers pull the
            present ones of the training from the servers, of tables the rows that their examples need.
    """

    def __init__(self, model: keras.Model, shards: EvaluationShards) -> None:
        self.num_parts = shards.number
        self.values: Mapping[str, np.ndarray] | None = None
        self._model = model
        self._shards = shards
        self._names = parameter_names(model)
        self._seeds = [*filter(is_seed, variables_of(model)[1]), global_seed()]

    def trace(self, training: PresentValues | None) -> tuple[Any, Any]:
        """The functions for the workers: one creates a shard's dataset, one iterates over it.

        Raises `NeedsWholeTable` if an evaluation that pulls needs more of a table than rows.
        """
        self._shards.trace_transfer()
        make = function_for_tasks(self._shards.dataset, tf.TensorSpec([], tf.int64), *self._shards.specs)
        variables = list(self._names.values())
        specs = [] if self.values is None else [[tf.TensorSpec(v.shape, v.dtype) for v in variables]]

        def through(dataset: tf.data.Dataset, *given: Sequence[tf.Tensor]) -> Any:
            run = _with_given(variables, *given) if given or training is None else _with_pulled(training)
            return self._through(dataset, run)

        return make, function_for_tasks(through, make.structured_outputs, *specs)

    def place(self, functions: tuple[Any, Any], part: int) -> Any:
        """A shard's dataset, on the worker that this is called for."""
        return call_with(functions[0], argument_for_task(part, tf.int64), *self._shards.arguments(part))

    def run(self, functions: tuple[Any, Any], dataset: Any) -> Any:
        """The result of a shard, fetched from the worker that this is called for."""
        arguments = [dataset]
        if self.values is not None:
            arguments.append([argument_for_task(self.values[name], v.dtype) for name, v in self._names.items()])
        return tf.nest.map_structure(fetch, functions[1](*arguments))

    @abc.abstractmethod
    def _through(self, dataset: tf.data.Dataset, run: _Run) -> Any:
        """Iterates over a shard; traced."""

    def _fix_seeds(self, scope: keras.StatelessScope) -> None:
        """Lets random numbers during evaluation be the same for every batch."""
        scope.state_mapping |= {id(seed): tf.zeros(seed.shape, seed.dtype) for seed in self._seeds}


def _fold(dataset: tf.data.Dataset, step: Callable[..., Sequence[Any]], initial: Sequence[Any]) -> list[Any]:
    """Traces a loop over a dataset: `step(batch, *state)` -> the next state; returns the last one."""
    iterator = iter(dataset)

    def body(optional: Any, *state: Any) -> Any:
        return (iterator.get_next_as_optional(), *step(optional.get_value(), *state))

    first = iterator.get_next_as_optional()
    _, *last = tf.while_loop(lambda optional, *_: optional.has_value(), body, [first, *initial])
    return last


class MetricsOnWorkers(_OnWorkers):
    """Loss and metrics of a shard; returns the metric variables, flattened into one float64 vector."""

    def __init__(self, model: keras.Model, shards: EvaluationShards) -> None:
        super().__init__(model, shards)
        self._reader = MetricReader(model)

    def join(self, results: Sequence[np.ndarray]) -> Logs:
        """Loss and metrics of all shards, loss first."""
        rows, initial = np.stack(results), self._reader.initial_values
        split = np.split(rows, np.cumsum([value.size for value in initial])[:-1], axis=1)
        values = [columns.reshape(len(rows), *value.shape) for columns, value in zip(split, initial)]
        logs = MetricRows(self._reader, tuple(values)).total().logs
        return {"loss": logs["loss"], **logs}

    def _through(self, dataset: tf.data.Dataset, run: _Run) -> tf.Tensor:
        metrics = metric_variables(self._model)

        def add(scope: keras.StatelessScope, batch: Any, totals: Sequence[tf.Tensor]) -> list[Any]:
            self._fix_seeds(scope)
            scope.state_mapping |= {id(metric): total for metric, total in zip(metrics, totals)}
            x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
            y_pred, loss = forward(self._model, x, y, sample_weight, training=False)
            update_metrics(self._model, x, y, y_pred, sample_weight, loss, batch_size_of((x,)))
            return [scope.get_current_value(metric) for metric in metrics]

        initial = [tf.constant(value, v.dtype) for value, v in zip(self._reader.initial_values, metrics)]
        totals = _fold(dataset, lambda batch, *totals: run(add, [batch, list(totals)]), initial)
        return tf.concat([tf.reshape(tf.cast(total, tf.float64), [-1]) for total in totals], 0)


class OutputsOnWorkers(_OnWorkers):
    """The outputs of a shard, in its order."""

    @staticmethod
    def join(results: Sequence[Any]) -> Any:
        """The outputs of all shards."""
        return tf.nest.map_structure(lambda *shards: np.concatenate(shards), *results)

    def _through(self, dataset: tf.data.Dataset, run: _Run) -> Any:
        def predict_on(scope: keras.StatelessScope, x: Any) -> Any:
            self._fix_seeds(scope)
            return call(self._model, x, training=False)

        def predict(batch: Any) -> Any:
            x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
            return run(predict_on, [x])

        like = tf.function(predict, autograph=False).get_concrete_function(dataset.element_spec).structured_outputs
        arrays = [
            tf.TensorArray(spec.dtype, 0, dynamic_size=True, infer_shape=False, element_shape=[None, *spec.shape[1:]])
            for spec in tf.nest.flatten(like)
        ]

        def step(batch: Any, number: tf.Tensor, *written: tf.TensorArray) -> Sequence[Any]:
            outputs = tf.nest.flatten(predict(batch))
            return [number + 1, *(array.write(number, output) for array, output in zip(written, outputs))]

        _, *written = _fold(dataset, step, [0, *arrays])
        return tf.nest.pack_sequence_as(like, [array.concat() for array in written])


def can_evaluate(model: keras.Model) -> bool:
    """True if workers can evaluate: the model is built and stateless, has no method that evaluates or counts except
    preprocessing, and its metrics need no order.
    """
    if not model.built or not metrics_are_built(model) or stateful_layers(model):
        return False
    is_in_order = not {"mean", "last"} & set(rules_of(model.metrics, metric_variables(model)))
    own = overrides_of(model, "test_step", "compute_metrics", "make_test_function", "evaluate")
    return own in ([], ["evaluate"] if preprocessing_of(model) is not None else []) and is_in_order


def can_predict(model: keras.Model) -> bool:
    """True if workers can predict: the model is built and stateless, and has no method that predicts."""
    own = overrides_of(model, "predict_step", "make_predict_function", "predict")
    return model.built and not stateful_layers(model) and not own
