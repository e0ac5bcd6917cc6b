"""Applies gradients on the device of the parameters, with the exact arithmetic of the user's Keras optimizer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kdist._compat.keras import (
    Accumulating,
    NadamBySteps,
    PureUpdates,
    apply_as_given,
    decays,
    learning_rate_variable,
    missing_variables,
    open_rows,
    set_path,
    step_counter,
    unbuilt_copy,
)
from kdist._compat.lazy_variable import cheap_constants
from kdist.errors import ConfigError
from kdist.model.names import LEARNING_RATE
from kdist.model.optimizer import leaves_other_rows_alone, optimizer_state
from kdist.model.updates import OptimizerGroup, StepUpdates
from kdist.parameters.placement.blocks import Blocks, StoredShard
from kdist.parameters.placement.messages import BlockUpdates
from kdist.parameters.tables.rows import RowLock, set_rows
from kdist.parameters.tables.table import FixedTable, Table


class ServerOptimizer:
    """A copy of the user's optimizer that owns the variables of one server.

    Its slots are created beside their variables, so `apply` moves nothing between tasks. The step that learning-rate
    schedules and bias corrections follow is an argument: Keras's own counter loses updates under several workers.

    Args:
        group: of the parameters, with the optimizer of the model.
        originals: the model's trainable variables, by block.
        variables: the server's variables for them, or for some of their rows, by block.
        tables: by block: a sparse gradient updates only its rows, whatever Keras does with the others; such a gradient
            is by key.
        is_shared: whether several workers make updates at the same time.
    """

    def __init__(
        self,
        group: OptimizerGroup,
        originals: Mapping[int, keras.Variable],
        variables: Mapping[int, keras.Variable],
        tables: Mapping[int, Table],
        device: str,
        *,
        is_shared: bool,
    ) -> None:
        self.variables, self._owner = variables, group.name
        self._dense = {b: variable for b, variable in variables.items() if b not in tables}
        with tf.device(device):
            self._by_rows = {
                b: RowOptimizer(group.optimizer, group.name, originals[b], variables[b], table)
                for b, table in tables.items()
            }
            #: Of the variables that are not updated by rows.
            self.optimizer = _copy_for(group.optimizer, [originals[b] for b in self._dense], list(self._dense.values()))
            self._lock = RowLock(is_shared=is_shared)

    def state(self) -> Iterator[tuple[str, keras.Variable]]:
        """The optimizer's variables, named as by `optimizer_state`, blocks by their numbers; the learning rate once for
        each copy of it.
        """
        for copy, own in [(self.optimizer, [*self._dense]), *((o.optimizer, [b]) for b, o in self._by_rows.items())]:
            yield from optimizer_state(copy, [self.variables[b] for b in own], list(map(str, own)), self._owner).items()

    def use_averages(self) -> None:
        """Sets the variables to their moving averages, if the optimizer keeps any."""
        self.optimizer.finalize_variable_values(list(self._dense.values()))
        for rows in self._by_rows.values():
            rows.table.use_averages()

    def apply(self, gradients: Mapping[int, tf.Tensor | tf.IndexedSlices], step: tf.Tensor) -> None:
        """Updates the variables.

        Args:
            gradients: by block, already clipped; a block without one is left unchanged.
            step: scalar int64: the number of updates before this one.
        """
        for b, by_rows in self._by_rows.items():
            if b in gradients:
                by_rows.apply(gradients[b], step)
        arrived = {b: _with_shape(gradients[b], variable) for b, variable in self._dense.items() if b in gradients}
        if self.optimizer.gradient_accumulation_steps:
            arrived = {b: tf.convert_to_tensor(gradient) for b, gradient in arrived.items()}
        if not arrived:
            return
        given = list(arrived.values())

        def apply() -> None:
            with _AtStep(self.optimizer, step):
                self.optimizer.apply(given, [self.variables[b] for b in arrived])

        if self._only_adds(given):
            apply()
            return
        graph = tf.compat.v1.get_default_graph()
        with self._lock.held([*tf.nest.flatten(given, expand_composites=True), step]) as updates:
            num_before = len(graph.get_operations())
            apply()
            updates += [op for op in graph.get_operations()[num_before:] if op.op_def.is_stateful]

    def _only_adds(self, gradients: Sequence[Any]) -> bool:
        """True if dense updates change values by kernels, or by additions alone, so that several at once lose nothing.

        What reads a slot and assigns to it what it has computed loses what another worker has written in between.
        """
        kinds = (*_BY_KERNEL.values(), keras.optimizers.Adagrad)
        return (
            any(kind in kinds for kind in type(self.optimizer).__mro__[:2])
            and not self.optimizer.use_ema
            and not any(isinstance(gradient, tf.IndexedSlices) for gradient in gradients)
            and all(variable.constraint is None for variable in self._dense.values())
        )


class _AtStep(keras.StatelessScope):
    """In this scope, `iterations` of an optimizer reads as `step`, and nothing changes it.

    The TensorFlow optimizer still updates tf.Variables in place and atomically. What Keras assigns by `Variable.assign`
    (constraints, moving averages, Muon's decay of weights) is written at once, too.
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer, step: tf.Tensor) -> None:
        self._counter = step_counter(optimizer)
        super().__init__([(self._counter, step)])

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        variable, value = update
        if variable is not self._counter:
            variable.value.assign(value)


