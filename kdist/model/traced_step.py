"""`TracedStep`: a step that was traced once, as a function of the values of the variables that it reads.

These variables are not known beforehand: a model may be built by its first step, and a step may read what it has
updated. So each variable becomes an input of the function when it is read. The same trace tells what the step needs and
does, is tried on made-up data, and is called by every strategy, however many steps a call has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import keras
import tensorflow as tf

from kdist._compat.keras import global_seed, is_being_built, layers_of, make_variables_at_once, stored_dtype
from kdist._compat.tensorflow import call_with, later_input, watch_in_every_tape, with_handle_of
from kdist.model.forward import SeededScope
from kdist.model.names import is_seed

#: The values of variables, by `id`.
Values = Mapping[int, tf.Tensor]


class TracedScope(SeededScope):
    """The scope of a trace: each variable that is read there becomes an input of the function.

    Tapes watch the inputs of trainable variables, as they watch variables.

    Args:
        made: the variables that are made during the trace, by `id`.

    Attributes:
        graph: of the function.
        variables: the variables that are read, by `id`.
        written: the variables that are assigned, by `id`.
        inputs: by the `id` of a variable, and the number of its updates before: a step that reads a variable after it
            has updated it has an input for its new value.
    """

    def __init__(self, model: keras.Model, made: Mapping[int, keras.Variable]) -> None:
        super().__init__(collect_losses=True)
        self._model = model
        self._made = made
        self.graph = tf.compat.v1.get_default_graph()
        self.variables: dict[int, keras.Variable] = {}
        self.written: dict[int, keras.Variable] = {}
        self.inputs: dict[tuple[int, int], tf.Tensor] = {}
        self._num_updates = Counter[int]()
        #: The number of times that step counters were advanced before they were read.
        self._num_steps = Counter[int]()
        #: The values of trainable variables after their last updates, by `id`: gradients are for these.
        self._roots: dict[int, tf.Tensor] = {}
        #: Assignments to trainable variables since: new values, and those before.
        self._assigned: dict[int, tuple[Any, Any]] = {}

    def get_current_value(self, variable: keras.Variable) -> Any:
        key = id(variable)
        if key not in self.state_mapping:
            if is_seed(variable) and all(variable is not one for one in (global_seed(), *self._model.variables)):
                # Its state follows from that of the global seed.
                self.get_current_value(global_seed())
            else:
                self._open(variable)
        value = super().get_current_value(variable)
        root = self._roots.get(key)
        if root is None:
            return value
        watch_in_every_tape(root)
        # As of a variable, the gradient is the sum of those of all reads, before and after it is assigned.
        return value if value is root else with_handle_of(root, value + (root - tf.stop_gradient(root)))

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        variable, value = update
        key = id(variable)
        if key in self._made and any(is_being_built(layer, variable) for layer in layers_of(self._model)):
            # As in Keras, whose `fit` traces a step again when that has built the model.
            return
        self.written[key] = variable
        if variable.trainable:
            if key not in self.state_mapping:
                self._open(variable)
            before = self.state_mapping[key]
            # No gradient goes through an assignment.
            value = tf.stop_gradient(tf.cast(value, before.dtype))
            self._assigned[key] = value, self._assigned.get(key, (None, before))[1]
        super().add_update((variable, value))

    def new_value(self, variable: keras.Variable) -> Any:
        """The value that was assigned to a variable last; None if it has not changed."""
        key = id(variable)
        if key not in self.written:
            return None
        value = self.state_mapping[key]
        return None if value is self.inputs.get((key, 0)) else value

    def value_of(self, variable: keras.Variable) -> tf.Tensor:
        """The value that a variable had at the beginning."""
        with self:
            self.get_current_value(variable)
        return self.inputs[id(variable), 0]

    def take_assigned(self, variables: Iterable[keras.Variable]) -> dict[int, tf.Tensor]:
        """Returns by how much assignments have changed these variables since the last call, by `id`."""
        pairs = {key: self._assigned.pop(key) for key in map(id, variables) if key in self._assigned}
        return {key: new - before for key, (new, before) in pairs.items()}

    def update(self, variables: Iterable[keras.Variable]) -> None:
        """Gives variables, which an optimizer updates, other values from now on."""
        for key in map(id, variables):
            self._num_updates[key] += 1
            self.state_mapping.pop(key, None)
            self._roots.pop(key, None)

    def advance(self, step_counter: keras.Variable) -> None:
        """Counts an update of an optimizer."""
        key = id(step_counter)
        if key in self.state_mapping:
            self.state_mapping[key] += 1
        else:
            self._num_steps[key] += 1

    def _open(self, variable: keras.Variable) -> None:
        key = id(variable)
        spec = tf.TensorSpec(variable.shape, stored_dtype(variable))
        value = later_input(self.graph, (key, self._num_updates[key]), spec)
        self.inputs[key, self._num_updates[key]] = value
        self.variables[key] = variable
        self.state_mapping[key] = value
        if self._num_steps[key]:
            with self.graph.as_default():
                self.state_mapping[key] = value + self._num_steps[key]
        if variable.trainable:
            self._roots[key] = value


class TracedStep:
    """A traced step.

    Args:
        step: batch, scope -> nested tensors, computed in the scope, which it enters itself; its findings.
        batch_spec: nested type specs of a batch.
    """

    scope: TracedScope
    outputs: Any
    found: Any

    def __init__(
        self,
        step: Callable[[Any, TracedScope], tuple[Any, Any]],
        batch_spec: Any,
        model: keras.Model,
        jit_compile: bool | None = None,
    ) -> None:
        def trace(batch: Any) -> Any:
            self._batch = batch
            with make_variables_at_once() as made:
                self.scope = TracedScope(model, made)
                self.outputs, self.found = step(batch, self.scope)
            return self.outputs

        function = tf.function(trace, autograph=False, jit_compile=jit_compile)
        self.function = function.get_concrete_function(batch_spec)
        self.graph = self.function.graph

    def __call__(self, batch: Any, values: Values) -> Any:
        """The step's outputs; variables without a value have their own."""
        inputs = {(key, n): self._value(key, values) for key, n in self.scope.inputs}
        return call_with(self.function, inputs, batch)

    def open_inputs(self, without: Collection[int] = ()) -> Any:
        """The nested inputs of the first phase, if the step is cut; it is run on `arguments`.

        Args:
            without: variables that the caller has no values of, by `id`.
        """
        self._first = [key for key, n in self.scope.inputs if n == 0 and key not in without]
        return [self._batch, [self.scope.inputs[key, 0] for key in self._first]]

    def arguments(self, batch: Any, values: Values) -> Any:
        """The values of `open_inputs`."""
        return [batch, [self._value(key, values) for key in self._first]]

    def _value(self, key: int, values: Values) -> tf.Tensor:
        variable = self.scope.variables[key]
        value = values.get(key)
        return tf.cast(tf.convert_to_tensor(variable.value if value is None else value), variable.dtype)
