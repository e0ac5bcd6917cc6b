"""What servers have of each group of tables, for `DeltaFiles`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import tensorflow as tf

from kdist.model.table_groups import TableGroup
from kdist.parameters.placement.blocks import Blocks, StoredShard
from kdist.parameters.placement.plan import Shard
from kdist.parameters.tables.changed_rows import ChangedRows
from kdist.parameters.tables.dynamic_table import DynamicTable
from kdist.parameters.values.delta_files import BlockRows, RowRange


def dynamic_groups(
    groups: Sequence[TableGroup],
    names: Sequence[str],
    shards: Sequence[Shard],
    blocks: Blocks,
    tables: Mapping[int, DynamicTable],
) -> list[tuple[list[str], list[DynamicTable]]]:
    """For each group of dynamic tables, the names of its tables, and its rows on the servers.

    Args:
        names: of all parameters.
        tables: by block.
    """
    found = []
    for group in groups:
        if group.dynamic:
            holders = [blocks.of_shard[i] for i in _shards_of(group.tables[0], shards)]
            of_servers = sorted((tables[b] for b in holders), key=lambda table: table.server)
            found.append(([names[table] for table in group.tables], of_servers))
    return found


def fixed_groups(
    groups: Sequence[TableGroup],
    names: Sequence[str],
    shards: Sequence[Shard],
    blocks: Blocks,
    devices: Sequence[str],
    parts: Mapping[str, Sequence[StoredShard]],
    marks: Mapping[int, ChangedRows],
) -> list[tuple[list[str], list[BlockRows]]]:
    """For each group that is updated by rows and has a length, the names of its tables, and its blocks.

    Args:
        names: of all parameters.
        devices: of the servers.
        parts: of all values, by their names in checkpoints.
        marks: of the rows that change, by block.
    """
    found = []
    for group in groups:
        if group.dynamic or not group.is_row_wise:
            continue
        ranges: dict[int, list[RowRange]] = defaultdict(list)
        columns: dict[int, dict[str, tf.Variable]] = defaultdict(dict)
        for position, table in enumerate(group.tables):
            of_table = {"vectors": parts[f"parameters/{names[table]}"]}
            slots = [name for name in parts if name.rpartition("/")[0] == f"slots/{names[table]}"]
            of_table |= {slot.rpartition("/")[2]: parts[slot] for slot in slots}
            for number, i in enumerate(_shards_of(table, shards)):
                b = blocks.of_shard[i]
                ranges[b].append(RowRange(position, shards[i].start, shards[i].stop, blocks.first_row(i)))
                columns[b] |= {column: of_shards[number].variable for column, of_shards in of_table.items()}
        of_group = [
            BlockRows(devices[blocks[b].server], columns[b], sorted(own, key=lambda rows: rows.first), marks.get(b))
            for b, own in ranges.items()
        ]
        found.append(([names[table] for table in group.tables], of_group))
    return found


def _shards_of(variable: int, shards: Sequence[Shard]) -> list[int]:
    return [i for i, shard in enumerate(shards) if shard.variable == variable]
