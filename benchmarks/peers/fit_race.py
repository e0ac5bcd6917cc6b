"""The race of contenders that train by `fit`: an endless fit that a callback watches."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.peers.task import Task

_TRIAL_SECS = 0.7


def race_fit(
    task: Task,
    keras: Any,
    fit: Callable[[int, list[Any]], None],
    steps_per_epoch: int,
    settings: Sequence[int],
    choose: Callable[[dict[int, float]], int] | None = None,
) -> None:
    """Fits for a moment with each setting, then without end with the best.

    Args:
        keras: the module whose callbacks `fit` takes.
        fit: steps at once, callbacks -> fits until a callback stops it.
        choose: rates by setting -> the best one, if it is not for this process to say.
    """

    class Trial(keras.callbacks.Callback):
        """Ends a fit after a moment, not counting its first epoch."""

        def __init__(self) -> None:
            super().__init__()
            self.epochs, self.started, self.rate = -1, 0.0, 0.0

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.epochs += 1
            if not self.epochs:
                self.started = time.monotonic()
                return
            secs = time.monotonic() - self.started
            self.rate = self.epochs * steps_per_epoch / secs
            self.model.stop_training = self.epochs >= 2 if choose else secs >= _TRIAL_SECS

    class Count(keras.callbacks.Callback):
        """Counts for the race."""

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            progress.set((epoch + 1) * steps_per_epoch)

    rates = {}
    for at_once in settings:
        trial = Trial()
        fit(at_once, [trial])
        rates[at_once] = trial.rate
    best = choose(rates) if choose else max(rates, key=lambda at_once: rates[at_once])
    (task.folder / "best").write_text(str(best))
    progress = task.counter()
    fit(best, [Count()])
