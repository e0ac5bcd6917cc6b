"""A program as people write it with Keras, and a run of it: by plain Keras, or by kdist somewhere."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np

import kdist

BATCH = 16
EXAMPLES = 128
SEED = 5

KERAS = "Keras"
# With how many replicas take part in each step.
PLACES: dict[str, tuple[dict[str, Any], int]] = {
    "local": ({"cluster": "local"}, 1),
    "1ps1w": ({"cluster": "1ps1w"}, 1),
    "2ps2w": ({"cluster": "2ps2w"}, 1),
    "sync": ({"cluster": "2ps2w", "strategy": "sync_replicas"}, 2),
    "2w": ({"cluster": "2w"}, 2),
}
EXACT = ("local", "1ps1w")

Values = Mapping[str, list[float]]


class MeansOfBatches(keras.callbacks.Callback):
    """The means over each epoch of what a step returns; Keras's history has the values of the last batch."""

    def on_train_begin(self, logs: Any = None) -> None:
        self.of_epochs: dict[str, list[float]] = {}

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.batches: list[dict[str, float]] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches.append({name: float(value) for name, value in logs.items()})

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        for name in self.batches[0]:
            self.of_epochs.setdefault(name, []).append(sum(values[name] for values in self.batches) / len(self.batches))


@dataclass(frozen=True)
class Program:
    """One program, small.

    Args:
        title: in the table of the documentation.
        build: makes the compiled model.
        data: makes `x` and `y` (and weights of the examples), or a dataset of batches, of the given size.
        draws: it draws random numbers while it trains, so that no two runs are alike.
        shows: the value of the history that the documentation shows.
        near: how far the last of these values may be above Keras's, in parts of the way that Keras's went; None: it
            says nothing about how good the model is, as with adversaries, and is only finite.
        epochs: of each fit.
        then: changes the trained model before a second fit, whose history is the one that counts.
        compares: its loss compares the examples of a batch, so that every replica needs a whole one.
        of_batches: its step returns plain values, not those of metrics.
        check: raises if the trained model has state that no step of a worker has computed.
        validates: the data is the data for validation, too.
        options: more arguments of `fit`.
        refused: where kdist says that it cannot train it, before it starts.
        needs: a package, beside Keras and TensorFlow.
    """

    title: str
    build: Callable[[], keras.Model]
    data: Callable[[int], Any]
    draws: bool = False
    shows: str = "loss"
    near: float | None = 0.5
    epochs: int = 4
    then: Callable[[keras.Model], None] | None = None
    compares: bool = False
    of_batches: bool = False
    check: Callable[[keras.Model], None] | None = None
    validates: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    refused: tuple[str, ...] = ()
    needs: str | None = None

    def can_run(self) -> bool:
        """Whether the package that it needs is installed."""
        return self.needs is None or importlib.util.find_spec(self.needs) is not None

    def train(self, place: str, run_dir: Path) -> Values:
        """The history of the last fit, by plain Keras or at one of `PLACES`."""
        if place == KERAS:
            model = self.built()
            means = MeansOfBatches()
            history = self._fit(model.fit, lambda: model, BATCH, callbacks=[means] * self.of_batches)
            return means.of_epochs if self.of_batches else history
        options, replicas = PLACES[place]
        # The same number of steps, each with as many examples as with Keras, or at least as many.
        batch_size, epochs = (BATCH, self.epochs * replicas) if self.compares else (BATCH // replicas, self.epochs)
        trainer = kdist.Trainer(self.built, run_dir=run_dir, seed=SEED, **options)
        return self._fit(trainer.fit, lambda: trainer.model, batch_size, epochs=epochs)

    def built(self) -> keras.Model:
        """A new model, which always starts with the same weights."""
        if self.needs is not None:
            # That may draw random numbers.
            importlib.import_module(self.needs)
        keras.utils.clear_session()
        keras.utils.set_random_seed(SEED)
        return self.build()

    def _fit(self, fit: Callable[..., Any], model: Callable[[], keras.Model], batch_size: int, **more: Any) -> Values:
        given = self.data(batch_size)
        arrays = isinstance(given, tuple)
        arguments: dict[str, Any] = dict(zip(("x", "y", "sample_weight"), given)) if arrays else {"x": given}
        if arrays:
            arguments |= {"batch_size": batch_size, "shuffle": False}
        if self.validates:
            arguments["validation_data"] = given
        arguments |= {"epochs": self.epochs, "verbose": 0, **self.options, **more}
        history = fit(**arguments).history
        if self.then is not None:
            self.then(model())
            history = fit(**arguments).history
        if self.check is not None:
            self.check(model())
        return {name: [float(value) for value in values] for name, values in history.items()}

    def compare(self, values: Values, with_keras: Values, place: str) -> None:
        """Raises an AssertionError if this history is not that of the program."""
        assert set(values) == set(with_keras)
        for name, expected in with_keras.items():
            assert np.isfinite(values[name]).all(), name
            if place in EXACT and not self.draws:
                np.testing.assert_allclose(values[name], expected, rtol=2e-3, atol=2e-4, err_msg=name)
        if self.near is not None:
            first, *_, last = with_keras[self.shows]
            assert values[self.shows][-1] - last <= self.near * abs(first - last) + 0.05 * abs(last)
