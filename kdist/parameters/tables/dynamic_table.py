"""`DynamicTable`: the rows of dynamic embedding tables that one server has.

An index finds the row of an id in resizable variables. Rows come with the first lookup of an id in training, and go
when the server sweeps. Whoever takes or gives a row, and every update, holds one lock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import ClassVar

import keras
import numpy as np
import tensorflow as tf

from kdist._compat.keras import set_value
from kdist._compat.tensorflow import function_of_its_own
from kdist.layers import Admission, Eviction
from kdist.layers.initial_rows import mix_bits
from kdist.model.embedding_lookup import TableGroup
from kdist.model.names import AVERAGE
from kdist.parameters.tables.rows import RowLock, resizable_variable, resize, resize_in_use, set_rows

#: The bins of ages, and the share of `max_rows` that stays when the oldest rows go.
_AGE_BINS, _LOW_WATER = 1024, 15 / 16
#: The size of the other columns of a row, in bytes.
_BESIDE_BYTES = 32
#: The column with the interval between saves in which a row has changed last; only if anybody asks.
CHANGED = "changed"
#: The column with the position in its group of the table of a row, -1 for none; and the one that identifies it there.
TABLES, IDS = "tables", "ids"


class DynamicTable:
    """The rows of a group of dynamic tables that one server has; `FixedTable` says more of the methods of both.

    Args:
        group: of the tables.
        device: of the server.
        server, num_servers: its number, and the number of servers.
        num_groups: groups of dynamic tables on the server.
        interval: on the server, scalar int32: the present interval between saves, if anybody asks what changes in it.

    Attributes:
        columns: the vectors, `vectors`, what `add_slot` adds, and for each row `ids`, int64; `tables`, the position of
            its table in the group, or -1 if nothing is in the row, int32; `counts` of its updates, int32; the global
            step of the last one, or of its creation, `last_steps`, int32.
        num_rows: int64: rows that are or were in use.
        evicted: ids that have lost their rows.
    """

    #: The room for the rows of all groups on a server at first, in bytes; they take memory when they are written.
    #: Rows that outgrow it move, and TensorFlow keeps the old place for later; more would count as used at once.
    reserved_bytes: ClassVar[int] = 1 << 30
    #: Rows that a sweep looks at while it holds the lock.
    sweep_rows: ClassVar[int] = 1 << 14

    def __init__(
        self,
        group: TableGroup,
        device: str,
        server: int,
        num_servers: int,
        num_groups: int = 1,
        interval: tf.Variable | None = None,
    ) -> None:
        self.group, self.layers, self.device, self.interval = group, group.dynamic, device, interval
        self.server, self.num_servers = server, num_servers
        first = group.dynamic[0]
        self._initializer = first.row_initializer
        self._admission = first.admission or Admission()
        self._eviction = first.eviction or Eviction(unseen_steps=2**31 - 1)
        self._dim = group.row_shape[0]
        self._shifts = tf.constant(key_shifts(group))
        self._seeds = tf.constant([layer.row_initializer.seed for layer in group.dynamic], tf.int64)
        most = self._eviction.max_rows
        self._max_rows = None if most is None else (most + server) // num_servers
        dtype = tf.as_dtype(group.dtype)
        # With up to three slots.
        row_bytes = 4 * self._dim * dtype.size + _BESIDE_BYTES
        capacity = self.reserved_bytes // num_groups // row_bytes
        capacity = max(1, capacity if self._max_rows is None else min(capacity, self._max_rows))
        self._capacity_at_first = capacity
        with tf.device(device):
            self.lock = RowLock(is_shared=True)
            self._index = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, -1)
            self.num_rows, self._num_free, self._capacity = (
                tf.Variable(value, trainable=False, dtype=tf.int64) for value in (0, 0, capacity)
            )
            self._free = resizable_variable((), tf.int64, capacity)
            if self._admission.min_count > 1:
                self._sketch = CountMinSketch()
            specs = {IDS: tf.int64, TABLES: tf.int32, "counts": tf.int32, "last_steps": tf.int32}
            self.columns = {name: resizable_variable((), of_column, capacity) for name, of_column in specs.items()}
            self.columns["vectors"] = resizable_variable(group.row_shape, dtype, capacity)
            if interval is not None:
                self.columns[CHANGED] = resizable_variable((), tf.int32, capacity)
        #: The values of columns in a new row, unless they depend on its id.
        self._initial = {"counts": np.zeros((), np.int32)}
        self.evicted = EvictedRows(self)

    @cached_property
    def _insert(self) -> tf.types.experimental.ConcreteFunction:
        """`insert` as one function, which the steps that a call unrolls share; traced when all slots are there."""
        specs = tf.TensorSpec([None], tf.int64), tf.TensorSpec([None], tf.int32), tf.TensorSpec([], tf.int64)
        with tf.init_scope():
            return function_of_its_own(self.insert).get_concrete_function(*specs)

    @property
    def vectors(self) -> tf.Variable:
        return self.columns["vectors"]

    @property
    def stored(self) -> dict[str, tf.Variable]:
        """All columns but the one that says when a row has changed."""
        return {name: column for name, column in self.columns.items() if name != CHANGED}

    @property
    def evicts(self) -> bool:
        return self.layers[0].eviction is not None

    def add_slot(self, name: str, slot: keras.Variable, initial: np.ndarray) -> None:
        """Gives each row a slot: `slot` gets a variable with the values of all rows."""
        with tf.device(self.device):
            variable = resizable_variable(initial.shape, tf.as_dtype(slot.dtype), self._capacity_at_first)
        set_value(slot, variable)
        # Without the owner of the optimizer, as in checkpoints.
        name = name.rpartition(".")[2]
        self.columns[name], self._initial[name] = variable, initial

    def read(self, request: tf.Tensor, step_of: Callable[[], tf.Tensor], *, inserts: bool) -> tf.Tensor:
        """The vectors of keys, zeros without a row. A request has the number of keys of each table, then the keys."""
        num_tables = len(self.layers)
        counts, keys = request[:num_tables], request[num_tables:]
        rows = self._find(keys)
        if inserts:
            step = step_of()
            rows = tf.cond(
                tf.reduce_any(rows < 0),
                lambda: self._insert(keys, tf.repeat(tf.range(num_tables), counts), step),
                lambda: rows,
            )
        vectors = self.vectors.sparse_read(tf.maximum(rows, 0))
        return tf.where(rows[:, tf.newaxis] < 0, tf.zeros([], vectors.dtype), vectors)

    def begin_update(
        self, gradient: tf.IndexedSlices, step: tf.Tensor, updates: list[tf.Operation]
    ) -> tf.IndexedSlices:
        """Counts the updates of the rows, too; drops keys without a row. Called with the lock held."""
        rows = self._find(gradient.indices)
        places = tf.where(rows >= 0)[:, 0]
        rows = tf.gather(rows, places)
        one, now = tf.ones_like(rows, tf.int32), tf.fill(tf.shape(rows), tf.cast(step, tf.int32))
        counts = self.columns["counts"]
        updates.append(tf.raw_ops.ResourceScatterAdd(resource=counts.handle, indices=rows, updates=one))
        for name, value in {"last_steps": now, **self._marks(rows)}.items():
            updates.append(set_rows(self.columns[name], rows, value))
        return tf.IndexedSlices(tf.gather(gradient.values, places), rows)

    def insert(self, keys: tf.Tensor, tables: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        """Gives rows to keys, int64 `[n]`, each once, that have none, if they are admitted; traced.

        Returns the rows of all keys, int64 `[n]`; -1 without a row. `tables`, int32 `[n]`, are those of the keys.
        """
        with tf.device(self.device), self.lock.held([keys, tables, step]) as updates:
            rows = self._find(keys)
            chosen = tf.where(self._admitted(keys, rows < 0, step, updates))[:, 0]
            if self._max_rows is not None:
                chosen = chosen[: tf.maximum(self._max_rows - self.num_live(), 0)]
            new_rows = self._take(tf.size(chosen, tf.int64), updates)
            rows = tf.tensor_scatter_nd_update(rows, chosen[:, tf.newaxis], new_rows)
            new_keys, of_new = tf.gather(keys, chosen), tf.gather(tables, chosen)
            ids = new_keys - tf.gather(self._shifts, of_new)
            vectors = self._initializer.rows(tf.gather(self._seeds, of_new), ids, self._dim, self.vectors.dtype)
            last_steps = tf.fill(tf.shape(of_new), tf.cast(step, tf.int32))
            values = {IDS: ids, TABLES: of_new, "vectors": vectors, "last_steps": last_steps}
            self._write(new_keys, new_rows, values, updates)
        with tf.control_dependencies(updates):
            return tf.identity(rows)

    def take(self, table: tf.Tensor, values: dict[str, tf.Tensor]) -> None:
        """As `FixedTable.take`; columns without values get initial ones."""
        self.remove(values[IDS], table)
        self.take_new(table, values)

    def take_new(self, table: tf.Tensor, values: dict[str, tf.Tensor]) -> None:
        """As `take`, for ids without a row."""
        with self.lock.held([table, *values.values()]) as updates:
            rows = self._take(tf.size(values[IDS], tf.int64), updates)
            tables = tf.fill(tf.shape(rows), table)
            self._write(values[IDS] + self._shifts[table], rows, {**values, TABLES: tables}, updates)

    def changed(self, since: tf.Tensor) -> dict[str, tf.Tensor]:
        """As `FixedTable.changed`; all rows in use if nobody asked for changes."""
        rows = tf.range(self.num_rows.read_value())
        is_chosen = self.columns[TABLES].sparse_read(rows) >= 0
        if CHANGED in self.columns:
            is_chosen &= self.columns[CHANGED].sparse_read(rows) > since
        rows = tf.boolean_mask(rows, is_chosen)
        return {name: column.sparse_read(rows) for name, column in self.stored.items()}

    def keys_here(self, ids: tf.Tensor, table: tf.Tensor) -> tf.Tensor:
        return tf.equal(self.servers_of(ids, table), self.server)

    def servers_of(self, ids: tf.Tensor, table: tf.Tensor) -> tf.Tensor:
        """The numbers of the servers of ids of a table, int32 `[n]`."""
        return server_of(ids + self._shifts[table], self.num_servers)

    def clear(self) -> None:
        """Forgets all rows; traced."""
        with tf.device(self.device), self.lock.held([]) as updates:
            keys, _ = self._index.export()
            updates.append(self._index.remove(keys))
            updates += [variable.assign(0).op for variable in (self.num_rows, self._num_free)]

    def use_averages(self) -> None:
        if AVERAGE not in self.columns:
            return

        def copy(start: tf.Tensor) -> tuple[tf.Tensor]:
            rows = tf.range(start, tf.minimum(start + self.sweep_rows, num_rows))
            set_rows(self.vectors, rows, self.columns[AVERAGE].sparse_read(rows))
            return (start + self.sweep_rows,)

        with tf.device(self.device):
            num_rows = self.num_rows.read_value()
            tf.while_loop(lambda start: start < num_rows, copy, [tf.zeros([], tf.int64)])

    def remove(self, ids: tf.Tensor, table: tf.Tensor) -> None:
        """Takes their rows from ids of a table, int64 `[n]`; traced."""
        with self.lock.held([ids]) as updates:
            keys = ids + self._shifts[table]
            rows = self._find(keys)
            self._free_rows(tf.boolean_mask(rows, rows >= 0), tf.boolean_mask(keys, rows >= 0), updates)

    def num_live(self) -> tf.Tensor:
        """The number of rows in use, scalar int64."""
        return self.num_rows.read_value() - self._num_free.read_value()

    def sweep(self, step: tf.Tensor) -> tf.Tensor:
        """Evicts rows in a global step, a few at a time, so that no step waits long; returns their number; traced."""
        step, num_rows = tf.cast(step, tf.int32), self.num_rows.read_value()
        excess = self._num_excess()
        oldest = tf.cond(excess > 0, lambda: self._oldest(step, excess), lambda: tf.constant(tf.int32.max))

        def evict(start: tf.Tensor, excess: tf.Tensor, evicted: tf.Tensor) -> tuple[tf.Tensor, ...]:
            stop = tf.minimum(start + self.sweep_rows, num_rows)
            count, of_excess = self._evict(start, stop, step, oldest, excess)
            return stop, excess - of_excess, evicted + count

        zero = tf.zeros([], tf.int64)
        return tf.while_loop(lambda start, *_: start < num_rows, evict, [zero, excess, zero], parallel_iterations=1)[2]

    def _find(self, keys: tf.Tensor) -> tf.Tensor:
        """The rows of keys, int64 `[n]`; -1 without a row."""
        return tf.ensure_shape(self._index.lookup(keys), [None])

    def _admitted(self, keys: tf.Tensor, is_new: tf.Tensor, step: tf.Tensor, updates: list[tf.Operation]) -> tf.Tensor:
        """True for keys that are new and get a row: bool `[n]`."""
        admission = self._admission
        if admission.min_count > 1:
            new = tf.where(is_new)[:, 0]
            seen = self._sketch.count(tf.gather(keys, new), updates)
            is_new = tf.scatter_nd(new[:, tf.newaxis], seen >= admission.min_count, tf.shape(is_new, tf.int64))
        if admission.probability < 1:
            drawn = _drawn(tf.bitwise.bitwise_xor(keys, mix_bits(step)))
            is_new &= tf.cast(drawn, tf.float64) < admission.probability * (1 << 40)
        return is_new

    def _take(self, count: tf.Tensor, updates: list[tf.Operation]) -> tf.Tensor:
        """Takes rows that are free, or new ones: int64 `[count]`."""
        num_rows, num_free, capacity = (
            variable.read_value() for variable in (self.num_rows, self._num_free, self._capacity)
        )
        used_again = tf.minimum(count, num_free)
        free = self._free.sparse_read(tf.range(num_free - used_again, num_free))
        end = num_rows + count - used_again
        rows = tf.concat([free, tf.range(num_rows, end)], 0)
        with tf.control_dependencies([rows]):
            updates.append(self._num_free.assign(num_free - used_again).op)
            updates.append(self.num_rows.assign(end).op)
            grown = tf.cond(end > capacity, lambda: self._grow(num_rows, end), lambda: capacity)
        with tf.control_dependencies([grown]):
            return tf.identity(rows)

    def _grow(self, used: tf.Tensor, needed: tf.Tensor) -> tf.Tensor:
        """Makes room for at least `needed` rows, of which `used` have values."""
        size = self._capacity.read_value()
        # By less than 2, so that what is given up is, together, soon large enough to be used again.
        capacity = tf.maximum(size * 3 // 2, needed)
        # Steps look up vectors without the lock.
        resize_in_use(self.vectors, used, capacity, self.sweep_rows)
        resize([self._free, *(of for of in self.columns.values() if of is not self.vectors)], size, capacity)
        return self._capacity.assign(capacity)

    def _write(
        self, keys: tf.Tensor, rows: tf.Tensor, values: dict[str, tf.Tensor], updates: list[tf.Operation]
    ) -> None:
        """Writes rows: given columns, and the initial values of the others; then they can be found."""
        written, values = [], {**values, **self._marks(rows)}
        for name, column in self.columns.items():
            of_rows = values.get(name)
            if of_rows is None:
                of_rows = tf.repeat(tf.constant(self._initial[name], column.dtype)[tf.newaxis], tf.size(rows), 0)
            written.append(set_rows(column, rows, of_rows))
        with tf.control_dependencies(written):
            updates.append(self._index.insert(keys, rows))

    def _num_excess(self) -> tf.Tensor:
        """The number of rows that have to go to keep `max_rows`, scalar int64."""
        if self._max_rows is None:
            return tf.zeros([], tf.int64)
        num_live, target = self.num_live(), int(self._max_rows * _LOW_WATER)
        # Not for a few rows each time.
        return tf.where(num_live > (target + self._max_rows) // 2, num_live - target, 0)

    def _oldest(self, step: tf.Tensor, excess: tf.Tensor) -> tf.Tensor:
        """The age, int32, from which on rows may go so that `excess` of them do: the oldest bins of a histogram go."""
        rows = tf.range(self.num_rows.read_value())
        tables, last_steps = (self.columns[name].sparse_read(rows) for name in (TABLES, "last_steps"))
        ages = step - tf.boolean_mask(last_steps, tables >= 0)
        width = tf.maximum(tf.reduce_max(ages) // _AGE_BINS + 1, 1)
        counts = tf.math.unsorted_segment_sum(tf.ones_like(ages, tf.int64), tf.maximum(ages // width, 0), _AGE_BINS)
        is_enough = tf.cumsum(counts, reverse=True) >= excess
        return tf.cast(tf.reduce_sum(tf.cast(is_enough, tf.int32)) - 1, tf.int32) * width

    def _evict(
        self, start: tf.Tensor, stop: tf.Tensor, step: tf.Tensor, oldest: tf.Tensor, excess: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Evicts from rows `start` to `stop`; returns their number, and the number of the oldest among them."""
        with self.lock.held([start, stop, excess]) as updates:
            rows = tf.range(start, stop)
            tables, counts, last_steps, ids = (
                self.columns[name].sparse_read(rows) for name in (TABLES, "counts", "last_steps", IDS)
            )
            is_live, ages = tables >= 0, step - last_steps
            # These go however many there are.
            goes = ages >= min(self._eviction.unseen_steps or tf.int32.max, tf.int32.max)
            if self._eviction.min_norm is not None:
                norms = tf.norm(tf.cast(self.vectors.sparse_read(rows), tf.float32), axis=1)
                goes |= (counts > 0) & (norms < self._eviction.min_norm)
            is_old = is_live & ~goes & (ages >= oldest)
            is_old &= tf.cumsum(tf.cast(is_old, tf.int64)) <= excess
            chosen = tf.where(is_live & (goes | is_old))[:, 0]
            tables = tf.gather(tables, chosen)
            keys = tf.gather(ids, chosen) + tf.gather(self._shifts, tables)
            self._free_rows(tf.gather(rows, chosen), keys, updates)
            if self.interval is not None:
                updates.append(self.evicted.add(keys, tables, self.interval.read_value()))
            count, of_excess = tf.size(chosen, tf.int64), tf.reduce_sum(tf.cast(is_old, tf.int64))
        with tf.control_dependencies(updates):
            return tf.identity(count), tf.identity(of_excess)

    def _free_rows(self, rows: tf.Tensor, keys: tf.Tensor, updates: list[tf.Operation]) -> None:
        """Takes rows from their keys, so that others can have them."""
        num_free, count = self._num_free.read_value(), tf.size(rows, tf.int64)
        with tf.control_dependencies([self._index.remove(keys), num_free]):
            updates.append(set_rows(self.columns[TABLES], rows, tf.fill(tf.shape(rows), -1)))
            updates.append(set_rows(self._free, tf.range(num_free, num_free + count), rows))
            updates.append(self._num_free.assign_add(count).op)

    def _marks(self, rows: tf.Tensor) -> dict[str, tf.Tensor]:
        """The column that marks rows as changed, if there is one."""
        return {} if self.interval is None else {CHANGED: tf.fill(tf.shape(rows), self.interval.read_value())}


