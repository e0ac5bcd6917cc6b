"""The updates of one step of a model: calls of optimizers, with their variables, in their order."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from kdist._compat.keras import parts_of, step_counter
from kdist.model.loss_weights import Term
from kdist.model.optimizer import Gradient, clip_gradients, is_elementwise, map_values, optimizer_state


@dataclass(frozen=True)
class ReplicaOutput:
    """The output of one replica step, or of one of its phases.

    Attributes:
        gradients: one per trainable variable, not clipped; None if no loss depends on the variable, or no update of
            this phase has it. For a table that is looked up by rows `tf.IndexedSlices` with the numbers of the rows in
            its group, each as often as it was looked up, as in Keras, or once if it is row-wise.
        assigned: for each trainable variable by how much assignments have changed it before the update; None without.
        state, metrics: new values of the variables, in the last phase; None for state that the step did not change.
        num_examples: of the batch.
        phase: its index.
        weight: of the gradients, float32 scalar; None if replicas have equal weights, or gradients add up.
        overflow: the scale of the loss, float32 scalar, if it has made a gradient infinite or no number, so that no
            parameter is updated; otherwise 0. None if the loss is not scaled.
    """

    gradients: list[Gradient | None]
    assigned: list[tf.Tensor | None]
    state: list[tf.Tensor | None]
    metrics: list[tf.Tensor]
    num_examples: tf.Tensor | int
    phase: int = 0
    weight: tf.Tensor | None = None
    overflow: tf.Tensor | None = None

    @property
    def state_weight(self) -> tf.Tensor | None:
        """The weight of the changes of state, float32: the number of examples; None if it is always the same."""
        return None if isinstance(self.num_examples, int) else tf.cast(self.num_examples, tf.float32)


def scale(gradient: Any, factor: tf.Tensor | None) -> Any:
    """A gradient times a factor; if either is None, the gradient as it is."""
    if gradient is None or factor is None:
        return gradient
    # A gradient without weight may be no number.
    return map_values(lambda v: tf.math.multiply_no_nan(v, tf.cast(factor, v.dtype)), gradient)


#: The phases of a step: yields the output of each, and is sent the new values of the variables that the next one reads;
#: see `StepUpdates.pulled_again`.
RunningStep: TypeAlias = "Generator[ReplicaOutput, Mapping[int, tf.Tensor], None]"


@dataclass(frozen=True)
class OptimizerGroup:
    """An optimizer with the variables that it updates; of a GAN, the discriminator's or the generator's.

    Attributes:
        optimizer: built.
        variables: their indices among the step's trainable variables.
        name: the attribute of the model that holds the optimizer; empty for the one that the model was compiled with.
        updates_per_step: the number of its calls in a step.
        first_iteration: its count of iterations at global step 0.
    """

    optimizer: keras.optimizers.Optimizer
    variables: tuple[int, ...]
    name: str = ""
    updates_per_step: int = 1
    first_iteration: int = 0

    def iteration(self, step: Any, number: int = 0) -> Any:
        """Its count of iterations before its update `number` of the step that follows global step `step`."""
        if self.updates_per_step == 1 and not self.first_iteration:
            return step
        return self.updates_per_step * step + self.first_iteration + number

    def state(self, variables: Sequence[keras.Variable], names: Sequence[str]) -> dict[str, keras.Variable]:
        """The optimizer's variables by name, as `optimizer_state`; both arguments are those of the whole step."""
        own = [variables[i] for i in self.variables]
        return optimizer_state(self.optimizer, own, [names[i] for i in self.variables], owner=self.name)


@dataclass(frozen=True)
class Update:
    """One call of an optimizer.

    Attributes:
        group: its index in `StepUpdates.groups`.
        variables: indices of the variables that it has a gradient for.
        phase: it is applied at the end of this phase of the step.
        number: of calls of the same optimizer before it in its step.
    """

    group: int
    variables: frozenset[int]
    phase: int = 0
    number: int = 0


@dataclass(frozen=True)
class StepUpdates:
    """The updates of one step.

    A step that reads a variable after updating it runs in phases: after each, its updates are applied, and the next
    phases pull the variables that they read again.

    Attributes:
        groups: the optimizers; the first is the one that the model was compiled with.
        updates: in the order of the step.
        pulled_again: for each phase the variables that it reads as the phases before have left them; none for the
            first.
        assigned: the trainable variables that the step also assigns.
        loss: MEAN, OWN_MEAN or SUM, which tells the weights of the gradients of synchronous replicas.
    """

    groups: tuple[OptimizerGroup, ...]
    updates: tuple[Update, ...]
    pulled_again: tuple[frozenset[int], ...] = (frozenset(),)
    assigned: frozenset[int] = frozenset()
    loss: Term = Term.MEAN

    @staticmethod
    def of_all(
        optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable], loss: Term = Term.MEAN
    ) -> StepUpdates:
        """One update of all variables by a built optimizer, as Keras's own step makes."""
        parts = parts_of(optimizer, variables)
        groups = [OptimizerGroup(optimizer, tuple(range(len(variables))) if not parts else ())]
        step = int(step_counter(optimizer).numpy())
        for i, (part, indices) in enumerate(parts):
            first = int(step_counter(part).numpy()) - step
            groups.append(OptimizerGroup(part, indices, f"optimizers_{i}", first_iteration=first))
        updates = tuple(Update(g, frozenset(group.variables)) for g, group in enumerate(groups) if group.variables)
        return StepUpdates(tuple(groups), updates, loss=loss)

    @property
    def num_phases(self) -> int:
        return len(self.pulled_again)

    def in_phase(self, phase: int) -> list[Update]:
        """The updates at the end of a phase; of different variables."""
        return [update for update in self.updates if update.phase == phase]

    def optimizers_of(self, variable: int) -> list[keras.optimizers.Optimizer]:
        """The optimizers that update a variable, by its index."""
        return [group.optimizer for group in self.groups if variable in group.variables]

    def is_elementwise(self, variable: int) -> bool:
        """True if a variable can be split without changing the result of its optimizers."""
        return all(map(is_elementwise, self.optimizers_of(variable)))

    def merge(self, gradients: Sequence[Sequence[Any]], phase: int) -> list[Any]:
        """Joins the gradients of the updates of a phase: one per variable, or None."""
        merged = [None] * len(gradients[0])
        for update, of_update in zip(self.updates, gradients):
            if update.phase == phase:
                merged = [old if new is None else new for old, new in zip(merged, of_update)]
        return merged

    def merge_assigned(self, assigned: Sequence[Mapping[int, tf.Tensor]], phase: int) -> list[Any]:
        """As `merge`, for the assignments before each update, and at the end of the step."""
        phases = [*(update.phase for update in self.updates), self.num_phases - 1]
        merged = {i: value for p, found in zip(phases, assigned) if p == phase for i, value in found.items()}
        num_variables = 1 + max((i for group in self.groups for i in group.variables), default=-1)
        return [merged.get(i) for i in range(num_variables)]

    def clip(self, gradients: Sequence[Any], phase: int) -> list[Gradient | None]:
        """Clips the gradients of a phase, one per variable or None, as the optimizers would."""
        clipped = dict(enumerate(gradients))
        for update in self.in_phase(phase):
            own = {i: gradients[i] for i in sorted(update.variables) if gradients[i] is not None}
            clipped |= clip_gradients(self.groups[update.group].optimizer, own)
        return list(clipped.values())
