"""Checkpoints in TensorFlow's own format: complete or absent; the newest readable one is restored.

Every value is one named tensor, whatever strategy and however many servers wrote it, so that
`tf.train.load_checkpoint(path).get_tensor("parameters/dense/kernel")` reads it without kdist.

A delta is a checkpoint that has, of tables, only the rows that have changed since the checkpoint or delta which it
follows. With the full checkpoint before them, deltas form a chain; it ends where one is missing or damaged.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from kdist.data.epoch_lengths import EpochCount
from kdist.errors import CheckpointError, NonFiniteError, reason
from kdist.log import warn
from kdist.model.names import (
    BESIDE,
    CHANGED_IDS,
    DATA_FINGERPRINT,
    DATA_STATE,
    EPOCHS_BEGIN,
    EVICTED,
    FOLLOWS,
    SEED,
    dynamic_names,
)
from kdist.parameters.tables.changed_rows import DeltaBase
from kdist.storage.files import CHECKPOINT_FILE, INDEX_SUFFIX, LEFT_BEHIND, write_whole
from kdist.storage.folder import Folder
from kdist.storage.lock import check_not_taken_over
from kdist.storage.object_storage import NotThereError, StorageError
from kdist.storage.tensorflow_paths import open_checkpoint

if TYPE_CHECKING:
    from kdist.strategies.base import Values

_DATA_PART = re.compile(r"\.data-\d+-of-\d+")
_SAVED = re.compile(r"unfinished-(delta-)?(\d+)\.index")
_FULL, _DELTA = "ckpt", "delta"
_ANEW = "run.resume=never to start anew"
#: Errors that TensorFlow raises for damaged files, depending on the byte that is wrong.
DAMAGE_ERRORS = (tf.errors.OpError, ValueError, IndexError, UnicodeDecodeError, RuntimeError)


class NotDownloadedError(StorageError, CheckpointError):
    """A checkpoint cannot be read, because object storage failed."""


class Checkpoints:
    """The checkpoints of one run, `<folder>/ckpt-<global step>`.

    Of a run dir at a URL, they are saved to a folder of this machine and uploaded from there, the index last, deleted
    with the index first, and downloaded when they are read. One that replaces another of the same step is absent until
    it is complete.

    Args:
        folder: the place of their files on this machine.
        run: the run dir that `folder` is in; None: the folder above, on a disk.
    """

    def __init__(self, folder: Path, run: Folder | None = None) -> None:
        self.folder = folder
        self._run = Folder(folder.parent) if run is None else run

    @property
    def place(self) -> str:
        """Their path or URL, for people."""
        return f"{self._run}/{self.folder.name}"

    def beside(self, name: str) -> Checkpoints:
        """The checkpoints of another folder of the same run dir."""
        return Checkpoints(self.folder.with_name(name), self._run)

    def steps(self) -> list[int]:
        """Global steps of the complete checkpoints and deltas, oldest first."""
        return sorted({*self._steps_of(_FULL), *self._steps_of(_DELTA)})

    def path(self, step: int) -> Path:
        """The full checkpoint of a step as TensorFlow names it: the prefix of its files."""
        return self.folder / f"{_FULL}-{step}"

    def delta_path(self, step: int) -> Path:
        return self.folder / f"{_DELTA}-{step}"

    def newest(self) -> Path | None:
        steps = self.steps()
        return self._path_of(steps[-1]) if steps else None

    def write(self, step: int, values: Values, *, keep: int | None = None, since: DeltaBase | None = None) -> Path:
        """Writes a checkpoint and deletes all but the newest `keep` full ones with their deltas; none if None.

        It is written under another name and renamed, the index last: without its index it does not exist. If it follows
        `since`, it is a delta.

        Raises:
            NonFiniteError: a value is NaN or infinite; nothing is written.
            CheckpointError: it cannot be written; earlier checkpoints are untouched.
            ConfigError: another chief has taken over the run dir.
        """
        write = partial(values.begin_save, self._unfinished(self._target(step, since)), since, aside=False)
        return self.finish_save(step, write, keep=keep, since=since)

    def begin_save(self, step: int, values: Values, *, since: DeltaBase | None = None) -> Future[None]:
        """As `write`, but returns when the values may change; pass what it returns to `finish_save`."""
        target = self._target(step, since)
        with self._saving(step):
            written = values.begin_save(self._unfinished(target), since)
            return self._run.publish_after(written, lambda: self._move_into_place(target))

    def finish_save(
        self, step: int, wait: Callable[[], object], *, keep: int | None = None, since: DeltaBase | None = None
    ) -> Path:
        """Completes a checkpoint that `begin_save` has begun, after `wait` until it is written; see `write`."""
        target = self._target(step, since)
        with self._saving(step):
            wait()
            self._move_into_place(target)
            # When an earlier save failed, other tasks may still have been writing.
            self._remove_left_behind()
            if since is None:
                # Later deltas do not follow it: training has come back to an earlier checkpoint.
                self._delete_deltas(later for later in self._steps_of(_DELTA, complete=False) if later >= step)
            own = max((full for full in self._steps_of(_FULL) if full <= step), default=step)
            for full, deltas in list(self._chains().items())[:-keep] if keep else []:
                # Later ones may be damaged: they never cost the chain that has just been saved.
                if full < own:
                    self._delete_deltas(deltas)
                    self._delete(self.path(full))
            # Only TensorFlow's own tools need it.
            with suppress(OSError):
                self._write_state(self._steps_of(_FULL))
        return target

    @contextmanager
    def _saving(self, step: int) -> Iterator[None]:
        """Checks that the run has no other chief; errors then name the step, the place and the last good checkpoint."""
        check_not_taken_over(Folder(self.folder.parent))
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
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
            why = str(error.strerror if isinstance(error, OSError) else reason(error))
            raise CheckpointError(
                f"step {step} could not be saved to {self.place}: {' '.join(why.split())}\n"
                f"  last good checkpoint: {self.newest() or 'none was saved'}"
            ) from error

    def keep_only(self, step: int) -> None:
        """Deletes every full checkpoint but one."""
        with suppress(OSError):
            for other in self._steps_of(_FULL):
                if other != step:
                    self._delete(self.path(other))
            self._write_state([step])

    def fit(self, values: Values) -> bool:
        """True if the newest checkpoint has these values, with their shapes, and no others."""
        self._fetch(path := self.path(self._steps_of(_FULL)[-1]))
        return not _differences_of(path, values)

    def restore(self, values: Values, until: float = math.inf) -> Path | None:
        """Reads the newest undamaged checkpoint, up to the step `until`, and its deltas; warns about damaged ones.

        Returns:
            The checkpoint, or the last delta; None if there is no checkpoint at all.

        Raises:
            CheckpointError: every checkpoint is damaged, or the newest undamaged one is of another model.
        """
        found = self._chains(complete=False, until=until)
        for full, deltas in reversed(found.items()):
            path = self.path(full)
            self._fetch(path)
            try:
                if different := _differences_of(path, values):
                    # If it is damaged, they mean nothing.
                    check_all(path)
                    raise CheckpointError(
                        f"{path} is of another model or optimizer:\n{different}  use another run.dir, or {_ANEW}"
                    )
                return self._restore_chain(values, path, self._unbroken(full, deltas))
            except DAMAGE_ERRORS as error:
                warn(f"{path} is damaged; skipped ({self._why(path, error)})")
        if found or self._steps_of(_DELTA, complete=False):
            raise CheckpointError(f"every checkpoint in {self.place} is damaged; move the folder away or set {_ANEW}")
        return None

    def _restore_chain(self, values: Values, path: Path, deltas: list[Path]) -> Path:
        """Reads a checkpoint, and its deltas up to the first damaged one."""
        while True:
            try:
                # The values of the model are read by whoever gets them.
                for each in (path, *deltas):
                    check_all(each, BESIDE)
                values.restore(path, deltas)
                return [path, *deltas][-1]
            except DAMAGE_ERRORS:
                good = list(itertools.takewhile(self._is_undamaged, deltas))
                if len(good) == len(deltas):
                    raise
                deltas = good

    def _unbroken(self, full: int, deltas: Sequence[int]) -> list[Path]:
        """The newest delta of a chain from which it goes back to the full checkpoint, after those before it.

        A delta that was never completed is in no way: the next one has all of its rows, too.
        """
        follows, left_out = dict[int, int](), set[int]()
        for step in deltas:
            try:
                follows[step] = self._followed_by(step)
            except DAMAGE_ERRORS as error:
                self._warn_of_delta(self.delta_path(step), error)
                left_out.add(step)
        for step in reversed(list(follows)):
            way = way_to(step, follows)
            before = follows[way[0]]
            if before == full:
                return list(map(self.delta_path, way))
            if before not in left_out:
                left_out.add(before)
                path = self.delta_path(way[0])
                warn(f"{path} follows step {before}, which is missing; it and later deltas are left out")
        return []

    def _followed_by(self, step: int) -> int:
        """The step that the delta of a step follows; raises one of `DAMAGE_ERRORS` if it is damaged."""
        self._fetch(path := self.delta_path(step))
        if (follows := int(open_checkpoint(path).get_tensor(FOLLOWS))) >= step:
            raise ValueError(f"it follows step {follows}")
        return follows

    def _is_undamaged(self, delta: Path) -> bool:
        try:
            check_all(delta)
            return True
        except DAMAGE_ERRORS as error:
            self._warn_of_delta(delta, error)
            return False

    def _warn_of_delta(self, path: Path, error: Exception) -> None:
        warn(f"{path} is damaged; it and later deltas are left out ({self._why(path, error)})")

    def _why(self, path: Path, error: Exception) -> str:
        return type(error).__name__ if f"{path.name}{INDEX_SUFFIX}" in self._names() else "its index is missing"

    def read(self, step: int) -> dict[str, np.ndarray] | None:
        """The values of the checkpoint, or delta, of a step; None if it, or one before it, is missing or damaged."""
        # A full checkpoint may have a delta of its step beside it, which counts if it is damaged.
        chains = (chain for chain in reversed(self._chains().items()) if step in (chain[0], *chain[1]))
        try:
            return next((values for chain in chains if (values := self._read(*chain, step)) is not None), None)
        except NotThereError:
            # The chief has deleted it meanwhile.
            return None
        finally:
            self._run.discard_copies(self.folder.name)

    def _read(self, full: int, deltas: Sequence[int], step: int) -> dict[str, np.ndarray] | None:
        self._fetch(self.path(full))
        with suppress(*DAMAGE_ERRORS):
            values = values_of(self.path(full))
            if step == full:
                return values
            way = way_to(step, {later: self._followed_by(later) for later in deltas if later <= step})
            if self._followed_by(way[0]) == full:
                return reduce(replay, map(values_of, map(self.delta_path, way)), values)
        return None

    def seed(self) -> int | None:
        """The seed of the run that saved the newest readable checkpoint; None without such a checkpoint."""
        _, seed = self._newest_with(SEED)
        return None if seed is None else int(seed)

    def epoch_count(self) -> tuple[int, EpochCount] | None:
        """The step of the newest readable checkpoint, and its count of epochs; None if there is none."""
        step, count = self._newest_with(EPOCHS_BEGIN)
        return None if count is None else (step, EpochCount.of_array(count))

    def fingerprint(self) -> str | None:
        """The fingerprint of the data of the newest readable checkpoint; None if it has none."""
        _, fingerprint = self._newest_with(DATA_FINGERPRINT)
        return None if fingerprint is None else fingerprint.decode()

    def newest_data_state(self) -> str | None:
        """The position in the data of the newest readable checkpoint; None if it has none."""
        _, state = self._newest_with(DATA_STATE)
        return None if state is None else state.decode()

    def _newest_with(self, name: str) -> tuple[int, Any]:
        """The newest readable checkpoint, and a value of it that is not of the model; None if it has none."""
        for step in reversed(self.steps()):
            # `restore` warns about damaged ones.
            with suppress(*DAMAGE_ERRORS):
                return step, self._value(step, name)
        return 0, None

    def data_state(self, step: int) -> str | None:
        """The position in data that may end, at a step; None if the checkpoint is missing or has none."""
        state = self._value(step, DATA_STATE) if step in self.steps() else None
        return None if state is None else state.decode()

    def _value(self, step: int, name: str) -> Any:
        self._fetch(path := self._path_of(step))
        reader = open_checkpoint(path)
        return reader.get_tensor(name) if reader.has_tensor(name) else None

    def tidy(self) -> None:
        """Cleans up after a killed process: finishes a save that was complete, removes the rest."""
        try:
            self._run.refresh()
        except StorageError as error:
            raise CheckpointError(f"{self.place}: cannot be listed: {error}") from None
        # The next save reports a folder that is not writable.
        with suppress(OSError, CheckpointError):
            for match in filter(None, map(_SAVED.fullmatch, sorted(self._names()))):
                # TensorFlow writes the index last.
                self._move_into_place((self.delta_path if match[1] else self.path)(int(match[2])))
        full = self._steps_of(_FULL)
        with suppress(OSError):
            # Without a full checkpoint before them they are of no use.
            self._delete_deltas(d for d in self._steps_of(_DELTA, complete=False) if d <= min(full, default=0))
            for step in self._steps_of(_FULL, complete=False):
                # Old checkpoints are deleted index first. A newer one without an index is damaged.
                if step < min(full, default=0):
                    self._delete(self.path(step))
        self._remove_left_behind()

    def set_aside(self, after: int | None = None) -> None:
        """Moves checkpoints and deltas to a folder beside this one: they no longer count, and nothing is lost.

        Only those after the step `after` are moved, if it is not None; raises `CheckpointError` if that fails.
        """
        # The data first: without its index a checkpoint does not exist.
        later = [match[0] for match in self._matches() if after is None or int(match[3]) > after]
        later.sort(key=lambda name: name.endswith(INDEX_SUFFIX))
        if not later:
            return
        names = (f"{self.folder.name}-before-{number}" for number in itertools.count(1))
        aside = next(n for n in names if not self._run.names(n) and not self.folder.with_name(n).exists())
        try:
            self._run.move(self.folder.name, aside, None if after is None else later)
        except (OSError, StorageError) as error:
            why = getattr(error, "strerror", None) or error
            raise CheckpointError(f"{self.place} could not be moved to {aside}: {why}") from error
        if after is not None:
            with suppress(OSError):
                self._write_state(self._steps_of(_FULL))
            warn(f"{self.place}: checkpoints after step {after} are moved to {aside}")

    def _chains(self, *, complete: bool = True, until: float = math.inf) -> dict[int, list[int]]:
        """The steps of the deltas up to the next full checkpoint, by the step of each full one, all oldest first.

        Deltas before all full checkpoints belong to none. If `complete`, what lacks its index is left out.
        """
        kinds = (self._steps_of(kind, complete=complete) for kind in (_FULL, _DELTA))
        full, deltas = ([step for step in steps if step <= until] for steps in kinds)
        return {step: [d for d in deltas if step < d <= end] for step, end in zip(full, [*full[1:], math.inf])}

    def _steps_of(self, kind: str, *, complete: bool = True) -> list[int]:
        """The steps of checkpoints, or of deltas, oldest first."""
        wanted = (m for m in self._matches() if m[2] == kind and (m[0].endswith(INDEX_SUFFIX) or not complete))
        return sorted({int(match[3]) for match in wanted})

    def _path_of(self, step: int) -> Path:
        """The checkpoint of a step if there is one; otherwise, the delta."""
        return self.path(step) if step in self._steps_of(_FULL) else self.delta_path(step)

    def _target(self, step: int, since: DeltaBase | None) -> Path:
        return self.path(step) if since is None else self.delta_path(step)

    def _unfinished(self, target: Path) -> Path:
        return target.with_name(f"unfinished-{target.name.removeprefix(f'{_FULL}-')}")

    def _names(self) -> set[str]:
        return self._run.names(self.folder.name)

    def _matches(self) -> Iterator[re.Match[str]]:
        return filter(None, map(CHECKPOINT_FILE.fullmatch, self._names()))

    def _fetch(self, path: Path) -> None:
        """Brings a checkpoint into the folder, if it is not there."""
        index, *data = self._names_of(path)
        if Path(f"{path}{INDEX_SUFFIX}").exists() or index.rpartition("/")[2] not in self._names():
            return
        try:
            self._run.fetch([*data, index])
        except NotThereError:
            raise
        except StorageError as error:
            raise NotDownloadedError(f"{self.place}/{path.name} cannot be downloaded: {error}") from None

    def _names_of(self, path: Path) -> list[str]:
        """The files of a checkpoint: its index, and its data as far as it is there."""
        index = f"{path.name}{INDEX_SUFFIX}"
        data = sorted(match[0] for match in self._matches() if match[1] == path.name and match[0] != index)
        return [f"{self.folder.name}/{name}" for name in (index, *data)]

    def _move_into_place(self, target: Path) -> None:
        """Gives a saved checkpoint its name, the index last; removes an earlier one of the same step first."""
        unfinished, index = self._unfinished(target), Path(f"{target}{INDEX_SUFFIX}")
        new_index = Path(f"{unfinished}{INDEX_SUFFIX}")
        if index.exists() and not new_index.exists():
            # `begin_save` has done it.
            return
        earlier = self._names_of(target)
        index.unlink(missing_ok=True)
        # A process that was killed in between has moved the data.
        if data := self._data_of(unfinished):
            num_files = data[0].name.rpartition("-")[2]
            for stale in self._data_of(target):
                if stale.name.rpartition("-")[2] != num_files:
                    stale.unlink()
        for path in data:
            path.replace(f"{target}{path.name.removeprefix(unfinished.name)}")
        new_index.replace(index)
        names = [f"{self.folder.name}/{path.name}" for path in (*self._data_of(target), index)]
        try:
            self._run.publish(names, instead_of=earlier)
        except StorageError as error:
            raise CheckpointError(
                f"step {target.name.rpartition('-')[2]} could not be uploaded: {error}\n  it stays in {target}\n"
                f"  if the run ends, copy its files to {self.place}, or the same run.dir resumes from an earlier step"
            ) from None

    def _remove_left_behind(self) -> None:
        for path in self._files():
            if LEFT_BEHIND.fullmatch(path.name):
                with suppress(OSError):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _write_state(self, steps: Iterable[int]) -> None:
        """Writes the `checkpoint` file, where TensorFlow's own tools look for the newest one."""
        names = [json.dumps(self.path(step).name) for step in steps]
        lines = [f"model_checkpoint_path: {names[-1]}\n", *(f"all_model_checkpoint_paths: {name}\n" for name in names)]
        write_whole(self.folder / "checkpoint", "".join(lines))

    def _delete_deltas(self, steps: Iterable[int]) -> None:
        # The newest first: what is left is a chain.
        for step in sorted(steps, reverse=True):
            self._delete(self.delta_path(step))

    def _delete(self, path: Path) -> None:
        try:
            # The index first: a half-deleted checkpoint no longer counts.
            self._run.delete(self._names_of(path))
        except StorageError as error:
            # The next save tries again.
            warn(f"{self.place}/{path.name} could not be deleted: {error}")

    def _data_of(self, prefix: Path) -> list[Path]:
        begin = prefix.name
        files = (path for path in self._files() if path.name.startswith(begin))
        return sorted(path for path in files if _DATA_PART.fullmatch(path.name, len(begin)))

    def _files(self) -> list[Path]:
        # `glob` would take a folder that cannot be listed for an empty one.
        return list(self.folder.iterdir()) if self.folder.is_dir() else []


