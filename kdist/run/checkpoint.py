"""Checkpoints in TensorFlow's own format: complete or absent; the newest readable one is restored.

Every value is one named tensor, whatever strategy and however many servers wrote it, so that
`tf.train.load_checkpoint(path).get_tensor("parameters/dense/kernel")` reads it without kdist.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

import numpy as np
import tensorflow as tf

from kdist.console.warn import warn
from kdist.errors import CheckpointError, NonFiniteError, reason
from kdist.model.names import BESIDE, DATA_STATE, SEED
from kdist.run.files import CHECKPOINT_FILE, INDEX_SUFFIX, LEFT_BEHIND, write_whole

_INDEX = re.compile(r"ckpt-(\d+)\.index")
_SAVED = re.compile(r"unfinished-(\d+)\.index")
# Errors that TensorFlow raises for damaged files, depending on the byte that is wrong.
_DAMAGE_ERRORS = (tf.errors.OpError, ValueError, IndexError, UnicodeDecodeError, RuntimeError)


class Stored(Protocol):
    """Something with values to save and restore: a strategy."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of each value, by its name in checkpoints."""

    def save(self, prefix: Path) -> None:
        """Writes a checkpoint with all values; raises `NonFiniteError`, or `tf.errors.OpError` or `OSError`."""

    def begin_save(self, prefix: Path) -> Future[None]:
        """As `save`, but the values may change as soon as it returns; the future raises what `save` does."""

    def restore(self, path: Path) -> None:
        """Reads all values from a checkpoint; raises `tf.errors.OpError` if it is damaged."""


