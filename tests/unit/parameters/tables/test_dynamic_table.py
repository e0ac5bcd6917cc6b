"""Rows of dynamic tables: they come with ids, are used again, and grow, in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from kdist.layers import Admission, DynamicEmbedding, Eviction
from kdist.layers.initial_rows import RowInitializer
from kdist.model.embedding_lookup import TableGroup
from kdist.parameters.tables.dynamic_table import CountMinSketch, DynamicTable, key_shifts, server_of
from kdist.parameters.tables.rows import set_rows

DIM = 3


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DynamicTable, "reserved_bytes", 4 * (4 * DIM * 4 + 32))
    monkeypatch.setattr(DynamicTable, "sweep_rows", 8)


class Server:
    """A table on one of some servers, with a slot, and its functions."""

    def __init__(self, num_tables: int = 1, server: int = 0, num_servers: int = 1, **options: Any) -> None:
        self.layers = tuple(
            DynamicEmbedding(DIM, embeddings_initializer=keras.initializers.RandomUniform(seed=seed), **options)
            for seed in range(num_tables)
        )
        group = TableGroup(tuple(range(num_tables)), (0,) * num_tables, (DIM,), "float32", True, self.layers)
        self.shifts = key_shifts(group)
        self.table = DynamicTable(group, "/CPU:0", server, num_servers)
        slot = keras.Variable(np.zeros([1, DIM], np.float32))
        self.table.add_slot("accumulator", slot, np.full(DIM, 0.5, np.float32))
        self.slot = slot.value
        self._read = self._function(lambda request, step: self.table.read(request, lambda: step, inserts=True))
        self._look = self._function(lambda request, step: self.table.read(request, lambda: step, inserts=False))
        self._sweep = tf.function(self.table.sweep, autograph=False)
        self._update = tf.function(self._add, autograph=False, reduce_retracing=True)

    def request(self, ids: Any, tables: Any = None) -> tuple[np.ndarray, np.ndarray]:
        ids = np.array(ids, np.int64)
        tables = np.zeros(len(ids), np.int64) if tables is None else np.array(tables)
        keys = ids + self.shifts[tables]
        return np.concatenate([np.bincount(tables, minlength=len(self.layers)), keys]), keys

    def fetch(self, ids: Any, step: int = 0, tables: Any = None) -> np.ndarray:
        """The rows that a step of training reads."""
        return self._read(tf.constant(self.request(ids, tables)[0]), tf.constant(step, tf.int64)).numpy()

    def look(self, ids: Any, tables: Any = None) -> np.ndarray:
        """The rows that an evaluation reads."""
        return self._look(tf.constant(self.request(ids, tables)[0]), tf.constant(0, tf.int64)).numpy()

    def update(self, ids: Any, by: float, step: int) -> None:
        """Adds a number to the vectors of ids, as an optimizer does."""
        keys = tf.constant(self.request(ids)[1])
        self._update(keys, tf.constant(by), tf.constant(step, tf.int64))

    def _add(self, keys: tf.Tensor, by: tf.Tensor, step: tf.Tensor) -> None:
        with self.table.lock.held([keys, by, step]) as updates:
            gradient = tf.IndexedSlices(tf.fill([tf.size(keys), DIM], by), keys)
            rows = self.table.begin_update(gradient, step, updates)
            present = self.table.vectors.sparse_read(rows.indices)
            updates.append(set_rows(self.table.vectors, rows.indices, present + rows.values))

    def sweep(self, step: int) -> int:
        return int(self._sweep(tf.constant(step, tf.int64)))

    def column(self, name: str) -> np.ndarray:
        rows = np.arange(int(self.table.num_rows))
        live = self.table.columns["tables"].sparse_read(rows).numpy() >= 0
        return self.table.columns[name].sparse_read(rows).numpy()[live]

    @staticmethod
    def _function(function: Callable[..., Any]) -> Any:
        return tf.function(
            function, input_signature=[tf.TensorSpec([None], tf.int64), tf.TensorSpec([], tf.int64)], autograph=False
        )


def drawn(ids: Any, seed: int = 0) -> np.ndarray:
    rows = RowInitializer(keras.initializers.RandomUniform(seed=seed))
    return rows.rows(
        tf.fill([len(ids)], tf.constant(seed, tf.int64)), tf.constant(ids, tf.int64), DIM, "float32"
    ).numpy()


def test_new_ids_get_rows_that_depend_on_seed_and_id_alone() -> None:
    server = Server()
    ids = [7, -(2**63), 2**63 - 1, 0]
    np.testing.assert_array_equal(server.fetch(ids), drawn(ids))
    np.testing.assert_array_equal(server.fetch(ids[::-1]), drawn(ids[::-1]))
    assert len(server.column("ids")) == 4
    other = Server()
    other.fetch([5, 0])
    np.testing.assert_array_equal(other.fetch(ids), drawn(ids))
    assert np.abs(drawn(range(100))).max() < 0.05
    assert len(np.unique(drawn(range(100)))) == 100 * DIM
    assert not np.array_equal(drawn([1], seed=0), drawn([1], seed=1))


def test_a_lookup_outside_of_training_adds_nothing_and_finds_zeros() -> None:
    server = Server()
    server.fetch([1])
    np.testing.assert_array_equal(server.look([2, 1]), [[0] * DIM, *drawn([1])])
    assert list(server.column("ids")) == [1]


def test_rows_keep_their_values_while_tables_grow() -> None:
    server = Server()
    for first in range(0, 100, 5):
        ids = np.arange(first, first + 5)
        server.fetch(ids, first)
        server.update(ids, 1.0, first)
    assert sorted(server.column("ids")) == list(range(100))
    np.testing.assert_allclose(server.look(range(100)), drawn(range(100)) + 1, rtol=1e-6)
    np.testing.assert_array_equal(server.column("accumulator"), np.full((100, DIM), 0.5))
    assert set(server.column("counts")) == {1}
    assert sorted(server.column("last_steps")) == [first for first in range(0, 100, 5) for _ in range(5)]


def test_tables_of_a_group_share_an_index_and_nothing_else() -> None:
    server = Server(num_tables=3)
    ids, tables = [5, 6, 5, 2**61, 5], [0, 0, 1, 1, 2]
    found = server.fetch(ids, tables=tables)
    np.testing.assert_array_equal(found, [drawn([i], seed=t)[0] for i, t in zip(ids, tables)])
    assert sorted(zip(server.column("ids"), server.column("tables"))) == sorted(zip(ids, tables))
    np.testing.assert_array_equal(server.look([6], tables=[1]), np.zeros((1, DIM)))


def test_every_id_is_on_one_of_the_servers_and_they_have_about_as_many() -> None:
    keys = np.concatenate([np.arange(3000), np.arange(3000) * 4096, np.arange(3000) + (1 << 62)])
    numbers = server_of(tf.constant(keys), 3).numpy()
    assert set(numbers) == {0, 1, 2}
    assert np.bincount(numbers).min() > 0.3 * len(keys)


def test_unseen_ids_go_and_their_rows_are_used_again() -> None:
    server = Server(eviction=Eviction(unseen_steps=10))
    server.fetch(range(20), 0)
    server.update(range(20), 1.0, 0)
    server.update([3, 4], 1.0, 8)
    assert server.sweep(9) == 0
    assert server.sweep(10) == 18
    assert sorted(server.column("ids")) == [3, 4]
    np.testing.assert_array_equal(server.look([0, 19]), np.zeros((2, DIM)))
    np.testing.assert_allclose(server.look([3]), drawn([3]) + 2, rtol=1e-6)
    # An id that comes back starts anew, in a row that was another one's, with new slots.
    server.slot.scatter_update(tf.IndexedSlices(tf.ones([20, DIM]), tf.range(20)))
    np.testing.assert_array_equal(server.fetch(range(100, 118), 11), drawn(range(100, 118)))
    assert int(server.table.num_rows) == 20
    assert server.column("accumulator").min() == 0.5


def test_an_update_of_an_evicted_row_is_dropped() -> None:
    server = Server(eviction=Eviction(unseen_steps=1))
    server.fetch([1, 2], 0)
    server.sweep(1)
    server.fetch([3, 4], 1)
    server.update([1, 3], 1.0, 1)
    np.testing.assert_allclose(server.look([1, 3, 4]), [np.zeros(DIM), drawn([3])[0] + 1, drawn([4])[0]], rtol=1e-6)


def test_small_vectors_go_once_they_were_trained() -> None:
    server = Server(eviction=Eviction(min_norm=1.0))
    server.fetch([1, 2, 3], 0)
    server.update([1], 5.0, 0)
    server.update([2], 0.0, 0)
    assert server.sweep(1) == 1
    assert sorted(server.column("ids")) == [1, 3]


def test_there_are_never_more_rows_than_allowed_and_the_oldest_go() -> None:
    server = Server(eviction=Eviction(max_rows=64))
    for step in range(16):
        ids = range(step * 5, step * 5 + 5)
        server.fetch(ids, step)
        server.update(ids, 1.0, step)
    assert len(server.column("ids")) == 64
    # Not admitted: there is no room.
    np.testing.assert_array_equal(server.look([79]), np.zeros((1, DIM)))
    assert server.sweep(16) == 4
    assert len(server.column("ids")) == 60
    assert set(range(5, 64)) <= set(server.column("ids"))
    assert server.sweep(16) == 0


def test_rows_of_several_servers_together_are_as_many_as_allowed() -> None:
    servers = [Server(server=i, num_servers=3, eviction=Eviction(max_rows=10)) for i in range(3)]
    for server in servers:
        server.fetch(range(50))
    assert sorted(len(server.column("ids")) for server in servers) == [3, 3, 4]


def test_an_id_is_admitted_when_it_has_been_in_enough_batches() -> None:
    server = Server(admission=Admission(min_count=3))
    for _ in range(2):
        np.testing.assert_array_equal(server.fetch([1, 2]), np.zeros((2, DIM)))
        server.update([1, 2], 1.0, 0)
    np.testing.assert_array_equal(server.fetch([1, 9]), [drawn([1])[0], np.zeros(DIM)])
    assert list(server.column("ids")) == [1]


def test_a_sketch_never_counts_too_few_and_forgets_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CountMinSketch, "width", 16)
    monkeypatch.setattr(CountMinSketch, "counts_until_halved", 100)
    server = Server(admission=Admission(min_count=4))
    for _ in range(4):
        server.fetch(range(5))
    assert sorted(server.column("ids")) == list(range(5))
    once = Server(admission=Admission(min_count=100))
    for first in range(0, 2000, 10):
        once.fetch(range(first, first + 10))
    assert len(once.column("ids")) == 0


def test_ids_are_admitted_with_a_probability() -> None:
    server = Server(admission=Admission(probability=0.25))
    server.fetch(range(1000), 1)
    first = set(server.column("ids"))
    assert 180 < len(first) < 320
    server.fetch(range(1000), 2)
    assert 370 < len(server.column("ids")) < 510
    again = Server(admission=Admission(probability=0.25))
    again.fetch(range(1000), 1)
    assert set(again.column("ids")) == first


def test_threads_that_bring_the_same_ids_while_others_go_lose_neither_rows_nor_updates() -> None:
    server = Server(eviction=Eviction(unseen_steps=100))
    barrier = threading.Barrier(3, timeout=30)

    def work(times: int) -> None:
        for step in range(times):
            ids = range(step * 8, step * 8 + 16)
            barrier.wait()
            server.fetch(ids, step)
            server.update(ids, 1.0, step)
            if step % 20 == 19:
                server.sweep(step)

    threads = [threading.Thread(target=work, args=(150,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ids, counts = server.column("ids"), server.column("counts")
    assert len(np.unique(ids)) == len(ids) == int(server.table.num_live()) == int(server.table._index.size())
    # Each is in two of a thread's batches, the first and the last ones in one; only old ones have gone.
    assert set(range(100 * 8, 150 * 8 + 8)) <= set(ids)
    assert set(counts[(ids >= 808) & (ids < 1200)]) == {6}
    np.testing.assert_allclose(server.look(ids), drawn(ids) + counts[:, None], rtol=1e-5)


def test_no_row_is_lost_over_many_evictions() -> None:
    server = Server(eviction=Eviction(unseen_steps=1))
    for step in range(60):
        server.fetch(range(step * 50, step * 50 + 50), step)
        assert server.sweep(step + 1) == 50
    assert int(server.table.num_rows) == 50
    assert int(server.table._num_free) == 50
    assert int(server.table._index.size()) == 0
