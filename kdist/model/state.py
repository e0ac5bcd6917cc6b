"""Reads and writes the values of a Keras model by the names of checkpoints; keeps the states of layers on a worker."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

import keras
import numpy as np
import tensorflow as tf

from kdist._compat.keras import layers_of, loss_scaling, main_optimizer, step_counter, table_of
from kdist._compat.lazy_variable import made_by
from kdist.layers import DynamicEmbedding
from kdist.model.names import (
    AVERAGE,
    DROPPED_STEPS,
    DYNAMIC_SCALE,
    DYNAMIC_SCALE_STEPS,
    GLOBAL_STEP,
    dynamic_names,
    is_seed,
    variable_names,
)
from kdist.model.updates import OptimizerGroup, StepUpdates

#: The parameters and the other variables of each model that has been trained here.
_variables: WeakKeyDictionary[keras.Model, tuple[list[keras.Variable], list[keras.Variable]]] = WeakKeyDictionary()
#: Their optimizers.
_groups: WeakKeyDictionary[keras.Model, tuple[OptimizerGroup, ...]] = WeakKeyDictionary()


def remember_groups(model: keras.Model, groups: tuple[OptimizerGroup, ...]) -> None:
    """Sets the optimizers of the variables that `choose_variables` has chosen."""
    _groups[model] = groups


def choose_variables(
    model: keras.Model, trainable: list[keras.Variable], beside: Sequence[keras.Variable]
) -> tuple[list[keras.Variable], list[keras.Variable]]:
    """The parameters to train, and the other variables of a model now; `variables_of` returns them from now on.

    A layer that a callback freezes during training is trained all the same, as by Keras's own compiled step.

    Args:
        beside: variables that a step reads, and the model does not have.
    """
    known = {id(variable) for variable in trainable}
    every = (*model.trainable_variables, *model.non_trainable_variables, *beside)
    _variables[model] = trainable, [v for v in every if id(v) not in known]
    _groups.pop(model, None)
    return _variables[model]


def variables_of(model: keras.Model) -> tuple[list[keras.Variable], list[keras.Variable]]:
    """The parameters and the other variables that the last training of a model has chosen, or would choose now."""
    return _variables.get(model) or (model.trainable_variables, model.non_trainable_variables)


def num_bytes(model: keras.Model) -> int:
    """The size of the parameters and the other variables, without the optimizer's."""
    fixed = sum(prod(v.shape) * tf.as_dtype(v.dtype).size for variables in variables_of(model) for v in variables)
    layers = (layer for layer in layers_of(model) if isinstance(layer, DynamicEmbedding))
    return fixed + sum(layer.num_rows * layer.row_bytes for layer in layers)


def stateful_layers(model: keras.Model) -> list[keras.layers.RNN]:
    """The recurrent layers that begin a batch with the state in which the one before has ended."""
    layers = (layer for layer in layers_of(model) if isinstance(layer, keras.layers.RNN) and layer.stateful)
    return list({id(layer): layer for layer in layers}.values())


def layer_states(layer: keras.layers.RNN) -> list[keras.Variable]:
    """The states of a stateful layer that is built. Keras does not count them among its variables."""
    return keras.tree.flatten(layer.states)


def names_here(model: keras.Model) -> list[str]:
    """The names in a checkpoint of the values that this process has of a model and its optimizer."""
    return [name for name, variable in _named_variables(model).items() if made_by(variable) is None]


def read_from_model(model: keras.Model, names: Collection[str] | None = None) -> dict[str, np.ndarray]:
    """The values of a model and its optimizer, by their names in a checkpoint; only `names` if they are given."""
    named = {name: variable.numpy for name, variable in _named_variables(model).items()}
    for name, layer in _dynamic_layers(model).items():
        ids, vectors = dynamic_names(name, ["ids", "vectors"]).values()
        named |= {ids: lambda of=layer: of.ids, vectors: lambda of=layer: of.rows}
    return {name: read() for name, read in named.items() if names is None or name in names}


def write_to_model(model: keras.Model, values: Mapping[str, np.ndarray]) -> None:
    """Sets weights, optimizer slots and the iteration count of a built and compiled model to values of a checkpoint."""
    for name, variable in _named_variables(model).items():
        # The states of random seeds belong to each worker and are not stored.
        if name in values:
            variable.assign(values[name])
    for name, layer in _dynamic_layers(model).items():
        ids, vectors, averages = dynamic_names(name, ["ids", "vectors", AVERAGE]).values()
        if ids in values and vectors in values:
            layer.set_rows(values[ids], values[vectors], values.get(averages))
    if GLOBAL_STEP in values:
        # Keras's optimizers do not count a step whose gradients have overflowed.
        step = int(values[GLOBAL_STEP]) - int(values.get(DROPPED_STEPS, 0))
        step_counter(main_optimizer(model)).assign(step)
        for group in _groups.get(model, ())[1:]:
            step_counter(group.optimizer).assign(group.iteration(step))


