"""The tables of the blocks of a store, on the devices of the servers."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from kdist.parameters.placement.blocks import Blocks
from kdist.parameters.tables.changed_rows import ChangedRows, SaveIntervals
from kdist.parameters.tables.dynamic_table import DynamicTable


def make_dynamic(blocks: Blocks, devices: Sequence[str], intervals: SaveIntervals | None) -> dict[int, DynamicTable]:
    """The rows of the blocks of dynamic tables, none at first.

    Args:
        intervals: in which their changes are marked, if they are.
    """
    num_dynamic = sum(bool(group.dynamic) for group in blocks.table_groups)
    found = {}
    for b, block in enumerate(blocks):
        if block.is_dynamic:
            group = blocks.table_groups[blocks.table_group(b)]
            device = devices[block.server]
            interval = None if intervals is None else intervals.of_servers[block.server]
            found[b] = DynamicTable(group, device, block.server, len(devices), num_dynamic, interval)
    return found


def make_marks(blocks: Blocks, devices: Sequence[str], intervals: SaveIntervals | None) -> dict[int, ChangedRows]:
    """The marks of the rows of other tables that are updated by rows; none without intervals."""
    found: dict[int, ChangedRows] = {}
    for b, block in enumerate(blocks):
        if intervals is not None and block.is_row_wise and not block.is_dynamic:
            with tf.device(devices[block.server]):
                num_rows = sum(blocks.shape_of(i)[0] for i in block.shards)
                found[b] = ChangedRows(num_rows, intervals.of_servers[block.server])
    return found
