"""The next day: new data with new ids on a finished run, by another batch size, cluster and strategy."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import pytest
from helpers import result_of

import kdist

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("tasks_prepared")]
NUM = 960


def build_model() -> keras.Model:
    ids = keras.Input((1,), dtype="int64")
    vectors = keras.layers.Flatten()(kdist.layers.DynamicEmbedding(4, name="table")(ids))
    model = keras.Model(ids, keras.layers.Dense(1)(vectors))
    model.compile("adagrad", "mse")
    return model


def day(number: int) -> tuple[np.ndarray, np.ndarray]:
    ids = np.random.default_rng(number).integers(100 * number, 100 * number + 150, (NUM, 1))
    return ids, (ids % 7).astype(np.float32)


def num_ids(trainer: kdist.Trainer) -> int:
    return len(trainer.model.get_layer("table").ids)


def test_one_more_epoch_of_new_data_each_day(run_dir: Path) -> None:
    trainer = kdist.Trainer(build_model, "2ps2w", run_dir=run_dir)
    assert len(trainer.fit(*day(1), batch_size=16, epochs=2, verbose=0).epoch) == 2
    assert (result_of(run_dir)["global_step"], num_ids(trainer)) == (120, 150)

    with pytest.raises(kdist.ConfigError, match="more_epochs"):
        kdist.Trainer(build_model, run_dir=run_dir).fit(*day(2), batch_size=16, epochs=1, verbose=0)

    trainer = kdist.Trainer(build_model, "1ps2w", "sync_replicas", run_dir=run_dir)
    history = trainer.fit(*day(2), batch_size=15, more_epochs=1, verbose=0)
    assert history.epoch == [0, 1, 2]
    assert (result_of(run_dir)["global_step"], num_ids(trainer)) == (120 + 32, 250)


@pytest.mark.long
def test_a_new_run_starts_from_the_rows_of_another(run_dir: Path) -> None:
    first = kdist.Trainer(build_model, "2ps2w", run_dir=run_dir / "first")
    first.fit(*day(1), batch_size=16, epochs=1, verbose=0)
    second = kdist.Trainer(build_model, "1ps2w", run_dir=run_dir / "second", start_from=run_dir / "first")
    second.fit(*day(2), batch_size=16, epochs=1, verbose=0)
    assert (result_of(run_dir / "second")["global_step"], num_ids(second)) == (60, 250)
    # The rows of the first day are there, as they were left or as ids of both days have moved them.
    before = dict(zip(first.model.get_layer("table").ids.tolist(), first.model.get_layer("table").rows))
    after = dict(zip(second.model.get_layer("table").ids.tolist(), second.model.get_layer("table").rows))
    only_first = set(before) - set(day(2)[0].ravel().tolist())
    assert only_first
    for key in only_first:
        np.testing.assert_array_equal(after[key], before[key])
