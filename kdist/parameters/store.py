"""`ParameterStore`: the one copy of everything that training changes, on parameter servers or in this process."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from kdist.parameters.apply import ServerOptimizer, decays, is_elementwise, optimizer_state
from kdist.parameters.placement import Plan
from kdist.parameters.transport import Fused, fuse, fuse_by, select_rows, unfuse

GLOBAL_STEP = "global_step"

#: What a step computes for a variable: a gradient, or of an embedding the gradient of some rows; None is no change.
Change: TypeAlias = "tf.Tensor | tf.IndexedSlices | None"


@dataclass(frozen=True)
class Trainable:
    """The variables of a model that training changes.

    Attributes:
        parameters: trainable variables; their present values are the initial ones.
        state: the other variables that training may change.
        looked_up: indices of the parameters that a step looks up by rows and never sees whole.
        row_wise: of those, the ones whose optimizer touches looked-up rows only.
        dense: indices of the parameters that get a dense gradient in every step.
    """

    parameters: Sequence[keras.Variable]
    state: Sequence[keras.Variable]
    looked_up: frozenset[int] = frozenset()
    row_wise: frozenset[int] = frozenset()
    dense: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Block:
    """Shards of one server that are stored as one variable.

    Attributes:
        server: index of the server.
        shards: indices of the shards in the plan.
        is_flat: whether the variable is a vector of all of them, one behind the other; else it is the only one.
    """

    server: int
    shards: tuple[int, ...]
    is_flat: bool


@dataclass(frozen=True)
class _Part:
    """A named value, or some rows of it, inside a variable: `shape`, from element `start`."""

    variable: tf.Variable
    start: int
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.start + prod(self.shape)


@dataclass(frozen=True)
class Pulled:
    """What a replica step starts from.

    Attributes:
        trainable: values of the trainable variables, in the model's order; of one that is looked up by rows, a function
            from unique ids, int64 `[n]`, to those rows.
        state: values of the state variables (BatchNormalization statistics), in the model's order.
        global_step: scalar int64 on the first server, the updates that these values contain.
    """

    trainable: list[tf.Tensor | Callable[[tf.Tensor], tf.Tensor]]
    state: list[tf.Tensor]
    global_step: tf.Tensor


@dataclass(frozen=True)
class Gathered:
    """Values on their servers, ready to travel.

    Attributes:
        single: by block, in one process.
        fused: by block, on servers.
        global_step: scalar int64 on the first server, the updates that these values contain.
    """

    single: dict[int, tf.Tensor]
    fused: list[Fused]
    global_step: tf.Tensor


class ParameterStore:
    """Parameters, state, optimizer slots and the exact global step.

    `pull` and `push` are called while a function for a worker is traced. Between tasks one tensor travels per server,
    dtype and direction, however many variables there are, and of tables only the rows of the batch.

    On servers, shards that their optimizer treats alike, element by element, are stored as one vector (`Block`), so
    that a server has one thing to read and one to update, however many layers there are. `read` and `write` know
    nothing of that: they speak of variables, by name.

    Args:
        model_variables: what is stored.
        optimizer: the built optimizer the model was compiled with; its slots are the initial ones.
        devices: one device per server; a single empty string is this process.
        plan: places the parameters, then the state, on `devices`, and names them.
    """

    def __init__(
        self,
        model_variables: Trainable,
        optimizer: keras.optimizers.Optimizer,
        devices: Sequence[str],
        plan: Plan,
    ) -> None:
        self.devices = list(devices)
        self.shards = plan.shards
        self._is_remote = any("/job:ps" in device for device in devices)
        self._originals = [*model_variables.parameters, *model_variables.state]
        self._num_trainable = len(model_variables.parameters)
        self._looked_up = model_variables.looked_up
        self._row_wise = model_variables.row_wise
        # The first server's is the global step. The others count the updates that they apply themselves, so that none
        # has to wait for word of another one before it can apply what has arrived.
        self._steps = [self._counter(device, optimizer.iterations.numpy()) for device in self.devices]
        self._shards_of: dict[int, list[int]] = defaultdict(list)
        for i, shard in enumerate(self.shards):
            self._shards_of[shard.variable].append(i)
        self.blocks = self._make_blocks(optimizer, model_variables.dense)
        self._block_of = {shard: b for b, block in enumerate(self.blocks) for shard in block.shards}
        self._variables = [self._variable_of(block, f"v{b}") for b, block in enumerate(self.blocks)]
        # By name the parts of a value, one behind the other by rows.
        self._named: dict[str, list[_Part]] = {GLOBAL_STEP: [_Part(self._steps[0], 0, ())]}
        for group, of_group in (("parameters", True), ("state", False)):
            for index, shards in self._shards_of.items():
                if self._is_trainable(index) == of_group:
                    parts = [self._part(shard, self._variables[self._block_of[shard]]) for shard in shards]
                    self._named[f"{group}/{plan.variables[index].name}"] = parts
        # Every server has its own copy of what belongs to the whole optimizer, as the learning rate, so that applying
        # needs nothing from another server.
        self._copies: dict[str, list[tf.Variable]] = defaultdict(list, {GLOBAL_STEP: self._steps})
        self._optimizers: dict[int, ServerOptimizer] = {}
        names = [variable.name for variable in plan.variables[: self._num_trainable]]
        self._make_optimizers(optimizer, names)
        state = optimizer_state(optimizer, model_variables.parameters, names)
        self.write({name: variable.numpy() for name, variable in state.items()})
        self._read_fused = tf.function(self._fuse_all).get_concrete_function()

    @property
    def names(self) -> list[str]:
        """Names of everything that is stored: `global_step`, `parameters/...`, `state/...`, `slots/...`, ..."""
        return list(self._named)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each stored value, by name."""
        return {
            name: parts[0].shape if len(parts) == 1 else (sum(p.shape[0] for p in parts), *parts[0].shape[1:])
            for name, parts in self._named.items()
        }

    def global_step(self) -> int:
        """How many updates have been applied, exactly."""
        return int(self._steps[0].numpy())

    def gather(self) -> Gathered:
        """The present values, where they are, fused for the way; for several `pull`s of the same values."""
        with tf.device(self.devices[0]):
            step = self._steps[0].read_value()
        whole = {b: self._variables[b].value for b, block in enumerate(self.blocks) if not self._is_table(block)}
        if not self._is_remote:
            return Gathered({b: variable.read_value() for b, variable in whole.items()}, [], step)
        return Gathered({}, fuse_by(whole, self._device, lambda variable: variable.read_value()), step)

    def pull(self, gathered: Gathered | None = None) -> Pulled:
        """The present values, or gathered ones, on the device of the caller; the global step stays where it is."""
        gathered = gathered or self.gather()
        arrived = dict(gathered.single)
        for fused in gathered.fused:
            arrived |= fused.split()
        by_shard: dict[int, tf.Tensor] = {}
        for b, value in arrived.items():
            by_shard |= self.split(b, value)
        values: list[tf.Tensor | Callable[[tf.Tensor], tf.Tensor]] = []
        for index in range(len(self._originals)):
            if index in self._looked_up:
                values.append(partial(self._look_up, index))
            else:
                parts = [by_shard[i] for i in self._shards_of[index]]
                values.append(parts[0] if len(parts) == 1 else tf.concat(parts, 0))
        return Pulled(values[: self._num_trainable], values[self._num_trainable :], gathered.global_step)

    def split(self, block: int, value: tf.Tensor) -> dict[int, tf.Tensor]:
        """The value of a block, or a change of it, by shard."""
        shards = self.blocks[block].shards
        if not self.blocks[block].is_flat:
            return {shards[0]: value}
        return dict(zip(shards, unfuse(value, [tf.TensorShape(self._shape_of(i)) for i in shards])))

    def join(self, block: int, by_shard: Mapping[int, tf.Tensor]) -> tf.Tensor:
        """Undoes `split`."""
        shards = self.blocks[block].shards
        return fuse([by_shard[i] for i in shards]) if self.blocks[block].is_flat else by_shard[shards[0]]

    def push(self, gradients: Sequence[Change], state: Sequence[Change], pulled: Pulled) -> tf.Tensor:
        """Applies gradients and state changes, and counts one step.

        Every server counts the step once what it gets of it has arrived.

        Args:
            gradients: one per trainable variable, a tensor, or `tf.IndexedSlices` of some of its rows; None where the
                loss does not depend on it.
            state: new values of the state variables; None where nothing changed. On servers what is added to the
                present value is the difference to the pulled one, so that no worker undoes what another one did.
            pulled: what the step started from.

        Returns:
            Scalar int64 on the first server, the global step of this update.
        """
        changes = self.changes(gradients, state, pulled)
        return self.apply(self.transport(changes) if self._is_remote else changes)

    def changes(
        self, gradients: Sequence[Change], state: Sequence[Change], pulled: Pulled
    ) -> dict[int, tf.Tensor | tf.IndexedSlices]:
        """What `push` is given, by block; blocks in which nothing changed are missing."""
        by_shard: dict[int, tf.Tensor | tf.IndexedSlices] = {}
        for index, change in enumerate([*gradients, *self._state_changes(state, pulled)]):
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
        changes: dict[int, tf.Tensor | tf.IndexedSlices] = {}
        for b, block in enumerate(self.blocks):
            if any(shard in by_shard for shard in block.shards):
                # Of state that did not change the difference is 0.
                dtype = self._variables[b].dtype
                changes[b] = self.join(
                    b, {i: by_shard[i] if i in by_shard else tf.zeros(self._shape_of(i), dtype) for i in block.shards}
                )
        return changes

    def transport(self, changes: Mapping[int, tf.Tensor | tf.IndexedSlices]) -> dict[int, tf.Tensor | tf.IndexedSlices]:
        """Changes by block, moved to their servers."""
        dense = {b: change for b, change in changes.items() if not isinstance(change, tf.IndexedSlices)}
        arrived: dict[int, tf.Tensor | tf.IndexedSlices] = {}
        for fused in fuse_by(dense, self._device, on_source=False):
            with tf.device(self._device(next(iter(fused.shapes)))):
                arrived |= fused.split()
        # How many rows an embedding's gradient has depends on the batch: they travel by themselves.
        for b in changes.keys() - dense.keys():
            with tf.device(self._device(b)):
                arrived[b] = tf.IndexedSlices(tf.identity(changes[b].values), tf.identity(changes[b].indices))
        return arrived

    def apply(self, arrived: Mapping[int, tf.Tensor | tf.IndexedSlices]) -> tf.Tensor:
        """Applies changes that have arrived at their servers, and counts one step.

        Returns:
            Scalar int64 on the first server, the global step of this update.
        """
        steps = [self._apply_on(server, arrived) for server in range(len(self.devices))]
        return steps[0]

    def read(self) -> dict[str, np.ndarray]:
        """Every stored value, by name. Reads one tensor per server and dtype."""
        flat: dict[int, np.ndarray] = {}
        for variables, fused in zip(self._read_groups(), self._read_fused()):
            bounds = np.cumsum([variable.shape.num_elements() for variable in variables])[:-1]
            flat |= zip(map(id, variables), np.split(fused.numpy(), bounds))

        def value(part: _Part) -> np.ndarray:
            return flat[id(part.variable)][part.start : part.stop].reshape(part.shape)

        return {
            name: value(parts[0]) if len(parts) == 1 else np.concatenate([value(part) for part in parts])
            for name, parts in self._named.items()
        }

    def write(self, values: Mapping[str, np.ndarray]) -> None:
        """Sets stored values by name; names that are not given keep theirs."""
        written: dict[int, list[tuple[_Part, np.ndarray]]] = defaultdict(list)
        for name, value in values.items():
            parts = self._named[name]
            if name in self._copies:
                parts = [_Part(variable, 0, parts[0].shape) for variable in self._copies[name]]
                pieces = [np.asarray(value)] * len(parts)
            elif len(parts) == 1:
                pieces = [np.asarray(value)]
            else:
                pieces = np.split(value, np.cumsum([part.shape[0] for part in parts])[:-1])
            for part, piece in zip(parts, pieces):
                written[id(part.variable)].append((part, piece))
        for pairs in written.values():
            variable = pairs[0][0].variable
            size = variable.shape.num_elements()
            if sum(part.stop - part.start for part, _ in pairs) == size:
                flat = np.empty(size, pairs[0][1].dtype)
            else:
                flat = variable.numpy().ravel()
            for part, piece in pairs:
                flat[part.start : part.stop] = piece.ravel()
            variable.assign(tf.cast(flat.reshape(variable.shape), variable.dtype))

    def is_parameter(self, block: int) -> bool:
        """Whether a block belongs to trainable variables, and not to state."""
        return self._is_trainable(self.shards[self.blocks[block].shards[0]].variable)

    def is_row_wise(self, block: int) -> bool:
        """Whether a block is a parameter whose optimizer touches looked-up rows only."""
        return self.shards[self.blocks[block].shards[0]].variable in self._row_wise

    def _is_trainable(self, index: int) -> bool:
        return index < self._num_trainable

    def _is_table(self, block: Block) -> bool:
        return self.shards[block.shards[0]].variable in self._looked_up

    def _shape_of(self, shard: int) -> tuple[int, ...]:
        whole = tuple(self._originals[self.shards[shard].variable].shape)
        return (self.shards[shard].stop - self.shards[shard].start, *whole[1:]) if whole else ()

    @staticmethod
    def _counter(device: str, value: int) -> tf.Variable:
        with tf.device(device):
            return tf.Variable(value, dtype=tf.int64, trainable=False, name=GLOBAL_STEP)

    def _make_blocks(self, optimizer: keras.optimizers.Optimizer, dense: frozenset[int]) -> list[Block]:
        alike: dict[tuple[Any, ...], list[int]] = defaultdict(list)
        for i, shard in enumerate(self.shards):
            key: tuple[Any, ...] = (i,)
            if self._can_be_flat(shard.variable, optimizer, dense):
                original = self._originals[shard.variable]
                is_trainable = self._is_trainable(shard.variable)
                is_decayed = is_trainable and decays(optimizer, original)
                key = ("flat", shard.server, original.dtype, is_trainable, is_decayed)
            alike[key].append(i)
        return [Block(self.shards[found[0]].server, tuple(found), key[0] == "flat") for key, found in alike.items()]

    def _can_be_flat(self, index: int, optimizer: keras.optimizers.Optimizer, dense: frozenset[int]) -> bool:
        original = self._originals[index]
        if not self._is_remote or original.dtype == "bool":
            return False
        if not self._is_trainable(index):
            return True
        has_own_rule = original.constraint is not None or original.overwrite_with_gradient
        # What gets no gradient must not be touched, neither by weight decay nor by anything else.
        return index in dense and index not in self._looked_up and is_elementwise(optimizer) and not has_own_rule

    def _variable_of(self, block: Block, name: str) -> keras.Variable:
        """The variable that stores a block, with its initial value."""
        first = self.shards[block.shards[0]]
        original = self._originals[first.variable]
        values = [self._originals[self.shards[i].variable].numpy() for i in block.shards]
        pieces = [
            value[self.shards[i].start : self.shards[i].stop] if value.ndim else value
            for i, value in zip(block.shards, values)
        ]
        with tf.device(self.devices[block.server]):
            variable = keras.Variable(
                np.concatenate([piece.ravel() for piece in pieces]) if block.is_flat else pieces[0],
                dtype=original.dtype,
                trainable=original.trainable,
                name=name,
            )
        if not block.is_flat:
            # Some optimizers treat variables by their path.
            variable._path = original.path
            variable.constraint = original.constraint
            variable.overwrite_with_gradient = original.overwrite_with_gradient
        return variable

    def _part(self, shard: int, variable: keras.Variable) -> _Part:
        """Where a shard is in a variable that is laid out as its block."""
        before = self.blocks[self._block_of[shard]].shards
        start = sum(prod(self._shape_of(i)) for i in before[: before.index(shard)])
        return _Part(variable.value, start, self._shape_of(shard))

    def _make_optimizers(self, optimizer: keras.optimizers.Optimizer, names: Sequence[str]) -> None:
        """One optimizer per server for its blocks, and the names of their slots."""
        slots: dict[str, dict[int, _Part]] = defaultdict(dict)
        for server, device in enumerate(self.devices):
            blocks = [b for b, block in enumerate(self.blocks) if block.server == server and self.is_parameter(b)]
            if not blocks:
                continue
            self._optimizers[server] = ServerOptimizer(
                optimizer,
                [self._originals[self.shards[self.blocks[b].shards[0]].variable] for b in blocks],
                [self._variables[b] for b in blocks],
                [self.is_row_wise(b) for b in blocks],
                device,
            )
            for key, variable in self._optimizers[server].state([str(b) for b in blocks]):
                group, _, rest = key.partition("/")
                if group != "slots":
                    self._copies[key].append(variable.value)
                    self._named.setdefault(key, [_Part(variable.value, 0, tuple(variable.shape))])
                    continue
                number, _, slot = rest.partition("/")
                block = self.blocks[int(number)]
                for shard in block.shards:
                    # A slot of another shape than its variable belongs to a block of one.
                    part = self._part(shard, variable) if block.is_flat else _whole(variable)
                    slots[f"slots/{names[self.shards[shard].variable]}/{slot}"][shard] = part
        for name, by_shard in slots.items():
            self._named[name] = [by_shard[i] for i in sorted(by_shard)]

    def _apply_on(self, server: int, arrived: Mapping[int, tf.Tensor | tf.IndexedSlices]) -> tf.Tensor:
        """Applies and counts what has arrived at one server; returns how many updates it has applied."""
        blocks = [b for b, block in enumerate(self.blocks) if block.server == server]
        of_server = [arrived[b] for b in blocks if b in arrived]
        with tf.device(self.devices[server]):
            with tf.control_dependencies(tf.nest.flatten(of_server, expand_composites=True)):
                self._steps[server].assign_add(1, read_value=False)
                step = self._steps[server].read_value()
            if server in self._optimizers:
                self._optimizers[server].apply([arrived.get(b) for b in blocks if self.is_parameter(b)], step - 1)
            for b in blocks:
                if not self.is_parameter(b) and b in arrived:
                    variable = self._variables[b].value
                    change = variable.assign_add if self._adds(variable.dtype) else variable.assign
                    change(arrived[b], read_value=False)
        return step

    def _look_up(self, index: int, ids: tf.Tensor) -> tf.Tensor:
        """Rows of a parameter, from whichever servers hold them: unique ids, int64 `[n]` -> `[n, ...]`."""
        shards = self._shards_of[index]
        chosen, rows = [], []
        for position, i in enumerate(shards):
            shard, block = self.shards[i], self._block_of[i]
            # Ids that no shard has go to the first or the last, which says that they are out of range.
            here = (ids >= shard.start) | (position == 0)
            here &= (ids < shard.stop) | (position == len(shards) - 1)
            chosen.append(tf.where(here)[:, 0])
            wanted = ids if len(shards) == 1 else tf.gather(ids, chosen[-1]) - shard.start
            with tf.device(self._device(block) or None):
                found = self._variables[block].value.sparse_read(tf.identity(wanted))
            rows.append(tf.identity(found))
        return rows[0] if len(shards) == 1 else tf.dynamic_stitch([tf.cast(c, tf.int32) for c in chosen], rows)

    def _adds(self, dtype: tf.DType) -> bool:
        """Whether a change of a state variable is added to it. With one writer the new value itself is exact."""
        return self._is_remote and dtype != tf.bool

    def _state_changes(self, state: Sequence[Change], pulled: Pulled) -> list[Change]:
        return [
            new if new is None else tf.cast(new, old.dtype) - old if self._adds(old.dtype) else tf.cast(new, old.dtype)
            for new, old in zip(state, pulled.state)
        ]

    def _device(self, block: int) -> str:
        return self.devices[self.blocks[block].server]

    def _read_groups(self) -> list[list[tf.Variable]]:
        groups: dict[tuple[str, tf.DType], dict[int, tf.Variable]] = defaultdict(dict)
        for parts in self._named.values():
            for part in parts:
                groups[part.variable.device, part.variable.dtype][id(part.variable)] = part.variable
        return [list(variables.values()) for variables in groups.values()]

    def _fuse_all(self) -> list[tf.Tensor]:
        fused = []
        for variables in self._read_groups():
            with tf.device(variables[0].device):
                fused.append(fuse([variable.read_value() for variable in variables]))
        return fused


def _whole(variable: keras.Variable) -> _Part:
    return _Part(variable.value, 0, tuple(variable.shape))
