"""`EpochLengths`: the steps at which epochs begin and end, as Keras counts them; and `EpochCount`, a run's count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import numpy as np


@dataclass(frozen=True)
class EpochLengths:
    """Epochs of a known number of steps.

    As in Keras, an epoch ends with the data at the latest, and one that is shorter than a pass over the data leaves the
    rest of the pass to the next epoch.

    Attributes:
        steps_per_epoch: of an epoch that does not end with the data.
        steps_per_pass: after which the data begins again, and with it an epoch.
        first_step: the global step at which the first epoch begins.
        per_step: what a step takes of the two numbers before: more than 1 if they are of batches, of which the last
            ones of a pass may not fill a step, which takes the first ones of the next pass as well.
        ahead: as many of these batches were taken before `first_step`.
    """

    steps_per_epoch: int
    steps_per_pass: int
    first_step: int = 0
    per_step: int = 1
    ahead: int = 0

    @classmethod
    def of(cls, steps_per_epoch: int | None, steps_per_pass: int | None, first_step: int = 0) -> EpochLengths | None:
        """The lengths; None if neither is known. Without `steps_per_epoch`, an epoch is a pass."""
        per_epoch, per_pass = steps_per_epoch or steps_per_pass, steps_per_pass or steps_per_epoch
        return cls(per_epoch, per_pass, first_step) if per_epoch and per_pass else None

    def epoch_at(self, step: Any) -> Any:
        """The number of the epoch, from 0, that has begun at a global step; of tensors, too."""
        since = (step - self.first_step) * self.per_step + self.ahead
        in_pass = since % self.steps_per_pass // self.steps_per_epoch
        return since // self.steps_per_pass * self._epochs_per_pass + in_pass

    def batch_at(self, step: int) -> int:
        """The number of the step within its epoch, from 0."""
        return step - self.begin_of(self.epoch_at(step))

    def begin_of(self, epoch: int) -> int:
        """The global step at which an epoch begins."""
        passes, in_pass = divmod(epoch, self._epochs_per_pass)
        before = passes * self.steps_per_pass + in_pass * self.steps_per_epoch
        return self.first_step + -(-(before - self.ahead) // self.per_step)

    def length_of(self, epoch: int) -> int:
        """The number of its steps."""
        return self.begin_of(epoch + 1) - self.begin_of(epoch)

    def left_at(self, step: int) -> int:
        """The part of the present pass that is not taken at a global step, in what `steps_per_pass` counts."""
        return self.steps_per_pass - ((step - self.first_step) * self.per_step + self.ahead) % self.steps_per_pass

    def placed(self, step: int, epoch: int, left: int) -> EpochLengths:
        """The same lengths, placed so that an epoch begins when what `left` counts is taken, from `step` on."""
        passes, in_pass = divmod(epoch, self._epochs_per_pass)
        taken = passes * self.steps_per_pass + in_pass * self.steps_per_epoch - left
        return replace(self, first_step=step - taken // self.per_step, ahead=taken % self.per_step)

    def continuing(self, count: EpochCount, step: int) -> EpochLengths:
        """The same lengths, placed so that at `step`, where a run has this count, as much of the epoch is done."""
        placed = replace(self, first_step=count.begin)
        epoch = count.epoch - count.first_epoch
        if not count.length or (placed.epoch_at(step), placed.length_of(epoch)) == (epoch, count.length):
            return placed
        from_zero = replace(self, first_step=0)
        done = round(count.batch / count.length * from_zero.length_of(epoch))
        return replace(self, first_step=step - from_zero.begin_of(epoch) - done)

    @property
    def _epochs_per_pass(self) -> int:
        return -(-self.steps_per_pass // self.steps_per_epoch)


@dataclass(frozen=True)
class EpochCount:
    """The epochs of a run so far, as its checkpoints have them: with other batches or another cluster they go on.

    Attributes:
        origin: the global step of the model with which the run began.
        begin: the global step at which the data, and epoch `first_epoch`, began.
        epoch: the number of the present epoch, from 0, of which `batch` of `length` steps are done; 0 if not known.
        more_epochs, epochs: of a fit that trains so many more, and the number at which it ends; 0 of any other.
        more_steps, steps: the same, in global steps.
    """

    origin: int = 0
    begin: int = 0
    first_epoch: int = 0
    epoch: int = 0
    batch: int = 0
    length: int = 0
    more_epochs: int = 0
    epochs: int = 0
    more_steps: int = 0
    steps: int = 0

    @classmethod
    def of_array(cls, values: Sequence[int]) -> EpochCount:
        """The count in a checkpoint; those of kdist 0.1.0 have two values."""
        begin, first_epoch, *others = map(int, values)
        origin, *later = others or [begin]
        return cls(origin, begin, first_epoch, *(later or [first_epoch]))

    def to_array(self) -> np.ndarray:
        """The values as in a checkpoint, int64 `[n]`; the first two are those of kdist 0.1.0."""
        origin, begin, first_epoch, *others = astuple(self)
        return np.array([begin, first_epoch, origin, *others], np.int64)

    @property
    def num_epochs(self) -> int:
        """The number of epochs that are done; one that was begun counts."""
        return self.epoch + (self.batch > 0)