class Checkpoints:
    """The checkpoints of one run, `<folder>/ckpt-<global step>`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def place(self) -> str:
        """Where they are, for people to read."""
        return str(self.folder)

    def beside(self, name: str) -> Checkpoints:
        """The checkpoints of another folder of the same run dir."""
        return Checkpoints(self.folder.with_name(name))

    def refresh(self) -> None:
        """Looks again at what another process has changed; in a folder, every method does."""

    def steps(self) -> list[int]:
        """Global steps of the complete checkpoints, oldest first."""
        return self._steps_of(_INDEX)

    def path(self, step: int) -> Path:
        """The checkpoint of `step` as TensorFlow names it: the prefix of its files."""
        return self.folder / f"ckpt-{step}"

    def newest(self) -> Path | None:
        """The newest complete checkpoint."""
        steps = self.steps()
        return self.path(steps[-1]) if steps else None

    def save(self, step: int, stored: Stored, *, keep: int | None = None) -> Path:
        """Writes a checkpoint and deletes all but the newest `keep`; none if None.

        It is written under another name and renamed, the index last: without its index it does not exist.

        Args:
            stored: what has the values.

        Raises:
            NonFiniteError: a value is NaN or infinite; nothing is written.
            CheckpointError: it cannot be written; earlier checkpoints are untouched.
        """
        with self._explaining(step):
            self.folder.mkdir(parents=True, exist_ok=True)
            stored.save(self._unfinished(step))
            self._complete(step, keep)
        return self.path(step)

    def begin_save(self, step: int, stored: Stored) -> Future[None]:
        """As `save`, but returns when the values may change; `finish_save` has to follow, and takes what it returns."""
        with self._explaining(step):
            self.folder.mkdir(parents=True, exist_ok=True)
            return stored.begin_save(self._unfinished(step))

    def finish_save(self, step: int, wait: Callable[[], None], *, keep: int | None = None) -> Path:
        """Completes what `begin_save` has begun; see `save`.

        Args:
            wait: waits until it is written.
        """
        with self._explaining(step):
            wait()
            self._complete(step, keep)
        return self.path(step)

    def _complete(self, step: int, keep: int | None) -> None:
        """Makes what was written a checkpoint."""
        self._move_into_place(step)
        # When an earlier save failed, other tasks may still have been writing.
        self._remove_left_behind()
        for old in self.steps()[:-keep] if keep else []:
            self._delete(old)
        # Only TensorFlow's own tools need it.
        with suppress(OSError):
            self._write_state([self.path(old).name for old in self.steps()])

    @contextmanager
    def _explaining(self, step: int) -> Iterator[None]:
        """Says what it means that a step cannot be saved."""
        try:
            yield
        except NonFiniteError as error:
            self._remove_left_behind()
            raise NonFiniteError(
                f"step {step} is not saved: {error}\n"
                f"  last good checkpoint, which is kept: {self.newest() or 'none was saved'}"
            ) from error
        except (tf.errors.OpError, OSError) as error:
            # A full disk should not be filled by what could not be written.
            self._remove_left_behind()
            raise CheckpointError(
                f"step {step} could not be saved to {self.place}: {_in_a_line(error)}\n"
                f"  last good checkpoint: {self.newest() or 'none was saved'}"
            ) from error

    def keep_only(self, step: int) -> None:
        """Deletes every checkpoint but one."""
        with suppress(OSError):
            for other in self.steps():
                if other != step:
                    self._delete(other)
            self._write_state([self.path(step).name])

    def restore(self, stored: Stored) -> Path | None:
        """Reads the newest undamaged checkpoint completely; warns about each damaged one.

        Args:
            stored: gets the values.

        Returns:
            The checkpoint; None if there is no checkpoint at all.

        Raises:
            CheckpointError: every checkpoint is damaged, or the newest undamaged one is of another model.
        """
        found = self._steps_of(CHECKPOINT_FILE)
        for step in reversed(found):
            path = self.path(step)
            self._fetch(step)
            try:
                if differences := _differences(_shapes_in(path), stored.shapes):
                    # If it is damaged, they mean nothing.
                    for name in _shapes_in(path):
                        tf.train.load_checkpoint(str(path)).get_tensor(name)
                    raise CheckpointError(
                        f"{path} is of another model or optimizer:\n{differences}"
                        "  use another run.dir, or run.resume=never to start anew"
                    )
                stored.restore(path)
                return path
            except _DAMAGE_ERRORS as error:
                why = type(error).__name__ if step in self.steps() else "its index is missing"
                warn(f"{path} is damaged; skipped ({why})")
        if found:
            raise CheckpointError(
                f"every checkpoint in {self.place} is damaged; move the folder away or set run.resume=never to start "
                "anew"
            )
        return None

    def read(self, step: int) -> dict[str, np.ndarray] | None:
        """The values of the checkpoint of a step; None if it is missing or damaged."""
        self._fetch(step)
        with suppress(*_DAMAGE_ERRORS):
            return _values_of(self.path(step))
        return None

    def seed(self) -> int | None:
        """The seed of the run that saved the newest readable checkpoint; None without such a checkpoint."""
        for step in reversed(self.steps()):
            self._fetch(step)
            # `restore` warns about damaged ones.
            with suppress(*_DAMAGE_ERRORS):
                return int(tf.train.load_checkpoint(str(self.path(step))).get_tensor(SEED))
        return None

    def data_state(self, step: int) -> str | None:
        """What was read, at a step, of data that keeps arriving; None if the checkpoint is missing or has none."""
        if step not in self.steps():
            return None
        self._fetch(step)
        reader = tf.train.load_checkpoint(str(self.path(step)))
        return reader.get_tensor(DATA_STATE).decode() if reader.has_tensor(DATA_STATE) else None

    def tidy(self) -> None:
        """Cleans up after a killed process: finishes a save that was complete, removes the rest."""
        # The next save reports a folder that is not writable.
        with suppress(OSError, CheckpointError):
            for step in self._steps_of(_SAVED):
                # TensorFlow writes the index last.
                self._move_into_place(step)
        oldest = min(self.steps(), default=0)
        for step in self._steps_of(CHECKPOINT_FILE):
            # Old checkpoints are deleted index first. A newer one without an index is damaged.
            if step < oldest:
                with suppress(OSError):
                    self._delete(step)
        self._remove_left_behind()

    def set_aside(self) -> None:
        """Renames the folder, so that a run can start over and nothing is lost."""
        if self._steps_of(CHECKPOINT_FILE):
            names = (f"{self.folder.name}-before-{number}" for number in itertools.count(1))
            self._rename(next(name for name in names if not self._exists(name)))

    def _steps_of(self, pattern: re.Pattern[str]) -> list[int]:
        """The steps in the names of the files that match, oldest first."""
        return sorted({int(match[1]) for name in self._names() if (match := pattern.fullmatch(name))})

    def _names(self) -> set[str]:
        """The names of all files."""
        return {path.name for path in self._files()}

    def _fetch(self, step: int) -> None:
        """Brings a checkpoint into the folder; here, it is there."""

    def _exists(self, name: str) -> bool:
        """Whether the run dir has a folder of that name."""
        return self.folder.with_name(name).exists()

    def _rename(self, name: str) -> None:
        self.folder.rename(self.folder.with_name(name))

    def _files(self) -> list[Path]:
        return list(self.folder.iterdir()) if self.folder.is_dir() else []

    def _unfinished(self, step: int) -> Path:
        return self.folder / f"unfinished-{step}"

    def _move_into_place(self, step: int) -> None:
        """Gives a saved checkpoint its name, the index last; removes an earlier one of the same step first."""
        unfinished, target = self._unfinished(step), self.path(step)
        Path(f"{target}{INDEX_SUFFIX}").unlink(missing_ok=True)
        # A process that was killed in between has moved the data.
        if data := self._data_of(unfinished):
            for stale in self._data_of(target):
                if _part(stale).rpartition("-")[2] != _part(data[0]).rpartition("-")[2]:
                    stale.unlink()
        for path in data:
            path.replace(f"{target}{_part(path)}")
        Path(f"{unfinished}{INDEX_SUFFIX}").replace(f"{target}{INDEX_SUFFIX}")

    def _remove_left_behind(self) -> None:
        for path in self._files():
            if LEFT_BEHIND.fullmatch(path.name):
                with suppress(OSError):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _write_state(self, kept: list[str]) -> None:
        """Writes the `checkpoint` file, where TensorFlow's own tools look for the newest one."""
        lines = [f"model_checkpoint_path: {json.dumps(kept[-1])}\n"]
        lines += [f"all_model_checkpoint_paths: {json.dumps(name)}\n" for name in kept]
        write_whole(self.folder / "checkpoint", "".join(lines))

    def _delete(self, step: int) -> None:
        # The index first: a half-deleted checkpoint no longer counts.
        Path(f"{self.path(step)}{INDEX_SUFFIX}").unlink(missing_ok=True)
        for path in self._data_of(self.path(step)):
            path.unlink(missing_ok=True)

    def _data_of(self, prefix: Path) -> list[Path]:
        """The files with the data of a checkpoint; every task that wrote one has some."""
        return sorted(path for path in self._files() if re.fullmatch(rf"{prefix.name}\.data-\d+-of-\d+", path.name))