class EvictedRows:
    """The ids of a dynamic table that have lost their rows, with the interval; restored, they lose them again.

    Without intervals, none are noted.
    """

    #: As of the tables; there is no column beside the ids.
    stored: ClassVar[Mapping[str, tf.Variable]] = {}

    def __init__(self, table: DynamicTable) -> None:
        self.device, self._table = table.device, table
        self._shifts, self._num_tables = key_shifts(table.group), len(table.group.tables)
        with tf.device(self.device):
            #: Of each key the interval, times the number of tables, plus the position of its table.
            self._noted = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, -1)

    def add(self, keys: tf.Tensor, tables: tf.Tensor, interval: tf.Tensor) -> tf.Operation:
        """Notes keys, int64 `[n]`, and the positions of their tables, int32 `[n]`; traced, with the rows locked."""
        tables, interval = tf.cast(tables, tf.int64), tf.cast(interval, tf.int64)
        return self._noted.insert(keys, interval * self._num_tables + tables)

    def changed(self, since: tf.Tensor) -> dict[str, tf.Tensor]:
        """The ids that have lost their rows after an interval, and their tables; traced."""
        keys, noted = (tf.ensure_shape(tensor, [None]) for tensor in self._noted.export())
        is_chosen = noted // self._num_tables > tf.cast(since, tf.int64)
        tables = tf.cast(tf.boolean_mask(noted, is_chosen) % self._num_tables, tf.int32)
        return {IDS: tf.boolean_mask(keys, is_chosen) - tf.gather(self._shifts, tables), TABLES: tables}

    def keys_here(self, ids: tf.Tensor, table: tf.Tensor) -> tf.Tensor:
        return self._table.keys_here(ids, table)

    def take(self, table: tf.Tensor, values: dict[str, tf.Tensor]) -> None:
        self._table.remove(values[IDS], table)

    def forget(self, up_to: tf.Tensor) -> None:
        """Forgets the ids of an interval and of all before; traced. No row may be evicted meanwhile."""
        with tf.device(self.device):
            keys, noted = (tf.ensure_shape(tensor, [None]) for tensor in self._noted.export())
            self._noted.remove(tf.boolean_mask(keys, noted // self._num_tables <= tf.cast(up_to, tf.int64)))


class CountMinSketch:
    """Counts keys in four tables of counters, where keys share counters; the least of a key's is never too small.

    After Cormode and Muthukrishnan (2005). From time to time all counters are halved, as in TinyLFU (Einziger et al.
    2017), so that what was rare long ago does not add up. It takes 4 MB on the device where it is made.
    """

    depth: ClassVar[int] = 4
    #: Counters of each table, a power of 2, and after how many counts they are halved.
    width: ClassVar[int] = 1 << 18
    counts_until_halved: ClassVar[int] = 8 << 18

    def __init__(self) -> None:
        self._counters = tf.Variable(tf.zeros([self.depth * self.width], tf.int32), trainable=False)
        self._total = tf.Variable(0, trainable=False, dtype=tf.int64)

    def count(self, keys: tf.Tensor, updates: list[tf.Operation]) -> tf.Tensor:
        """Counts keys, int64 `[n]`, each once, by operations that it adds to `updates`; traced, one call at a time.

        Returns the count of each, int32 `[n]`.
        """
        hashes = [tf.bitwise.bitwise_and(mix_bits(keys + row), self.width - 1) for row in range(self.depth)]
        places = tf.stack([of_row + row * self.width for row, of_row in enumerate(hashes)])
        counts = self._counters.sparse_read(places) + 1
        with tf.control_dependencies([counts]):
            ones = tf.ones_like(places, tf.int32)
            counted = tf.raw_ops.ResourceScatterAdd(resource=self._counters.handle, indices=places, updates=ones)
            total = self._total.assign_add(tf.size(keys, tf.int64))

        def halve() -> tf.Tensor:
            # Rows are read and written one by one elsewhere; this is the only place that takes all of them.
            halved = self._counters.assign(self._counters // 2)
            with tf.control_dependencies([halved]):
                return tf.identity(self._total.assign(total // 2))

        with tf.control_dependencies([counted]):
            updates.append(tf.cond(total > self.counts_until_halved, halve, lambda: total).op)
        return tf.reduce_min(counts, 0)


def key_shifts(group: TableGroup) -> np.ndarray:
    """The number that turns an id into its key, by table, so that a group can share an index: int64 `[tables]`.

    Keys of ids between minus and plus 2^63 / (number of tables) differ for sure; of hashes, with a probability like
    that of two hashes of 64 bits.
    """
    count = len(group.tables)
    return np.array([(table * (1 << 64) // count + (1 << 63)) % (1 << 64) - (1 << 63) for table in range(count)])


def server_of(keys: tf.Tensor, num_servers: int) -> tf.Tensor:
    """The number of the server that has a key, int32 `[n]`."""
    return tf.cast(_drawn(keys) % num_servers, tf.int32)


def _drawn(keys: tf.Tensor) -> tf.Tensor:
    """For each key a number that looks random, of 40 bits."""
    return tf.bitwise.bitwise_and(mix_bits(keys), tf.constant((1 << 40) - 1, tf.int64))