class RowOptimizer:
    """Keras's own arithmetic on some rows of a variable and of its slots; the other rows are neither read nor written.

    The optimizer is built once more on stand-ins with an open number of rows, and its step runs as a pure function of
    the present values of the rows. TF1 called this lazy: moments of rows that a batch does not touch do not decay.

    Args: as of `ServerOptimizer`, for one variable and its table.

    Attributes:
        optimizer: a copy that owns the slots of `variable`.
    """

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        owner: str,
        original: keras.Variable,
        variable: keras.Variable,
        table: Table,
    ) -> None:
        self.table = table
        self.optimizer = _copy_for(optimizer, [original], [variable])
        pure: Any = type(type(optimizer).__name__, (PureUpdates, type(optimizer)), {})
        self._pure = unbuilt_copy(self.optimizer, pure)
        with tf.device("CPU:0"):
            self._stand_in = keras.Variable(np.zeros((1, *variable.shape[1:])), dtype=variable.dtype)
            set_path(self._stand_in, variable.path)
            if not decays(optimizer, original):
                self._pure.exclude_from_weight_decay(var_list=[self._stand_in])
            self._pure.build([self._stand_in])
        slots = optimizer_state(self.optimizer, [variable], ["it"], owner)
        self._pairs = [(self._stand_in, variable)]
        for name, stand_in in optimizer_state(self._pure, [self._stand_in], ["it"], owner).items():
            if name.startswith("slots/"):
                table.add_slot(name.removeprefix("slots/it/"), slots[name], stand_in.numpy()[0])
                self._pairs.append((stand_in, slots[name]))
        for stand_in, _ in self._pairs:
            open_rows(stand_in)
        # Plain SGD adds to a row what does not depend on its value. An id of a dynamic table may get another row.
        self._only_adds = (
            isinstance(table, FixedTable) and variable.constraint is None and leaves_other_rows_alone(optimizer)
        )

    def apply(self, gradient: tf.IndexedSlices, step: tf.Tensor) -> None:
        """Updates the rows of `gradient`, which contains each row once; `step` as in `ServerOptimizer.apply`."""
        if self._only_adds:
            # In one operation, which holds the variable's own lock; ours would cost small tables a fifth of their rate.
            # `ResourceScatterAdd` shares that lock, and loses what two of them add to a row at the same time.
            variable = self._pairs[0][1].value
            rate = tf.cast(_learning_rate(self.optimizer, step), variable.dtype)
            change = -rate * tf.cast(gradient.values, variable.dtype)
            tf.raw_ops.ResourceScatterNdAdd(
                ref=variable.handle, indices=gradient.indices[:, tf.newaxis], updates=change, use_locking=True
            )
            self.table.begin_update(gradient, step, [])
            return
        with self.table.lock.held([gradient.values, gradient.indices, step]) as updates:
            gradient = self.table.begin_update(gradient, step, updates)
            rows = [real.value.sparse_read(gradient.indices) for _, real in self._pairs]
            with keras.StatelessScope([(step_counter(self._pure), step)]) as scope:
                scope.state_mapping |= {id(stand_in): row for (stand_in, _), row in zip(self._pairs, rows)}
                rate, own_rate = learning_rate_variable(self._pure), learning_rate_variable(self.optimizer)
                if rate is not None and own_rate is not None:
                    scope.state_mapping[id(rate)] = own_rate.value.read_value()
                self._pure.apply([gradient.values], [self._stand_in])
            for stand_in, real in self._pairs:
                updates.append(set_rows(real.value, gradient.indices, scope.get_current_value(stand_in)))


def _learning_rate(optimizer: keras.optimizers.Optimizer, step: tf.Tensor) -> tf.Tensor:
    with keras.StatelessScope([(step_counter(optimizer), step)]):
        return tf.convert_to_tensor(optimizer.learning_rate)


