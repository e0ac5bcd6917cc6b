"""Epochs end where Keras ends them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import models
import numpy as np
import pytest
from helpers import in_short, toy_data

import kdist
from kdist.cluster.spec import ClusterShape
from kdist.data.epoch_lengths import EpochLengths
from kdist.data.shares import SharedData


class Epochs(keras.callbacks.Callback):
    """The batches of each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[list[int]] = []

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        self.batches.append([])

    def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
        self.batches[-1].append(batch)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("steps_per_pass", in_short([1, 4, 5], {5}))
@pytest.mark.parametrize("steps_per_epoch", [None, 1, 2, 3, 4, 7])
def test_epochs_and_their_batches_are_those_of_keras(steps_per_epoch: int | None, steps_per_pass: int) -> None:
    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    x = np.zeros((steps_per_pass, 1))
    seen = Epochs()
    model.fit(x, x, batch_size=1, epochs=5, steps_per_epoch=steps_per_epoch, verbose=0, callbacks=[seen])
    lengths = EpochLengths.of(steps_per_epoch, steps_per_pass, first_step=100)
    assert lengths is not None
    steps = range(100, lengths.begin_of(5))
    assert [(lengths.epoch_at(step), lengths.batch_at(step)) for step in steps] == [
        (epoch, batch) for epoch, batches in enumerate(seen.batches) for batch in batches
    ]
    assert [lengths.length_of(epoch) for epoch in range(5)] == [len(batches) for batches in seen.batches]


def test_data_without_an_end_counts_no_passes() -> None:
    lengths = EpochLengths.of(3, None)
    assert lengths is not None
    assert [lengths.begin_of(epoch) for epoch in range(3)] == [0, 3, 6]
    assert EpochLengths.of(None, None) is None


@pytest.mark.parametrize(("per_pass", "before", "after"), [(101, 2, 3), (100, 3, 2), (7, 2, 5), (12, 4, 1)])
def test_epochs_end_with_the_pass_also_if_a_step_takes_the_last_and_the_first_batches(
    per_pass: int, before: int, after: int
) -> None:
    lengths, step, taken, ends = EpochLengths(per_pass, per_pass, 10, per_step=before), 10, 0, []
    for epoch in range(20):
        while taken < (epoch + 1) * per_pass:
            assert (lengths.epoch_at(step), lengths.left_at(step)) == (epoch, (epoch + 1) * per_pass - taken)
            if epoch == 5 and taken >= 5.5 * per_pass and lengths.per_step == before:
                left = lengths.left_at(step)
                lengths = EpochLengths(per_pass, per_pass, per_step=after).placed(step, epoch + 1, left)
                assert 0 <= lengths.ahead < after
            step, taken = step + 1, taken + lengths.per_step
        ends.append(step)

    assert [lengths.begin_of(epoch) for epoch in range(7, 21)] == ends[6:]


@pytest.mark.parametrize(
    ("cluster", "strategy", "length"),
    [("local", "auto", 3), ("1ps1w", "auto", 3), ("2ps2w", "auto", 5), ("2ps2w", "sync_replicas", 5)],
)
def test_with_several_workers_an_epoch_has_the_steps_that_it_is_asked_for(
    cluster: str, strategy: str, length: int, run_dir: Path
) -> None:
    x, y = (part[:20] for part in toy_data())
    trainer = kdist.Trainer(models.mlp, cluster, strategy, run_dir=run_dir)
    request = trainer._fit_of(x, y, batch_size=8, steps_per_epoch=5)
    lengths = request.epoch_lengths(request.training_data)
    assert lengths is not None
    assert [lengths.length_of(epoch) for epoch in range(3)] == [length] * 3


def test_epochs_of_asynchronous_workers_go_on_when_their_number_changes(run_dir: Path) -> None:
    x, y = (np.concatenate([part] * 10)[:320] for part in toy_data())
    request = kdist.Trainer(models.mlp, "1ps1w", run_dir=run_dir)._fit_of(
        x, y, batch_size=8, steps_per_epoch=10, epochs=100
    )
    data = SharedData(request.training_data, 1, [205])
    # Of a range of several epochs.
    data.splits.assign(0)
    data.splits.advance(0, 5)
    spec: Any = SimpleNamespace(epoch_lengths=request.epoch_lengths(request.training_data), data=data)
    for step, workers in ((205, 2), (500, 1)):
        spec.epoch_lengths = request.lengths_on(ClusterShape(1, workers), spec, step, 1)
        assert spec.epoch_lengths.epoch_at(step) == step // 10
        assert spec.epoch_lengths.begin_of(100) == 1000
