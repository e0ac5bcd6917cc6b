"""A model's own `train_step` as a part of the replica step, for every strategy.

Such steps (GANs, distillation, contrastive learning) compute gradients with a tape and give them to an optimizer. Here
the tape sees pulled values, wherever they are from, and the optimizer only records gradients; the strategy applies
them.
"""

from __future__ import annotations

import inspect
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

import keras
import tensorflow as tf

from kdist._compat.keras import (
    built_variables,
    is_multi_optimizer,
    learning_rate_variable,
    loss_scaling,
    main_optimizer,
    optimizers_of,
    outside_of_scopes,
    step_counter,
)
from kdist._compat.tensorflow import rename_legacy_functions
from kdist.errors import ConfigError
from kdist.model.logs import flat
from kdist.model.loss_weights import Term
from kdist.model.optimizer import unscale
from kdist.model.phases import PhaseOfTensor, Phases, ancestors
from kdist.model.phases import flat as flat_tensors
from kdist.model.traced_step import TracedScope, TracedStep
from kdist.model.updates import OptimizerGroup, StepUpdates, Update


@dataclass(frozen=True)
class OptimizerRead:
    """A variable that a step reads of the optimizer of a group, or of the one that scales the loss."""

    variable: keras.Variable
    group: int
    kind: Literal["step", "learning_rate", "loss_scale"]


@dataclass(frozen=True)
class _Applied:
    """One call of an optimizer, and by how much its variables were assigned before, by `id`."""

    optimizer: keras.optimizers.Optimizer
    gradients: list[Any]
    variables: list[keras.Variable]
    assigned: dict[int, tf.Tensor]