def way_to(step: int, follows: Mapping[int, int]) -> list[int]:
    """The steps of the deltas up to one, oldest first, as far as they are in `follows`, which has each one's base."""
    way = [step]
    while follows[way[0]] in follows:
        way.insert(0, follows[way[0]])
    return way


def replay(values: Mapping[str, np.ndarray], delta: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The values of a checkpoint after one of its deltas, by name."""
    new = {name: value for name, value in delta.items() if not name.startswith((CHANGED_IDS, EVICTED, FOLLOWS))}
    for name, ids in delta.items():
        if name.startswith(CHANGED_IDS):
            table = name.removeprefix(CHANGED_IDS)
            fixed = dynamic_names(table, ["vectors", "ids", "counts", "last_steps"])
            own = [n for n in delta if n in fixed.values() or n.rpartition("/")[0] == f"slots/{table}"]
            gone = delta.get(f"{EVICTED}{table}")
            if gone is None:
                for n in own:
                    new[n] = values[n].copy()
                    new[n][ids] = delta[n]
            else:
                old_ids = values[fixed["ids"]]
                stays = ~np.isin(old_ids, np.concatenate([gone, ids]))
                new |= {n: np.concatenate([values[n][stays], delta[n]]) for n in own}
                new[fixed["ids"]] = np.concatenate([old_ids[stays], ids])
    return {**values, **new}


def values_of(path: Path) -> dict[str, np.ndarray]:
    """All values of a model in a checkpoint or delta, and the marks of a delta."""
    reader = open_checkpoint(path)
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map() if name not in BESIDE}


def check_all(path: Path, only: Container[str] | None = None) -> None:
    """Reads all tensors of a checkpoint, or `only` some, one by one; raises one of `DAMAGE_ERRORS` if it is damaged."""
    reader = open_checkpoint(path)
    for name in reader.get_variable_to_shape_map():
        if only is None or name in only:
            reader.get_tensor(name)


def _differences_of(path: Path, values: Values) -> str:
    saved = open_checkpoint(path).get_variable_to_shape_map()
    return differences({name: tuple(shape) for name, shape in saved.items() if name not in BESIDE}, values.shapes)


def differences(saved: Mapping[str, tuple[int, ...]], shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Lines about the differences between the values of a checkpoint and of a model; empty without any."""

    def fits(has: Sequence[int], wanted: Sequence[int | None]) -> bool:
        # None stands for any number.
        return len(has) == len(wanted) and all(size in (None, own) for own, size in zip(has, wanted))

    found = {
        "missing": sorted(shapes.keys() - saved.keys()),
        "unexpected": sorted(saved.keys() - shapes.keys()),
        "of another shape": [
            f"{name} {saved[name]} (the model has {shapes[name]})"
            for name in sorted(shapes.keys() & saved.keys())
            if not fits(saved[name], shapes[name])
        ],
    }
    return "".join(f"  {what}: {', '.join(names)}\n" for what, names in found.items() if names)
