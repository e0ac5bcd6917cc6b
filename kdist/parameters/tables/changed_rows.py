"""Which rows of tables have changed since a save, so that a delta has only these.

Time is cut into intervals by saves. Every server has the number of the present one, and marks a row that changes with
it; a delta has the rows with the mark of a later interval than that of the checkpoint which it follows. So nothing has
to be cleared, and what a failed save did not write stays marked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import tensorflow as tf

from kdist.parameters.tables.resizable_variable import resizable_variable, resize, set_rows, set_value


@dataclass(frozen=True)
class DeltaBase:
    """The checkpoint that a delta follows.

    Attributes:
        step: its global step.
        interval: that it has ended.
    """

    step: int
    interval: int


class SaveIntervals:
    """The number of the present interval, on each server.

    Attributes:
        of_servers: scalar int32.
    """

    def __init__(self, devices: Sequence[str]) -> None:
        self._present = 1
        self.of_servers: list[tf.Variable] = []
        for device in devices:
            with tf.device(device):
                self.of_servers.append(tf.Variable(self._present, dtype=tf.int32, trainable=False))

    def next(self) -> int:
        """Begins another interval; returns the number of the one that it ends. Nothing may change rows meanwhile."""
        self._present += 1
        for variable in self.of_servers:
            variable.assign(self._present)
        return self._present - 1


class ChangedRows:
    """For each row of a block, in which interval it has changed last; 0 if it never did.

    Args:
        num_rows: of the block.
        interval: the present one, on the server of the block, where this is made.
    """

    def __init__(self, num_rows: int, interval: tf.Variable) -> None:
        self._interval = interval
        self._marks = tf.Variable(tf.zeros([num_rows], tf.int32), trainable=False)

    def mark(self, rows: tf.Tensor) -> tf.Operation:
        """Rows, int64 `[n]`, change; traced."""
        return set_rows(self._marks, rows, tf.fill(tf.shape(rows), self._interval.read_value()))

    def changed(self, since: tf.Tensor) -> tf.Tensor:
        """The rows that have changed after an interval, int64 `[n]`; traced."""
        return tf.where(self._marks.read_value() > since)[:, 0]


class _Evicts(Protocol):
    """A table whose ids may lose their rows."""

    device: str

    def keys_here(self, ids: tf.Tensor, table: tf.Tensor) -> tf.Tensor: ...

    def remove(self, ids: tf.Tensor, table: tf.Tensor) -> None: ...


class EvictedRows:
    """The ids of a dynamic table that have lost their rows, with the interval; restored, they lose them again.

    Args:
        table: that they were in.
        interval: the present one, on the server; None if nobody asks for what is evicted.
        rows_at_once: how many are moved at once when there is no room for more.
    """

    def __init__(self, table: _Evicts, interval: tf.Variable | None, rows_at_once: int) -> None:
        self.device, self._table = table.device, table
        self._interval, self._rows_at_once = interval, rows_at_once
        self.stored: dict[str, tf.Variable] = {}
        if interval is None:
            return
        with tf.device(self.device):
            self._num_rows, self._capacity = (tf.Variable(0, trainable=False, dtype=tf.int64) for _ in range(2))
            self.stored = {"ids": resizable_variable((), tf.int64), "tables": resizable_variable((), tf.int32)}
            self._intervals = resizable_variable((), tf.int32)

    def add(self, ids: tf.Tensor, tables: tf.Tensor, updates: list[tf.Operation]) -> None:
        """Adds ids, int64 `[n]`, and the positions of their tables, int32 `[n]`; traced, with the rows locked."""
        start, capacity = self._num_rows.read_value(), self._capacity.read_value()
        end = start + tf.size(ids, tf.int64)
        with tf.control_dependencies([tf.cond(end > capacity, lambda: self._grow(start, end), lambda: capacity)]):
            places = tf.range(start, end)
            assert self._interval is not None
            intervals = tf.fill(tf.shape(tables), self._interval.read_value())
            updates.append(set_rows(self.stored["ids"], places, ids))
            updates.append(set_rows(self.stored["tables"], places, tables))
            updates.append(set_rows(self._intervals, places, intervals))
            updates.append(self._num_rows.assign(end).op)

    def chosen(self, since: tf.Tensor) -> tf.Tensor:
        """Those that have lost their rows after an interval."""
        return tf.where(self._intervals.sparse_read(tf.range(self._num_rows.read_value())) > since)[:, 0]

    def placed(self, rows: tf.Tensor) -> dict[str, tf.Tensor]:
        return {}

    def keys_here(self, ids: tf.Tensor, table: tf.Tensor) -> tf.Tensor:
        return self._table.keys_here(ids, table)

    def take(self, table: tf.Tensor, values: dict[str, tf.Tensor]) -> None:
        self._table.remove(values["ids"], table)

    def forget(self, up_to: tf.Tensor) -> None:
        """Forgets those of an interval and of all before; traced. No row may be evicted meanwhile."""
        with tf.device(self.device):
            kept = self.chosen(up_to)
            variables = [*self.stored.values(), self._intervals]
            values = [variable.sparse_read(kept) for variable in variables]
            with tf.control_dependencies(values):
                for variable, value in zip(variables, values):
                    set_value(variable, value)
                for count in (self._num_rows, self._capacity):
                    count.assign(tf.size(kept, tf.int64))

    def _grow(self, used: tf.Tensor, needed: tf.Tensor) -> tf.Tensor:
        capacity = tf.maximum(2 * self._capacity.read_value(), needed)
        for variable in [*self.stored.values(), self._intervals]:
            resize(variable, used, capacity, self._rows_at_once)
        return self._capacity.assign(capacity)
