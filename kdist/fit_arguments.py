"""What `fit` and `session` are given, checked once."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras

from kdist import callbacks
from kdist.checks import check_whole_number
from kdist.data import TrainingData, training_data
from kdist.errors import ConfigError
from kdist.schema import VERBOSE


@dataclass(frozen=True)
class FitArguments:
    """The arguments of `Trainer.fit` that say what to do, under the names that Keras gave them; see there.

    Raises:
        ConfigError: a value that is not allowed.
    """

    x: Any
    y: Any = None
    batch_size: int | None = None
    steps: int | None = None
    epochs: int | None = None
    initial_epoch: int = 0
    steps_per_epoch: int | None = None
    shuffle: bool = True
    class_weight: Mapping[int, float] | None = None
    sample_weight: Any = None
    verbose: int | str = "auto"
    callbacks: Sequence[keras.callbacks.Callback] = ()
    validation_data: Any = None
    validation_steps: int | None = None
    validation_batch_size: int | None = None
    validation_freq: int | Collection[int] = 1
    validation_every_steps: int | None = None
    validate_with_ema: bool = False

    def __post_init__(self) -> None:
        if self.x is None:
            raise ConfigError("fit needs data: x is None")
        for key in (
            "batch_size",
            "steps",
            "epochs",
            "steps_per_epoch",
            "validation_batch_size",
            "validation_steps",
            "validation_every_steps",
        ):
            check_whole_number(key, getattr(self, key))
        if self.verbose not in VERBOSE:
            raise ConfigError(f"verbose={self.verbose}: choose one of {', '.join(map(str, VERBOSE))}")
        callbacks.checked(self.callbacks)
        check_whole_number("initial_epoch", self.initial_epoch, at_least=0)

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is to be printed."""
        return self.verbose == 0

    @property
    def shows_progress(self) -> bool:
        """Whether a terminal shows a line that changes."""
        return self.verbose in (1, "auto")

    @property
    def tells_all(self) -> bool:
        """Whether it is printed which tasks there are, and where variables live."""
        return self.verbose == 3

    def training_data(self, seed: int | None) -> TrainingData:
        """What the workers read.

        Raises:
            ConfigError: data that cannot travel to the workers, or is of another kind.
        """
        return training_data(
            self.x,
            self.y,
            self.sample_weight,
            batch_size=self.batch_size,
            shuffle=self.shuffle,
            class_weight=self.class_weight,
            seed=seed,
        )