class OwnTrainStep:
    """The `train_step` of a model that overrides it.

    Attributes, of the last trace:
        trainable: the variables that the step gives to optimizers, in the model's order.
        groups: the optimizers with their variables; the first is the one that the model was compiled with.
        updated: for each update of the step the indices of the variables that it has a gradient for.
        order: for each update its group.

    Raises:
        ConfigError: the step cannot be spread over tasks.
    """

    groups: tuple[OptimizerGroup, ...]
    order: list[int]

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._optimizers = optimizers_of(model)
        self._applied: list[_Applied] = []
        self._scaling = loss_scaling(model)
        if is_multi_optimizer(main_optimizer(model)):
            raise self.refusal("uses MultiOptimizer; call several optimizers instead, or leave train_step to Keras")

    def trace(self, batch: Any, scope: TracedScope) -> dict[str, Any]:
        """Traces the step in `scope`, which the caller has entered; returns the values that it returns."""
        self._applied = []
        with self._recording(scope), rename_legacy_functions():
            logs = self._model.train_step(batch)
        if not isinstance(logs, Mapping):
            raise self.refusal(f"returns {type(logs).__name__}; return a dict of what is to be shown")
        if not self._applied:
            raise self.refusal(
                "applies no gradients; call apply_gradients of an optimizer that the model, or an attribute of it, has"
            )
        self.trainable = self._given_to_optimizers()
        self._index_of = {id(variable): i for i, variable in enumerate(self.trainable)}
        self.updated = [
            [self._index_of[id(v)] for v, gradient in zip(one.variables, one.gradients) if gradient is not None]
            for one in self._applied
        ]
        return flat(logs)

    def gradients(self, scale: tf.Tensor | None) -> list[list[Any]]:
        """For each update of the trace a gradient for each of `trainable`, or None; `scale` is the one of the loss."""
        of_updates = []
        for one in self._applied:
            given = dict(zip(map(id, one.variables), unscale(one.optimizer, one.gradients, scale)))
            of_updates.append([given.get(id(variable)) for variable in self.trainable])
        return of_updates

    def assigned(self, scope: TracedScope) -> list[dict[int, tf.Tensor]]:
        """For each update, and for the end of the step: by how much assignments have changed variables, by index."""
        assigned = [*(one.assigned for one in self._applied), scope.take_assigned(self.trainable)]
        return [{self._index_of[key]: by for key, by in found.items()} for found in assigned]

    @contextmanager
    def _recording(self, scope: TracedScope) -> Iterator[None]:
        called = [(optimizer, optimizer) for optimizer in self._optimizers.values()]
        if self._scaling is not None:
            called.append((self._scaling, main_optimizer(self._model)))
        for optimizer, applied in called:
            object.__setattr__(optimizer, "apply", partial(self._record, scope, applied))
            object.__setattr__(optimizer, "build", outside_of_scopes()(optimizer.build))
        try:
            yield
        finally:
            for optimizer, _ in called:
                object.__delattr__(optimizer, "apply")
                object.__delattr__(optimizer, "build")

    def _record(
        self, scope: TracedScope, optimizer: keras.optimizers.Optimizer, gradients: Any, trainable_variables: Any = None
    ) -> None:
        variables = built_variables(optimizer) if trainable_variables is None else trainable_variables
        gradients = list(gradients)
        if tf.compat.v1.get_default_graph() is not scope.graph:
            raise self.refusal(
                "applies gradients inside tf.cond, a loop, or a function of its own; apply them in every step, outside "
                "of these (multiply them by 0 to skip an update)"
            )
        if all(gradient is None for gradient in gradients):
            raise self.refusal("applies gradients of a loss that depends on none of their variables")
        self._applied.append(_Applied(optimizer, gradients, list(variables), scope.take_assigned(variables)))
        scope.update(v for v, gradient in zip(variables, gradients) if gradient is not None)
        scope.advance(step_counter(optimizer))

    def _given_to_optimizers(self) -> list[keras.Variable]:
        model, applied = self._model, self._applied
        given = {id(variable): variable for one in applied for variable in one.variables}
        also = {id(variable) for variable in built_variables(main_optimizer(model))}
        trainable = [v for v in model.trainable_variables if id(v) in given or id(v) in also]
        known = {id(variable) for variable in trainable}
        if unknown := [variable.path for key, variable in given.items() if key not in known]:
            raise self.refusal(
                f"updates {', '.join(unknown)}, which the model does not list in trainable_variables; assign their "
                "layers to attributes of the model"
            )
        return trainable

    def build_optimizers(self, read: Iterable[keras.Variable]) -> None:
        """Sets `groups`, with their optimizers built, and `order`.

        Args:
            read: the variables that the step reads; it is refused if no worker has those of its optimizers.
        """
        model, applied = self._model, self._applied
        step = int(step_counter(main_optimizer(model)).numpy())
        groups = []
        for name, optimizer in self._optimizers.items():
            calls = [one for one in applied if one.optimizer is optimizer]
            if name and not calls:
                continue
            given = {id(v) for v in (*(v for one in calls for v in one.variables), *built_variables(optimizer))}
            indices = [i for i, variable in enumerate(self.trainable) if id(variable) in given]
            built = optimizer if name or self._scaling is None else self._scaling
            if not built.built:
                built.build([self.trainable[i] for i in indices])
            first = int(step_counter(optimizer).numpy()) - len(calls) * step if name else 0
            groups.append(OptimizerGroup(optimizer, tuple(indices), name, len(calls), first))
        by_id = {id(group.optimizer): i for i, group in enumerate(groups)}
        self.order = [by_id[id(one.optimizer)] for one in applied]
        if self._scaling is not None and len(self.order) > 1:
            raise self.refusal(
                "calls optimizers several times, and scales its loss; use the policy mixed_bfloat16, which needs no "
                "loss scaling, or compile with auto_scale_loss=False"
            )
        self.groups = tuple(groups)
        known = {id(of(group.optimizer)) for group in groups for of in (step_counter, learning_rate_variable)}
        slots = {id(v) for optimizer in self._optimizers.values() for v in optimizer.variables} - known
        if unknown := sorted(v.name for v in read if id(v) in slots):
            raise self.refusal(
                f"uses {', '.join(unknown)} of its optimizers, which other tasks do not have; a step can read their "
                "iterations and learning_rate"
            )

    def refusal(self, why: str) -> ConfigError:
        """The error that says why the step cannot be spread over tasks."""
        kind = type(self._model)
        where = f"{inspect.getsourcefile(kind.train_step)}:{inspect.getsourcelines(kind.train_step)[1]}"
        return ConfigError(f"model {self._model.name}: {kind.__name__}.train_step ({where}) {why}")


