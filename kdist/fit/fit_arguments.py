"""The arguments of `fit` and `session`, checked once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras

from kdist.config.checks import check_verbose, check_whole_number
from kdist.config.schema import RunConfig, TrainConfig
from kdist.data.base import Readers, TrainingData
from kdist.data.sources import training_data
from kdist.data.split_data import SplitSource
from kdist.errors import ConfigError
from kdist.evaluation.evaluate import ValidationArguments
from kdist.log import warn


@dataclass(frozen=True)
class FitArguments:
    """The arguments of `Trainer.fit`, under the names that Keras gave them; documented there.

    Raises:
        ConfigError: a value is not allowed.
    """

    x: Any
    y: Any = None
    batch_size: int | None = None
    steps: int | None = None
    epochs: int | None = None
    initial_epoch: int = 0
    steps_per_epoch: int | None = None
    shuffle: bool = True
    class_weight: Mapping[float, float] | None = None
    sample_weight: Any = None
    verbose: Any = RunConfig.verbose
    callbacks: Sequence[keras.callbacks.Callback] = ()
    validation_data: Any = None
    validation_steps: int | None = None
    validation_batch_size: int | None = None
    validation_freq: int | Collection[int] = 1
    validation_every_steps: int | None = None
    validate_with_ema: bool = TrainConfig.validate_with_ema

    def __post_init__(self) -> None:
        if self.x is None:
            raise ConfigError("fit needs data: x is None")
        if isinstance(self.validation_data, SplitSource):
            raise ConfigError("validation_data: data that keeps arriving is read once, by training; give other data")
        for key in (
            "batch_size",
            "steps",
            "steps_per_epoch",
            "validation_batch_size",
            "validation_steps",
            "validation_every_steps",
        ):
            check_whole_number(key, getattr(self, key))
        check_verbose("verbose", self.verbose)
        for key in ("epochs", "initial_epoch"):
            check_whole_number(key, getattr(self, key), at_least=0)

    def within_limits(self) -> FitArguments:
        """The arguments, limited by `keras.config.set_max_epochs` and `keras.config.set_max_steps_per_epoch`."""
        limits = {"epochs": keras.config.max_epochs(), "steps_per_epoch": keras.config.max_steps_per_epoch()}
        given = {name: getattr(self, name) for name in limits}
        lower = {n: limit for n, limit in limits.items() if limit and (given[n] is None or given[n] > limit)}
        for name, limit in lower.items():
            warn(f"{name}={given[name]}: limited to {limit} by keras.config.set_max_{name}")
        return replace(self, **lower)

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is printed."""
        return self.verbose == 0

    @property
    def shows_progress(self) -> bool:
        """Whether a terminal shows a live line."""
        return self.verbose in (1, "auto")

    @property
    def tells_all(self) -> bool:
        """Whether the tasks and the placement of variables are printed."""
        return self.verbose == 3

    @property
    def validation(self) -> ValidationArguments:
        """The arguments about validation."""
        return ValidationArguments(
            self.validation_data,
            self.validation_batch_size or self.batch_size,
            self.validation_steps,
            self.validate_with_ema,
        )

    @property
    def has_no_epoch(self) -> bool:
        """Whether the last epoch is before the first one, as in a program whose stages may be empty."""
        return self.steps is None and self.epochs is not None and self.epochs <= self.initial_epoch

    @property
    def ends_by_epochs(self) -> bool:
        """Whether training ends after a number of epochs."""
        return self.steps is None and self.epochs is not None

    def training_data(
        self, seed: int | None, readers: Readers, preprocess: Callable[..., Any] | None = None
    ) -> TrainingData:
        """The data that the workers read, its batches prepared by `preprocess`.

        Raises:
            ConfigError: data that these workers cannot get, or that is not supported.
            TaskError: the user's code failed to make its first batches.
        """
        return training_data(
            self.x,
            self.y,
            self.sample_weight,
            batch_size=self.batch_size,
            steps_per_epoch=self.steps_per_epoch,
            shuffle=self.shuffle,
            class_weight=self.class_weight,
            seed=seed,
            readers=readers,
            preprocess=preprocess,
        )
