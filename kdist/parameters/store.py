"""`ParameterStore`: the one copy of everything that training changes, on parameter servers or in this process."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import keras
import numpy as np
import tensorflow as tf

from kdist.parameters.apply import ServerOptimizer, optimizer_state
from kdist.parameters.placement import Plan, Shard
from kdist.parameters.transport import Fused, fuse, fuse_by, select_rows

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
    """

    parameters: Sequence[keras.Variable]
    state: Sequence[keras.Variable]
    looked_up: frozenset[int] = frozenset()
    row_wise: frozenset[int] = frozenset()


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
        single: by shard, in one process.
        fused: on servers.
        global_step: scalar int64 on the first server, the updates that these values contain.
    """

    single: dict[int, tf.Tensor]
    fused: list[Fused]
    global_step: tf.Tensor


class ParameterStore:
    """Parameters, state, optimizer slots and the exact global step.

    `pull` and `push` are called while a function for a worker is traced. Between tasks one tensor travels per server,
    dtype and direction, however many variables there are, and of tables only the rows of the batch; storage stays one
    named variable each, or one per shard.

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
        self._variables = [self._copy_of(shard, f"v{i}") for i, shard in enumerate(self.shards)]
        self._shards_of: dict[int, list[int]] = defaultdict(list)
        for i, shard in enumerate(self.shards):
            self._shards_of[shard.variable].append(i)
        # By name the parts of a value, one behind the other by rows.
        self._named: dict[str, list[tf.Variable]] = defaultdict(list, {GLOBAL_STEP: [self._steps[0]]})
        for shard, variable in zip(self.shards, self._variables):
            group = "parameters" if shard.variable < self._num_trainable else "state"
            self._named[f"{group}/{plan.variables[shard.variable].name}"].append(variable.value)
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
            name: tuple(parts[0].shape) if len(parts) == 1 else (sum(p.shape[0] for p in parts), *parts[0].shape[1:])
            for name, parts in self._named.items()
        }

    def global_step(self) -> int:
        """How many updates have been applied, exactly."""
        return int(self._steps[0].numpy())

    def gather(self) -> Gathered:
        """The present values, where they are, fused for the way; for several `pull`s of the same values."""
        with tf.device(self.devices[0]):
            step = self._steps[0].read_value()
        whole = {i: self._variables[i].value for i, s in enumerate(self.shards) if s.variable not in self._looked_up}
        if not self._is_remote:
            return Gathered({i: variable.read_value() for i, variable in whole.items()}, [], step)
        return Gathered({}, fuse_by(whole, self._device, lambda variable: variable.read_value()), step)

    def pull(self, gathered: Gathered | None = None) -> Pulled:
        """The present values, or gathered ones, on the device of the caller; the global step stays where it is."""
        gathered = gathered or self.gather()
        arrived = dict(gathered.single)
        for fused in gathered.fused:
            arrived |= fused.split()
        values: list[tf.Tensor | Callable[[tf.Tensor], tf.Tensor]] = []
        for index in range(len(self._originals)):
            if index in self._looked_up:
                values.append(partial(self._look_up, index))
            else:
                parts = [arrived[i] for i in self._shards_of[index]]
                values.append(parts[0] if len(parts) == 1 else tf.concat(parts, 0))
        return Pulled(values[: self._num_trainable], values[self._num_trainable :], gathered.global_step)

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
        """What `push` is given, by shard; where a variable did not change, its shards are missing."""
        changes: dict[int, tf.Tensor | tf.IndexedSlices] = {}
        for index, change in enumerate([*gradients, *self._state_changes(state, pulled)]):
            shards = self._shards_of[index]
            if change is None:
                continue
            if len(shards) == 1:
                changes[shards[0]] = change
            elif isinstance(change, tf.IndexedSlices):
                changes |= {i: select_rows(change, self.shards[i].start, self.shards[i].stop) for i in shards}
            else:
                sizes = [self.shards[i].stop - self.shards[i].start for i in shards]
                changes |= zip(shards, tf.split(change, sizes))
        return changes

    def transport(self, changes: Mapping[int, tf.Tensor | tf.IndexedSlices]) -> dict[int, tf.Tensor | tf.IndexedSlices]:
        """Changes by shard, moved to the servers of their shards."""
        dense = {i: change for i, change in changes.items() if not isinstance(change, tf.IndexedSlices)}
        arrived: dict[int, tf.Tensor | tf.IndexedSlices] = {}
        for fused in fuse_by(dense, self._device, on_source=False):
            with tf.device(self._device(next(iter(fused.shapes)))):
                arrived |= fused.split()
        # How many rows an embedding's gradient has depends on the batch: they travel by themselves.
        for i in changes.keys() - dense.keys():
            with tf.device(self._device(i)):
                arrived[i] = tf.IndexedSlices(tf.identity(changes[i].values), tf.identity(changes[i].indices))
        return arrived

    def apply(self, arrived: Mapping[int, tf.Tensor | tf.IndexedSlices]) -> tf.Tensor:
        """Applies changes that have arrived at their servers, and counts one step.

        Returns:
            Scalar int64 on the first server, the global step of this update.
        """
        steps = [self._apply_on(server, arrived) for server in range(len(self.devices))]
        return steps[0]

    def _apply_on(self, server: int, arrived: Mapping[int, tf.Tensor | tf.IndexedSlices]) -> tf.Tensor:
        """Applies and counts what has arrived at one server; returns how many updates it has applied."""
        shards = [i for i in range(len(self.shards)) if self.shards[i].server == server]
        of_server = [arrived[i] for i in shards if i in arrived]
        with tf.device(self.devices[server]):
            with tf.control_dependencies(tf.nest.flatten(of_server, expand_composites=True)):
                self._steps[server].assign_add(1, read_value=False)
                step = self._steps[server].read_value()
            if server in self._optimizers:
                self._optimizers[server].apply([arrived.get(i) for i in shards if self.is_parameter(i)], step - 1)
            for i in shards:
                if not self.is_parameter(i) and i in arrived:
                    variable = self._variables[i].value
                    change = variable.assign_add if self._adds(variable.dtype) else variable.assign
                    change(arrived[i], read_value=False)
        return step

    def read(self) -> dict[str, np.ndarray]:
        """Every stored value, by name. Reads one tensor per server and dtype."""
        parts: dict[tuple[str, int], np.ndarray] = {}
        for keys, fused in zip(self._read_groups(), self._read_fused()):
            variables = [self._named[name][number] for name, number in keys]
            bounds = np.cumsum([variable.shape.num_elements() for variable in variables])[:-1]
            for key, variable, part in zip(keys, variables, np.split(fused.numpy(), bounds)):
                parts[key] = part.reshape(variable.shape)
        return {
            name: parts[name, 0] if len(found) == 1 else np.concatenate([parts[name, i] for i in range(len(found))])
            for name, found in self._named.items()
        }

    def write(self, values: Mapping[str, np.ndarray]) -> None:
        """Sets stored values by name; names that are not given keep theirs."""
        for name, value in values.items():
            parts = self._named[name]
            if len(parts) > 1:
                bounds = np.cumsum([part.shape[0] for part in parts])[:-1]
                for part, rows in zip(parts, np.split(value, bounds)):
                    part.assign(tf.cast(rows, part.dtype))
            else:
                for variable in self._copies.get(name) or parts:
                    variable.assign(tf.cast(value, variable.dtype))

    def is_parameter(self, shard: int) -> bool:
        """Whether a shard belongs to a trainable variable, and not to one of state."""
        return self.shards[shard].variable < self._num_trainable

    def is_row_wise(self, shard: int) -> bool:
        """Whether a shard belongs to a parameter whose optimizer touches looked-up rows only."""
        return self.shards[shard].variable in self._row_wise

    @staticmethod
    def _counter(device: str, value: int) -> tf.Variable:
        with tf.device(device):
            return tf.Variable(value, dtype=tf.int64, trainable=False, name=GLOBAL_STEP)

    def _copy_of(self, shard: Shard, name: str) -> keras.Variable:
        original = self._originals[shard.variable]
        value = original.numpy()
        with tf.device(self.devices[shard.server]):
            variable = keras.Variable(
                value[shard.start : shard.stop] if value.ndim else value,
                dtype=original.dtype,
                trainable=original.trainable,
                name=name,
            )
        # Some optimizers treat variables by their path.
        variable._path = original.path
        variable.constraint = original.constraint
        variable.overwrite_with_gradient = original.overwrite_with_gradient
        return variable

    def _make_optimizers(self, optimizer: keras.optimizers.Optimizer, names: Sequence[str]) -> None:
        """One optimizer per server for its shards, and the names of their slots."""
        parts: dict[str, dict[int, tf.Variable]] = defaultdict(dict)
        trainable = [i for i in range(len(self.shards)) if self.is_parameter(i)]
        for server, shards in sorted(self._by_server(trainable).items()):
            variables = [self._variables[i] for i in shards]
            self._optimizers[server] = ServerOptimizer(
                optimizer,
                [self._originals[self.shards[i].variable] for i in shards],
                variables,
                [self.is_row_wise(i) for i in shards],
                self.devices[server],
            )
            for key, variable in self._optimizers[server].state([str(i) for i in shards]):
                group, _, rest = key.partition("/")
                if group == "slots":
                    shard, _, slot = rest.partition("/")
                    parts[f"slots/{names[self.shards[int(shard)].variable]}/{slot}"][int(shard)] = variable.value
                else:
                    self._copies[key].append(variable.value)
                    self._named.setdefault(key, [variable.value])
        for name, by_shard in parts.items():
            self._named[name] = [by_shard[i] for i in sorted(by_shard)]

    def _look_up(self, index: int, ids: tf.Tensor) -> tf.Tensor:
        """Rows of a parameter, from whichever servers hold them: unique ids, int64 `[n]` -> `[n, ...]`."""
        shards = self._shards_of[index]
        chosen, rows = [], []
        for position, i in enumerate(shards):
            shard = self.shards[i]
            # Ids that no shard has go to the first or the last, which says that they are out of range.
            here = (ids >= shard.start) | (position == 0)
            here &= (ids < shard.stop) | (position == len(shards) - 1)
            chosen.append(tf.where(here)[:, 0])
            wanted = ids if len(shards) == 1 else tf.gather(ids, chosen[-1]) - shard.start
            with tf.device(self._device(i) or None):
                found = self._variables[i].value.sparse_read(tf.identity(wanted))
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

    def _device(self, shard: int) -> str:
        return self.devices[self.shards[shard].server]

    def _by_server(self, shards: Iterable[int]) -> dict[int, list[int]]:
        """Shards, grouped by the server that holds them."""
        groups: dict[int, list[int]] = defaultdict(list)
        for i in shards:
            groups[self.shards[i].server].append(i)
        return groups

    def _read_groups(self) -> list[list[tuple[str, int]]]:
        groups: dict[tuple[str, tf.DType], list[tuple[str, int]]] = defaultdict(list)
        for name, parts in self._named.items():
            for number, variable in enumerate(parts):
                groups[variable.device, variable.dtype].append((name, number))
        return list(groups.values())

    def _fuse_all(self) -> list[tf.Tensor]:
        fused = []
        for keys in self._read_groups():
            variables = [self._named[name][number] for name, number in keys]
            with tf.device(variables[0].device):
                fused.append(fuse([variable.read_value() for variable in variables]))
        return fused
