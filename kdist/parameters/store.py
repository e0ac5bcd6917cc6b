"""`ParameterStore`: the one copy of everything that training changes, on parameter servers or in this process."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import keras
import numpy as np
import tensorflow as tf

from kdist.parameters.apply import ServerOptimizer, optimizer_state
from kdist.parameters.placement import Plan

GLOBAL_STEP = "global_step"


@dataclass(frozen=True)
class Pulled:
    """What a replica step starts from.

    Attributes:
        trainable: values of the trainable variables, in the model's order.
        state: values of the state variables (BatchNormalization statistics), in the model's order.
        global_step: scalar int64, the updates that these values contain.
    """

    trainable: list[tf.Tensor]
    state: list[tf.Tensor]
    global_step: tf.Tensor


class ParameterStore:
    """Parameters, state, optimizer slots and the exact global step.

    `pull` and `push` are called while a function for a worker is traced. Between tasks one tensor travels per server,
    dtype and direction, however many variables there are; storage stays one named variable each.

    Args:
        trainable: the model's trainable variables; their present values are the initial ones.
        state: the model's other variables that training may change.
        names: names of `trainable`, then of `state`.
        optimizer: the built optimizer the model was compiled with; its slots are the initial ones.
        devices: one device per server; a single empty string is this process.
        plan: places `trainable`, then `state`, on `devices`.
    """

    def __init__(
        self,
        trainable: Sequence[keras.Variable],
        state: Sequence[keras.Variable],
        names: Sequence[str],
        optimizer: keras.optimizers.Optimizer,
        devices: Sequence[str],
        plan: Plan,
    ) -> None:
        self._devices = list(devices)
        self._is_remote = any(devices)
        self._num_trainable = len(trainable)
        self._servers = plan.servers
        with tf.device(self._devices[0]):
            self._step = tf.Variable(optimizer.iterations.numpy(), dtype=tf.int64, trainable=False, name=GLOBAL_STEP)
        self._variables = [
            _copy_to(self._devices[server], original, f"v{i}")
            for i, (original, server) in enumerate(zip([*trainable, *state], self._servers))
        ]
        self._named: dict[str, tf.Variable] = {GLOBAL_STEP: self._step}
        for i, (name, variable) in enumerate(zip(names, self._variables)):
            group = "parameters" if i < self._num_trainable else "state"
            self._named[f"{group}/{name}"] = variable.value
        # Every server has its own copy of what belongs to the whole optimizer, as the learning rate, so that applying
        # needs nothing from another server.
        self._copies: dict[str, list[tf.Variable]] = defaultdict(list)
        self._optimizers: dict[int, ServerOptimizer] = {}
        for server, indices in sorted(self._by_server(range(self._num_trainable)).items()):
            server_optimizer = ServerOptimizer(
                optimizer,
                [trainable[i] for i in indices],
                [self._variables[i] for i in indices],
                self._devices[server],
            )
            self._optimizers[server] = server_optimizer
            server_state = optimizer_state(
                server_optimizer.optimizer, [self._variables[i] for i in indices], [names[i] for i in indices]
            )
            for name, variable in server_state.items():
                self._named.setdefault(name, variable.value)
                self._copies[name].append(variable.value)
        self.write(
            {
                name: variable.numpy()
                for name, variable in optimizer_state(optimizer, trainable, names[: len(trainable)]).items()
            }
        )
        self._read_fused = tf.function(self._fuse_all).get_concrete_function()

    @property
    def names(self) -> list[str]:
        """Names of everything that is stored: `global_step`, `parameters/...`, `state/...`, `slots/...`, ..."""
        return list(self._named)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each stored value, by name."""
        return {name: tuple(variable.shape) for name, variable in self._named.items()}

    def global_step(self) -> int:
        """How many updates have been applied, exactly."""
        return int(self._step.numpy())

    def pull(self) -> Pulled:
        """The present values, on the device of the caller."""
        values = [variable.value for variable in self._variables]
        with tf.device(self._devices[0]):
            step = self._step.read_value()
        values = self._transport_to_worker(values) if self._is_remote else [value.read_value() for value in values]
        return Pulled(values[: self._num_trainable], values[self._num_trainable :], tf.identity(step))

    def push(
        self, gradients: Sequence[tf.Tensor | None], state: Sequence[tf.Tensor | None], pulled: Pulled
    ) -> tf.Tensor:
        """Applies gradients and state changes, and counts one step.

        The step is counted on the first server once that server's gradients have arrived.

        Args:
            gradients: one per trainable variable, a tensor, or `tf.IndexedSlices` of some of its rows; None where the
                loss does not depend on it.
            state: new values of the state variables; None where nothing changed. On servers what is added to the
                present value is the difference to the pulled one, so that no worker undoes what another one did.
            pulled: what the step started from.

        Returns:
            Scalar int64, the global step of this update.
        """
        arrived: dict[int, tf.Tensor | tf.IndexedSlices] = {
            i: tensor
            for i, tensor in enumerate([*gradients, *self._state_changes(state, pulled)])
            if tensor is not None
        }
        if self._is_remote:
            arrived = self._transport_to_servers(arrived)
        first = tf.nest.flatten([arrived[i] for i in self._by_server(arrived).get(0, [])], expand_composites=True)
        with tf.device(self._devices[0]), tf.control_dependencies(first):
            self._step.assign_add(1, read_value=False)
            step = self._step.read_value()
        # Parameter servers do not see each other: the step reaches the others by way of the worker.
        step_at_worker = tf.identity(step)
        for server, indices in self._by_server(range(len(self._variables))).items():
            with tf.device(self._devices[server]):
                updates_before = (step if server == 0 else step_at_worker) - 1
                if server in self._optimizers:
                    self._optimizers[server].apply(
                        [arrived.get(i) for i in indices if i < self._num_trainable], updates_before
                    )
                for i in indices:
                    if i >= self._num_trainable and i in arrived:
                        variable = self._variables[i].value
                        change = variable.assign_add if self._adds(variable.dtype) else variable.assign
                        change(arrived[i], read_value=False)
        return step_at_worker

    def read(self) -> dict[str, np.ndarray]:
        """Every stored value, by name. Reads one tensor per server and dtype."""
        values: dict[str, np.ndarray] = {}
        for (_, names), fused in zip(self._read_groups(), self._read_fused()):
            sizes = [int(self._named[name].shape.num_elements()) for name in names]
            parts = np.split(fused.numpy(), np.cumsum(sizes)[:-1])
            values |= {name: part.reshape(self._named[name].shape) for name, part in zip(names, parts)}
        return values

    def write(self, values: Mapping[str, np.ndarray]) -> None:
        """Sets stored values by name; names that are not given keep theirs."""
        for name, value in values.items():
            for variable in self._copies.get(name) or [self._named[name]]:
                variable.assign(tf.cast(value, variable.dtype))

    def _adds(self, dtype: tf.DType) -> bool:
        """Whether a change of a state variable is added to it. With one writer the new value itself is exact."""
        return self._is_remote and dtype != tf.bool

    def _state_changes(self, state: Sequence[tf.Tensor | None], pulled: Pulled) -> list[tf.Tensor | None]:
        return [
            new if new is None else tf.cast(new, old.dtype) - old if self._adds(old.dtype) else tf.cast(new, old.dtype)
            for new, old in zip(state, pulled.state)
        ]

    def _by_server(self, indices: Iterable[int]) -> dict[int, list[int]]:
        """The variable indices, grouped by the server that holds them."""
        groups: dict[int, list[int]] = defaultdict(list)
        for i in indices:
            groups[self._servers[i]].append(i)
        return groups

    def _by_server_and_dtype(self, dtypes: Mapping[int, tf.DType]) -> dict[tuple[int, tf.DType], list[int]]:
        groups: dict[tuple[int, tf.DType], list[int]] = defaultdict(list)
        for i, dtype in dtypes.items():
            groups[self._servers[i], dtype].append(i)
        return groups

    def _transport_to_worker(self, variables: Sequence[tf.Variable]) -> list[tf.Tensor]:
        values: dict[int, tf.Tensor] = {}
        for (server, _), indices in self._by_server_and_dtype({i: v.dtype for i, v in enumerate(variables)}).items():
            with tf.device(self._devices[server]):
                fused = _fuse([variables[i].read_value() for i in indices])
            values |= zip(indices, _unfuse(tf.identity(fused), [variables[i].shape for i in indices]))
        return [values[i] for i in range(len(variables))]

    def _transport_to_servers(
        self, tensors: Mapping[int, tf.Tensor | tf.IndexedSlices]
    ) -> dict[int, tf.Tensor | tf.IndexedSlices]:
        arrived: dict[int, tf.Tensor | tf.IndexedSlices] = {}
        dense = {i: tensor for i, tensor in tensors.items() if not isinstance(tensor, tf.IndexedSlices)}
        for (server, _), indices in self._by_server_and_dtype({i: t.dtype for i, t in dense.items()}).items():
            fused = _fuse([dense[i] for i in indices])
            with tf.device(self._devices[server]):
                arrived |= zip(indices, _unfuse(tf.identity(fused), [dense[i].shape for i in indices]))
        # How many rows an embedding's gradient has may depend on the batch: they travel by themselves.
        for i in tensors.keys() - dense.keys():
            with tf.device(self._devices[self._servers[i]]):
                arrived[i] = tf.IndexedSlices(
                    tf.identity(tensors[i].values),
                    tf.identity(tensors[i].indices),
                    tf.constant(tuple(self._variables[i].shape)),
                )
        return arrived

    def _read_groups(self) -> list[tuple[str, list[str]]]:
        groups: dict[tuple[str, tf.DType], list[str]] = defaultdict(list)
        for name, variable in self._named.items():
            groups[variable.device, variable.dtype].append(name)
        return [(device, names) for (device, _), names in groups.items()]

    def _fuse_all(self) -> list[tf.Tensor]:
        fused = []
        for device, names in self._read_groups():
            with tf.device(device):
                fused.append(_fuse([self._named[name].read_value() for name in names]))
        return fused


def _copy_to(device: str, original: keras.Variable, name: str) -> keras.Variable:
    with tf.device(device):
        variable = keras.Variable(original.numpy(), dtype=original.dtype, trainable=original.trainable, name=name)
    # Some optimizers treat variables by their path.
    variable._path = original.path
    variable.constraint = original.constraint
    variable.overwrite_with_gradient = original.overwrite_with_gradient
    return variable


def _fuse(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Tensors of one dtype, flattened, one behind the other."""
    return tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], 0)


def _unfuse(fused: tf.Tensor, shapes: Sequence[tf.TensorShape]) -> list[tf.Tensor]:
    parts = tf.split(fused, [shape.num_elements() for shape in shapes])
    return [tf.reshape(part, shape) for part, shape in zip(parts, shapes)]
