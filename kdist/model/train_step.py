"""A model's own `train_step` as a part of the replica step, for every strategy.

Keras's models of their own steps (GANs, distillation, contrastive learning) compute gradients with a tape and give them
to an optimizer. Here the tape sees the values that were pulled from wherever they are, and the optimizer only records
what it is given; the strategy applies it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from kdist._compat.keras import (
    built_variables,
    is_multi_optimizer,
    learning_rate_variable,
    loss_scaling,
    loss_tracker,
    main_optimizer,
    optimizers_of,
    recorded_reductions,
    step_counter,
)
from kdist._compat.tensorflow import legacy_functions_renamed, watch_in_every_tape, with_handle_of
from kdist.errors import ConfigError
from kdist.model.logs import flat
from kdist.model.loss_weights import LossTerms, Term, kinds_of, trial_values
from kdist.model.metrics import ReturnedValues
from kdist.model.seeded_scope import SeededScope
from kdist.model.updates import OptimizerGroup, Update, first_iteration

#: Variables with their values.
Pairs = list[tuple[keras.Variable, Any]]


class StandIns(SeededScope):
    """A scope in which tapes watch the tensors of trainable variables, as they watch variables.

    Args:
        trainable: the variables with their values.
        others: more of them, which no gradient is for.
    """

    def __init__(self, trainable: Pairs, others: Pairs) -> None:
        super().__init__([*trainable, *others], collect_losses=True)
        #: The values of trainable variables after their last updates, by `id`: gradients are for these.
        self._roots = {id(variable): value for variable, value in trainable}
        #: What has been assigned to trainable variables since: new values, and those before.
        self._assigned: dict[int, tuple[Any, Any]] = {}

    def get_current_value(self, variable: keras.Variable) -> Any:
        value = super().get_current_value(variable)
        root = self._roots.get(id(variable))
        if root is None:
            return value
        watch_in_every_tape(root)
        # As of a variable, the gradient is the sum of those of all reads, before and after it is assigned.
        return value if value is root else with_handle_of(root, value + (root - tf.stop_gradient(root)))

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        variable, value = update
        if id(variable) in self._roots:
            before = super().get_current_value(variable)
            # No gradient goes through an assignment.
            value = tf.stop_gradient(tf.cast(value, before.dtype))
            self._assigned[id(variable)] = value, self._assigned.get(id(variable), (None, before))[1]
        super().add_update((variable, value))

    def take_assigned(self, variables: Iterable[keras.Variable]) -> dict[int, tf.Tensor]:
        """By how much assignments have changed these variables since it was asked for last, by `id`."""
        pairs = {key: self._assigned.pop(key) for key in map(id, variables) if key in self._assigned}
        return {key: new - before for key, (new, before) in pairs.items()}

    def replace(self, trainable: Pairs) -> None:
        """Gives variables other values from now on."""
        values = {id(variable): value for variable, value in trainable}
        self.state_mapping |= values
        self._roots |= values


class ClockKind(Enum):
    """What a variable of an optimizer says."""

    STEP = auto()
    LEARNING_RATE = auto()
    LOSS_SCALE = auto()


@dataclass(frozen=True)
class Clock:
    """A variable of an optimizer that a step reads: of the group's, or of what scales the loss."""

    variable: keras.Variable
    group: int
    kind: ClockKind


@dataclass(frozen=True)
class _Applied:
    """What a step gave to an optimizer, in one call, and what it had assigned to these variables before, by `id`."""

    optimizer: keras.optimizers.Optimizer
    gradients: list[Any]
    variables: list[keras.Variable]
    assigned: dict[int, tf.Tensor]