def finalize_ema(model: keras.Model) -> None:
    """Gives the model the moving averages of its parameters, as Keras does at the end of `fit`, if it keeps any."""
    if main_optimizer(model).use_ema:
        main_optimizer(model).finalize_variable_values(variables_of(model)[0])
        for layer in _dynamic_layers(model).values():
            layer.use_averages()


def rows_cannot_be_sent(model: keras.Model) -> bool:
    """True if a model has layers with rows instead of variables, which workers can only pull."""
    return bool(_dynamic_layers(model))


def _dynamic_layers(model: keras.Model) -> dict[str, DynamicEmbedding]:
    """The layers with rows instead of variables, by the names of the variables that stand for their vectors."""
    layers = [layer for layer in layers_of(model) if isinstance(layer, DynamicEmbedding) and layer.built]
    if not layers:
        return {}
    trainable, others = variables_of(model)
    variables = [*trainable, *others]
    names = {id(variable): name for variable, name in zip(variables, variable_names(model, variables))}
    return {names[id(table_of(layer))]: layer for layer in layers}


def parameter_names(model: keras.Model) -> dict[str, keras.Variable]:
    """The parameters and state of a model without its seeds, by their names in a checkpoint."""
    wanted = ("parameters/", "state/")
    return {n: v for n, v in _named_variables(model).items() if n.startswith(wanted) and not is_seed(v)}


def _named_variables(model: keras.Model) -> dict[str, keras.Variable]:
    trainable, others = variables_of(model)
    variables = [*trainable, *others]
    names = variable_names(model, variables)
    groups = ["parameters"] * len(trainable) + ["state"] * (len(variables) - len(trainable))
    named = {f"{group}/{name}": variable for group, name, variable in zip(groups, names, variables)}
    optimizer, scaling = main_optimizer(model), loss_scaling(model)
    for group in _groups.get(model) or StepUpdates.of_all(optimizer, trainable).groups:
        named |= group.state(trainable, names[: len(trainable)])
    if scaling is not None:
        named |= {DYNAMIC_SCALE: scaling.dynamic_scale, DYNAMIC_SCALE_STEPS: scaling.step_counter}
    for dynamic in _dynamic_layers(model):
        # The variable that stands for its rows has none.
        of_rows = f"parameters/{dynamic}", f"slots/{dynamic}"
        named = {n: v for n, v in named.items() if n not in of_rows and n.rpartition("/")[0] not in of_rows}
    return {**named, GLOBAL_STEP: step_counter(optimizer)}


class WorkerState:
    """The states of stateful layers, for each device that computes; they begin with zeros, as in Keras.

    They are variables that a function for a worker makes where it runs, so that they never travel, and a worker that
    has restarted begins with zeros.

    Args:
        variables: the states in the model.
        epoch_at: the number of the epoch at a global step; when one begins, states are zeros again. None: there are no
            epochs.
    """

    def __init__(self, variables: Sequence[keras.Variable], epoch_at: Callable[[tf.Tensor], tf.Tensor] | None) -> None:
        self.variables = list(variables)
        self._specs = [*(tf.TensorSpec(v.shape, v.dtype) for v in variables), tf.TensorSpec([len(variables)], tf.int64)]
        self._epoch_at = epoch_at
        #: Each fit has its own.
        self._name = f"worker_state_{uuid.uuid4().hex}"
        #: The handles in a graph and their last values there, by device. Within a call values pass from step to step
        #: as tensors; a function orders the first read and the writes of a variable if they have the same handle.
        self._known: WeakKeyDictionary[Any, dict[str, tuple[list[tf.Tensor], list[tf.Tensor]]]] = WeakKeyDictionary()

    def read(self, global_step: tf.Tensor, resets: tf.Tensor) -> list[tf.Tensor]:
        """The states before a step, on the device of the caller; called while a call is traced.

        Args:
            global_step: scalar int64.
            resets: int64 `[number of states]`, of each so far.
        """
        _, known = self._find()
        *values, seen = known
        epoch = 0 if self._epoch_at is None else self._epoch_at(global_step)
        # Any other value means that a state belongs to the past; at first it is zero in any case.
        now = resets * 2**32 + tf.cast(epoch, tf.int64)
        fresh = [tf.where(same, value, tf.zeros_like(value)) for same, value in zip(tf.unstack(now == seen), values)]
        known[:] = [*fresh, now]
        return fresh

    def write(self, values: Sequence[tf.Tensor | None]) -> None:
        """Sets the states after a step that has read them; None leaves one as it is."""
        handles, known = self._find()
        known[:-1] = [old if new is None else new for old, new in zip(known, values)]
        for handle, value, spec in zip(handles, known, self._specs):
            tf.raw_ops.AssignVariableOp(resource=handle, value=tf.cast(value, spec.dtype))

    def _find(self) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        of_graph = self._known.setdefault(tf.compat.v1.get_default_graph(), {})
        device = self._handle(0).device
        if device not in of_graph:
            handles = [self._handle(i) for i in range(len(self._specs))]
            of_graph[device] = handles, [_value(*pair) for pair in zip(handles, self._specs)]
        return of_graph[device]

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