def optimizer_reads(groups: Sequence[OptimizerGroup], scaling: Any, read: Mapping[int, Any]) -> list[OptimizerRead]:
    """The step counters and learning rates that a step reads, and the scale of its loss.

    Args:
        scaling: the optimizer that scales the loss by a dynamic factor; None without one.
        read: the variables that the step reads, by `id`.
    """
    found = []
    for g, group in enumerate(groups):
        counter, rate = step_counter(group.optimizer), learning_rate_variable(group.optimizer)
        if id(counter) in read:
            found.append(OptimizerRead(counter, g, "step"))
        if rate is not None and id(rate) in read:
            found.append(OptimizerRead(rate, g, "learning_rate"))
        if scaling is not None and g == 0:
            found.append(OptimizerRead(scaling.dynamic_scale, g, "loss_scale"))
    return found


def cut_own_step(
    own: OwnTrainStep, traced: TracedStep, loss: Term, jit_compile: bool | None
) -> tuple[StepUpdates, Callable[[], Phases]]:
    """Finds the updates of a model's own traced step, with their phases.

    Returns:
        The updates; a function that cuts the step, once: each phase returns merged gradients, merged assignments,
        state, metrics and other values.
    """
    gradients, assigned, state, metrics, values, *_ = traced.outputs
    first_phases = PhaseOfTensor()
    phases: list[int] = []
    last: dict[int, int] = {}
    num_updates = Counter[int]()
    live = set(ancestors(traced.graph, flat_tensors([gradients, assigned, state, metrics, values])))
    arriving = defaultdict[int, dict[int, tf.Tensor]](dict)
    for indices, of_update, before in zip(own.updated, gradients, assigned):
        again = [last[i] + 1 for i in indices if i in last]
        phase = max([first_phases.of([of_update, before]), *phases[-1:], *again])
        num_updates.update(indices)
        keys = {i: (id(own.trainable[i]), num_updates[i]) for i in indices}
        inputs = {i: traced.scope.inputs[key] for i, key in keys.items() if key in traced.scope.inputs}
        first_phases.arrive(inputs.values(), phase + 1)
        arriving[phase + 1] |= {i: tensor for i, tensor in inputs.items() if tensor.op in live}
        phases.append(phase)
        last |= dict.fromkeys(indices, phase)
    at_end = [last[i] + 1 for i in assigned[-1] if i in last]
    num_phases = 1 + max(*map(first_phases.of_operation, live), *phases, *at_end)
    updates = StepUpdates(
        own.groups,
        tuple(
            Update(group, frozenset(own.updated[i]), phases[i], own.order[:i].count(group))
            for i, group in enumerate(own.order)
        ),
        pulled_again=tuple(frozenset(arriving[phase]) for phase in range(num_phases)),
        assigned=frozenset(i for found in assigned for i in found),
        loss=loss,
    )

    @cache
    def cut() -> Phases:
        of_phases = [(updates.merge(gradients, p), updates.merge_assigned(assigned, p)) for p in range(num_phases)]
        unknown: list[Any] = [None] * len(state)
        outputs: list[Any] = [(*found, unknown, [], []) for found in of_phases]
        outputs[-1] = *of_phases[-1], state, metrics, values
        later = [[arriving[p][i] for i in sorted(arriving[p])] for p in range(1, num_phases)]
        return Phases(traced.graph, first_phases, [traced.open_inputs(), *later], outputs, jit_compile)

    return updates, cut
