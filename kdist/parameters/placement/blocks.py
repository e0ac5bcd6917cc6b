"""`Block`: the variable that stores shards.

All shards that a server's optimizer updates in the same way, element by element, form one vector, so that a server
reads and updates one variable, regardless of the number of layers; the rows of embedding tables form one table.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import keras
import numpy as np
import tensorflow as tf

from kdist._compat.keras import decays, set_path
from kdist._compat.lazy_variable import made_by
from kdist.model.embedding_lookup import TableGroup
from kdist.model.updates import StepUpdates, Update
from kdist.parameters.placement.messages import cut, fuse, unfuse
from kdist.parameters.placement.plan import Shard

#: Of the rows that form one table: TensorFlow counts some rows in 32 bits.
_TABLE_BYTES = 4 << 30


@dataclass(frozen=True)
class ModelVariables:
    """The variables of a model that training changes.

    Attributes:
        parameters, state: trainable variables, and the others that training may change, with their initial values.
        table_groups: the parameters that a step looks up by rows and never sees whole.
        dense: indices of the parameters that get a dense gradient in every step.
        loss_scaling: the optimizer that scales the loss of the model, built.
        num_worker_states: states of layers that stay on each worker.
        replaced: indices of the state whose new value does not add to the old one.
    """

    parameters: Sequence[keras.Variable]
    state: Sequence[keras.Variable]
    table_groups: Sequence[TableGroup] = ()
    dense: frozenset[int] = frozenset()
    loss_scaling: keras.optimizers.LossScaleOptimizer | None = None
    num_worker_states: int = 0
    replaced: frozenset[int] = frozenset()

    @property
    def all(self) -> list[keras.Variable]:
        """The parameters, then the state: the order of variable indices."""
        return [*self.parameters, *self.state]

    def is_parameter(self, variable: int) -> bool:
        return variable < len(self.parameters)

    def tables_with(self, variable: int) -> TableGroup | None:
        """The group of a variable, if it is a table that is looked up."""
        return next((group for group in self.table_groups if variable in group.tables), None)


@dataclass(frozen=True)
class StoredShard:
    """A named value, or some rows of it, from element `start` of a variable on."""

    #: Values are saved, and travel, in slices of at most this size (or one row), so that neither takes memory for a
    #: whole table.
    slice_bytes: ClassVar[int] = 32 << 20

    variable: tf.Variable
    start: int
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.start + prod(self.shape)

    @staticmethod
    def whole(variable: tf.Variable) -> StoredShard:
        return StoredShard(variable, 0, tuple(variable.shape))


@dataclass(frozen=True)
class Block:
    """Shards of one server that are stored as one variable.

    Attributes:
        shards: their indices in the plan.
        variable: the index of the variable of the first; the others are in the same updates.
        is_flat: whether the variable is the concatenation of all of them, flattened; otherwise there is only one shard,
            or they are of tables, and their rows follow each other.
        is_parameter: whether they belong to trainable variables rather than to state.
        tables: the group of tables that is looked up by rows, if they are of these.
        is_replaced: whether a change is the new value, and not what is added to the old one.
        aggregation: joins the changes of synchronous replicas: `mean`, `sum` or `first`.
    """

    server: int
    shards: tuple[int, ...]
    variable: int
    is_flat: bool
    is_parameter: bool
    tables: TableGroup | None = None
    is_replaced: bool = False
    aggregation: str = "mean"

    @property
    def is_row_wise(self) -> bool:
        """True for rows of tables that are also updated by rows."""
        return self.tables is not None and self.tables.is_row_wise

    @property
    def is_dynamic(self) -> bool:
        """True for dynamic tables; the variable is that of `DynamicTable.vectors`."""
        return self.tables is not None and bool(self.tables.dynamic)


class Blocks(Sequence[Block]):
    """The blocks of all shards, and the conversion between values of blocks and values of shards.

    Args:
        flat_parameters, flat_state: whether variables that are treated alike are one block; if not, each has one.

    Attributes:
        of_shard: the index of the block of each shard.
        table_groups: the groups of tables that are looked up.
    """

    def __init__(
        self,
        variables: ModelVariables,
        shards: Sequence[Shard],
        updates: StepUpdates,
        *,
        flat_parameters: bool,
        flat_state: bool,
    ) -> None:
        self.shards, self.table_groups = list(shards), variables.table_groups
        self._variables, self._all_variables = variables, variables.all
        alike: dict[tuple[Any, ...], list[int]] = defaultdict(list)
        for i, shard in enumerate(self.shards):
            original = self._all_variables[shard.variable]
            is_parameter = variables.is_parameter(shard.variable)
            tables = variables.tables_with(shard.variable)
            key: tuple[Any, ...] = (i,)
            if tables is not None and tables.is_row_wise:
                key = ("rows", shard.server, tables.tables)
            elif (flat_parameters if is_parameter else flat_state) and self._can_be_flat(shard.variable, updates):
                # Of state, neither has any.
                in_updates = tuple(is_parameter and shard.variable in update.variables for update in updates.updates)
                decayed_by = tuple(decays(optimizer, original) for optimizer in updates.optimizers_of(shard.variable))
                aggregation = self._aggregation(shard.variable)
                key = ("flat", shard.server, original.dtype, in_updates, decayed_by, aggregation)
            alike[key].append(i)
        self._blocks = [
            self._block(group, is_flat=key[0] == "flat")
            for key, found in alike.items()
            for group in cut(found, self._num_bytes, _TABLE_BYTES if key[0] == "rows" else None)
        ]
        self.of_shard = {shard: b for b, block in enumerate(self._blocks) for shard in block.shards}
        # Traced once, however many steps a call unrolls: a flat block may have hundreds of shards.
        self._split_flat = tf.function(self._trace_split, autograph=False)
        self._join_flat = tf.function(fuse, autograph=False)

    def __getitem__(self, index: Any) -> Any:
        return self._blocks[index]

    def __len__(self) -> int:
        return len(self._blocks)

    def split(self, block: int, value: Any) -> dict[int, Any]:
        """The value of a block, or a change of it, by shard."""
        shards = self._blocks[block].shards
        if self._blocks[block].is_flat:
            return dict(zip(shards, self._split_flat(block, value)))
        if len(shards) == 1:
            return {shards[0]: value}
        # Changes of rows of tables, which keep their numbers.
        starts = tf.constant([self.first_row(i) for i in shards], value.indices.dtype)
        number = tf.searchsorted(starts, value.indices, side="right") - 1
        parts = (tf.dynamic_partition(tensor, number, len(shards)) for tensor in (value.values, value.indices))
        return {i: tf.IndexedSlices(*part) for i, part in zip(shards, zip(*parts))}

    def join(self, block: int, by_shard: Mapping[int, Any]) -> Any:
        """Undoes `split`, but for the order of rows."""
        of_shards = [by_shard[i] for i in self._blocks[block].shards]
        if self._blocks[block].is_flat:
            return self._join_flat(of_shards)
        if len(of_shards) == 1:
            return of_shards[0]
        values, rows = ([getattr(part, name) for part in of_shards] for name in ("values", "indices"))
        return tf.IndexedSlices(tf.concat(values, 0), tf.concat(rows, 0))

    def _trace_split(self, block: int, value: tf.Tensor) -> list[tf.Tensor]:
        return unfuse(value, [tf.TensorShape(self.shape_of(i)) for i in self._blocks[block].shards])

    def shape_of(self, shard: int) -> tuple[int, ...]:
        whole = tuple(self._all_variables[self.shards[shard].variable].shape)
        return (self.shards[shard].stop - self.shards[shard].start, *whole[1:]) if whole else ()

    def shape_of_block(self, block: int) -> tuple[int, ...]:
        """Of its variable; of a dynamic table as if it had no rows."""
        shapes = [self.shape_of(i) for i in self._blocks[block].shards]
        if self._blocks[block].is_flat:
            return (sum(map(prod, shapes)),)
        return shapes[0] if len(shapes) == 1 else (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def _num_bytes(self, shard: int) -> int:
        return prod(self.shape_of(shard)) * tf.as_dtype(self._all_variables[self.shards[shard].variable].dtype).size

    def start_of(self, shard: int) -> int:
        """The element of its block with which a shard begins."""
        before = self._blocks[self.of_shard[shard]].shards
        return sum(prod(self.shape_of(i)) for i in before[: before.index(shard)])

    def first_row(self, shard: int) -> int:
        """The row of its block with which a shard of a table begins."""
        return self.start_of(shard) // prod(self.shape_of(shard)[1:])

    def stored_shard(self, shard: int, variable: keras.Variable) -> StoredShard:
        """The elements of a shard in the variable of its block, or in one of the same shape."""
        return StoredShard(variable.value, self.start_of(shard), self.shape_of(shard))

    def of_tables(self, group: TableGroup) -> list[int]:
        """The blocks that have rows of a group of tables, server by server."""
        own = [b for b, block in enumerate(self) if block.tables is group]
        return sorted(own, key=lambda b: self._blocks[b].server)

    def in_update(self, update: Update) -> set[int]:
        return {b for b, block in enumerate(self) if block.is_parameter and block.variable in update.variables}

    def original(self, block: int) -> keras.Variable:
        """The variable of the model that a block stands for; the first of several; the others are equivalent."""
        return self._all_variables[self._blocks[block].variable]

    def starts_empty(self, block: int) -> bool:
        """True if a block is made without values, because this process has none, or they do not travel at once."""
        shards = self._blocks[block].shards
        are_here = all(made_by(self._all_variables[self.shards[i].variable]) is None for i in shards)
        return not are_here or sum(map(self._num_bytes, shards)) > StoredShard.slice_bytes

    def make_variable(self, block: int, device: str) -> keras.Variable:
        """The variable that stores a block, with its initial value if it does not start empty."""
        original = self.original(block)
        with tf.device(device):
            variable = keras.Variable(
                _capacity if self.starts_empty(block) else self._initial_value(block),
                shape=self.shape_of_block(block),
                dtype=original.dtype,
                trainable=original.trainable,
                name=f"v{block}",
            )
        if not self._blocks[block].is_flat:
            # Some optimizers treat variables by their path.
            set_path(variable, original.path)
            variable.constraint = original.constraint
            variable.overwrite_with_gradient = original.overwrite_with_gradient
        return variable

    def _initial_value(self, block: int) -> np.ndarray:
        values = []
        for shard in (self.shards[i] for i in self._blocks[block].shards):
            value = self._all_variables[shard.variable].numpy()
            values.append(value[shard.start : shard.stop] if value.ndim else value)
        if self._blocks[block].is_flat:
            values = [value.ravel() for value in values]
        return values[0] if len(values) == 1 else np.concatenate(values)

    def _block(self, shards: Sequence[int], *, is_flat: bool) -> Block:
        first, variables = self.shards[shards[0]], self._variables
        original = self._all_variables[first.variable]
        # A sum of new values would have the old one in it twice.
        is_summed = original.aggregation == "sum" and tf.as_dtype(original.dtype) != tf.bool
        return Block(
            first.server,
            tuple(shards),
            first.variable,
            is_flat,
            variables.is_parameter(first.variable),
            variables.tables_with(first.variable),
            first.variable in variables.replaced and not is_summed,
            self._aggregation(first.variable),
        )

    def _aggregation(self, variable: int) -> str:
        """By the variable's own `aggregation`; without one, a mean of values that do not add up makes no sense."""
        if self._variables.is_parameter(variable):
            return "mean"
        default = "first" if variable in self._variables.replaced else "mean"
        own = self._all_variables[variable].aggregation
        return {"mean": "mean", "sum": "sum", "only_first_replica": "first"}.get(own, default)

    def _can_be_flat(self, variable: int, updates: StepUpdates) -> bool:
        original, variables = self._all_variables[variable], self._variables
        if not variables.is_parameter(variable):
            return variable not in variables.replaced
        # What gets no gradient must not be touched, neither by weight decay nor by anything else.
        if variable in updates.assigned or variable not in variables.dense:
            return False
        has_own_rule = original.constraint is not None or original.overwrite_with_gradient
        return variables.tables_with(variable) is None and updates.is_elementwise(variable) and not has_own_rule


def _capacity(shape: Sequence[int], dtype: Any = None) -> tf.Tensor:
    """Memory without values: the system provides it when it is first written to."""
    return tf.raw_ops.Empty(shape=shape, dtype=tf.as_dtype(dtype), init=False)