class OwnTrainStep:
    """The `train_step` of a model that overrides it.

    Args:
        model: compiled. It is built as `fit` builds it: the step is traced once.
        batch_spec: nested type specs of an element of the data, which `train_step` gets as it is.
        num_replicas: how many synchronous ones make a step.

    Attributes:
        trainable: the variables that the step gives to optimizers, in the model's order.
        groups: the optimizers with their variables, first that which the model was compiled with.
        returned: the values that the step returns.
        terms: the losses of synchronous replicas; none of a single one.
        updated: for each update of the step the indices of the variables that it has a gradient for.
        clock: step counters and learning rates that the step reads.

    Raises:
        ConfigError: the step cannot be spread over tasks.
    """

    def __init__(self, model: keras.Model, batch_spec: Any, num_replicas: int = 1) -> None:
        self._model = model
        self._optimizers = optimizers_of(model)
        self._applied: list[_Applied] = []
        self._scope: StandIns | None = None
        self._later: Sequence[Sequence[tf.Tensor]] = ()
        self.clock: list[Clock] = []
        self._scaling = loss_scaling(model)
        if is_multi_optimizer(main_optimizer(model)):
            raise self._refusal("uses MultiOptimizer; call several optimizers instead, or leave train_step to Keras")
        # Layers, metrics and seeds get their variables.
        with recorded_reductions(model) as reductions:
            self._trace(batch_spec, self._train_step)
        self.trainable = self._given_to_optimizers()
        self.groups = self._build_optimizers()
        index_of = {id(variable): i for i, variable in enumerate(self.trainable)}
        self.updated = [
            [index_of[id(v)] for v, gradient in zip(one.variables, one.gradients) if gradient is not None]
            for one in self._applied
        ]
        names: list[str] = []
        counted: set[str] = set()

        def find_counted(batch: Any) -> None:
            # Regularizers of an unmapped variable would find None.
            present = [(variable, tf.convert_to_tensor(variable.value)) for variable in model.trainable_variables]
            with self.scope(present, []) as scope:
                names.extend(self._train_step(batch))
                # The tracker of the loss is a metric, too, and stays at 0 if the step leaves it alone.
                for metric in (*model.metrics, loss_tracker(model)):
                    if any(scope.get_current_value(variable) is not None for variable in metric.variables):
                        counted.update(flat({metric.name: metric.result()}))

        self._trace(batch_spec, find_counted)
        means = {name: keras.metrics.Mean(name=name) for name in names if name not in counted}
        self.terms, sums = LossTerms(), frozenset[str]()
        if num_replicas > 1:
            kinds = self._tried(batch_spec, names)
            sums = frozenset(name for name, kind in zip(names, kinds[len(self.updated) :]) if kind is Term.SUM)
            terms = tuple(kinds[: len(self.updated)])
            if divided := [reduction for reduction in reductions if reduction.divisor is not None]:
                # Of several divisors or updates, only the step knows which belong together.
                terms = (Term.OWN_MEAN if len(divided) == len(self.updated) == 1 else Term.UNKNOWN,)
            self.terms = LossTerms(terms, is_whole=True)
        self.returned = ReturnedValues(means, names, "loss" in counted, sums)

    def _tried(self, batch_spec: Any, names: Sequence[str]) -> list[Term]:
        """The kinds of the gradients of each update, and of the values that the step returns."""

        def values(batch: Any, draw: int) -> list[Any]:
            trainable, others = trial_values(self._model, draw)
            with self.scope(trainable, others):
                logs = self._train_step(batch)
                gradients = [
                    [tf.reshape(tf.convert_to_tensor(g), [-1]) for g in one.gradients if g is not None]
                    for one in self._applied
                ]
                return [*(tf.concat(of_update, 0) for of_update in gradients), *(logs[name] for name in names)]

        return kinds_of(values, batch_spec, self._model)

    @contextmanager
    def scope(self, trainable: Pairs, others: Pairs, later: Sequence[Sequence[tf.Tensor]] = ()) -> Iterator[StandIns]:
        """The scope for a step with these values.

        Args:
            later: for each update the values of its variables after it, as in `updated`; none if no update changes
                what the step reads.
        """
        self._later = later
        try:
            with StandIns(trainable, others) as self._scope:
                yield self._scope
        finally:
            self._scope, self._later = None, ()

    def __call__(self, batch: Any, num_examples: tf.Tensor | int) -> tuple[list[list[Any]], list[dict[int, tf.Tensor]]]:
        """Runs the step in a `scope` that the caller has entered, where it updates metrics and `means`.

        Returns:
            For each of its updates, in their order: a gradient for each of `trainable`, or None. For each, and for the
            end of the step: by how much assignments have changed its variables, by index.
        """
        logs = self._train_step(batch)
        self.returned.count(logs, num_examples)
        applied, self._applied = self._applied, []
        if [id(one.optimizer) for one in applied] != [id(self.groups[group].optimizer) for group in self.order]:
            raise self._refusal(
                "calls other optimizers when it is traced again; do not let it depend on Python values that change"
            )
        of_updates = [{id(v): g for v, g in zip(one.variables, one.gradients)} for one in applied]
        gradients = [[given.get(id(variable)) for variable in self.trainable] for given in of_updates]
        index_of = {id(variable): i for i, variable in enumerate(self.trainable)}
        assert self._scope is not None
        assigned = [*(one.assigned for one in applied), self._scope.take_assigned(self.trainable)]
        return gradients, [{index_of[key]: by for key, by in found.items()} for found in assigned]

    def updates(self, phases: Sequence[int]) -> tuple[Update, ...]:
        """The step's updates, of which these are the phases."""
        return tuple(
            Update(group, frozenset(self.updated[i]), phases[i], self.order[:i].count(group))
            for i, group in enumerate(self.order)
        )

    def _train_step(self, batch: Any) -> dict[str, Any]:
        """What the step returns; `_applied` has what it gave to optimizers."""
        self._applied.clear()
        with self._recording(), legacy_functions_renamed():
            logs = self._model.train_step(batch)
        if not isinstance(logs, Mapping):
            raise self._refusal(f"returns {type(logs).__name__}; return a dict of what is to be shown")
        if not self._applied:
            raise self._refusal(
                "applies no gradients; call apply_gradients of an optimizer that the model, or an attribute of it, has"
            )
        return flat(logs)

    @contextmanager
    def _recording(self) -> Iterator[None]:
        """In this context, the model's optimizers record what they are given."""
        graph, called = tf.compat.v1.get_default_graph(), list(self._optimizers.values())
        for optimizer in called:
            object.__setattr__(optimizer, "apply", partial(self._record, graph, optimizer))
        if self._scaling is not None:
            object.__setattr__(self._scaling, "apply", partial(self._record, graph, main_optimizer(self._model)))
            called.append(self._scaling)
        try:
            yield
        finally:
            for optimizer in called:
                object.__delattr__(optimizer, "apply")

    def _record(
        self, graph: Any, optimizer: keras.optimizers.Optimizer, gradients: Any, trainable_variables: Any = None
    ) -> None:
        variables = built_variables(optimizer) if trainable_variables is None else trainable_variables
        gradients = list(gradients)
        if tf.compat.v1.get_default_graph() is not graph:
            raise self._refusal(
                "applies gradients inside tf.cond, a loop, or a function of its own; apply them in every step, outside "
                "of these (multiply them by 0 to skip an update)"
            )
        if all(gradient is None for gradient in gradients):
            raise self._refusal("applies gradients of a loss that depends on none of their variables")
        number = len(self._applied)
        assigned = {} if self._scope is None else self._scope.take_assigned(variables)
        self._applied.append(_Applied(optimizer, gradients, list(variables), assigned))
        if self._later and self._scope is not None:
            self._scope.replace([(self.trainable[i], v) for i, v in zip(self.updated[number], self._later[number])])
        if any(clock.variable is step_counter(optimizer) for clock in self.clock):
            step_counter(optimizer).assign_add(1)

    def _given_to_optimizers(self) -> list[keras.Variable]:
        model, applied = self._model, self._applied
        given = {id(variable): variable for one in applied for variable in one.variables}
        also = {id(variable) for variable in built_variables(main_optimizer(model))}
        trainable = [v for v in model.trainable_variables if id(v) in given or id(v) in also]
        known = {id(variable) for variable in trainable}
        if unknown := [variable.path for key, variable in given.items() if key not in known]:
            raise self._refusal(
                f"updates {', '.join(unknown)}, which the model does not list in trainable_variables; assign their "
                "layers to attributes of the model"
            )
        return trainable

    def _build_optimizers(self) -> tuple[OptimizerGroup, ...]:
        """The groups, with their optimizers built; sets the `_order` in which the step calls them."""
        model, applied = self._model, self._applied
        step = int(step_counter(main_optimizer(model)).numpy())
        used = {id(one.optimizer) for one in applied}
        names = [name for name, optimizer in self._optimizers.items() if name == "" or id(optimizer) in used]
        groups = []
        for name in names:
            optimizer = self._optimizers[name]
            calls = [one for one in applied if one.optimizer is optimizer]
            given = {id(v) for v in (*(v for one in calls for v in one.variables), *built_variables(optimizer))}
            indices = [i for i, variable in enumerate(self.trainable) if id(variable) in given]
            built = optimizer if name or self._scaling is None else self._scaling
            if not built.built:
                built.build([self.trainable[i] for i in indices])
            first = first_iteration(optimizer, len(calls), step) if name else 0
            groups.append(OptimizerGroup(optimizer, tuple(indices), name, len(calls), first))
        by_id = {id(group.optimizer): i for i, group in enumerate(groups)}
        self.order = [by_id[id(one.optimizer)] for one in applied]
        if self._scaling is not None and len(self.order) > 1:
            raise self._refusal(
                "calls optimizers several times, and scales its loss; use the policy mixed_bfloat16, which needs no "
                "loss scaling, or compile with auto_scale_loss=False"
            )
        return tuple(groups)

    def find_clock(self, traced: tf.types.experimental.ConcreteFunction) -> list[Clock]:
        """Sets and returns `clock`, from what the traced step uses as it is on this machine.

        Raises:
            ConfigError: it uses other variables of its optimizers, which no worker has.
        """
        used = {id(variable): variable.name for variable in traced.variables}
        self.clock = []
        for g, group in enumerate(self.groups):
            read = [(step_counter(group.optimizer), ClockKind.STEP)]
            if (rate := learning_rate_variable(group.optimizer)) is not None:
                read.append((rate, ClockKind.LEARNING_RATE))
            if (scaling := self._scaling) is not None and g == 0:
                read.append((scaling.dynamic_scale, ClockKind.LOSS_SCALE))
            for variable, kind in read:
                if used.pop(id(variable.value), None) or kind is ClockKind.LOSS_SCALE:
                    self.clock.append(Clock(variable, g, kind))
        slots = {id(v.value) for optimizer in self._optimizers.values() for v in optimizer.variables}
        if unknown := sorted(name for key, name in used.items() if key in slots):
            raise self._refusal(
                f"uses {', '.join(unknown)} of its optimizers, which other tasks do not have; a step can read their "
                "iterations and learning_rate"
            )
        return self.clock

    def _trace(self, batch_spec: Any, function: Any) -> None:
        def discarding(batch: Any) -> None:
            function(batch)

        tf.function(discarding, autograph=False).get_concrete_function(batch_spec)

    def _refusal(self, why: str) -> ConfigError:
        kind = type(self._model)
        where = f"{inspect.getsourcefile(kind.train_step)}:{inspect.getsourcelines(kind.train_step)[1]}"
        return ConfigError(f"model {self._model.name}: {kind.__name__}.train_step ({where}) {why}")


def overrides_train_step(model: keras.Model) -> bool:
    """Whether a model has a `train_step` of its own."""
    return type(model).train_step is not keras.Model.train_step
