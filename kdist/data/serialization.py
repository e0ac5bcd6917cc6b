"""A `tf.data.Dataset` as a graph that can be sent to other processes, and the checks of such graphs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from kdist.errors import ConfigError

#: Ops that make elements in the user's process only.
_PYTHON_GENERATORS = {"GeneratorDataset": "a Python generator"}
#: Ops that exist in the user's process only, by way of a dataset's graph: Python functions, and state that lives there.
_OPS_THAT_CANNOT_TRAVEL = {
    **_PYTHON_GENERATORS,
    "PyFunc": "a Python function",
    "PyFuncStateless": "a Python function",
    "EagerPyFunc": "a Python function",
    "VarHandleOp": "a variable",
    "MutableHashTableV2": "a lookup table that changes",
}
#: Ops that write files, also as `V2`, with the method of `tf.data.Dataset` that makes them; the path is their second
#: input.
_OPS_THAT_WRITE = {"CacheDataset": "cache", "SaveDataset": "save", "SnapshotDataset": "snapshot"}
_INSTEAD = "give arrays, or a function (context) -> tf.data.Dataset that makes the dataset of TensorFlow ops"


class CannotTravel(ConfigError):
    """A dataset cannot be read by the workers."""


def dataset_graph(dataset: tf.data.Dataset, num_readers: int = 1) -> tf.Tensor:
    """The dataset's graph as a scalar string tensor, for so many iterators that read it at the same time.

    Raises:
        CannotTravel: the dataset needs something that exists in this process only, is too large, or writes files that
            only one of several readers may write.
    """
    try:
        with tf.device("CPU:0"):
            variant, ignore = tf.data.experimental.to_variant(dataset), tf.data.experimental.ExternalStatePolicy.IGNORE
            serialized = tf.raw_ops.DatasetToGraphV2(input_dataset=variant, external_state_policy=ignore.value)
    except (tf.errors.OpError, ValueError) as error:
        raise CannotTravel(f"the dataset cannot travel to the workers: {error}; {_INSTEAD}") from error
    graph = tf.compat.v1.GraphDef.FromString(serialized.numpy())
    _check_ops(graph, _OPS_THAT_CANNOT_TRAVEL)
    _check_files(graph, num_readers)
    return serialized


def check_function(function: tf.types.experimental.ConcreteFunction, num_readers: int, *, travels: bool) -> None:
    """Checks a traced function that makes a dataset, as `dataset_graph`; if it `travels`, other processes call it."""
    graph = function.graph.as_graph_def()
    if travels:
        _check_ops(graph, _PYTHON_GENERATORS)
        if any(captured.dtype == tf.variant for captured, _ in function.graph.captures):
            raise CannotTravel(
                "the dataset function uses a dataset that was made outside of it, in this process; make it inside"
            )
    _check_files(graph, num_readers)


def uses_libraries(serialized: tf.Tensor) -> bool:
    """True if the graph of a dataset has ops that are not TensorFlow's own: a task may not have them."""
    return _has_other_ops(tf.compat.v1.GraphDef.FromString(serialized.numpy()))


def may_need_this_process(function: tf.types.experimental.ConcreteFunction) -> bool:
    """True if a traced function has ops that are not TensorFlow's own, or reads variables or tables of this process."""
    has_state = any(captured.dtype == tf.resource for captured, _ in function.graph.captures)
    return has_state or _has_other_ops(function.graph.as_graph_def())


def dataset_of_graph(graph: tf.Tensor, element_spec: Any) -> tf.data.Dataset:
    """Undoes `dataset_graph`."""
    return tf.data.experimental.from_variant(tf.raw_ops.DatasetFromGraph(graph_def=graph), element_spec)


def _check_ops(graph: Any, refused: dict[str, str]) -> None:
    for nodes in _scopes(graph):
        for node in nodes:
            if node.op in refused:
                raise CannotTravel(
                    f"the dataset cannot travel to the workers: it uses {refused[node.op]} ({node.op}), which exists "
                    f"in this process only; {_INSTEAD}"
                )


def _has_other_ops(graph: Any) -> bool:
    ops = {node.op for nodes in _scopes(graph) for node in nodes}
    called = {function.signature.name for function in graph.library.function}
    return any(not (op.startswith("_") or op in called or hasattr(tf.raw_ops, op)) for op in ops)


def _check_files(graph: Any, num_readers: int) -> None:
    """Refuses files that several readers would write: one that is computed, from the worker's index, is its own."""
    if num_readers == 1:
        return
    for nodes in _scopes(graph):
        constants = {node.name: node.attr["value"].tensor for node in nodes if node.op == "Const"}
        for node in nodes:
            method = _OPS_THAT_WRITE.get(node.op.removesuffix("V2"))
            place = constants.get(node.input[1].partition(":")[0]) if method else None
            if place is not None and (path := b"".join(place.string_val).decode()):
                raise CannotTravel(
                    f"the dataset uses {method}({path!r}), and {num_readers} workers cannot write the same file; use "
                    "cache() in memory, or a function (context) -> tf.data.Dataset with a file for each worker: "
                    'tf.strings.join(["cache-", tf.strings.as_string(context.worker_index)])'
                )


def _scopes(graph: Any) -> Iterator[Sequence[Any]]:
    """The nodes of a graph, and of each of its functions."""
    yield graph.node
    for function in graph.library.function:
        yield function.node_def
