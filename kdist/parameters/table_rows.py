"""`TableRows`: finds the rows of embedding tables on their servers, with one request per server for all tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod

import tensorflow as tf

from kdist.model.table_groups import TableGroup
from kdist.parameters.packing import Blocks
from kdist.parameters.placement import Shard
from kdist.parameters.transport import Wire


class _Places:
    """Where the rows of a group are; one operation finds them for all tables and servers.

    Attributes:
        blocks: those that hold its rows.
    """

    def __init__(self, group: TableGroup, shards: Sequence[Shard], blocks: Blocks) -> None:
        self._group = group
        starts: list[int] = []
        shifts: list[int] = []
        holders: list[int] = []
        for table, offset in zip(group.tables, group.offsets):
            for i in (i for i, shard in enumerate(shards) if shard.variable == table):
                starts.append(offset + shards[i].start)
                shifts.append(blocks.start_of(i) // prod(group.row_shape) - starts[-1])
                holders.append(blocks.of_shard[i])
        self.blocks = list(dict.fromkeys(holders))
        self._starts, self._shifts = starts, shifts
        self._holders = [self.blocks.index(block) for block in holders]
        # Traced once, no matter how many steps a call unrolls.
        self.split = tf.function(self._split, autograph=False)
        self.split_gradients = tf.function(self._split_gradients, autograph=False)

    def _split(self, numbers: tf.Tensor) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """For each block the rows in it, int64 `[n]`, and which of `numbers` they are, int32."""
        holder, row = self._find(numbers)
        count = len(self.blocks)
        return (
            tf.dynamic_partition(row, holder, count),
            tf.dynamic_partition(tf.range(tf.size(numbers)), holder, count),
        )

    def _split_gradients(self, gradients: Sequence[tf.IndexedSlices | None]) -> list[tf.IndexedSlices]:
        """Gradients of the tables, in their order, by block."""
        pairs = [(gradient, offset) for gradient, offset in zip(gradients, self._group.offsets) if gradient is not None]
        holder, row = self._find(tf.concat([gradient.indices + offset for gradient, offset in pairs], 0))
        values, count = tf.concat([gradient.values for gradient, _ in pairs], 0), len(self.blocks)
        parts = zip(tf.dynamic_partition(values, holder, count), tf.dynamic_partition(row, holder, count))
        return [tf.IndexedSlices(*part) for part in parts]

    def _find(self, numbers: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """The block of each row, by its place in `blocks`, and its row there."""
        shard = tf.searchsorted(tf.constant(self._starts, tf.int64), numbers, side="right") - 1
        shift = tf.gather(tf.constant(self._shifts, tf.int64), shard)
        return tf.gather(tf.constant(self._holders), shard), numbers + shift


class TableRows:
    """Looks up rows of all groups of tables, and splits their gradients.

    Args:
        groups: of the tables.
        shards, blocks: where they are.
        variables: of each block.
        device_of: block -> its server; empty for this process.
        wire: how rows travel.
    """

    def __init__(
        self,
        groups: Sequence[TableGroup],
        shards: Sequence[Shard],
        blocks: Blocks,
        variables: Sequence[tf.Variable],
        device_of: Callable[[int], str],
        wire: Wire,
    ) -> None:
        self._groups = groups
        self._places = [_Places(group, shards, blocks) for group in groups]
        self._variables = variables
        self._device_of = device_of
        self._wire = wire

    def fetch(self, wanted: Mapping[int, tf.Tensor]) -> dict[int, tf.Tensor]:
        """Rows of groups, by their indices, on the device of the caller; see `kdist.model.lookup_rounds.FetchRows`."""
        rows: dict[int, tf.Tensor] = {}
        which: dict[int, list[tf.Tensor]] = {}
        for g, numbers in wanted.items():
            split, which[g] = self._places[g].split(numbers)
            rows |= zip(self._places[g].blocks, split)
        by_server: dict[str, dict[int, tf.Tensor]] = {}
        for block, of_block in rows.items():
            by_server.setdefault(self._device_of(block), {})[block] = of_block
        found: dict[int, tf.Tensor] = {}
        for device, of_server in by_server.items():
            found |= self._request(device, of_server) if device else self._read(of_server)
        return {g: _stitch(which[g], [found[block] for block in self._places[g].blocks]) for g in wanted}

    def by_block(self, gradients: Mapping[int, tf.IndexedSlices]) -> dict[int, tf.IndexedSlices]:
        """Gradients of tables by the blocks that hold their rows."""
        changes: dict[int, tf.IndexedSlices] = {}
        for group, places in zip(self._groups, self._places):
            of_group = [gradients.get(table) for table in group.tables]
            if any(gradient is not None for gradient in of_group):
                changes |= zip(places.blocks, places.split_gradients(of_group))
        return changes

    def _read(self, rows: Mapping[int, tf.Tensor]) -> dict[int, tf.Tensor]:
        return {block: self._variables[block].sparse_read(of_block) for block, of_block in rows.items()}

    def _request(self, device: str, rows: Mapping[int, tf.Tensor]) -> dict[int, tf.Tensor]:
        """Rows of blocks of a server: one tensor travels there, and one of each dtype comes back."""
        blocks = list(rows)
        sizes = tf.stack([tf.size(rows[block], tf.int64) for block in blocks])
        request = rows[blocks[0]] if len(blocks) == 1 else tf.concat([sizes, *rows.values()], 0)
        with tf.device(device):
            arrived = tf.identity(request)
            if len(blocks) == 1:
                found = self._read({blocks[0]: arrived})
            else:
                num = len(blocks)
                parts = tf.split(arrived[num:], arrived[:num], num=num)
                found = self._read(dict(zip(blocks, parts)))
            by_dtype: dict[tf.DType, list[int]] = {}
            for block, tensor in found.items():
                by_dtype.setdefault(tensor.dtype, []).append(block)
            packed = [self._wire.pack(_flat([found[block] for block in of_dtype])) for of_dtype in by_dtype.values()]
        here: dict[int, tf.Tensor] = {}
        for (dtype, of_dtype), tensor in zip(by_dtype.items(), packed):
            values = self._wire.unpack(tf.identity(tensor), dtype)
            row_sizes = [found[block].shape[1:].num_elements() for block in of_dtype]
            own = [sizes[blocks.index(block)] * size for block, size in zip(of_dtype, row_sizes)]
            parts = tf.split(values, own, num=len(own)) if len(own) > 1 else [values]
            here |= {block: tf.reshape(part, [-1, *found[block].shape[1:]]) for block, part in zip(of_dtype, parts)}
        return here


def _flat(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    return tensors[0] if len(tensors) == 1 else tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], 0)


def _stitch(which: Sequence[tf.Tensor], parts: Sequence[tf.Tensor]) -> tf.Tensor:
    return parts[0] if len(parts) == 1 else tf.dynamic_stitch(which, parts)
