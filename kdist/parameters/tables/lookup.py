"""`TableRows`: finds the rows of embedding tables on their servers, with one request per server for all tables."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from itertools import accumulate

import numpy as np
import tensorflow as tf

from kdist.model.embedding_lookup import TableGroup
from kdist.model.lookup_rounds import RowRequest
from kdist.parameters.placement.blocks import Blocks
from kdist.parameters.placement.messages import Wire, fuse
from kdist.parameters.tables.dynamic_table import key_shifts, server_of
from kdist.parameters.tables.table import Table


class _Places:
    """Places of the rows of a group.

    Rows are numbered block by block, so that the block of a row follows from its number without a search.

    Attributes:
        blocks: with its rows.
    """

    def __init__(self, group: TableGroup, blocks: Blocks) -> None:
        shards = blocks.shards
        of_tables = [[i for i, shard in enumerate(shards) if shard.variable == table] for table in group.tables]
        self.blocks = blocks.of_tables(group)
        lengths = [sum(shards[i].stop - shards[i].start for i in blocks[block].shards) for block in self.blocks]
        first = dict(zip(self.blocks, accumulate(lengths, initial=0)))
        self._firsts = list(first.values())
        self._most = most = max(map(len, of_tables))
        #: Of each table, for each of as many parts as any table has, at which id it begins: at none, if it has fewer.
        self._starts = np.full([len(of_tables), most], tf.int64.max)
        #: The difference between the numbers of rows and ids, of each shard.
        self._shifts = np.zeros([len(of_tables), most], np.int64)
        for t, of_table in enumerate(of_tables):
            for part, i in enumerate(of_table):
                self._starts[t, part] = shards[i].start
                self._shifts[t, part] = first[blocks.of_shard[i]] + blocks.first_row(i) - shards[i].start

    def number(self, tables: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
        if not self._shifts.any():
            return ids
        part = tables * self._most
        for later in range(1, self._most):
            part += tf.cast(ids >= tf.gather(self._starts[:, later], tables), tf.int32)
        return ids + tf.gather(self._shifts.reshape(-1), part)

    def split(self, numbers: tf.Tensor) -> list[tuple[tf.Tensor, tf.Tensor]]:
        """For each block the rows in it, int64 `[n]`, and their places in `numbers`, int32 `[n]`."""
        if len(self.blocks) == 1:
            return [(numbers, tf.range(tf.size(numbers)))]
        which = tf.dynamic_partition(tf.range(tf.size(numbers)), self._holders(numbers), len(self.blocks))
        return [(tf.gather(numbers, chosen) - first, chosen) for chosen, first in zip(which, self._firsts)]

    def _holders(self, numbers: tf.Tensor) -> tf.Tensor:
        """The position in `blocks` of the one that has a row: int32 `[n]`."""
        holder = tf.zeros_like(numbers, tf.int32)
        for first in self._firsts[1:]:
            holder += tf.cast(numbers >= first, tf.int32)
        return holder


class _DynamicPlaces(_Places):
    """Places of the rows of a group of dynamic tables: the number of a row is its key, in its block, too.

    The blocks are in the order of the servers, and the key tells the server.
    """

    def __init__(self, group: TableGroup, blocks: Blocks) -> None:
        self.blocks = blocks.of_tables(group)
        self._firsts = [0] * len(self.blocks)
        self._shifts = key_shifts(group)

    def number(self, tables: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
        return ids + tf.gather(self._shifts, tables) if len(self._shifts) > 1 else ids

    def _holders(self, keys: tf.Tensor) -> tf.Tensor:
        return server_of(keys, len(self.blocks))


class TableRows:
    """A `kdist.model.lookup_rounds.RowSource` of all groups of tables, on the device of the caller; splits gradients.

    Args:
        blocks: with the rows.
        tables: by block.
        step_on: block -> the global step, on its server.
        wire: the format of rows in transit.
    """

    def __init__(
        self, blocks: Blocks, tables: Mapping[int, Table], step_on: Callable[[int], tf.Tensor], wire: Wire
    ) -> None:
        self._groups = blocks.table_groups
        self._places = [(_DynamicPlaces if group.dynamic else _Places)(group, blocks) for group in self._groups]
        self._tables, self._step_on, self._wire = tables, step_on, wire
        #: True if new ids of dynamic tables get a row.
        self._inserts = True

    def read_only(self) -> TableRows:
        """The same rows, for lookups outside training."""
        other = copy.copy(self)
        other._inserts = False
        return other

    def number(self, group: int, tables: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
        return self._places[group].number(tables, ids)

    def fetch(self, wanted: Mapping[int, RowRequest]) -> dict[int, tf.Tensor]:
        by_server: dict[str, dict[int, tf.Tensor]] = defaultdict(dict)
        which: dict[int, tf.Tensor] = {}
        for g, of_group in wanted.items():
            num_tables = len(self._groups[g].dynamic)
            for block, (numbers, which[block]) in zip(self._places[g].blocks, self._places[g].split(of_group.numbers)):
                request = [numbers]
                if num_tables:
                    tables = tf.gather(of_group.tables, which[block])
                    counts = tf.math.unsorted_segment_sum(tf.ones_like(tables, tf.int64), tables, num_tables)
                    request = [counts, numbers]
                by_server[self._tables[block].device][block] = tf.concat(request, 0)
        found: dict[int, tf.Tensor] = {}
        for device, asked in by_server.items():
            found |= self._request(device, asked, which) if device else self._read(asked)
        rows: dict[int, tf.Tensor] = {}
        for g in wanted:
            first, *others = own = self._places[g].blocks
            rows[g] = tf.dynamic_stitch([which[b] for b in own], [found[b] for b in own]) if others else found[first]
        return rows

    def by_block(self, gradients: Mapping[int, tf.IndexedSlices]) -> dict[int, tf.IndexedSlices]:
        """Gradients of tables, as in `kdist.model.updates.ReplicaOutput`, by the blocks that hold their rows."""
        changes: dict[int, tf.IndexedSlices] = {}
        for group, places in zip(self._groups, self._places):
            parts = [gradients[table] for table in group.tables if table in gradients]
            if not parts:
                continue
            values, numbers = (tf.concat([getattr(part, name) for part in parts], 0) for name in ("values", "indices"))
            if len(places.blocks) == 1:
                changes[places.blocks[0]] = tf.IndexedSlices(values, numbers)
                continue
            for block, (rows, chosen) in zip(places.blocks, places.split(numbers)):
                changes[block] = tf.IndexedSlices(tf.gather(values, chosen), rows)
        return changes

    def _read(self, asked: Mapping[int, tf.Tensor]) -> dict[int, tf.Tensor]:
        return {
            block: self._tables[block].read(of_block, partial(self._step_on, block), inserts=self._inserts)
            for block, of_block in asked.items()
        }

    def _request(
        self, device: str, asked: Mapping[int, tf.Tensor], which: Mapping[int, tf.Tensor]
    ) -> dict[int, tf.Tensor]:
        """Rows of blocks of a server: one tensor travels there, and one of each dtype comes back."""
        requests = list(asked.values())
        is_one = len(requests) == 1
        counts = [tf.size(of_block, tf.int64) for of_block in requests]
        request = requests[0] if is_one else tf.concat([counts, *requests], 0)
        by_dtype: dict[tf.DType, list[int]] = defaultdict(list)
        for block in asked:
            by_dtype[self._tables[block].vectors.dtype].append(block)
        with tf.device(device):
            arrived = tf.identity(request)
            parts = [arrived]
            if not is_one:
                sizes = tf.concat([[len(asked)], arrived[: len(asked)]], 0)
                _, *parts = tf.split(arrived, sizes, num=1 + len(asked))
            there = self._read(dict(zip(asked, parts)))
            packed = [self._wire.pack(fuse([there[block] for block in own])) for own in by_dtype.values()]
        here: dict[int, tf.Tensor] = {}
        for (dtype, own), tensor in zip(by_dtype.items(), packed):
            values = self._wire.unpack(tf.identity(tensor), dtype)
            shapes = [self._tables[block].vectors.shape[1:] for block in own]
            sizes = [tf.size(which[block]) * shape.num_elements() for block, shape in zip(own, shapes)]
            here |= {b: tf.reshape(part, [-1, *s]) for b, part, s in zip(own, tf.split(values, sizes), shapes)}
        return here
