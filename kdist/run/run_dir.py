"""`RunDir`: the folder that holds everything one run produces."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kdist.config.scheduler import folder_of_step
from kdist.config.schema import RunConfig
from kdist.errors import ConfigError, KdistError
from kdist.log import warn
from kdist.run.checkpoint import Checkpoints
from kdist.run.metrics_file import MetricsFile
from kdist.run.model_file import lambdas_need_source, write_model_file
from kdist.run.result import Result, record_in
from kdist.run.summaries import Summaries
from kdist.storage.files import BEST_FOLDERS, SET_ASIDE, make_new, make_private
from kdist.storage.folder import Folder
from kdist.storage.lock import RunLock, check_not_taken_over
from kdist.storage.mirror import Mirror, lock_of
from kdist.storage.object_storage import NotThereError, is_url

if TYPE_CHECKING:
    import keras

    from kdist.parameters.placement.plan import PlacementPlan


class RunDir:
    """The files of a run dir; writes the result, the model and the plan. Every file is complete or absent.

    Its chief, which `lock` keeps alone, writes it; `open_for` opens it for other processes.

    Args:
        path: a path, a URL on object storage, or a folder. None creates a new `runs/<name>/<date_time>`; in a step of a
            Slurm job it is `runs/<name>/slurm-<job id>`, with a number for the second one of a program, so that a
            requeued job resumes.
        storage_timeout: seconds for which object storage may fail.
        is_joined: True if this process is one of tasks that were started externally.

    Raises:
        ConfigError: `path` is a file, or a URL that is not allowed.
    """

    def __init__(
        self,
        path: str | Path | Folder | None,
        name: str,
        storage_timeout: float = RunConfig.storage_timeout,
        *,
        is_joined: bool = False,
    ) -> None:
        if path is None and (folder := folder_of_step(os.environ, is_joined=is_joined)) is not None:
            path = _numbered(Path("runs") / name / folder)
        if is_url(path):
            path = Mirror(str(path), storage_timeout)
        self._given = path if path is None or isinstance(path, Folder) else Folder(Path(path))
        self._name = name
        if self._given is not None and self._given.path.exists() and not self._given.path.is_dir():
            raise ConfigError(f"run_dir={path}: is a file")

    @property
    def is_given(self) -> bool:
        """True if other tasks may know it: the user chose it, or it has the name of the Slurm job."""
        return self._given is not None

    @contextmanager
    def open_for(self, reader: str) -> Iterator[RunDir]:
        """Yields the run dir for another process than its chief. At a URL, every use of it may raise `StorageError`.

        Raises `ConfigError` if the storage fails, or a process on this machine has the same name as `reader`.
        """
        with self._as_it_is.open_for(reader) as folder:
            yield RunDir(folder, self._name)

    @cached_property
    def folder(self) -> Folder:
        """Created on first use."""
        if self._given is None:
            return Folder(make_new(Path("runs") / self._name / datetime.now().strftime("%Y-%m-%d_%H-%M-%S")))
        self._given.make()
        return self._given

    @property
    def _as_it_is(self) -> Folder:
        """For reading only: a given folder that is missing is not created."""
        return self._given or self.folder

    @property
    def path(self) -> Path:
        return self.folder.path

    @property
    def lock(self) -> RunLock | Mirror:
        """The lock that keeps other chiefs out while it is entered; at a URL, it mirrors the folder as well."""
        return lock_of(self.folder)

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def __str__(self) -> str:
        return str(self.folder)

    def checkpoints(self) -> Checkpoints:
        return Checkpoints(self.path / "checkpoints", self.folder)

    def find_checkpoints(self, step: int | None = None, *, best: bool = False) -> Checkpoints:
        """The checkpoints of the run, or of another folder of it: of a step that only that has, or the best ones.

        Raises:
            ConfigError: there is no such checkpoint, and which ones there are.
        """
        if best:
            found = next((kept for name in BEST_FOLDERS if (kept := self.checkpoints().beside(name)).steps()), None)
            what = "--best: no best checkpoint was kept, as BestCheckpoint does, and EarlyStopping with restore_best"
        elif step is None or step in (own := self.checkpoints()).steps():
            return self.checkpoints()
        else:
            found = next((kept for kept in self._all_checkpoints() if step in kept.steps()), None)
            what = f"--step={step}: no such checkpoint in {own.place}"
        if found is not None:
            return found
        there = [f"{', '.join(map(str, kept.steps()))} in {kept.folder.name}" for kept in self._all_checkpoints()]
        raise ConfigError(f"{what}; there are {'; '.join(there) or 'none'}")

    def _all_checkpoints(self) -> list[Checkpoints]:
        """Each folder that has checkpoints: that of the run, the best ones, those set aside, the last first."""
        own = self.checkpoints()
        folders = {name.partition("/")[0] for name in self.folder.names() if "/" in name}
        aside = sorted(filter(None, map(SET_ASIDE.fullmatch, folders)), key=lambda found: -int(found[2]))
        names = (own.folder.name, *BEST_FOLDERS, *(found[0] for found in aside))
        return [kept for name in names if (kept := own.beside(name)).steps()]

    def summaries(self) -> Summaries:
        return Summaries(self.path / "tb")

    def metrics(self) -> MetricsFile:
        return MetricsFile(self.path)

    def file(self, name: str) -> Path | None:
        """A file of the run dir, on this machine; None if there is none."""
        with suppress(NotThereError):
            self.folder.fetch([name])
        path = self.path / name
        return path if path.is_file() else None

    def write_plan(self, plan: PlacementPlan | None) -> None:
        """Writes `placement.txt` and `placement.png`, or removes those of an earlier run."""
        table, picture = files = self.path / "placement.txt", self.path / "placement.png"
        if plan is not None:
            try:
                make_private(self.path)
                table.write_text(plan.table(), encoding="utf-8")
                plan.draw(picture)
                return
            except OSError as error:
                # Training does not need them.
                warn(f"{table}: cannot be written: {error.strerror or error}")
        for path in files:
            with suppress(OSError):
                path.unlink(missing_ok=True)

    def describe(self, summaries: Summaries, model: keras.Model, step: int) -> None:
        """Shows the run in TensorBoard: its config, the layers of its model, the placement of its variables."""
        config, table, picture = (self.path / n for n in (".hydra/config.yaml", "placement.txt", "placement.png"))
        for tag, path in (("config", config), ("placement", table)):
            if path.exists():
                # Markdown leaves indented text as it is.
                lines = [f"    {line}" for line in path.read_text(encoding="utf-8").splitlines()]
                summaries.text("train", tag, "\n".join(lines), step)
        if picture.exists():
            summaries.picture("train", "placement/picture", picture, step)
        try:
            with lambdas_need_source():
                layers = model.to_json()
        except (NotImplementedError, TypeError, ValueError):
            # A model without get_config has no graph of layers.
            return
        summaries.keras_graph(layers, step)

    def write_model(self, model: keras.Model) -> None:
        """Writes `model.keras`, which plain Keras can read; warns if the model cannot be saved in that format.

        Raises:
            KdistError: the file cannot be written; a `ConfigError` if another chief has taken over the run dir.
        """
        check_not_taken_over(Folder(self.path))
        try:
            write_model_file(model, self.path / "model.keras")
        except OSError as error:
            raise KdistError(
                f"{self.path / 'model.keras'}: cannot be written: {error.strerror or error}\n"
                f"  last checkpoint: {self.checkpoints().newest() or 'none was saved'}\n"
                "  the same run.dir resumes from it"
            ) from error
        except (NotImplementedError, TypeError, ValueError) as error:
            # A model without get_config can be trained, too; its weights are in the checkpoint.
            warn(f"model.keras could not be written ({error}); the weights are in {self.path / 'checkpoints'}")

    def result_written_at(self) -> float | None:
        """The time when `result.json` was written, in seconds since the epoch by the clock there; None without one."""
        return self._as_it_is.modified("result.json")

    def read_result(self) -> dict[str, Any]:
        return record_in(self._as_it_is.read("result.json"), f"{self._as_it_is}/result.json")

    def write_result(self, result: Result) -> None:
        """Writes `result.json`; raises `KdistError` if that fails, but only warns if the run has failed, too."""
        try:
            check_not_taken_over(Folder(self.path))
        except ConfigError as error:
            if result.status != "failed":
                raise
            warn(str(error))
            return
        try:
            self.folder.write("result.json", result.to_json().encode())
        except OSError as error:
            message = f"{self.path / 'result.json'}: cannot be written: {error.strerror or error}"
            if result.status != "failed":
                raise KdistError(message) from error
            warn(message)

    def upload(self) -> None:
        """Uploads all files that are not at the URL yet, if there is one; raises `KdistError`."""
        self.folder.push()


def name_of_program() -> str:
    stem = Path(sys.argv[0]).stem
    return "notebook" if stem == "ipykernel_launcher" else stem or "python"


_num_of_step: Counter[Path] = Counter()


def _numbered(path: Path) -> Path:
    """`path`, and `path-2` when it is asked for a second time: every program that is run again asks in this order."""
    _num_of_step[path] += 1
    return path if _num_of_step[path] == 1 else path.with_name(f"{path.name}-{_num_of_step[path]}")
