"""The base of `mirrored` and `multi_worker_mirrored`: every replica holds all parameters and applies the same gradient.

Each device has its store. Between the pull from it and the push to it, the replicas exchange their gradients
by TensorFlow's all-reduce (`tf.distribute.ReplicaContext.all_reduce`); since all push the same, the stores stay equal.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from kdist._compat.collectives import all_reduce
from kdist.cluster.spec import CHIEF
from kdist.data.base import iterator_over, iterator_spec
from kdist.data.epoch_lengths import EpochCount, EpochLengths
from kdist.data.shares import DealtShares, Shares
from kdist.errors import TaskError
from kdist.model.embedding_lookup import sum_duplicates
from kdist.model.updates import ReplicaOutput
from kdist.parameters.aggregation import dtype_of_total, finished, of_total, rule_of, weighted
from kdist.parameters.placement.messages import BlockUpdates, Overflow, Pulled, fuse_rows, unfuse_rows
from kdist.strategies.base import TrainingSpec
from kdist.strategies.call_logs import CallLogs, StepLogs
from kdist.strategies.calls import Replica, run_steps
from kdist.strategies.on_store import StoreStrategy, StoreValues
from kdist.strategies.prepared_training import PreparedTraining, no_batch, prepare
from kdist.strategies.worker_step import shared_step


class AllReduce(StoreStrategy):
    """Synchronous replicas over a `tf.distribute` strategy, which subclasses create."""

    takes_equal_steps: ClassVar[bool] = True

    def __init__(self) -> None:
        #: The first one of this process, over all processes.
        self._first_replica = 0
        #: By replica; of shares also the place at which each goes on.
        self._iterators: dict[int, Any] = {}
        self._places: dict[int, tuple[int, int]] = {}
        self._functions: dict[int, Callable[..., tf.Tensor]] = {}
        self._traced: set[int] = set()

    def _start(self, spec: TrainingSpec, distribution: tf.distribute.Strategy) -> None:
        """Creates the variables on every device of this process."""
        self._distribution = distribution
        self.num_replicas = distribution.num_replicas_in_sync
        devices = distribution.extended.worker_devices
        self._prepared = self._prepare(spec)
        plan = self._prepared.plan_for_one()
        self._stores = [self._prepared.store([device], plan, is_replicated=True) for device in devices]
        self._hold(self._stores)
        self._make_dataset = self._prepared.trace_dataset()

    def _prepare(self, spec: TrainingSpec) -> PreparedTraining:
        prepared = prepare(spec, self.num_replicas, self.num_replicas)
        prepared.check_fixed_tables(self.name)
        if self.num_replicas > 1:
            prepared.check_assigned(self.name)
        if isinstance(spec.data.splits, DealtShares):
            spec.data.splits.deal_to(self.num_replicas)
        self._logs = CallLogs(prepared.replica_step)
        # All replicas take all steps.
        self._sizer = prepared.sizer(num_workers=1)
        return prepared

    def stop(self) -> None:
        self._forget_iterators()
        self._functions.clear()
        self._traced.clear()

    def _next_logs(self, may_begin: int, interrupted: Callable[[], bool]) -> StepLogs | None:
        splits, replicas = self._splits, range(self.num_replicas)
        if interrupted() or (splits is not None and not splits.look()):
            return None
        if splits is not None and splits.have_lengths:
            may_begin = min(splits.reserve(replica, may_begin) for replica in replicas)
        size = self._sizer.next_size(may_begin)
        self.warming_up |= size not in self._traced
        self._traced.add(size)
        packed = self.call(size)
        if splits is not None:
            for replica in replicas:
                splits.advance(replica, size)
        return self._logs.join([self._logs.unpack(row) for row in packed])

    def call(self, num_steps: int) -> np.ndarray:
        """Runs steps on all replicas, which every process has to do; returns all logs, `[replicas, num_steps, n]`."""
        for replica in self._replicas:
            self._take_iterator(replica, num_steps)
        try:
            return self._function(num_steps)([self._iterators[replica] for replica in self._replicas]).numpy()
        except tf.errors.OutOfRangeError as error:
            raise TaskError(str(CHIEF), no_batch()) from error

    def _take_iterator(self, replica: int, num_steps: int) -> None:
        """Makes a new iterator for a replica, unless the one that it has goes on where it is to read."""
        data = self._prepared.spec.data
        # A split is one batch, which is no dataset.
        is_dataset = isinstance(self._make_dataset.structured_outputs, tf.data.Dataset)
        place = data.place(replica) if isinstance(data, Shares) else None
        if not is_dataset or replica not in self._iterators or self._places.get(replica) != place:
            self._iterators[replica] = iterator_over(self._dataset(replica))
        if place is not None:
            share, batch = place
            self._places[replica] = share, batch + num_steps

    def _forget_iterators(self) -> None:
        self._iterators.clear()
        self._places.clear()

    def begin_data_at(self, count: EpochCount, lengths: EpochLengths | None) -> None:
        """Counts the epochs of the data from another step on."""
        spec = replace(self._prepared.spec, count=count, epoch_lengths=lengths)
        self._prepared = replace(self._prepared, spec=spec)
        self.values = StoreValues(self._stores, self, spec)
        self._forget_iterators()

    def share(self) -> None:
        """Sends the values of the chief to the other processes, if there are any."""

    @property
    def _replicas(self) -> range:
        """The replicas of this process."""
        return range(self._first_replica, self._first_replica + len(self._stores))

    def _function(self, num_steps: int) -> Callable[..., tf.Tensor]:
        """The call of `num_steps` steps: iterators of this process -> all replicas' logs, float64 `[replicas, ...]`."""
        if num_steps not in self._functions:
            compute = shared_step(self._prepared.replica_step, self._store)

            def call(iterators: list[Any]) -> tf.Tensor:
                devices = self._distribution.extended.worker_devices
                parts = zip(self._stores, iterators, devices)
                replicas = [Replica(store, iterator, compute, device) for store, iterator, device in parts]
                packed = run_steps(replicas, num_steps, self._logs, self._exchange)
                return self._in_each_replica(partial(_all_rows, packed))[0]

            spec = [iterator_spec(self._make_dataset)] * len(self._stores)
            self._functions[num_steps] = tf.function(call, autograph=False).get_concrete_function(spec)
        return self._functions[num_steps]

    def _exchange(self, outputs: list[ReplicaOutput], pulled: list[Pulled]) -> list[BlockUpdates]:
        """Joins gradients and changes of state over all replicas; returns those for each replica of this process."""
        overflow = self._overflow(outputs)
        each: list[BlockUpdates] = []
        for store, output, values, overflows in zip(self._stores, outputs, pulled, overflow):
            with tf.device(store.devices[0]):
                each.append(weighted(store, replace(output, overflow=overflows), values))
        sparse = [key for key, change in each[0].items() if isinstance(change, tf.IndexedSlices)]
        self._exchange_dense(each, [key for key in each[0] if key not in sparse and not isinstance(key, Overflow)])
        self._exchange_rows(each, sparse)
        exchanged = []
        for store, changes, output in zip(self._stores, each, outputs):
            with tf.device(store.devices[0]):
                exchanged.append(finished(store, changes, self.num_replicas, output.phase))
        return exchanged

    def _exchange_dense(self, each: Sequence[BlockUpdates], keys: Sequence[Any]) -> None:
        """Joins changes of whole variables, given for each replica of this process by their keys."""
        first = each[0]
        rules = {key: rule_of(self._store, key, first[key].dtype) for key in keys}
        by_dtype: dict[tf.DType, list[Any]] = defaultdict(list)
        for key in keys:
            by_dtype[dtype_of_total(rules[key], first[key].dtype)].append(key)
        for alike in by_dtype.values():
            # All at once, so that TensorFlow packs them into one message, which is of one dtype.
            own = [[changes[key] for key in alike] for changes in each]
            totals = self._in_each_replica(partial(_totals, own, [rules[key] for key in alike]))
            for store, changes, of_replica in zip(self._stores, each, totals):
                with tf.device(store.devices[0]):
                    for key, total in zip(alike, of_replica):
                        joined = of_total(rules[key], total, self.num_replicas, changes[key].dtype)
                        changes[key] = tf.ensure_shape(joined, changes[key].shape)

    def _exchange_rows(self, each: Sequence[BlockUpdates], keys: Sequence[int]) -> None:
        """Joins changes of some rows of variables, as `_exchange_dense`."""
        first, blocks = each[0], self._store.blocks
        by_row: dict[tuple[tf.DType, tuple[int, ...]], list[int]] = defaultdict(list)
        for b in keys:
            by_row[first[b].dtype, blocks.shape_of_block(b)[1:]].append(b)
        for alike in by_row.values():
            dtypes, own = [first[b].indices.dtype for b in alike], []
            for store, changes in zip(self._stores, each):
                with tf.device(store.devices[0]):
                    own.append(fuse_rows([changes[b] for b in alike]))
            # TensorFlow takes three messages for each `tf.IndexedSlices`, and prepares two ways to exchange it.
            means = self._in_each_replica(partial(_mean_of, own))
            for store, changes, mean in zip(self._stores, each, means):
                with tf.device(store.devices[0]):
                    for b, rows in zip(alike, unfuse_rows(mean, dtypes)):
                        changes[b] = sum_duplicates(rows) if blocks[b].is_row_wise else rows

    def _overflow(self, outputs: Sequence[ReplicaOutput]) -> Sequence[tf.Tensor | None]:
        """The overflow of all replicas together, for each of this process; None if the loss is not scaled."""
        of_each = [output.overflow for output in outputs if output.overflow is not None]
        if not of_each:
            return [None] * len(outputs)
        gathered = self._in_each_replica(partial(_all_rows, of_each))
        return [tf.reduce_max(of_all) for of_all in gathered]

    def _in_each_replica(self, function: Callable[[tf.distribute.ReplicaContext, int], Any]) -> list[Any]:
        """Calls `function(context, index of the replica in this process)` for each; the results by that index.

        Only the communication between replicas happens inside it: Keras changes how losses are computed in such a
            context.
        """

        def replica() -> Any:
            context = tf.distribute.get_replica_context()
            local = int(tf.get_static_value(context.replica_id_in_sync_group)) - self._first_replica
            return function(context, local)

        results = self._distribution.run(replica)
        values_of = self._distribution.experimental_local_results
        return [
            tf.nest.map_structure(lambda value, i=i: values_of(value)[i], results) for i in range(len(self._stores))
        ]