def _values_of(path: Path) -> dict[str, np.ndarray]:
    """All values of a model in a checkpoint."""
    reader = tf.train.load_checkpoint(str(path))
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map() if name not in BESIDE}


def _in_a_line(error: tf.errors.OpError | OSError) -> str:
    text = error.strerror if isinstance(error, OSError) else reason(error)
    return " ".join(str(text).split())


def _shapes_in(path: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of all values of a model in a checkpoint, by name."""
    shapes = tf.train.load_checkpoint(str(path)).get_variable_to_shape_map()
    return {name: tuple(shape) for name, shape in shapes.items() if name not in BESIDE}


def _differences(saved: Mapping[str, tuple[int, ...]], shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Lines that say how the values of a checkpoint differ from those of the model; empty if they do not."""
    differences = {
        "missing": sorted(shapes.keys() - saved.keys()),
        "unexpected": sorted(saved.keys() - shapes.keys()),
        "of another shape": [
            f"{name} {saved[name]} (the model has {shapes[name]})"
            for name in sorted(shapes.keys() & saved.keys())
            if not _fits(saved[name], shapes[name])
        ],
    }
    return "".join(f"  {what}: {', '.join(names)}\n" for what, names in differences.items() if names)


def _fits(saved: Sequence[int], shape: Sequence[int | None]) -> bool:
    """Whether a saved value has a shape, in which None stands for any number."""
    return len(saved) == len(shape) and all(wanted in (None, size) for size, wanted in zip(saved, shape))


def _part(path: Path) -> str:
    """The suffix of a file with data: `.data-00000-of-00002`."""
    return path.name[path.name.index(".data-") :]
