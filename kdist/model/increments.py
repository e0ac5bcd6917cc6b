"""Tells what a step adds to a variable from what it assigns, by the operations between its old and its new value.

Changes of several workers add up if each is an increment: a counter, the steps of a moving average. They do not if the
new value is computed otherwise: a flag, an index that wraps around, a queue, a clipped number. The sum of two such
changes is a value that no worker has computed.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

#: Operations whose output is their input, or its value as another type.
_UNCHANGED = frozenset({"Identity", "Cast", "StopGradient", "PreventGradient", "CheckNumerics", "EnsureShape"})
_SUMS = frozenset({"Add", "AddV2", "AddN", "Sub"})


def is_increment(old: tf.Tensor, new: Any) -> bool:
    """Whether `new` is `old` and something added, or `old` times a known factor in (0, 1] and something added.

    Both are of the same graph, and floating-point: whole numbers count, but they also number places in a buffer.
    """
    if not tf.is_symbolic_tensor(new) or not new.dtype.is_floating:
        return False
    return _Dependence(old).is_increment(new)


class _Dependence:
    """How tensors of a graph depend on one of them."""

    def __init__(self, old: tf.Tensor) -> None:
        self._old = old
        #: All operations that use it, or what was made of it.
        self._users: set[tf.Operation] = set()
        found = old.consumers()
        while found:
            operation = found.pop()
            if operation not in self._users:
                self._users.add(operation)
                found.extend(user for output in operation.outputs for user in output.consumers())

    def is_increment(self, new: tf.Tensor) -> bool:
        if not self._depends(new):
            return False
        factor = self._factor(new)
        return self._is_sum(new) if factor is None else 0 < factor <= 1

    def _depends(self, tensor: tf.Tensor) -> bool:
        return tensor is self._old or tensor.op in self._users

    def _is_sum(self, tensor: tf.Tensor) -> bool:
        """Whether the old value itself is one of the summands, whatever the others are."""
        while tensor is not self._old and tensor.op.type in _UNCHANGED:
            tensor = tensor.op.inputs[0]
        if tensor is self._old:
            return True
        if tensor.op.type not in _SUMS:
            return False
        summands = tensor.op.inputs[:1] if tensor.op.type == "Sub" else tensor.op.inputs
        return any(self._depends(summand) and self._is_sum(summand) for summand in summands)

    def _factor(self, tensor: tf.Tensor) -> float | None:
        """That of the old value in a linear function of it; None if it is none, or the factor is not constant."""
        if tensor is self._old or not self._depends(tensor):
            return float(tensor is self._old)
        operation = tensor.op
        inputs = list(operation.inputs)
        # The factors of the inputs, by which the operation multiplies them.
        signs: list[float | None] = [None] * len(inputs)
        if operation.type in _UNCHANGED | {"Neg"}:
            signs[0] = -1.0 if operation.type == "Neg" else 1.0
        elif operation.type in _SUMS:
            signs = [-1.0 if operation.type == "Sub" and i else 1.0 for i in range(len(inputs))]
        elif operation.type in ("Mul", "RealDiv"):
            one, other = inputs
            signs = [self._constant(other), self._constant(one) if operation.type == "Mul" else None]
            if operation.type == "RealDiv" and signs[0]:
                signs[0] = 1 / signs[0]
        total = 0.0
        for sign, part in zip(signs, inputs):
            if self._depends(part):
                factor = self._factor(part)
                if sign is None or factor is None:
                    return None
                total += sign * factor
        return total

    def _constant(self, tensor: tf.Tensor) -> float | None:
        """The number that all elements of a tensor are, if it is known."""
        value = None if self._depends(tensor) else tf.get_static_value(tensor)
        return None if value is None or not value.size or (value != value.flat[0]).any() else float(value.flat[0])
