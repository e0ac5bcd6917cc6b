"""`ParameterStore`: the only copy of everything that training changes, on parameter servers or in this process."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property, partial
from itertools import count
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kdist._compat.keras import step_counter
from kdist.model.names import (
    DROPPED_STEPS,
    DYNAMIC_SCALE,
    DYNAMIC_SCALE_STEPS,
    GLOBAL_STEP,
    LEARNING_RATE,
    STATE_RESETS,
)
from kdist.model.replica_step import ReplicaStep
from kdist.model.updates import ReplicaOutput, RunningStep, StepUpdates
from kdist.parameters.optimizer import ServerOptimizers
from kdist.parameters.placement.blocks import Blocks, ModelVariables, StoredShard
from kdist.parameters.placement.messages import (
    Assigned,
    BlockUpdates,
    Change,
    Gathered,
    Message,
    Overflow,
    Pulled,
    UpdateKey,
    Weight,
    Wire,
    fuse_by,
)
from kdist.parameters.placement.plan import PlacementPlan
from kdist.parameters.tables.dynamic_table import DynamicTable
from kdist.parameters.tables.lookup import TableRows
from kdist.parameters.tables.rows import on_each
from kdist.parameters.tables.table import make_tables
from kdist.parameters.values.dynamic_values import DynamicValues
from kdist.parameters.values.initial_values import set_initial_values
from kdist.parameters.values.moves import move_rows, move_values
from kdist.parameters.values.named_values import NamedValues
from kdist.parameters.values.value_files import ValueFiles
from kdist.storage.tensorflow_paths import open_checkpoint


class ParameterStore:
    """Parameters, state, optimizer slots and the exact global step.

    `pull` and `push` are called while a function for a worker is traced. Between tasks, one tensor travels per server,
    dtype and direction, regardless of the number of variables, and of tables only the rows of the batch.

    Args:
        updates: of the parameters; the slots of the optimizers are the initial ones.
        devices: one device per server; a single empty string stands for this process.
        plan: places the parameters, then the state, on `devices`, and names them.
        wire: the format of values and gradients in transit.
        marks_changes: whether it is marked which rows of tables change, so that deltas can be saved.
        is_replicated: whether replicas exchange their changes before each applies them to its own store.

    Attributes:
        values: all stored values by name, for checkpoints and models, except rows of dynamic tables.
        dynamic: the rows of dynamic tables.
        files: saves and restores them.
        servers: those that take part in updates: the first one, and all that have values.
        counters: of the updates.
    """

    def __init__(
        self,
        model_variables: ModelVariables,
        updates: StepUpdates,
        devices: Sequence[str],
        plan: PlacementPlan,
        wire: Wire | None = None,
        *,
        marks_changes: bool = False,
        is_replicated: bool = False,
    ) -> None:
        self.devices = list(devices)
        self.is_remote = any("/job:ps" in device for device in devices)
        self._has_several_writers = self.is_remote or is_replicated
        self.wire = wire or Wire()
        self.updates = updates
        self._originals = model_variables.all
        self._num_trainable = len(model_variables.parameters)
        self._tables = {table for group in model_variables.table_groups for table in group.tables}
        self._shards_of: dict[int, list[int]] = defaultdict(list)
        for i, shard in enumerate(plan.shards):
            self._shards_of[shard.variable].append(i)
        # Few tensors travel.
        flat = {"flat_parameters": self._has_several_writers, "flat_state": self.is_remote}
        self.blocks = blocks = Blocks(model_variables, plan.shards, updates, **flat)
        # A step need not visit a server that has nothing of the model, which small models leave most of them.
        self.servers = sorted({0, *(block.server for block in blocks)})
        used = {server: self.devices[server] for server in self.servers}
        step = int(step_counter(updates.groups[0].optimizer).numpy())
        self.counters = UpdateCounters(used, step, updates.num_phases)
        self._variables = [blocks.make_variable(b, self.devices[block.server]) for b, block in enumerate(blocks)]
        # The present interval between saves, see `kdist.parameters.tables.changed_rows`.
        intervals = on_each(self.devices, 1, tf.int32) if marks_changes else []
        tables = make_tables(blocks, self._variables, self.devices, intervals, is_shared=self.is_remote)
        self._evicting = [table for table in tables.values() if isinstance(table, DynamicTable) and table.evicts]
        begun = self.counters.begun
        self._table_rows = TableRows(blocks, tables, lambda b: begun[blocks[b].server].read_value(), self.wire)
        self._stored_names = [
            f"{'parameters' if model_variables.is_parameter(index) else 'state'}/{variable.name}"
            for index, variable in enumerate(plan.variables)
        ]
        names = [variable.name for variable in plan.variables[: self._num_trainable]]
        self._optimizers = ServerOptimizers(
            updates, blocks, self._variables, tables, names, self.devices, is_shared=self.is_remote
        )
        scaling = model_variables.loss_scaling
        self._loss_scale = None if scaling is None else ServerLossScale(scaling, used)
        groups = [
            ([names[i] for i in group.tables], [tables[b] for b in blocks.of_tables(group)])
            for group in blocks.table_groups
            if group.is_row_wise
        ]
        self.dynamic = DynamicValues(groups)
        self._initial = {
            name: variable
            for of_group in updates.groups
            for name, variable in of_group.state(model_variables.parameters, names).items()
            if name not in self.dynamic.shapes
        }
        self.values = self._named_values(model_variables)
        self.files = ValueFiles(self.values, self.dynamic, groups, intervals)

    def _named_values(self, model_variables: ModelVariables) -> NamedValues:
        """All values by name; makes variables for values that nothing else needs."""
        stored = {
            self._stored_names[index]: [
                self.blocks.stored_shard(shard, self._variables[self.blocks.of_shard[shard]]) for shard in shards
            ]
            for index, shards in self._shards_of.items()
            if not self.blocks[self.blocks.of_shard[shards[0]]].is_dynamic
        }
        stored |= self._optimizers.stored
        copies = {GLOBAL_STEP: list(self.counters.begun.values()), **self._optimizers.copies}
        if self._loss_scale is not None:
            copies |= self._loss_scale.copies
        with tf.device(self.devices[0]):
            if model_variables.num_worker_states:
                self._resets = tf.Variable(tf.zeros([model_variables.num_worker_states], tf.int64), trainable=False)
                stored[STATE_RESETS] = [StoredShard.whole(self._resets)]
            for name in self._initial.keys() - stored.keys() - copies.keys():
                # An optimizer that updates nothing has a learning rate all the same, which callbacks may set.
                stored[name] = [StoredShard.whole(tf.Variable(self._initial[name].value, trainable=False))]
        return NamedValues(stored, copies, are_remote=self.is_remote)

    def fill(self) -> None:
        """Sets the initial values of large variables and of slots, which may take a while; called once, at first."""
        set_initial_values(
            self.blocks, self._variables, self._originals, self._stored_names, self._initial, self.values
        )
        self.dynamic.fill(self.counters.global_step())
        if self.is_remote:
            self.dynamic.hand_over()

    def take_over(self, other: ParameterStore) -> None:
        """Takes all values of another store, on other servers, in the place of the initial ones."""
        move_values(other.values, self.values)
        move_rows(other.dynamic, self.dynamic)
        copies = other.values.copies.keys() & self.values.copies.keys()
        self.write({name: value for values in other.values.portions(copies) for name, value in values.items()})

    @cached_property
    def sweep(self) -> Callable[[], object] | None:
        """Lets servers evict rows of dynamic tables; None if none of them does. May be called in any thread."""

        def sweep() -> None:
            for table in self._evicting:
                with tf.device(table.device):
                    table.sweep(self.counters.begun[table.server].read_value())

        return tf.function(sweep, autograph=False).get_concrete_function() if self._evicting else None

    def use_averages(self) -> None:
        self._optimizers.use_averages()

    def align(self) -> None:
        """Resets every server's counter to the global step, after a lost worker's update reached only some of them."""
        self.counters.align()
        if self._loss_scale is not None:
            self._loss_scale.align()

    def write(self, values: Mapping[str, np.ndarray]) -> None:
        self.values.write(values)
        if GLOBAL_STEP in values:
            self.align()

    def restore(self, path: Path, deltas: Sequence[Path] = ()) -> None:
        """Reads all values but the learning rate from a checkpoint and its deltas, see `ValueFiles.restore`."""
        self.files.restore(path, deltas)
        reader = open_checkpoint([path, *deltas][-1])
        self.write({name: reader.get_tensor(name) for name in self.values.copies if name != LEARNING_RATE})

    def learning_rate(self, step: tf.Tensor, group: int = 0) -> tf.Tensor:
        """The learning rate of a group after `step` updates, a scalar on a server; called while a call is traced."""
        return self._optimizers.learning_rate(step, group)

    def gather(self, only: Collection[int] | None = None) -> Gathered:
        """The present values on their servers, fused, for several `pull`s; `only` those of some variables, if given."""
        with tf.device(self.devices[0]):
            step = self.counters.begun[0].read_value()
        if only is None:
            wanted = {b for b, block in enumerate(self.blocks) if block.tables is None}
        else:
            wanted = {self.blocks.of_shard[shard] for index in only for shard in self._shards_of[index]}
        whole = {b: self._variables[b].value for b in sorted(wanted)}
        if not self.is_remote:
            return Gathered({b: variable.read_value() for b, variable in whole.items()}, [], step)
        fused = fuse_by(whole, self.device_of, lambda variable: variable.read_value(), wire=self.wire)
        return Gathered({}, fused, step)

    def pull(self, gathered: Gathered | None = None, *, trains: bool = True) -> Pulled:
        """The present values, or gathered ones, on the device of the caller; the global step stays on its server.

        If it `trains`, new ids of dynamic tables get rows.
        """
        gathered = gathered or self.gather()
        by_shard = self._arrived(gathered)
        variables = range(len(self._originals))
        values = [None if index in self._tables else self._whole(index, by_shard) for index in variables]
        rows = (self._table_rows if trains else self._table_rows.read_only()) if self._tables else None
        return Pulled(values[: self._num_trainable], values[self._num_trainable :], gathered.global_step, rows)

    def pull_again(self, phase: int, gathered: Gathered | None = None) -> dict[int, tf.Tensor]:
        """The present values of the variables that a phase of a step needs anew, by their indices."""
        wanted = sorted(self.updates.pulled_again[phase])
        by_shard = self._arrived(gathered or self.gather(wanted))
        return {index: self._whole(index, by_shard) for index in wanted}

    def run_step(
        self, replica_step: ReplicaStep, pulled: Pulled, batch: Any, seeds: tf.Tensor, metrics: list[tf.Tensor]
    ) -> RunningStep:
        """Runs a step of the model on pulled values, with the learning rates and the scale of the loss of the store."""
        reads = []
        for read in replica_step.optimizer_reads:
            value = replica_step.updates.groups[read.group].iteration(pulled.global_step)
            if read.kind == "loss_scale":
                assert self._loss_scale is not None
                value = self._loss_scale.read()
            elif read.kind != "step":
                value = self.learning_rate(value, read.group)
            reads.append(tf.identity(value))
        moment = None
        if replica_step.worker_state.variables:
            with tf.device(self.devices[0]):
                resets = self._resets.read_value()
            moment = tf.identity(pulled.global_step), tf.identity(resets)
        return replica_step.run(pulled.trainable, pulled.state, metrics, seeds, batch, reads, moment, pulled.rows)

    def push(self, output: ReplicaOutput, pulled: Pulled) -> tf.Tensor:
        """Applies the output of a step, or of a phase of it; a server counts a step when its part of the first phase
        has arrived.

        Args:
            output: its gradients, clipped. Of what the step has assigned, servers add the difference to the value that
                was pulled, so that no worker undoes the changes of another one.
            pulled: the values that the step started from.

        Returns:
            Scalar int64 on the first server: the global step of this update.
        """
        if self.is_remote:
            return self.push_packed(self.pack(output, pulled), output.phase)
        return self.apply(self.updates_of(output, pulled), output.phase)

    def pack(self, output: ReplicaOutput, pulled: Pulled) -> list[Message]:
        """The changes of a step, fused on the worker; takes the same as `push`."""
        return self.fuse(self.updates_of(output, pulled))

    def push_packed(self, messages: Sequence[Message], phase: int = 0) -> tf.Tensor:
        """Applies the packed changes of a phase; returns the same as `push`."""
        changes: BlockUpdates = {}
        for tensor, layout in messages:
            with tf.device(layout.device):
                changes |= layout.split(tensor)
        return self.apply(changes, phase)

    def updates_of(self, output: ReplicaOutput, pulled: Pulled) -> BlockUpdates:
        """The changes of a step, by block; blocks without a change are missing."""
        by_shard: BlockUpdates = {}
        of_tables: dict[int, tf.IndexedSlices] = {}
        of_state = map(self._state_change, count(self._num_trainable), output.state, pulled.state)
        for index, change in enumerate([*output.gradients, *of_state]):
            if change is None:
                continue
            shards = self._shards_of[index]
            # What travels needs the shape, which TensorFlow does not infer of every gradient.
            shape = self._originals[index].shape
            if isinstance(change, tf.IndexedSlices):
                change.values.set_shape([None, *shape[1:]])
            else:
                change.set_shape(shape)
            if index in self._tables:
                of_tables[index] = change
            elif len(shards) == 1:
                by_shard[shards[0]] = change
            else:
                by_shard |= zip(shards, tf.split(change, [self.blocks.shape_of(i)[0] for i in shards]))
        changes: BlockUpdates = dict(self._table_rows.by_block(of_tables))
        for index, change in enumerate(output.assigned):
            if change is not None:
                (shard,) = self._shards_of[index]
                changes[Assigned(self.blocks.of_shard[shard])] = change
        for b, block in enumerate(self.blocks):
            if any(shard in by_shard for shard in block.shards):
                # The difference of state that did not change is 0.
                dtype = self._variables[b].dtype
                by_shard |= {i: tf.zeros(self.blocks.shape_of(i), dtype) for i in block.shards if i not in by_shard}
                changes[b] = self.blocks.join(b, by_shard)
        if output.overflow is not None:
            changes |= {Overflow(server): output.overflow for server in self.servers}
        return changes

    def fuse(self, changes: BlockUpdates) -> list[Message]:
        """Changes by block, fused by server and dtype on the worker."""
        return fuse_by(changes, self.device_of, on_source=False, wire=self.wire)

    def device_of(self, key: UpdateKey) -> str:
        """The server of a block, or of another key of updates."""
        if isinstance(key, (Overflow, Weight)):
            return self.devices[key.server]
        return self.devices[self.blocks[key.block if isinstance(key, Assigned) else key].server]

    def apply(self, arrived: BlockUpdates, phase: int = 0) -> tf.Tensor:
        """Applies changes of a phase that have arrived at their servers; counts the step, and returns it, as `push`."""
        step, *_ = [self._apply_on(server, arrived, phase) for server in self.servers]
        return step

    def _arrived(self, gathered: Gathered) -> dict[int, tf.Tensor]:
        """Gathered values on the device of the caller, by shard."""
        arrived = dict(gathered.single)
        for tensor, layout in gathered.fused:
            arrived |= layout.split(tensor)
        return {shard: v for b, value in arrived.items() for shard, v in self.blocks.split(b, value).items()}

    def _whole(self, index: int, by_shard: Mapping[int, tf.Tensor]) -> tf.Tensor:
        return tf.concat([by_shard[i] for i in self._shards_of[index]], 0)

    def _apply_on(self, server: int, arrived: BlockUpdates, phase: int) -> tf.Tensor:
        """As `apply`, on one server; returns the number of its updates."""
        blocks = [b for b, block in enumerate(self.blocks) if block.server == server]
        keys = [*(key for b in blocks for key in (b, Assigned(b))), Overflow(server)]
        of_server = [arrived[key] for key in keys if key in arrived]
        overflow = arrived.get(Overflow(server))
        graph = tf.compat.v1.get_default_graph()
        with tf.device(self.devices[server]):
            # Not the results of functions themselves: what waits for those does not wait when TensorFlow inlines them.
            all_there = [tf.identity(tensor) for tensor in tf.nest.flatten(of_server, expand_composites=True)]
            with tf.control_dependencies(all_there):
                if phase == 0:
                    self.counters.begun[server].assign_add(1, read_value=False)
                step = self.counters.begun[server].read_value()
            num_operations = len(graph.get_operations())
            for b in blocks:
                if Assigned(b) in arrived:
                    self._variables[b].value.assign_add(arrived[Assigned(b)], read_value=False)
            update = partial(self._optimizers.apply, server, phase, arrived)
            if overflow is None or self._loss_scale is None:
                update(step - 1)
            else:
                self._loss_scale.apply(server, overflow, step - 1, update)
            for b in blocks:
                if not self.blocks[b].is_parameter and b in arrived:
                    variable = self._variables[b].value
                    change = variable.assign_add if self._adds(b) else variable.assign
                    change(arrived[b], read_value=False)
            begun = graph.get_operations()[num_operations:]
            with tf.control_dependencies([operation for operation in begun if operation.op_def.is_stateful]):
                self.counters.applied[server].assign_add(1, read_value=False)
        return step

    def _adds(self, block: int) -> bool:
        """True if a change of a state variable is added to it. With one writer the new value itself is exact."""
        return self._has_several_writers and not self.blocks[block].is_replaced

    def _state_change(self, index: int, new: Change, old: tf.Tensor) -> Change:
        if new is None:
            return None
        new = tf.cast(new, old.dtype)
        return new - old if self._adds(self.blocks.of_shard[self._shards_of[index][0]]) else new


class UpdateCounters:
    """The number of updates that each server has begun, and of phases that it has applied completely.

    The first server's count is the global step. The other servers that have values count the updates that they apply
    themselves, so that none has to wait for another one before it applies what has arrived.

    Args:
        devices: of the servers that take part in updates, by their numbers.

    Attributes:
        begun, applied: scalar int64 variables, by server. If `applied` lags behind, a task was lost in the middle.
    """

    def __init__(self, devices: Mapping[int, str], step: int, num_phases: int) -> None:
        self._num_phases = num_phases
        self.begun = dict(zip(devices, on_each(devices.values(), step, tf.int64)))
        self.applied = dict(zip(devices, on_each(devices.values(), step * num_phases, tf.int64)))

    def global_step(self) -> int:
        return int(self.begun[0].numpy())

    def is_consistent(self) -> bool:
        """True if every update that a server has begun was applied completely by all of them."""
        begun = {int(counter.numpy()) * self._num_phases for counter in self.begun.values()}
        return len(begun | {int(counter.numpy()) for counter in self.applied.values()}) == 1

    def align(self) -> None:
        step = self.begun[0].read_value()
        for server, counter in self.begun.items():
            if server:
                counter.assign(step)
        for counter in self.applied.values():
            counter.assign(step * self._num_phases)


class ServerLossScale:
    """The scale on the first server, and on every server the number of steps that it has dropped.

    A step whose gradients overflow updates no parameter, and halves the scale; after `dynamic_growth_steps` steps
    without an overflow, the scale doubles (Micikevicius et al., Mixed Precision Training, 2018). Several asynchronous
    workers whose gradients overflow with the same scale halve it once.

    Args:
        optimizer: of the model, built: the scale begins as it is there.
        devices: of the servers that take part in updates, by their numbers.
    """

    def __init__(self, optimizer: keras.optimizers.LossScaleOptimizer, devices: Mapping[int, str]) -> None:
        self._growth_steps = optimizer.dynamic_growth_steps
        with tf.device(devices[0]):
            self._scale = tf.Variable(optimizer.dynamic_scale.numpy(), dtype=tf.float32, trainable=False)
            self._steps = tf.Variable(optimizer.step_counter.numpy(), dtype=tf.int32, trainable=False)
        self._dropped = dict(zip(devices, on_each(devices.values(), 0, tf.int64)))
        #: All variables, by their names in checkpoints.
        self.copies = {
            DYNAMIC_SCALE: [self._scale],
            DYNAMIC_SCALE_STEPS: [self._steps],
            DROPPED_STEPS: list(self._dropped.values()),
        }

    def read(self) -> tf.Tensor:
        """The scale, a float32 scalar on the first server."""
        with tf.device(self._scale.device):
            return self._scale.read_value()

    def align(self) -> None:
        for server, dropped in self._dropped.items():
            if server:
                dropped.assign(self._dropped[0].read_value())

    def apply(self, server: int, overflow: tf.Tensor, step: tf.Tensor, update: Callable[[tf.Tensor], None]) -> None:
        """Updates the variables of a server, unless the step has overflowed; traced on that server.

        Args:
            overflow: `ReplicaOutput.overflow`.
            step: scalar int64: the number of steps before this one.
            update: updates the variables; its argument is the number of steps before this one that were not dropped.
        """
        is_dropped = overflow > 0
        iteration = step - self._dropped[server].read_value()
        tf.cond(is_dropped, lambda: None, lambda: update(iteration))
        self._dropped[server].assign_add(tf.cast(is_dropped, tf.int64), read_value=False)
        if server == 0:
            steps = tf.where(is_dropped, 0, self._steps.read_value() + 1)
            grows = steps >= self._growth_steps
            scale = self._scale.read_value()
            grown = tf.where(grows, 2 * scale, scale)
            self._scale.assign(tf.where(is_dropped, tf.minimum(scale, 0.5 * overflow), grown), read_value=False)
            self._steps.assign(tf.where(grows, 0, steps), read_value=False)
