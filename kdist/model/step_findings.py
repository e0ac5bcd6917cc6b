"""The outputs of a traced step, and the findings of its trace: its variables, and the state that it only adds to.

Changes of several workers add up if each is an increment: a counter, the steps of a moving average. They do not if the
new value is computed otherwise: a flag, an index that wraps around, a queue, a clipped number. The sum of two such
changes is a value that no worker has computed. `is_increment` tells one from the other by the operations between the
old value and the new one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from kdist._compat.keras import global_seed, layers_of, loss_scaling, loss_tracker, optimizers_of
from kdist.errors import ConfigError
from kdist.model.embedding_lookup import RowLookups
from kdist.model.loss_weights import LossTerms
from kdist.model.metrics import ReturnedValues, metric_variables
from kdist.model.names import is_seed
from kdist.model.state import choose_variables, layer_states, stateful_layers
from kdist.model.traced_step import TracedScope

#: Operations whose output is their input, or its value as another type.
_UNCHANGED = frozenset({"Identity", "Cast", "StopGradient", "PreventGradient", "CheckNumerics", "EnsureShape"})
_SUMS = frozenset({"Add", "AddV2", "AddN", "Sub"})


def is_increment(old: tf.Tensor, new: Any) -> bool:
    """True if `new` is `old`, or `old` times a known factor in (0, 1], and something added.

    Both are of the same graph, and floating-point: whole numbers count, but they also number places in a buffer.
    """
    if not tf.is_symbolic_tensor(new) or not new.dtype.is_floating:
        return False
    dependence = _Dependence(old)
    if not dependence.of(new):
        return False
    factor = dependence.factor(new)
    return dependence.is_sum(new) if factor is None else 0 < factor <= 1


class _Dependence:
    """The dependence of tensors of a graph on one of them."""

    def __init__(self, old: tf.Tensor) -> None:
        self._old = old
        #: All operations that use it, directly or not.
        self._users: set[tf.Operation] = set()
        found = old.consumers()
        while found:
            operation = found.pop()
            if operation not in self._users:
                self._users.add(operation)
                found.extend(user for output in operation.outputs for user in output.consumers())

    def of(self, tensor: tf.Tensor) -> bool:
        return tensor is self._old or tensor.op in self._users

    def is_sum(self, tensor: tf.Tensor) -> bool:
        """True if the old value itself is one of the summands, whatever the others are."""
        while tensor is not self._old and tensor.op.type in _UNCHANGED:
            tensor = tensor.op.inputs[0]
        if tensor is self._old:
            return True
        if tensor.op.type not in _SUMS:
            return False
        summands = tensor.op.inputs[:1] if tensor.op.type == "Sub" else tensor.op.inputs
        return any(self.of(summand) and self.is_sum(summand) for summand in summands)

    def factor(self, tensor: tf.Tensor) -> float | None:
        """The factor of the old value in a linear function of it; None if it is none, or the factor is not constant."""
        if tensor is self._old or not self.of(tensor):
            return float(tensor is self._old)
        kind, inputs = tensor.op.type, list(tensor.op.inputs)
        # The factors by which the operation multiplies its inputs.
        signs: list[float | None] = [None] * len(inputs)
        if kind in _UNCHANGED | {"Neg"}:
            signs[0] = -1.0 if kind == "Neg" else 1.0
        elif kind in _SUMS:
            signs = [-1.0 if kind == "Sub" and i else 1.0 for i in range(len(inputs))]
        elif kind == "Mul":
            signs = [self._constant(inputs[1]), self._constant(inputs[0])]
        elif kind == "RealDiv" and (divisor := self._constant(inputs[1])) is not None:
            signs[0] = 1 / divisor if divisor else divisor
        total = 0.0
        for sign, part in zip(signs, inputs):
            if self.of(part):
                factor = self.factor(part)
                if sign is None or factor is None:
                    return None
                total += sign * factor
        return total

    def _constant(self, tensor: tf.Tensor) -> float | None:
        """The number that all elements of a tensor are, if it is known."""
        value = None if self.of(tensor) else tf.get_static_value(tensor)
        return None if value is None or not value.size or (value != value.flat[0]).any() else float(value.flat[0])


def check_assigned(model: keras.Model, assigned: Mapping[int, keras.Variable]) -> None:
    """Refuses, with a `ConfigError`, a step that assigns a variable of Keras that the model does not know."""
    if others := [v.path for v in _of_others(model, assigned)]:
        raise ConfigError(
            f"model {model.name}: a step assigns {', '.join(others)}, which the model does not have; make it with "
            "self.add_weight(..., trainable=False) of the model or a layer, or assign its owner to an attribute of them"
        )


def read_beside(model: keras.Model, read: Mapping[int, keras.Variable]) -> list[keras.Variable]:
    """The variables that a step reads beside the model's and its optimizers': of a loss, a metric, a regularizer.

    A callback may assign them, so they belong to the state of the training.
    """
    of_optimizers = {id(v) for optimizer in optimizers_of(model).values() for v in optimizer.variables}
    if (scaling := loss_scaling(model)) is not None:
        of_optimizers |= {id(v) for v in scaling.variables}
    return [v for v in _of_others(model, read) if id(v) not in of_optimizers]


def _of_others(model: keras.Model, variables: Mapping[int, keras.Variable]) -> list[keras.Variable]:
    """The variables that the model does not know. Seeds are not among them: a step's scope has their states."""
    states = (variable for layer in stateful_layers(model) for variable in layer_states(layer))
    known = {id(v) for v in (*model.variables, *model.metrics_variables, *loss_tracker(model).variables, *states)}
    return [v for key, v in variables.items() if key not in known and not is_seed(v)]


