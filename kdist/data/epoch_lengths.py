"""`EpochLengths`: the steps at which epochs begin and end, as Keras counts them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class EpochLengths:
    """Epochs of a known number of steps.

    As in Keras, an epoch ends with the data at the latest, and one that is shorter than a pass over the data leaves the
    rest of the pass to the next epoch.

    Attributes:
        steps_per_epoch: of an epoch that does not end with the data.
        steps_per_pass: after which the data begins again, and with it an epoch.
        first_step: the global step at which the first epoch begins.
    """

    steps_per_epoch: int
    steps_per_pass: int
    first_step: int = 0

    @classmethod
    def of(cls, steps_per_epoch: int | None, steps_per_pass: int | None, first_step: int = 0) -> EpochLengths | None:
        """The lengths; None if neither is known. Without `steps_per_epoch`, an epoch is a pass."""
        per_epoch, per_pass = steps_per_epoch or steps_per_pass, steps_per_pass or steps_per_epoch
        return cls(per_epoch, per_pass, first_step) if per_epoch and per_pass else None

    def epoch_at(self, step: Any) -> Any:
        """The number of the epoch, from 0, that has begun at a global step; of tensors, too."""
        since = step - self.first_step
        in_pass = since % self.steps_per_pass // self.steps_per_epoch
        return since // self.steps_per_pass * self._epochs_per_pass + in_pass

    def batch_at(self, step: int) -> int:
        """The number of the step within its epoch, from 0."""
        return (step - self.first_step) % self.steps_per_pass % self.steps_per_epoch

    def begin_of(self, epoch: int) -> int:
        """The global step at which an epoch begins."""
        passes, in_pass = divmod(epoch, self._epochs_per_pass)
        return self.first_step + passes * self.steps_per_pass + in_pass * self.steps_per_epoch

    def length_of(self, epoch: int) -> int:
        """The number of its steps."""
        return self.begin_of(epoch + 1) - self.begin_of(epoch)

    @property
    def _epochs_per_pass(self) -> int:
        return -(-self.steps_per_pass // self.steps_per_epoch)
