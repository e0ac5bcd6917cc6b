"""What stateful layers remember from batch to batch, on the worker that reads the batches."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import keras
import tensorflow as tf


class WorkerState:
    """The states of stateful layers, for each device that computes; they begin with zeros, as in Keras.

    They are variables that a function for a worker makes where it runs, so that they never travel, and a worker that
    has restarted begins with zeros.

    Args:
        variables: the states in the model.
        epoch_at: the number of the epoch at a global step; when one begins, states are zeros again. None: there are no
            epochs.

    Attributes:
        variables: as given.
    """

    def __init__(self, variables: Sequence[keras.Variable], epoch_at: Callable[[tf.Tensor], tf.Tensor] | None) -> None:
        self.variables = list(variables)
        self._specs = [tf.TensorSpec(v.shape, v.dtype) for v in variables]
        self._specs.append(tf.TensorSpec([len(variables)], tf.int64))
        self._epoch_at = epoch_at
        #: Each fit has its own.
        self._name = f"worker_state_{uuid.uuid4().hex}"
        #: The handles in a graph and their last values there, by device. Within a call values pass from step to step
        #: as tensors, so that nothing depends on the order in which variables are read and written.
        self._known: WeakKeyDictionary[Any, dict[str, tuple[list[tf.Tensor], list[tf.Tensor]]]] = WeakKeyDictionary()

    def read(self, global_step: tf.Tensor, resets: tf.Tensor) -> list[tf.Tensor]:
        """The states before a step, on the device of the caller; called while a call is traced.

        Args:
            global_step: scalar int64.
            resets: int64 `[number of states]`: how often each was reset so far.
        """
        handles, (*values, seen) = self._find()
        epoch = 0 if self._epoch_at is None else self._epoch_at(global_step)
        # Any other value means that a state belongs to the past; at first it is zero in any case.
        now = resets * 2**32 + tf.cast(epoch, tf.int64)
        fresh = [tf.where(same, value, tf.zeros_like(value)) for same, value in zip(tf.unstack(now == seen), values)]
        self._remember(handles, [*fresh, now])
        return fresh

    def write(self, values: Sequence[tf.Tensor | None]) -> None:
        """Sets the states after a step that has read them; None leaves one as it is."""
        handles, (*before, seen) = self._find()
        values = [old if new is None else new for old, new in zip(before, values)]
        self._remember(handles, [*values, seen])
        for handle, value, spec in zip(handles, [*values, seen], self._specs):
            tf.raw_ops.AssignVariableOp(resource=handle, value=tf.cast(value, spec.dtype))

    def _find(self) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        of_graph = self._known.setdefault(tf.compat.v1.get_default_graph(), {})
        device = self._handle(0).device
        if device not in of_graph:
            handles = [self._handle(i) for i in range(len(self._specs))]
            of_graph[device] = handles, [_value(*pair) for pair in zip(handles, self._specs)]
        return of_graph[device]

    def _remember(self, handles: list[tf.Tensor], values: list[tf.Tensor]) -> None:
        self._known[tf.compat.v1.get_default_graph()][handles[0].device] = handles, values

    def _handle(self, index: int) -> tf.Tensor:
        spec = self._specs[index]
        return tf.raw_ops.VarHandleOp(dtype=spec.dtype, shape=spec.shape, shared_name=f"{self._name}_{index}")


def _value(handle: tf.Tensor, spec: tf.TensorSpec) -> tf.Tensor:
    """The value of a variable; zeros if nothing was assigned to it."""
    value = tf.cond(
        tf.raw_ops.VarIsInitializedOp(resource=handle),
        lambda: tf.raw_ops.ReadVariableOp(resource=handle, dtype=spec.dtype),
        lambda: tf.zeros(spec.shape, spec.dtype),
    )
    return tf.ensure_shape(value, spec.shape)
