"""Workers read arrays from files that they see, and train to what arrays in memory train to, bit by bit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import toy_data
from keras import layers

import kdist
from kdist.data.columns import Column
from kdist.data.file_column import ArrayFile

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("tasks_prepared")]


class Ways:
    """The number of shares that were read from a file, and of chunks that were sent."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.read = self.sent = 0
        map_file, chunks = ArrayFile.map, Column._chunks

        def counted_map(file: ArrayFile) -> tf.Tensor:
            self.read += 1
            return map_file(file)

        def counted_chunks(column: Column, rows: Any) -> Iterator[np.ndarray]:
            for chunk in chunks(column, rows):
                self.sent += 1
                yield chunk

        patch.setattr(ArrayFile, "map", counted_map)
        patch.setattr(Column, "_chunks", counted_chunks)


@pytest.fixture(autouse=True)
def ways(monkeypatch: pytest.MonkeyPatch) -> Ways:
    monkeypatch.setattr(Column, "chunk_bytes", 1 << 9)
    return Ways(monkeypatch)


def build() -> keras.Model:
    keras.utils.set_random_seed(4)
    model = keras.Sequential([layers.Input((6,)), layers.Dense(16, "relu"), layers.Dense(3)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def train(
    run_dir: Path, x: Any, y: Any, cluster: str = "2ps2w", **options: Any
) -> tuple[list[np.ndarray], list[float]]:
    """Weights, and the losses of validations, after two epochs."""
    strategy = "parameter_server" if "1w" in cluster else "sync_replicas"
    trainer = kdist.Trainer(build, cluster=cluster, strategy=strategy, run_dir=run_dir, seed=1)
    history = trainer.fit(x, y, batch_size=16, epochs=2, verbose=0, **options)
    return trainer.model.get_weights(), history.history.get("val_loss", [])


def in_files(folder: Path) -> tuple[np.memmap, np.memmap]:
    x, y = toy_data()
    for name, values in (("x", x.astype(np.float64)), ("y", y)):
        np.save(folder / f"{name}.npy", values)
        (folder / f"{name}.npy").chmod(0o444)
    x, y = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in "xy")
    return x, y


@pytest.mark.long
@pytest.mark.parametrize("cluster", [pytest.param("2ps2w", marks=pytest.mark.long), "1ps1w"])
def test_workers_read_memory_mapped_arrays_from_their_files(
    cluster: str, run_dir: Path, tmp_path: Path, ways: Ways
) -> None:
    x, y = in_files(tmp_path)
    validation = {"validation_split": 0.25}
    weights, losses = train(run_dir, x, y, cluster, **validation)
    # Two columns for each worker. Two workers also validate; their labels are so few that they travel at once.
    assert (ways.read, ways.sent) == (2 if cluster == "1ps1w" else 4 + 2, 0)
    in_memory = train(run_dir.with_name("memory"), *toy_data(), cluster, **validation)
    assert ways.sent > 0
    for mine, expected in zip([*weights, losses], [*in_memory[0], in_memory[1]]):
        np.testing.assert_array_equal(mine, expected)


@pytest.mark.long
@pytest.mark.parametrize("num_seeing", [pytest.param(0, marks=pytest.mark.long), 1])
def test_a_worker_that_sees_another_file_gets_its_rows_sent(
    num_seeing: int, run_dir: Path, tmp_path: Path, ways: Ways, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = in_files(tmp_path)
    if num_seeing:
        is_same, asked = ArrayFile.is_same, []

        def only_of_one(file: ArrayFile, values: np.ndarray, probed: np.ndarray) -> bool:
            asked.append(file)
            return is_same(file, values, probed) and len(asked) <= 2 * num_seeing

        monkeypatch.setattr(ArrayFile, "is_same", only_of_one)
    else:
        # The chief has the first file open; under its name there is another one by now.
        for name, array in (("x", x), ("y", y)):
            np.save(tmp_path / "other.npy", np.array(array) + 1)
            os.replace(tmp_path / "other.npy", tmp_path / f"{name}.npy")
    weights, _ = train(run_dir, x, y)
    assert ways.read == 2 * num_seeing
    assert ways.sent > 0
    expected, _ = train(run_dir.with_name("memory"), *toy_data())
    for mine, other in zip(weights, expected):
        np.testing.assert_array_equal(mine, other)


@pytest.mark.long
def test_hdf5_datasets(run_dir: Path, tmp_path: Path, ways: Ways) -> None:
    x, y = toy_data()
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["x"] = x
        file.create_dataset("y", data=y, chunks=(100,), compression="gzip")
    with h5py.File(tmp_path / "data.h5", "r") as file:
        weights, losses = train(run_dir, file["x"], file["y"], validation_data=(file["x"], file["y"]))
        predicted = kdist.Trainer(build, cluster="2ps2w", run_dir=run_dir).predict(file["x"], on_workers=True)
    assert ways.read == 6
    expected, expected_losses = train(run_dir.with_name("memory"), x, y, validation_data=(x, y))
    for mine, other in zip([*weights, losses], [*expected, expected_losses]):
        np.testing.assert_array_equal(mine, other)
    np.testing.assert_allclose(predicted, build().predict(x, verbose=0), rtol=1e-5, atol=1e-6)


class MappedFiles(kdist.hooks.Hook):
    """Writes down whether the process that trains has mapped a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def end(self, session: Any) -> None:
        (session.run_dir / "mapped").write_text(str(str(self.path) in Path("/proc/self/maps").read_text()))


@pytest.mark.long
def test_workers_in_processes_of_their_own_map_an_npz_file(run_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    # The half of each worker is too large for one piece.
    np.savez(path, x=np.random.default_rng(1).random((90_000, 100), np.float32), y=np.zeros(90_000, np.float32))
    arrays = kdist.load_npz(path)
    weights = []
    for x, hooks in ((arrays["x"], [MappedFiles(path)]), (np.array(arrays["x"]), [])):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([layers.Input((100,)), layers.Dense(1)])
        model.compile("sgd", "mse")
        trainer = kdist.Trainer(model, cluster="2w", run_dir=run_dir, resume="never", seed=1, hooks=hooks)
        trainer.fit(x, arrays["y"], batch_size=8, steps=10, verbose=0)
        weights.append(trainer.model.get_weights())
    assert (run_dir / "mapped").read_text() == "True"
    for mapped, sent in zip(*weights):
        np.testing.assert_array_equal(mapped, sent)
