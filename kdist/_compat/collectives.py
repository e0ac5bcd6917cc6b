"""The collectives of TensorFlow, by which workers reduce together, and their private names; read in 2.20 and 2.21."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import tensorflow_server_pb2
from tensorflow.python.distribute import cross_device_utils, multi_worker_util
from tensorflow.python.distribute.collective_all_reduce_strategy import CollectiveAllReduceExtended
from tensorflow.python.distribute.distribute_lib import _batch_reduce_destination
from tensorflow.python.eager import context

from kdist._compat.replaced import replaced

_key_bases = itertools.count(0, 1000)
#: The worker that numbers the collectives of all, and the distance of the keys of two rounds.
_COLLECTIVE_LEADER, _KEYS_OF_ROUND = "/job:worker/replica:0/task:0", 1000
#: What two workers send each other whole: at most so many bytes, of these types. Of more, the copies cost more than a
#: round.
_MOST_IN_ONE_ROUND = 1 << 20
_SENT_WHOLE = (tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)
#: The numbers of rows that are gathered, if it varies: of each doubling eight, so that at most an eighth is padding.
_SIZES = [rows << doubling for doubling in range(28) for rows in range(8, 16)]


class NumberedMirroredStrategy(tf.distribute.MirroredStrategy):
    """Numbers its collectives unlike others of this process: TensorFlow keeps the shapes of each number for good."""

    def __init__(self, devices: list[str]) -> None:
        self._collective_key_base = next(_key_bases)
        super().__init__(devices)


def serve_collectives(index: int, address: str) -> None:
    """Starts this process's server for collectives, by which it can reduce among itself alone until it joins others.

    Args:
        index: of this worker, for good: its devices are named after it.
        address: `host:port` of this worker.

    Raises:
        RuntimeError: TensorFlow has run ops in this process already.
        tf.errors.OpError: the address is in use.
    """
    _configure_collectives(index)
    config = context.context().config
    config.experimental.collective_group_leader = _COLLECTIVE_LEADER
    cluster = tf.train.ClusterSpec({"worker": {index: address}}).as_cluster_def()
    server = tensorflow_server_pb2.ServerDef(
        cluster=cluster, default_session_config=config, job_name="worker", task_index=index, protocol="grpc"
    )
    context.context().enable_collective_ops(server)
    context.context().ensure_initialized()


def join_collectives(addresses: Mapping[int, str], index: int, round_number: int = 0) -> tf.distribute.Strategy:
    """Makes this process one of several workers that reduce together; may be called again, with other workers.

    TensorFlow means a program to do so once. Its server takes another list of workers as well, with a new executor of
    collectives, also after a failure; what is in the way is the coordination service, whose number of tasks is fixed,
    and which is left out here, and checks in Python that expect workers to be counted without a gap.

    Args:
        addresses: `host:port` of each worker, by its index; worker 0 must be among them, and join before the others.
        index: of this worker.
        round_number: the same in all workers, and another one whenever they change: collectives of another round
            belong to nobody.

    Raises:
        RuntimeError: TensorFlow has run ops in this process already, and no `serve_collectives` before.
    """
    number_collectives_when_traced()
    reduce_two_in_one_round()
    _configure_collectives(index)
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({"worker": dict(addresses)}), task_type="worker", task_id=index, rpc_layer="grpc"
    )
    rank = sorted(addresses).index(index)
    configured = {name: lambda **_: None for name in ("configure_collective_ops", "configure_coordination_service")}
    with (
        replaced(context.context(), **configured),
        replaced(multi_worker_util, id_in_cluster=lambda *_: rank, _validate_cluster_spec=lambda *_, **__: None),
        replaced(CollectiveAllReduceExtended, _enable_check_health=False),
        # It would warn that this process has run ops.
        replaced(context.logging, warning=lambda *_: None),
        replaced(tf.distribute.MultiWorkerMirroredStrategy, _collective_key_base=_KEYS_OF_ROUND * round_number),
    ):
        return tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver)


def all_reduce(replica: tf.distribute.ReplicaContext, how: tf.distribute.ReduceOp, value: Any) -> Any:
    """As `replica.all_reduce`, of what no gradient is taken.

    That one has a gradient of its own, and TensorFlow keeps those of all traces, with the whole graph of each.
    """
    flat, extended = tf.nest.flatten(value), replica.strategy.extended
    options = tf.distribute.experimental.CommunicationOptions()

    def reduce_all(strategy: tf.distribute.Strategy, *values: Any) -> Any:
        pairs = [(each, _batch_reduce_destination(each)) for each in values]
        return strategy.extended.batch_reduce_to(how, pairs, options)

    if extended._use_merge_call():
        reduced = replica.merge_call(reduce_all, args=flat)
    else:
        reduced = extended._replica_ctx_all_reduce(how, flat, options)
    return tf.nest.pack_sequence_as(value, reduced)


def abort_collectives(why: str) -> None:
    """Lets all collectives of this process fail until it joins others again, also those that wait."""
    context.context().abort_collective_ops(tf.errors.UNAVAILABLE, why)


def _configure_collectives(index: int) -> None:
    context.context().configure_collective_ops(
        collective_leader=_COLLECTIVE_LEADER, device_filters=(f"/job:worker/task:{index}",)
    )


@functools.cache
def number_collectives_when_traced() -> None:
    """Numbers a collective once, when its function is traced, if its input has a static shape, or is rows to gather.

    TensorFlow numbers it anew in every call, keeps a record of each number for good (1.6 KB), and asks the first worker
    for it. With one number, a process of two does not grow and calls 1.6 times as many small all-reduces a second. What
    it guards against does not happen here: all replicas trace the same functions, before the same call. Since
    TensorFlow keeps the shape with the number, rows whose number varies are padded to one of few sizes, each of which
    has a number. Any other input whose shape varies gets a new number in every call, as before.
    """
    launcher: Any = cross_device_utils.CollectiveReplicaLauncher
    launcher.all_reduce = _numbered_when_traced(launcher.all_reduce)
    launcher._all_gather = _in_few_sizes(_numbered_when_traced(launcher._all_gather))
    # It pads rows to the largest number of any replica, and forgets their shape.
    cross_device_utils._pad_util = _keeping_row_shape(cross_device_utils._pad_util)


@functools.cache
def reduce_two_in_one_round() -> None:
    """Lets two workers send each other small tensors whole and add them up, in one round.

    In the ring of TensorFlow, each adds up one half, and a second round brings it the other: the same bytes and sums,
    after twice the latency of the network. The first round of recursive doubling (Thakur, Rabenseifner and Gropp, 2005)
    is all that two workers need.
    """
    launcher: Any = cross_device_utils.CollectiveReplicaLauncher
    launcher.all_reduce = _in_one_round(launcher.all_reduce)


def _in_one_round(original: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
    @functools.wraps(original)
    def all_reduce(launcher: Any, tensor: tf.Tensor, control_input: Any = None, options: Any = None) -> tf.Tensor:
        if launcher._group_size != 2 or "CPU" not in launcher._device or not _is_sent_whole(tensor):
            return original(launcher, tensor, control_input, options)
        with tf.device(launcher._device):
            gathered = launcher._all_gather(tensor, options)
            # TensorFlow infers no shape.
            gathered.set_shape([2 * tensor.shape[0]])
            return tf.add_n(tf.split(gathered, 2))

    return all_reduce


def _is_sent_whole(tensor: tf.Tensor) -> bool:
    num_elements = tensor.shape.num_elements() if tensor.shape.rank == 1 else None
    return tensor.dtype in _SENT_WHOLE and 0 < (num_elements or 0) * tensor.dtype.size <= _MOST_IN_ONE_ROUND


def _numbered_when_traced(original: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
    @functools.wraps(original)
    def collective(launcher: Any, tensor: tf.Tensor, *args: Any, **options: Any) -> tf.Tensor:
        if tf.executing_eagerly() or not tensor.shape.is_fully_defined():
            return original(launcher, tensor, *args, **options)
        keys, group, device = launcher._collective_keys, launcher._group_key, launcher._device
        with replaced(launcher, _next_instance_key=lambda: keys.get_instance_key(group, device)):
            return original(launcher, tensor, *args, **options)

    return collective


def _in_few_sizes(original: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
    @functools.wraps(original)
    def _all_gather(launcher: Any, rows: tf.Tensor, options: Any) -> tf.Tensor:
        shape = rows.shape
        varies = not tf.executing_eagerly() and shape.rank and shape[0] is None
        if not varies or not shape[1:].is_fully_defined():
            return original(launcher, rows, options)
        keys, replicas, row_shape = launcher._collective_keys, launcher._group_size, list(shape[1:])
        first_key, *_ = [keys.get_instance_key(launcher._group_key, launcher._device) for _ in _SIZES]
        with tf.device(launcher._device):
            number = tf.shape(rows)[0]
            place = tf.searchsorted(_SIZES, [number])[0]
            size = tf.gather(_SIZES, place)
            padded = tf.pad(rows, [[0, size - number], *([0, 0] for _ in row_shape)])
            with replaced(launcher, _next_instance_key=lambda: first_key + place):
                gathered = original(launcher, padded, options)
            of_each = tf.reshape(gathered, [replicas, size, *row_shape])[:, :number]
            return tf.reshape(of_each, [replicas * number, *row_shape])

    return _all_gather


def _keeping_row_shape(original: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
    @functools.wraps(original)
    def pad(rows: tf.Tensor, *number: Any) -> tf.Tensor:
        padded = original(rows, *number)
        padded.set_shape(tf.TensorShape([None]).concatenate(rows.shape[1:]))
        return padded

    return pad
