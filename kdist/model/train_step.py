"""A model's own `train_step` as a part of the replica step, for every strategy.

Keras's models of their own steps (GANs, distillation, contrastive learning) compute gradients with a tape and give them
to an optimizer. Here the tape sees the values that were pulled from wherever they are, and the optimizer only records
what it is given; the strategy applies it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from kdist._compat.keras import (
    as_fit_passes_it,
    built_variables,
    learning_rate_variable,
    loss_tracker,
    optimizers_of,
    step_counter,
)
from kdist._compat.tensorflow import legacy_functions_renamed, watch_in_every_tape
from kdist.errors import ConfigError
from kdist.model.logs import flat
from kdist.model.metrics import ReturnedValues

#: Variables with their values.
Pairs = list[tuple[keras.Variable, Any]]


class StandIns(keras.StatelessScope):
    """A stateless scope in which tapes watch the tensors of trainable variables, as they watch variables.

    Args:
        trainable: the variables with their values.
        others: more of them, which no gradient is for.
        check_read: called with each of `trainable` that is read.
    """

    def __init__(self, trainable: Pairs, others: Pairs, check_read: Callable[[keras.Variable], None]) -> None:
        super().__init__([*trainable, *others], collect_losses=True)
        self._watched = {id(variable) for variable, _ in trainable}
        self._check_read = check_read

    def get_current_value(self, variable: keras.Variable) -> Any:
        value = super().get_current_value(variable)
        if id(variable) in self._watched:
            self._check_read(variable)
            watch_in_every_tape(value)
        return value


class OwnTrainStep:
    """The `train_step` of a model that overrides it.

    Args:
        model: compiled. It is built as `fit` builds it: the step is traced once.
        batch_spec: nested `tf.TensorSpec`s of a batch `(x,)`, `(x, y)` or `(x, y, sample_weight)`.

    Attributes:
        trainable: the variables that the step gives to the optimizer, in the model's order.
        returned: the values that the step returns.
        clock: the optimizer's step counter and learning rate, if the step reads them.

    Raises:
        ConfigError: the step cannot be spread over tasks.
    """

    def __init__(self, model: keras.Model, batch_spec: Any) -> None:
        self._model = model
        self._recorded: list[tuple[list[Any], list[keras.Variable]]] = []
        self.clock: list[keras.Variable] = []
        # Layers, metrics and seeds get their variables.
        self._trace(batch_spec, self._train_step)
        self.trainable = self._given_to_the_optimizer()
        if not model.optimizer.built:
            model.optimizer.build(self.trainable)
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
        self.returned = ReturnedValues(means, names, counts_loss="loss" in counted)

    def scope(self, trainable: Pairs, others: Pairs) -> StandIns:
        """The scope for a step with these values."""
        return StandIns(trainable, others, self._check_read)

    def __call__(self, batch: Any, num_examples: tf.Tensor | int) -> list[Any]:
        """Runs the step in a `scope` that the caller has entered, where it updates metrics and `means`.

        Returns:
            A gradient for each of `trainable`, or None.
        """
        logs = self._train_step(batch)
        self.returned.count(logs, num_examples)
        ((gradients, variables),) = self._recorded
        self._recorded.clear()
        given = {id(variable): gradient for variable, gradient in zip(variables, gradients)}
        return [given.get(id(variable)) for variable in self.trainable]

    def _train_step(self, batch: Any) -> dict[str, Any]:
        """What the step returns; `_recorded` has what it gave to the optimizer."""
        self._recorded.clear()
        with self._recording(), legacy_functions_renamed():
            logs = self._model.train_step(as_fit_passes_it(batch))
        if not isinstance(logs, Mapping):
            raise self._refusal(f"returns {type(logs).__name__}; return a dict of what is to be shown")
        if len(self._recorded) != 1:
            raise self._refusal(
                f"applies gradients {len(self._recorded)} times in one step; compute them with one tape and call "
                "self.optimizer.apply_gradients once"
            )
        return flat(logs)

    @contextmanager
    def _recording(self) -> Iterator[None]:
        """In this context, the model's optimizers record what they are given."""

        def record(gradients: Any, trainable_variables: Any = None) -> None:
            variables = built_variables(self._model.optimizer) if trainable_variables is None else trainable_variables
            self._recorded.append((list(gradients), list(variables)))
            for variable in self.clock:
                if variable is step_counter(self._model.optimizer):
                    variable.assign_add(1)

        def refuse(*_: Any) -> None:
            raise self._refusal(
                "applies gradients with an optimizer that the model was not compiled with; give it to "
                "super().compile(optimizer=...) and use self.optimizer; only one is supported"
            )

        optimizers = optimizers_of(self._model)
        for optimizer in optimizers:
            object.__setattr__(optimizer, "apply", record if optimizer is self._model.optimizer else refuse)
        try:
            yield
        finally:
            for optimizer in optimizers:
                object.__delattr__(optimizer, "apply")

    def _given_to_the_optimizer(self) -> list[keras.Variable]:
        model, (_, variables) = self._model, self._recorded.pop()
        given = {id(variable) for variable in (*variables, *built_variables(model.optimizer))}
        trainable = [variable for variable in model.trainable_variables if id(variable) in given]
        known = {id(variable) for variable in trainable}
        if unknown := [variable.path for variable in variables if id(variable) not in known]:
            raise self._refusal(
                f"updates {', '.join(unknown)}, which the model does not list in trainable_variables; assign their "
                "layers to attributes of the model"
            )
        return trainable

    def find_clock(self, traced: tf.types.experimental.ConcreteFunction) -> list[keras.Variable]:
        """Sets and returns `clock`, from what the traced step uses as it is on this machine.

        Raises:
            ConfigError: it uses other variables, which no worker has.
        """
        optimizer = self._model.optimizer
        candidates = [v for v in (step_counter(optimizer), learning_rate_variable(optimizer)) if v is not None]
        used = {id(variable): variable.name for variable in traced.variables}
        self.clock = [variable for variable in candidates if used.pop(id(variable.value), None)]
        if used:
            raise self._refusal(
                f"uses {', '.join(sorted(used.values()))}, which other tasks do not have; the model's own weights and "
                "metrics travel with the step: create it with self.add_weight(..., trainable=False)"
            )
        return self.clock

    def _check_read(self, variable: keras.Variable) -> None:
        if self._recorded:
            raise self._refusal(
                f"reads {variable.path} after its update, which a worker sees in the next step only; read it before "
                "apply_gradients is called"
            )

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