def check_slots_only(group: OptimizerGroup, trainable: Sequence[keras.Variable]) -> None:
    """Refuses, with a `ConfigError`, optimizers with state of no single parameter, which cannot live on a server.

    Args:
        trainable: all variables of the step.
    """
    optimizer = group.optimizer
    state = optimizer_state(optimizer, [trainable[i] for i in group.variables], [str(i) for i in group.variables])
    others = [name for name in state if name.startswith("optimizer/") and name != LEARNING_RATE]
    if others and type(optimizer) is not keras.optimizers.Nadam:
        raise ConfigError(
            f"optimizer {type(optimizer).__name__}: it keeps state that belongs to no single parameter, and so to no "
            "server; choose another optimizer, or strategy=single"
        )


def _copy_for(
    optimizer: keras.optimizers.Optimizer, originals: Sequence[keras.Variable], variables: Sequence[keras.Variable]
) -> keras.optimizers.Optimizer:
    """A copy of `optimizer`, built for `variables` in place of `originals`, that takes gradients as they are."""
    kind = _BY_KERNEL.get(type(optimizer), type(optimizer))
    if optimizer.gradient_accumulation_steps:
        kind = type(kind.__name__, (Accumulating, kind), {})
    copy = unbuilt_copy(optimizer, kind)
    # The worker has divided by the factor of the loss, and clipped, unless the mean of several gradients has to be.
    copy.loss_scale_factor = None
    if not optimizer.gradient_accumulation_steps:
        copy.clipnorm = copy.clipvalue = copy.global_clipnorm = None
    excluded = [variable for original, variable in zip(originals, variables) if not decays(optimizer, original)]
    if excluded:
        copy.exclude_from_weight_decay(var_list=excluded)
    apply_as_given(copy)
    with cheap_constants(copy):
        copy.build(list(variables))
    if missing := missing_variables(copy, optimizer):
        raise ConfigError(
            f"optimizer {type(optimizer).__name__} cannot be copied to the servers: it creates {', '.join(missing)} "
            "elsewhere than in `build`"
        )
    return copy


