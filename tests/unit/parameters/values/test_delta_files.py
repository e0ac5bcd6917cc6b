"""A full checkpoint and its deltas have the bits of a full one, and a delta has little but the rows that changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import kdist
from kdist.config.schema import ServerOptions
from kdist.errors import CheckpointError, NonFiniteError
from kdist.hooks import CheckpointSaver
from kdist.layers import DynamicEmbedding, Embedding, Eviction
from kdist.parameters.placement.blocks import StoredShard
from kdist.parameters.tables.changed_rows import DeltaBase
from kdist.parameters.tables.dynamic_table import DynamicTable
from kdist.parameters.values.slices import WritePlan
from kdist.run.checkpoint import Checkpoints
from kdist.strategies.calls import UnrolledCalls
from kdist.strategies.prepared_training import prepare
from kdist.threads import in_thread

DIM, ROWS = 8, 500
CPU = "/job:localhost/replica:0/task:0/device:CPU:0"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DynamicTable, "reserved_bytes", 4 * (4 * DIM * 4 + 32))
    monkeypatch.setattr(StoredShard, "slice_bytes", 8192)


def build(optimizer: Callable[[], keras.optimizers.Optimizer], rows: int = ROWS) -> keras.Model:
    """Two tables with a length, in one group, two without, and a dense layer."""
    inputs = layers.Input((4,), dtype="int64")
    vectors = [Embedding(rows + n, DIM, name=f"fixed_{n}")(inputs[:, n]) for n in range(2)]
    eviction = Eviction(unseen_steps=3)
    for n in range(2):
        initializer = keras.initializers.RandomUniform(seed=n)
        vectors.append(
            DynamicEmbedding(DIM, "int64", initializer, eviction=eviction, name=f"open_{n}")(inputs[:, 2 + n])
        )
    model = keras.Model(inputs, layers.Dense(1, name="out")(layers.Concatenate()(vectors)))
    model.compile(optimizer(), "mse")
    return model


class Servers:
    """A store on some servers, all of them this process, and checkpoints of it; its steps see given ids."""

    def __init__(
        self,
        folder: Path,
        num_servers: int = 2,
        optimizer: Callable[[], keras.optimizers.Optimizer] = keras.optimizers.Adagrad,
        rows: int = ROWS,
        full_every: int = 9,
        batch: int = 8,
    ) -> None:
        trainer = kdist.Trainer(
            lambda: build(optimizer, rows), run_dir=folder, seed=3, hooks=[CheckpointSaver(full_every=full_every)]
        )
        ids, y = np.zeros((batch, 4), np.int64), np.zeros((batch, 1), np.float32)
        request = trainer._fit_of(ids, y, batch_size=batch)
        prepared = prepare(request.training_spec(request.training_data), 1)
        plan = prepared.plan(num_servers, ServerOptions())
        self.store = prepared.store([CPU] * num_servers, plan)
        self.checkpoints = Checkpoints(folder / "checkpoints")
        self._element = prepared.trace_dataset().structured_outputs.element_spec
        self._seeds = np.zeros((len(prepared.replica_step.seeds), 2), np.uint32)
        self._call = UnrolledCalls(prepared.replica_step, self.store, tf.data.IteratorSpec(self._element)).function(1)
        self._batch = batch
        self.since: DeltaBase | None = None

    def train(self, *ids: int) -> None:
        """A step on a batch of these ids, all in each of the four tables, and a sweep."""
        x = np.repeat(np.resize(ids, self._batch)[:, None], 4, 1)
        element = (x, np.arange(self._batch, dtype=np.float32)[:, None]), self._seeds
        dataset = tf.data.Dataset.from_generator(lambda: iter([element]), output_signature=self._element)
        self._call(iter(dataset))
        assert self.store.sweep is not None
        self.store.sweep()

    def save(self, *, full: bool = False) -> Path:
        step, since = self.store.counters.global_step(), None if full else self.since
        ended = self.store.files.next_interval(None if since is None else since.interval)
        path = self.checkpoints.write(step, stored_by(self), since=since)
        self.since = None if ended is None else DeltaBase(step, ended)
        return path

    def values(self) -> dict[str, np.ndarray]:
        """All values, the rows of tables without a length in the order of their ids."""
        portions = [*self.store.values.portions(), *self.store.dynamic.read()]
        return ordered({name: value for portion in portions for name, value in portion.items()})


def stored_by(servers: Servers) -> Any:
    """The values that `Checkpoints` save and restore."""
    return SimpleNamespace(
        shapes={**servers.store.values.shapes, **servers.store.dynamic.shapes},
        begin_save=lambda prefix, since, aside: servers.store.files.begin_save(
            prefix, {"seed": np.array(3)}, since, copies=aside
        )(),
        restore=servers.store.restore,
    )


def ordered(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    found = dict(values)
    for n in range(2):
        ids = values[f"parameters/open_{n}/embeddings_ids"]
        for name in (name for name in values if f"/open_{n}/" in name):
            found[name] = values[name][np.argsort(ids)]
    return found


def assert_same_bits(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert value.dtype == theirs[name].dtype
        np.testing.assert_array_equal(value, theirs[name], err_msg=name)


@pytest.mark.parametrize(
    ("optimizer", "num_servers"),
    [(keras.optimizers.Adagrad, 3), (keras.optimizers.Adam, 1)],
)
@pytest.mark.long
def test_a_full_checkpoint_and_its_deltas_have_the_bits_of_a_full_one(
    optimizer: type[keras.optimizers.Optimizer], num_servers: int, tmp_path: Path
) -> None:
    servers = Servers(tmp_path / "a", 2, optimizer)
    # 7 and 8 are evicted, and 8 comes again; 11 stays, and is updated in every step.
    for step, ids in enumerate([(7, 8, 9), (9, 499), (9,), (9, 3), (8, 9, -1 % ROWS), (9, 250, 251), (251,), (8,)]):
        servers.train(*ids, 11)
        if step in (1, 4, 7):
            path = servers.save()
    assert path.name == "delta-8"
    assert servers.checkpoints.steps() == [2, 5, 8]
    now = servers.values()
    assert len(now["parameters/open_0/embeddings_ids"]) < len({7, 8, 9, 11, 499, 3, 250, 251})
    read = servers.checkpoints.read(8)
    assert read is not None
    assert_same_bits(ordered(read), now)
    others = Servers(tmp_path / "b", num_servers, optimizer, full_every=1)
    assert servers.checkpoints.restore(stored_by(others)) == path
    assert_same_bits(others.values(), now)
    # It goes on in the same way: nothing of the rows that were replaced is left.
    for either in (servers, others):
        either.train(251, 8, 77)
    for ours, theirs in zip(others.values().values(), servers.values().values(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.long
def test_a_delta_of_one_percent_of_the_rows_has_less_than_three_percent_of_the_bytes(tmp_path: Path) -> None:
    rows = 20_000
    servers = Servers(tmp_path, rows=rows, optimizer=keras.optimizers.Adam, batch=rows // 100)
    servers.train(1, 2)
    full = servers.save()
    servers.train(*range(0, rows, 100))
    delta = servers.save()
    sizes = [sum(path.stat().st_size for path in tmp_path.glob(f"checkpoints/{p.name}.*")) for p in (full, delta)]
    assert sizes[1] < 0.03 * sizes[0]
    assert len(tf.train.load_checkpoint(str(delta)).get_tensor("delta/ids/fixed_0/embeddings")) == rows // 100


@pytest.mark.long
def test_rows_stay_marked_until_a_save_has_succeeded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    servers = Servers(tmp_path)
    servers.train(1)
    servers.save()
    servers.train(2)
    with monkeypatch.context() as patch:
        patch.setattr(WritePlan, "write", full_disk)
        with pytest.raises(CheckpointError):
            servers.save()
    servers.train(3)
    delta = tf.train.load_checkpoint(str(servers.save()))
    assert sorted(delta.get_tensor("delta/ids/fixed_0/embeddings")) == [2, 3]
    assert sorted(delta.get_tensor("delta/ids/open_0/embeddings")) == [2, 3]
    assert {path.name.partition(".")[0] for path in servers.checkpoints.folder.iterdir()} == {
        "checkpoint",
        "ckpt-1",
        "delta-3",
    }


def full_disk(*_: Any) -> None:
    raise tf.errors.ResourceExhaustedError(None, None, "No space left on device")


@pytest.mark.long
def test_what_is_copied_is_written_whatever_becomes_of_the_rows(tmp_path: Path) -> None:
    servers = Servers(tmp_path)
    servers.train(1)
    servers.save()
    since = servers.since
    assert since is not None
    servers.train(2)
    servers.store.files.next_interval(since.interval)
    write = servers.store.files.begin_save(tmp_path / "delta-2", {"seed": np.array(3)}, since)
    now = servers.values()
    servers.train(2, 3)
    in_thread(write).result()
    others = Servers(tmp_path / "b", 1)
    others.store.restore(servers.checkpoints.path(1), [tmp_path / "delta-2"])
    assert_same_bits(others.values(), now)
    for changed in servers.store.files._delta[1:]:
        for rows in changed._snapshot[0].rows:
            assert not any(tf.size(column.read_value()).numpy() for column in rows.stored.values())


@pytest.mark.long
def test_changed_rows_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    servers = Servers(tmp_path)
    servers.train(1)
    servers.save()
    servers.store.write({"parameters/out/bias": np.array([np.inf], np.float32)})
    servers.train(2)
    with pytest.raises(NonFiniteError, match="fixed_0/embeddings"):
        servers.save()
    assert servers.checkpoints.steps() == [1]


@pytest.mark.long
def test_servers_that_do_not_see_the_files_send_them_through_the_chief(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on a disk of their own that has another file under that name.
    monkeypatch.setattr(tf.io, "read_file", lambda path: tf.constant(b"other"))
    servers = Servers(tmp_path / "a")
    servers.train(1, 2)
    with pytest.warns(UserWarning, match="through the chief"):
        servers.save()
    servers.train(2, 3)
    servers.save()
    others = Servers(tmp_path / "b", 3)
    with pytest.warns(UserWarning, match="through the chief"):
        servers.checkpoints.restore(stored_by(others))
    assert_same_bits(others.values(), servers.values())


def test_nothing_is_marked_if_nobody_asks(tmp_path: Path) -> None:
    servers = Servers(tmp_path, full_every=1)
    assert servers.store.files.next_interval(None) is None
    assert not any("changed" in table.columns for table in servers.store._evicting)
    tables = [rows.table for o in servers.store._optimizers._optimizers.values() for rows in o._by_rows.values()]
    assert tables
    values = [value for table in tables for value in vars(table).values() if isinstance(value, tf.Variable)]
    assert values
    assert not any(value.dtype == tf.int32 for value in values)