def check_exchanges(model: keras.Model, exchanges: Sequence[str], assigned: Mapping[int, keras.Variable]) -> None:
    """Refuses, with a `ConfigError`, a step that reads, before its end, values of other replicas.

    A synchronized layer needs them if the step assigns its statistics, even where Keras's code does not read them: with
    a mask it takes the moments of the replica alone.
    """
    layers = [layer for layer in layers_of(model) if getattr(layer, "synchronized", False)]
    if not exchanges and not any(id(v) in assigned for layer in layers for v in layer.non_trainable_variables):
        return
    names = [f"{type(layer).__name__} {layer.name}" for layer in layers]
    raise ConfigError(
        f"model {model.name}: {', '.join(names) or 'its step'} (synchronized=True, or the replica context of "
        "tf.distribute) needs values of the other replicas in the middle of a step, which replicas of kdist do not "
        "exchange; set synchronized=False, or train with one replica (cluster=local) or strategy=parameter_server"
    )


class StepOutputs(NamedTuple):
    """The outputs of a traced step: tensors of its graph.

    Attributes:
        gradients: of each update of the step, one for each trainable variable, or None.
        assigned: before each update, and at the end: by how much trainable variables were changed, by index.
        state, metrics: new values of state and worker state, and of the model's metrics; None where the step did not
            change them.
        values: the returned values that no metric has counted.
        divisor: of the loss, if it depends on more than the shape of the batch.
        overflow: see `ReplicaOutput`.
        of_rows: gradients of rows that were looked up, by round and lookup; None where there is none.
        tried: the values that tell how the loss grows with the batch; none if that is known.
    """

    gradients: list[list[Any]]
    assigned: list[dict[int, tf.Tensor]]
    state: list[tf.Tensor | None]
    metrics: list[tf.Tensor | None]
    values: list[tf.Tensor]
    divisor: tf.Tensor | None
    overflow: tf.Tensor | None
    of_rows: list[list[Any]]
    tried: list[Any]


@dataclass(frozen=True)
class StepFindings:
    """The findings of a trace of a step.

    Attributes:
        lookups: of rows of tables.
        returned: the values that it returns beside metrics.
        trainable, state, seeds: its variables. The last seed is that of keras.random.
        worker_state: of stateful layers.
        replaced: the state that it replaces instead of adding to it, by index: whole numbers, and all other functions.
        terms: of the loss of a synchronous replica, as far as its graph tells.
        assumed: the terms for which it was traced.
        num_divisors: the number of losses of a model's own step divided by more than the shape of a batch.
    """

    lookups: RowLookups
    returned: ReturnedValues
    trainable: list[keras.Variable]
    state: list[keras.Variable]
    seeds: list[keras.Variable]
    worker_state: list[keras.Variable]
    replaced: frozenset[int]
    terms: LossTerms = field(default_factory=LossTerms)
    assumed: LossTerms = field(default_factory=LossTerms)
    num_divisors: int = 0

    @staticmethod
    def of(
        model: keras.Model,
        scope: TracedScope,
        lookups: RowLookups,
        returned: ReturnedValues,
        trainable: list[keras.Variable],
    ) -> StepFindings:
        """Finds the variables at the end of a trace in `scope`."""
        chosen, others = choose_variables(model, trainable, read_beside(model, scope.variables))
        state = [v for v in others if not is_seed(v)]

        def is_replaced(variable: keras.Variable) -> bool:
            old, new = scope.inputs.get((id(variable), 0)), scope.new_value(variable)
            is_added = new is None or (old is not None and is_increment(old, new))
            return not is_added or not tf.as_dtype(variable.dtype).is_floating

        replaced = frozenset(i for i, variable in enumerate(state) if is_replaced(variable))
        seeds = [*(v for v in others if is_seed(v)), global_seed()]
        worker_state = [variable for layer in stateful_layers(model) for variable in layer_states(layer)]
        return StepFindings(lookups, returned, chosen, state, seeds, worker_state, replaced)

    def changed(self, model: keras.Model, scope: TracedScope) -> tuple[list[Any], list[Any]]:
        """The outputs `state` and `metrics`."""
        state = [scope.new_value(variable) for variable in [*self.state, *self.worker_state]]
        return state, [scope.new_value(variable) for variable in metric_variables(model)]
