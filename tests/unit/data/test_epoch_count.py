"""`EpochCount`: a run counts its epochs, also with other batches or on another cluster."""

import numpy as np
import pytest

from kdist.data.epoch_lengths import EpochCount, EpochLengths


def test_a_count_is_the_same_when_it_is_read_again() -> None:
    count = EpochCount(5, 105, 1, 3, 7, 50, 2, 4, 0, 0)
    assert EpochCount.of_array(count.to_array()) == count
    assert count.to_array().dtype == np.int64


def test_one_that_an_earlier_version_has_written_has_a_beginning_only() -> None:
    assert EpochCount.of_array([100, 2]) == EpochCount(origin=100, begin=100, first_epoch=2, epoch=2)


def test_an_epoch_that_was_begun_counts() -> None:
    assert EpochCount(epoch=2).num_epochs == 2
    assert EpochCount(epoch=2, batch=1, length=10).num_epochs == 3


@pytest.mark.parametrize(
    ("per_epoch", "step", "begin"),
    [
        # As before.
        (100, 250, 0),
        # Batches of half the size: epochs have twice as many steps, and half of the third one is done.
        (200, 250, 250 - 500),
        (50, 250, 250 - 125),
    ],
)
def test_other_batches_do_as_much_of_the_epoch_that_has_begun(per_epoch: int, step: int, begin: int) -> None:
    count = EpochCount(epoch=2, batch=50, length=100)
    lengths = EpochLengths(per_epoch, per_epoch).continuing(count, step)
    assert lengths.first_step == begin
    assert lengths.epoch_at(step) == 2
    assert lengths.batch_at(step) == per_epoch // 2
    assert lengths.begin_of(3) - step == per_epoch // 2


def test_at_the_end_of_an_epoch_the_next_one_begins() -> None:
    lengths = EpochLengths(30, 30).continuing(EpochCount(epoch=1, batch=0, length=100), 100)
    assert (lengths.epoch_at(100), lengths.batch_at(100), lengths.begin_of(2)) == (1, 0, 130)


def test_epochs_that_began_later_count_from_there() -> None:
    count = EpochCount(origin=0, begin=100, first_epoch=1, epoch=1, batch=10, length=40)
    assert EpochLengths(40, 40).continuing(count, 110).first_step == 100
    other = EpochLengths(20, 20).continuing(count, 110)
    assert (other.first_step, other.begin_of(1)) == (105, 125)


def test_a_count_without_a_length_leaves_the_beginning_where_it_is() -> None:
    assert EpochLengths(20, 20).continuing(EpochCount(begin=7), 110).first_step == 7
