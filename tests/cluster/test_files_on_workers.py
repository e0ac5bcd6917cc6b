"""Files of records on real servers: over all workers every record counts once in each epoch, in any order of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import counted
import numpy as np
import pytest
from helpers import in_short, result_of

import kdist
from kdist.hooks import CheckpointSaver

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("tasks_prepared")]
SIZES = [400, 37, 250, 200]
TOTAL = sum(SIZES)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def files(folder: Path, suffix: str) -> Any:
    counted.write_files(folder, suffix, SIZES)
    parse = counted.parse_record if "tfrecord" in suffix else counted.parse
    return kdist.files(folder / f"*{suffix}", parse, shuffle_records=100)


def counts(trainer: kdist.Trainer) -> np.ndarray:
    return counted.counts(trainer.model)[:TOTAL]


@pytest.mark.parametrize("suffix", in_short([".parquet", ".csv", ".tfrecord", ".csv.gz"], {".csv"}))
def test_every_record_is_trained_on_once_in_each_epoch(folder: Path, run_dir: Path, suffix: str) -> None:
    data = files(folder, suffix)
    trainer = kdist.Trainer(counted.counting_model, "2ps2w", run_dir=run_dir, hooks=[CheckpointSaver(every_steps=50)])
    trainer.fit(data, batch_size=10, steps=50, verbose=0)
    # In the middle of the first epoch.
    assert counts(trainer).sum() == 500
    assert counts(trainer).max() == 1
    trainer = kdist.Trainer(counted.counting_model, "2ps2w", run_dir=run_dir)
    history = trainer.fit(data, batch_size=10, epochs=3, verbose=0)
    np.testing.assert_array_equal(counts(trainer), 3)
    result = result_of(run_dir)
    assert (result["global_step"], result["extra_steps"], len(history.epoch)) == (3 * -(-TOTAL // 10), 0, 3)


@pytest.mark.long
@pytest.mark.parametrize(("cluster", "strategy"), [("1ps2w", "sync_replicas"), ("2w", "auto"), ("local", "auto")])
def test_synchronous_replicas_have_equal_shares(folder: Path, run_dir: Path, cluster: str, strategy: str) -> None:
    trainer = kdist.Trainer(counted.counting_model, cluster, strategy, run_dir=run_dir)
    trainer.fit(files(folder, ".parquet"), batch_size=10, epochs=2, verbose=0)
    replicas = 1 if cluster == "local" else 2
    np.testing.assert_array_equal(counts(trainer), 2)
    assert result_of(run_dir)["global_step"] == 2 * -(-TOTAL // (10 * replicas))


@pytest.mark.long
def test_workers_evaluate_files(folder: Path, run_dir: Path) -> None:
    data = files(folder, ".csv")
    trainer = kdist.Trainer(counted.counting_model, "1ps2w", run_dir=run_dir)
    history = trainer.fit(data, batch_size=10, epochs=1, validation_data=data, verbose=0)
    assert history.history["val_loss"] == [pytest.approx(trainer.evaluate(data, batch_size=10, verbose=0))]
    assert trainer.predict(data, batch_size=10, verbose=0, on_workers=True).shape == (TOTAL, 1)
