"""`WarmStart`: a new run that begins with the values of another one, as TF1's `init_fn` and `warm_start_from` did."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import keras
import numpy as np

from kdist.console import lines
from kdist.errors import ConfigError
from kdist.hooks.base import Hook, Session
from kdist.model.names import GLOBAL_STEP, LEARNING_RATE
from kdist.model.state import read_from_model
from kdist.run.run_dir import RunDir
from kdist.storage.object_storage import StorageError

_KEY = "run.start_from"


class WarmStart(Hook):
    """Gives a session the values of another run, or of a Keras model, that have the name and shape of its own.

    A fit with `run.start_from` adds it if there is no checkpoint to resume from.

    Args:
        source: a run dir, of which the newest checkpoint counts, or a file `x.keras`.

    Raises:
        ConfigError: it cannot be read, or none of its values fits.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._is_done = False

    def after_create_session(self, session: Session) -> None:
        if self._is_done:
            # What a restarted cluster has restored includes them.
            return
        self._is_done = True
        if Path(self._source).suffix == ".keras":
            self._take(session, self._of_model())
            return
        try:
            with RunDir(self._source, "").open_for("start") as run:
                checkpoints = run.checkpoints()
                if (newest := checkpoints.newest()) is None:
                    raise ConfigError(f"{_KEY}={self._source}: there is no checkpoint")
                if checkpoints.fit(session.strategy.values):
                    session.restore_values(checkpoints)
                    session.print_line(lines.start_from_line(str(newest), len(session.strategy.values.shapes), []))
                else:
                    self._take(session, checkpoints.read(checkpoints.steps()[-1]) or {})
        except StorageError as error:
            raise ConfigError(f"{_KEY}={self._source}: {error}") from None

    def _of_model(self) -> dict[str, np.ndarray]:
        try:
            return read_from_model(keras.saving.load_model(self._source, safe_mode=True))
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"{_KEY}={self._source}: cannot be loaded: {error}") from None

    def _take(self, session: Session, values: Mapping[str, np.ndarray]) -> None:
        wanted = session.strategy.values.shapes
        fitting = {
            name: value
            for name, value in values.items()
            if name not in (GLOBAL_STEP, LEARNING_RATE) and value.shape == wanted.get(name)
        }
        if not fitting:
            raise ConfigError(f"{_KEY}={self._source}: has no value of the name and shape of one of the model's")
        session.write(fitting)
        new = sorted(wanted.keys() - fitting.keys() - {GLOBAL_STEP, LEARNING_RATE})
        session.print_line(lines.start_from_line(self._source, len(fitting), new))
