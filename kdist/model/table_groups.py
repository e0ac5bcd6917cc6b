"""Groups of embedding tables that are looked up and updated as one, so that a step costs the same for any number."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import keras

from kdist._compat.keras import decays, table_of
from kdist.layers import DynamicEmbedding
from kdist.model.updates import StepUpdates


@dataclass(frozen=True)
class TableGroup:
    """Tables with rows of one dtype and shape, and the same updates. Each row of a group has a number, which whatever
    stores the rows gives it.

    Attributes:
        tables: the indices of the tables among the trainable variables.
        num_rows: of each table; 0 if it is dynamic.
        row_shape, dtype: of a row.
        is_row_wise: whether the optimizer updates only the rows that were looked up; otherwise there is one table.
        dynamic: the layers of dynamic tables; they differ in their seeds at most.
    """

    tables: tuple[int, ...]
    num_rows: tuple[int, ...]
    row_shape: tuple[int, ...]
    dtype: str
    is_row_wise: bool
    dynamic: tuple[DynamicEmbedding, ...] = ()


def single_groups(layers: Mapping[int, keras.layers.Layer], row_wise: frozenset[int]) -> list[TableGroup]:
    """A group for each table by itself; `layers` by the index of their table."""
    return [_group({index: layer}, index in row_wise) for index, layer in layers.items()]


def group_tables(
    layers: Mapping[int, keras.layers.Layer],
    row_wise: frozenset[int],
    updates: StepUpdates,
    with_gradient: frozenset[int],
) -> list[TableGroup]:
    """Groups as large as they can be.

    Args:
        layers: by the index of their table.
        row_wise: tables whose optimizer updates looked-up rows only; any other is a group by itself.
        updates: of the step.
        with_gradient: tables that get a gradient; those without one are not updated at all.
    """
    alike: dict[Hashable, dict[int, keras.layers.Layer]] = defaultdict(dict)
    for index, layer in layers.items():
        key: Hashable = index
        if index in row_wise:
            table = table_of(layer)
            own = tuple(u for u, update in enumerate(updates.updates) if index in update.variables)
            decayed_by = tuple(decays(optimizer, table) for optimizer in updates.optimizers_of(index))
            key = (table.dtype, tuple(table.shape[1:]), own, decayed_by, index in with_gradient)
            if isinstance(layer, DynamicEmbedding):
                key = (*key, *_dynamic_key(index, layer, is_clipped=_is_clipped_by_itself(updates, index)))
        alike[key][index] = layer
    return [_group(found, next(iter(found)) in row_wise) for found in alike.values()]


def _dynamic_key(index: int, layer: DynamicEmbedding, *, is_clipped: bool) -> tuple[Hashable, ...]:
    """What is equal for dynamic tables of one group."""
    has_bound = layer.eviction is not None and layer.eviction.max_rows is not None
    # Nobody knows afterwards which rows were whose.
    own = index if has_bound or is_clipped else None
    return layer.row_initializer.kind, layer.admission, layer.eviction, own


def _is_clipped_by_itself(updates: StepUpdates, index: int) -> bool:
    return any(optimizer.clipnorm for optimizer in updates.optimizers_of(index))


def _group(layers: Mapping[int, keras.layers.Layer], is_row_wise: bool) -> TableGroup:
    tables = [table_of(layer) for layer in layers.values()]
    first = tables[0]
    num_rows = tuple(table.shape[0] for table in tables)
    dynamic = tuple(layer for layer in layers.values() if isinstance(layer, DynamicEmbedding))
    return TableGroup(tuple(layers), num_rows, tuple(first.shape[1:]), first.dtype, is_row_wise, dynamic)
