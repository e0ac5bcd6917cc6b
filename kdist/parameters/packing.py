"""How shards are stored: all shards that a server's optimizer updates in the same way, element by element, form one
vector (`Block`), so that a server reads and updates one variable, regardless of the number of layers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kdist._compat.keras import decays, set_path
from kdist._compat.reserved import made_by
from kdist.model.updates import StepUpdates, Update
from kdist.parameters.named_values import NamedValues
from kdist.parameters.placement import Shard
from kdist.parameters.transport import cut, fuse, unfuse


@dataclass(frozen=True)
class ModelVariables:
    """The variables of a model that training changes.

    Attributes:
        parameters, state: trainable variables, and the others that training may change, with their initial values.
        looked_up: indices of the parameters that a step looks up by rows and never sees whole.
        row_wise: of those, the ones whose optimizer touches looked-up rows only.
        dense: indices of the parameters that get a dense gradient in every step.
        loss_scaling: what scales the loss of the model, built.
        num_worker_states: how many states of layers stay on each worker.
    """

    parameters: Sequence[keras.Variable]
    state: Sequence[keras.Variable]
    looked_up: frozenset[int] = frozenset()
    row_wise: frozenset[int] = frozenset()
    dense: frozenset[int] = frozenset()
    loss_scaling: keras.optimizers.LossScaleOptimizer | None = None
    num_worker_states: int = 0

    @property
    def all(self) -> list[keras.Variable]:
        """The parameters, then the state: the order of variable indices."""
        return [*self.parameters, *self.state]

    def is_parameter(self, variable: int) -> bool:
        return variable < len(self.parameters)


@dataclass(frozen=True)
class Block:
    """Shards of one server that are stored as one variable.

    Attributes:
        shards: their indices in the plan.
        is_flat: whether the variable is the concatenation of all of them; otherwise there is only one shard.
        is_parameter: whether they belong to trainable variables rather than to state.
        is_table, is_row_wise: whether it belongs to a parameter in `looked_up`, or in `row_wise`.
    """

    server: int
    shards: tuple[int, ...]
    is_flat: bool
    is_parameter: bool
    is_table: bool
    is_row_wise: bool


class Blocks(Sequence[Block]):
    """The blocks of all shards, and the conversion between values of blocks and values of shards.

    Args:
        updates: of the parameters.
        may_be_flat: False: one block per shard.
    """

    def __init__(
        self,
        variables: ModelVariables,
        shards: Sequence[Shard],
        updates: StepUpdates,
        *,
        may_be_flat: bool,
    ) -> None:
        self._variables = variables
        self._all_variables = variables.all
        self._shards = list(shards)
        alike: dict[tuple[Any, ...], list[int]] = defaultdict(list)
        for i, shard in enumerate(self._shards):
            original = self._all_variables[shard.variable]
            key: tuple[Any, ...] = (i,)
            if may_be_flat and self._can_be_flat(shard.variable, updates):
                # Of state, neither has any.
                in_updates = tuple(u for u, update in enumerate(updates.updates) if self._is_in(update, shard.variable))
                decayed_by = [decays(optimizer, original) for optimizer in updates.optimizers_of(shard.variable)]
                key = ("flat", shard.server, original.dtype, in_updates, tuple(decayed_by))
            alike[key].append(i)
        self._blocks = [
            self._block(group, is_flat=key[0] == "flat")
            for key, found in alike.items()
            for group in cut(found, self._num_bytes)
        ]
        #: The index of the block that a shard is in.
        self.of_shard = {shard: b for b, block in enumerate(self._blocks) for shard in block.shards}
        # Traced once, however many steps a call unrolls: a flat block may have hundreds of shards.
        self._split_flat = tf.function(self._trace_split, autograph=False)
        self._join_flat = tf.function(fuse, autograph=False)

    def __getitem__(self, index: Any) -> Any:
        return self._blocks[index]

    def __len__(self) -> int:
        return len(self._blocks)

    def split(self, block: int, value: tf.Tensor) -> dict[int, tf.Tensor]:
        """The value of a block, or a change of it, by shard."""
        shards = self._blocks[block].shards
        if not self._blocks[block].is_flat:
            return {shards[0]: value}
        return dict(zip(shards, self._split_flat(block, value)))

    def join(self, block: int, by_shard: Mapping[int, tf.Tensor]) -> tf.Tensor:
        """Undoes `split`."""
        shards = self._blocks[block].shards
        return self._join_flat([by_shard[i] for i in shards]) if self._blocks[block].is_flat else by_shard[shards[0]]

    def _trace_split(self, block: int, value: tf.Tensor) -> list[tf.Tensor]:
        return unfuse(value, [tf.TensorShape(self.shape_of(i)) for i in self._blocks[block].shards])

    def shape_of(self, shard: int) -> tuple[int, ...]:
        whole = tuple(self._all_variables[self._shards[shard].variable].shape)
        return (self._shards[shard].stop - self._shards[shard].start, *whole[1:]) if whole else ()

    def _num_bytes(self, shard: int) -> int:
        return prod(self.shape_of(shard)) * tf.as_dtype(self._all_variables[self._shards[shard].variable].dtype).size

    def start_of(self, shard: int) -> int:
        """At which element of its block a shard begins."""
        before = self._blocks[self.of_shard[shard]].shards
        return sum(prod(self.shape_of(i)) for i in before[: before.index(shard)])

    def original(self, block: int) -> keras.Variable:
        """The variable of the model that a block stands for; of a flat one the first, in all that matters like it."""
        return self._all_variables[self._shards[self._blocks[block].shards[0]].variable]

    def starts_empty(self, block: int) -> bool:
        """Whether a block is made without values, because this process has none, or they do not travel at once."""
        shards = self._blocks[block].shards
        are_here = all(made_by(self._all_variables[self._shards[i].variable]) is None for i in shards)
        return not are_here or sum(map(self._num_bytes, shards)) > NamedValues.piece_bytes

    def make_variable(self, block: int, device: str) -> keras.Variable:
        """The variable that stores a block, with its initial value if it does not start empty."""
        original, is_flat = self.original(block), self._blocks[block].is_flat
        shards = self._blocks[block].shards
        size = sum(prod(self.shape_of(i)) for i in shards)
        with tf.device(device):
            variable = keras.Variable(
                _capacity if self.starts_empty(block) else self._initial_value(block),
                shape=(size,) if is_flat else self.shape_of(shards[0]),
                dtype=original.dtype,
                trainable=original.trainable,
                name=f"v{block}",
            )
        if not is_flat:
            # Some optimizers treat variables by their path.
            set_path(variable, original.path)
            variable.constraint = original.constraint
            variable.overwrite_with_gradient = original.overwrite_with_gradient
        return variable

    def _initial_value(self, block: int) -> np.ndarray:
        pieces = []
        for i in self._blocks[block].shards:
            shard = self._shards[i]
            value = self._all_variables[shard.variable].numpy()
            pieces.append(value[shard.start : shard.stop] if value.ndim else value)
        return np.concatenate([piece.ravel() for piece in pieces]) if self._blocks[block].is_flat else pieces[0]

    def _block(self, shards: Sequence[int], *, is_flat: bool) -> Block:
        first, variables = self._shards[shards[0]], self._variables
        return Block(
            first.server,
            tuple(shards),
            is_flat,
            is_parameter=variables.is_parameter(first.variable),
            is_table=first.variable in variables.looked_up,
            is_row_wise=first.variable in variables.row_wise,
        )

    def _is_in(self, update: Update, variable: int) -> bool:
        return self._variables.is_parameter(variable) and variable in update.variables

    def _can_be_flat(self, variable: int, updates: StepUpdates) -> bool:
        original, variables = self._all_variables[variable], self._variables
        if original.dtype == "bool":
            return False
        if not variables.is_parameter(variable):
            return True
        has_own_rule = original.constraint is not None or original.overwrite_with_gradient
        # What gets no gradient must not be touched, neither by weight decay nor by anything else.
        if variable in updates.assigned:
            return False
        is_dense = variable in variables.dense and variable not in variables.looked_up
        return is_dense and updates.is_elementwise(variable) and not has_own_rule


def _capacity(shape: Sequence[int], dtype: Any = None) -> tf.Tensor:
    """Memory without values: the system provides it when it is first written to."""
    return tf.raw_ops.Empty(shape=shape, dtype=tf.as_dtype(dtype), init=False)