def _totals(
    values: Sequence[Sequence[tf.Tensor]], rules: Sequence[str], context: tf.distribute.ReplicaContext, local: int
) -> Any:
    """The sums over all replicas; by the rule `first`, of one and of zeros. Truth values travel as numbers."""
    own = []
    for value, rule in zip(values[local], rules):
        number = tf.cast(value, tf.int32 if value.dtype == tf.bool else dtype_of_total(rule, value.dtype))
        if rule == "first":
            number = tf.where(context.replica_id_in_sync_group == 0, number, tf.zeros_like(number))
        own.append(number)
    return all_reduce(context, tf.distribute.ReduceOp.SUM, here(own))


def _mean_of(slices: Sequence[tf.IndexedSlices], context: tf.distribute.ReplicaContext, local: int) -> Any:
    return all_reduce(context, tf.distribute.ReduceOp.MEAN, here(slices[local]))


def _all_rows(rows: Sequence[tf.Tensor], context: tf.distribute.ReplicaContext, local: int) -> tf.Tensor:
    """The rows of all replicas, `[replicas, ...]`: the sum of a replica's own, among zeros. All have the same shape.

    `all_gather` lets the shapes differ, and so takes two messages.
    """
    row, replicas = rows[local], context.num_replicas_in_sync
    index = int(tf.get_static_value(context.replica_id_in_sync_group))
    zeros = tf.zeros_like(row)
    among_zeros = tf.stack([row if i == index else zeros for i in range(replicas)])
    return all_reduce(context, tf.distribute.ReduceOp.SUM, here(among_zeros))


def here(values: Any) -> Any:
    """The same on the replica's own device: TensorFlow derives from a tensor's device where to reduce it."""
    return tf.nest.map_structure(tf.identity, values, expand_composites=True)
