"""`ParameterStore`: the only copy of everything that training changes, on parameter servers or in this process."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import keras
import tensorflow as tf

from kdist._compat.keras import step_counter
from kdist.model.optimizer import optimizer_state
from kdist.parameters.named_values import NamedValues, Part
from kdist.parameters.optimizer import ServerOptimizer
from kdist.parameters.packing import Blocks, ModelVariables
from kdist.parameters.placement import PlacementPlan
from kdist.parameters.transport import Fused, Layout, Wire, fuse_by, select_rows

GLOBAL_STEP = "global_step"

#: What a step computes for a variable: a gradient, for an embedding that of some rows; None for no change.
Change: TypeAlias = "tf.Tensor | tf.IndexedSlices | None"
#: Changes by shard or by block; those without one are missing.
Changes: TypeAlias = "dict[int, tf.Tensor | tf.IndexedSlices]"


@dataclass(frozen=True)
class Pulled:
    """The values that a replica step starts from.

    Attributes:
        trainable: values of the trainable variables, in the model's order; for a table that is looked up by rows, a
            function from unique ids, int64 `[n]`, to those rows.
        state: values of the state variables (BatchNormalization statistics), in the model's order.
        global_step: scalar int64 on the first server: the number of updates in these values.
    """

    trainable: list[tf.Tensor | Callable[[tf.Tensor], tf.Tensor]]
    state: list[tf.Tensor]
    global_step: tf.Tensor


@dataclass(frozen=True)
class Gathered:
    """Values on their servers, ready to be sent: by block in one process (`single`), fused on servers."""

    single: dict[int, tf.Tensor]
    fused: list[Fused]
    global_step: tf.Tensor


class ParameterStore:
    """Parameters, state, optimizer slots and the exact global step.

    `pull` and `push` are called while a function for a worker is traced. Between tasks, one tensor travels per server,
    dtype and direction, regardless of the number of variables, and of tables only the rows of the batch.

    Args:
        model_variables: what is stored.
        optimizer: the built optimizer of the model; its slots are the initial ones.
        devices: one device per server; a single empty string stands for this process.
        plan: places the parameters, then the state, on `devices`, and names them.
        wire: the format of values and gradients in transit.

    Attributes:
        values: all stored values, by name, for checkpoints and models.
    """

    def __init__(
        self,
        model_variables: ModelVariables,
        optimizer: keras.optimizers.Optimizer,
        devices: Sequence[str],
        plan: PlacementPlan,
        wire: Wire | None = None,
    ) -> None:
        self.devices = list(devices)
        self.shards = plan.shards
        self.is_remote = any("/job:ps" in device for device in devices)
        self.wire = wire or Wire()
        self._originals = model_variables.all
        self._num_trainable = len(model_variables.parameters)
        self._looked_up = model_variables.looked_up
        # The first server's counter is the global step. The other servers count the updates that they apply themselves,
        # so that none has to wait for another one before it applies what has arrived.
        self._steps = [self._counter(device, step_counter(optimizer).numpy()) for device in self.devices]
        # Counted when an update is applied completely; if it lags behind, a task was lost in the middle of an update.
        self._applied = [self._counter(device, step_counter(optimizer).numpy()) for device in self.devices]
        self._shards_of: dict[int, list[int]] = defaultdict(list)
        for i, shard in enumerate(self.shards):
            self._shards_of[shard.variable].append(i)
        self.blocks = Blocks(model_variables, self.shards, optimizer, may_be_flat=self.is_remote)
        self._variables = [
            self.blocks.make_variable(b, self.devices[block.server]) for b, block in enumerate(self.blocks)
        ]
        parts: dict[str, list[Part]] = {GLOBAL_STEP: [Part.whole(self._steps[0])]}
        for index, shards in self._shards_of.items():
            group = "parameters" if model_variables.is_parameter(index) else "state"
            parts[f"{group}/{plan.variables[index].name}"] = [
                self._part(shard, self._variables[self.blocks.of_shard[shard]]) for shard in shards
            ]
        # Every server has its own copy of values of the whole optimizer, such as the learning rate, so that applying
        # needs nothing from another server.
        copies: dict[str, list[tf.Variable]] = defaultdict(list, {GLOBAL_STEP: [*self._steps, *self._applied]})
        self._optimizers: dict[int, ServerOptimizer] = {}
        names = [variable.name for variable in plan.variables[: self._num_trainable]]
        self._make_optimizers(optimizer, names, parts, copies)
        self.values = NamedValues(parts, copies)
        state = optimizer_state(optimizer, model_variables.parameters, names)
        self.values.write({name: variable.numpy() for name, variable in state.items()})

    def global_step(self) -> int:
        """The exact number of updates applied."""
        return int(self._steps[0].numpy())

    def is_consistent(self) -> bool:
        """Whether every update that a server has started to apply was applied completely by all of them."""
        return len({int(counter.numpy()) for counter in [*self._steps, *self._applied]}) == 1

    def align(self) -> None:
        """Resets every server's counter to the global step, after a lost worker's update reached only some of them."""
        step = self._steps[0].read_value()
        for counter in [*self._steps[1:], *self._applied]:
            counter.assign(step)

    def learning_rate(self, step: tf.Tensor) -> tf.Tensor:
        """The learning rate after `step` updates, a scalar on a server; called while a function is traced."""
        server = min(self._optimizers)
        with tf.device(self.devices[server]):
            return self._optimizers[server].learning_rate(step)

    def gather(self) -> Gathered:
        """The present values on their servers, fused; for several `pull`s of the same values."""
        with tf.device(self.devices[0]):
            step = self._steps[0].read_value()
        whole = {b: self._variables[b].value for b, block in enumerate(self.blocks) if not block.is_table}
        if not self.is_remote:
            return Gathered({b: variable.read_value() for b, variable in whole.items()}, [], step)
        fused = fuse_by(whole, self._device, lambda variable: variable.read_value(), wire=self.wire)
        return Gathered({}, fused, step)

    def pull(self, gathered: Gathered | None = None) -> Pulled:
        """The present values, or gathered ones, on the device of the caller; the global step stays on its server."""
        gathered = gathered or self.gather()
        arrived = dict(gathered.single)
        for fused in gathered.fused:
            arrived |= fused.split()
        by_shard: dict[int, tf.Tensor] = {}
        for b, value in arrived.items():
            by_shard |= self.blocks.split(b, value)
        values: list[tf.Tensor | Callable[[tf.Tensor], tf.Tensor]] = []
        for index in range(len(self._originals)):
            if index in self._looked_up:
                values.append(partial(self._look_up, index))
            else:
                parts = [by_shard[i] for i in self._shards_of[index]]
                values.append(parts[0] if len(parts) == 1 else tf.concat(parts, 0))
        return Pulled(values[: self._num_trainable], values[self._num_trainable :], gathered.global_step)

    def push(self, gradients: Sequence[Change], state: Sequence[Change], pulled: Pulled) -> tf.Tensor:
        """Applies gradients and state changes; every server counts the step when its part of it has arrived.

        Args:
            gradients: one per trainable variable, a tensor, or `tf.IndexedSlices` of some of its rows; None where the
                loss does not depend on it.
            state: new values of the state variables; None if nothing changed. Servers add the difference to the pulled
                value, so that no worker undoes the changes of another one.
            pulled: the values that the step started from.

        Returns:
            Scalar int64 on the first server: the global step of this update.
        """
        changes = self.changes(gradients, state, pulled)
        if not self.is_remote:
            return self.apply(changes)
        arrived: Changes = {}
        for fused in self.fuse(changes):
            with tf.device(self.device_of(fused.layout)):
                arrived |= fused.split()
        return self.apply(arrived)

    def changes(self, gradients: Sequence[Change], state: Sequence[Change], pulled: Pulled) -> Changes:
        """The arguments of `push`, by block; blocks without a change are missing."""
        by_shard: Changes = {}
        for index, change in enumerate([*gradients, *map(self._state_change, state, pulled.state)]):
            shards = self._shards_of[index]
            if change is None:
                continue
            if len(shards) == 1:
                by_shard[shards[0]] = change
            elif isinstance(change, tf.IndexedSlices):
                by_shard |= {i: select_rows(change, self.shards[i].start, self.shards[i].stop) for i in shards}
            else:
                sizes = [self.shards[i].stop - self.shards[i].start for i in shards]
                by_shard |= zip(shards, tf.split(change, sizes))
        changes: Changes = {}
        for b, block in enumerate(self.blocks):
            if any(shard in by_shard for shard in block.shards):
                # The difference of state that did not change is 0.
                dtype = self._variables[b].dtype
                by_shard |= {i: tf.zeros(self.blocks.shape_of(i), dtype) for i in block.shards if i not in by_shard}
                changes[b] = self.blocks.join(b, by_shard)
        return changes

    def fuse(self, changes: Changes) -> list[Fused]:
        """Changes by block, fused by server and dtype on the worker."""
        return fuse_by(changes, self._device, on_source=False, wire=self.wire)

    def device_of(self, layout: Layout) -> str:
        """The server of fused changes."""
        return self._device(next(iter([*layout.row_shapes, *layout.shapes])))

    def apply(self, arrived: Changes) -> tf.Tensor:
        """Applies changes that have arrived at their servers; counts one step, and returns it as `push` does."""
        steps = [self._apply_on(server, arrived) for server in range(len(self.devices))]
        return steps[0]

    @staticmethod
    def _counter(device: str, value: int) -> tf.Variable:
        with tf.device(device):
            return tf.Variable(value, dtype=tf.int64, trainable=False, name=GLOBAL_STEP)

    def _part(self, shard: int, variable: keras.Variable) -> Part:
        return Part(variable.value, self.blocks.start_of(shard), self.blocks.shape_of(shard))

    def _make_optimizers(
        self,
        optimizer: keras.optimizers.Optimizer,
        names: Sequence[str],
        parts: dict[str, list[Part]],
        copies: dict[str, list[tf.Variable]],
    ) -> None:
        """Creates one optimizer per server for its blocks; adds their variables to `parts` and `copies`, by name."""
        slots: dict[str, dict[int, Part]] = defaultdict(dict)
        for server, device in enumerate(self.devices):
            own = [b for b, block in enumerate(self.blocks) if block.server == server and block.is_parameter]
            if not own:
                continue
            self._optimizers[server] = ServerOptimizer(
                optimizer,
                [self.blocks.original(b) for b in own],
                [self._variables[b] for b in own],
                [self.blocks[b].is_row_wise for b in own],
                device,
            )
            for key, variable in self._optimizers[server].state([str(b) for b in own]):
                group, _, rest = key.partition("/")
                if group != "slots":
                    copies[key].append(variable.value)
                    parts.setdefault(key, [Part.whole(variable.value)])
                    continue
                number, _, slot = rest.partition("/")
                block = self.blocks[int(number)]
                for shard in block.shards:
                    # A slot with another shape than its variable belongs to a block of one shard.
                    part = self._part(shard, variable) if block.is_flat else Part.whole(variable.value)
                    slots[f"slots/{names[self.shards[shard].variable]}/{slot}"][shard] = part
        for name, by_shard in slots.items():
            parts[name] = [by_shard[i] for i in sorted(by_shard)]

    def _apply_on(self, server: int, arrived: Changes) -> tf.Tensor:
        """As `apply`, on one server; returns the number of its updates."""
        blocks = [b for b, block in enumerate(self.blocks) if block.server == server]
        of_server = [arrived[b] for b in blocks if b in arrived]
        graph = tf.compat.v1.get_default_graph()
        with tf.device(self.devices[server]):
            with tf.control_dependencies(tf.nest.flatten(of_server, expand_composites=True)):
                self._steps[server].assign_add(1, read_value=False)
                step = self._steps[server].read_value()
            num_operations = len(graph.get_operations())
            if server in self._optimizers:
                self._optimizers[server].apply(
                    [arrived.get(b) for b in blocks if self.blocks[b].is_parameter], step - 1
                )
            for b in blocks:
                if not self.blocks[b].is_parameter and b in arrived:
                    variable = self._variables[b].value
                    change = variable.assign_add if self._adds(variable.dtype) else variable.assign
                    change(arrived[b], read_value=False)
            begun = graph.get_operations()[num_operations:]
            with tf.control_dependencies([operation for operation in begun if operation.op_def.is_stateful]):
                self._applied[server].assign_add(1, read_value=False)
        return step

    def _look_up(self, index: int, ids: tf.Tensor) -> tf.Tensor:
        """Rows of a parameter, from whichever servers hold them: unique ids, int64 `[n]` -> `[n, ...]`."""
        shards = self._shards_of[index]
        chosen, rows = [], []
        for position, i in enumerate(shards):
            shard, block = self.shards[i], self.blocks.of_shard[i]
            # Ids that no shard has go to the first or the last, which says that they are out of range.
            here = (ids >= shard.start) | (position == 0)
            here &= (ids < shard.stop) | (position == len(shards) - 1)
            chosen.append(tf.where(here)[:, 0])
            wanted = ids if len(shards) == 1 else tf.gather(ids, chosen[-1]) - shard.start
            with tf.device(self._device(block) or None):
                found = self._variables[block].value.sparse_read(tf.identity(wanted))
                packed = self.wire.pack(found)
            rows.append(self.wire.unpack(tf.identity(packed), found.dtype))
        return rows[0] if len(shards) == 1 else tf.dynamic_stitch([tf.cast(c, tf.int32) for c in chosen], rows)

    def _adds(self, dtype: tf.DType) -> bool:
        """Whether a change of a state variable is added to it. With one writer the new value itself is exact."""
        return self.is_remote and dtype != tf.bool

    def _state_change(self, new: Change, old: tf.Tensor) -> Change:
        if new is None:
            return None
        return tf.cast(new, old.dtype) - old if self._adds(old.dtype) else tf.cast(new, old.dtype)

    def _device(self, block: int) -> str:
        return self.devices[self.blocks[block].server]