def _with_shape(gradient: tf.Tensor | tf.IndexedSlices, variable: keras.Variable) -> tf.Tensor | tf.IndexedSlices:
    """A sparse gradient with the shape of its variable, which Keras needs to make it dense."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    return tf.IndexedSlices(gradient.values, gradient.indices, tf.constant(tuple(variable.shape)))


class ServerOptimizers:
    """One optimizer for each server and group of parameters.

    Args:
        variables, tables: by block.
        names: of the parameters.
        is_shared: whether several workers make updates at the same time.

    Attributes:
        stored: the slots by their names in checkpoints.
        copies: of values of whole optimizers, by such names. Every server has its own, of the learning rate for one,
            so that applying needs nothing from another server.
    """

    def __init__(
        self,
        updates: StepUpdates,
        blocks: Blocks,
        variables: Sequence[keras.Variable],
        tables: Mapping[int, Table],
        names: Sequence[str],
        devices: Sequence[str],
        *,
        is_shared: bool,
    ) -> None:
        self._updates, self._blocks, self._devices = updates, blocks, devices
        #: By server and group.
        self._optimizers: dict[tuple[int, int], ServerOptimizer] = {}
        #: By name, and by the index of the shard of the parameter.
        self._slots: dict[str, dict[int, StoredShard]] = defaultdict(dict)
        self.copies: dict[str, list[tf.Variable]] = defaultdict(list)
        for g, group in enumerate(updates.groups):
            for server, device in enumerate(devices):
                own = [b for b, block in enumerate(blocks) if block.server == server and block.is_parameter]
                if not (own := [b for b in own if blocks[b].variable in group.variables]):
                    continue
                self._optimizers[server, g] = optimizer = ServerOptimizer(
                    group,
                    {b: blocks.original(b) for b in own},
                    {b: variables[b] for b in own},
                    {b: tables[b] for b in own if blocks[b].is_row_wise},
                    device,
                    is_shared=is_shared,
                )
                for key, variable in optimizer.state():
                    self._add(key, variable, names)
        self.stored = {name: [by_shard[i] for i in sorted(by_shard)] for name, by_shard in self._slots.items()}

    def learning_rate(self, step: tf.Tensor, group: int) -> tf.Tensor:
        server = min(server for server, of_group in self._optimizers if of_group == group)
        with tf.device(self._devices[server]):
            return _learning_rate(self._optimizers[server, group].optimizer, step)

    def use_averages(self) -> None:
        for optimizer in self._optimizers.values():
            optimizer.use_averages()

    def apply(self, server: int, phase: int, arrived: BlockUpdates, step: tf.Tensor) -> None:
        """The updates of a phase, of the variables that a server has, in the step after `step`."""
        for update in self._updates.in_phase(phase):
            if optimizer := self._optimizers.get((server, update.group)):
                blocks = [b for b in optimizer.variables if self._blocks[b].variable in update.variables]
                iteration = self._updates.groups[update.group].iteration(step, update.number)
                optimizer.apply({b: arrived[b] for b in blocks if b in arrived}, iteration)

    def _add(self, key: str, variable: keras.Variable, names: Sequence[str]) -> None:
        kind, _, rest = key.partition("/")
        if kind != "slots":
            self.copies[key].append(variable.value)
            return
        number, _, slot = rest.partition("/")
        block = self._blocks[int(number)]
        # The slots of dynamic tables are stored with their rows.
        for shard in () if block.is_dynamic else block.shards:
            # A slot with another shape than its variable belongs to a block of one shard.
            is_joint = block.is_flat or block.is_row_wise
            stored = self._blocks.stored_shard(shard, variable) if is_joint else StoredShard.whole(variable.value)
            self._slots[f"slots/{names[self._blocks.shards[shard].variable]}/{slot}"][shard] = stored


# Keras's optimizers with their dense updates as one operation each, by TensorFlow's own kernels. Keras writes an update
# as a dozen operations, each of which goes over all the elements and makes a tensor of them. The kernels compute the
# same formulas in one go and in place, and hold the locks of all the variables that they change, so that updates of
# several workers come one after the other. Sparse gradients are left to Keras.


class _SGD(keras.optimizers.SGD):
    """Plain, with momentum, and Nesterov's."""

    def update_step(self, gradient: tf.Tensor, variable: tf.Variable, learning_rate: tf.Tensor) -> None:
        if isinstance(gradient, tf.IndexedSlices):
            super().update_step(gradient, variable, learning_rate)
            return
        learning_rate = tf.cast(learning_rate, variable.dtype)
        gradient = tf.cast(gradient, variable.dtype)
        if self.momentum == 0:
            tf.raw_ops.ResourceApplyGradientDescent(
                var=variable.handle, alpha=learning_rate, delta=gradient, use_locking=True
            )
            return
        tf.raw_ops.ResourceApplyKerasMomentum(
            var=variable.handle,
            accum=self.momentums[self._get_variable_index(variable)].value.handle,
            lr=learning_rate,
            grad=gradient,
            momentum=tf.cast(self.momentum, variable.dtype),
            use_locking=True,
            use_nesterov=self.nesterov,
        )


class _Adam(keras.optimizers.Adam):
    """With and without AMSGrad."""

    def update_step(self, gradient: tf.Tensor, variable: tf.Variable, learning_rate: tf.Tensor) -> None:
        if isinstance(gradient, tf.IndexedSlices):
            super().update_step(gradient, variable, learning_rate)
            return
        index = self._get_variable_index(variable)
        local_step = tf.cast(self.iterations + 1, variable.dtype)
        beta_1, beta_2 = tf.cast(self.beta_1, variable.dtype), tf.cast(self.beta_2, variable.dtype)
        arguments: dict[str, Any] = {
            "var": variable.handle,
            "m": self._momentums[index].value.handle,
            "v": self._velocities[index].value.handle,
            "beta1_power": tf.pow(beta_1, local_step),
            "beta2_power": tf.pow(beta_2, local_step),
            "lr": tf.cast(learning_rate, variable.dtype),
            "beta1": beta_1,
            "beta2": beta_2,
            "epsilon": tf.cast(self.epsilon, variable.dtype),
            "grad": tf.cast(gradient, variable.dtype),
            "use_locking": True,
        }
        if self.amsgrad:
            tf.raw_ops.ResourceApplyAdamWithAmsgrad(vhat=self._velocity_hats[index].value.handle, **arguments)
        else:
            tf.raw_ops.ResourceApplyAdam(**arguments)


class _AdamW(_Adam, keras.optimizers.AdamW):
    """Keras decays the weights before the update."""


#: Classes of the same maths with updates by kernels. Not for subclasses: a user's may compute something else.
_BY_KERNEL: dict[type[keras.optimizers.Optimizer], type[keras.optimizers.Optimizer]] = {
    keras.optimizers.SGD: _SGD,
    keras.optimizers.Adam: _Adam,
    keras.optimizers.AdamW: _AdamW,
    keras.optimizers.Nadam: NadamBySteps,
}
