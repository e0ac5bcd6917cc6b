"""A `tf.data.Dataset` as a graph that can be sent to other processes."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from kdist._compat.tensorflow import dataset_as_graph
from kdist.errors import ConfigError

# Ops that exist in the user's process only: Python functions, and state that lives there.
_OPS_THAT_CANNOT_TRAVEL = {
    "PyFunc": "a Python function",
    "PyFuncStateless": "a Python function",
    "EagerPyFunc": "a Python function",
    "GeneratorDataset": "a Python generator",
    "VarHandleOp": "a variable",
    "MutableHashTableV2": "a lookup table that changes",
}
_INSTEAD = "give arrays, or a function (context) -> tf.data.Dataset that makes the dataset of TensorFlow ops"


class CannotTravel(ConfigError):
    """A dataset cannot be sent to another process."""


def dataset_graph(dataset: tf.data.Dataset) -> tf.Tensor:
    """The dataset's graph as a scalar string tensor.

    Raises:
        CannotTravel: the dataset needs something that exists in this process only, or is too large.
    """
    try:
        with tf.device("CPU:0"):
            serialized = dataset_as_graph(dataset)
    except (tf.errors.OpError, ValueError) as error:
        raise CannotTravel(f"the dataset cannot travel to the workers: {error}; {_INSTEAD}") from error
    graph = tf.compat.v1.GraphDef.FromString(serialized.numpy())
    nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
    for node in nodes:
        if node.op in _OPS_THAT_CANNOT_TRAVEL:
            raise CannotTravel(
                f"the dataset cannot travel to the workers: it uses {_OPS_THAT_CANNOT_TRAVEL[node.op]} ({node.op}), "
                f"which exists in this process only; {_INSTEAD}"
            )
    return serialized


def dataset_of_graph(graph: tf.Tensor, element_spec: Any) -> tf.data.Dataset:
    """Undoes `dataset_graph`."""
    return tf.data.experimental.from_variant(tf.raw_ops.DatasetFromGraph(graph_def=graph), element_spec)
