"""`RunDir`: the folder that holds everything one run produces."""

from __future__ import annotations

import os
import shlex
import sys
from collections import Counter
from contextlib import suppress
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
from kdist.run.mirrored_checkpoints import MirroredCheckpoints
from kdist.run.model_file import lambdas_need_source, write_model_file
from kdist.run.result import Result, check_format, content_of
from kdist.run.summaries import Summaries
from kdist.storage.files import make_new, make_private, write_whole
from kdist.storage.lock import RunLock, check_not_taken_over
from kdist.storage.mirror import Mirror
from kdist.storage.object_storage import ObjectStorage, is_url

if TYPE_CHECKING:
    import keras

    from kdist.parameters.placement.plan import PlacementPlan


class RunDir:
    """Names the files of a run dir, and writes those that are written once. Every file is complete or absent.

    Args:
        path: the folder, or a URL on object storage, or its mirror, which the caller enters. None creates a new
            `runs/<name>/<date_time>`; in a step of a Slurm job it is `runs/<name>/slurm-<job id>`, with a number for
            the second one of a program, so that a requeued job resumes.
        name: of the run.
        storage_timeout: seconds for which object storage may fail.
        is_joined: whether others have started the tasks of the run, of which this process is one.

    Raises:
        ConfigError: `path` is a file, or a URL that is not allowed.
    """

    def __init__(
        self,
        path: str | Path | Mirror | None,
        name: str,
        storage_timeout: float = RunConfig.storage_timeout,
        *,
        is_joined: bool = False,
    ) -> None:
        if path is None and (folder := folder_of_step(os.environ, is_joined=is_joined)) is not None:
            path = _numbered(Path("runs") / name / folder)
        if is_url(path):
            path = Mirror(str(path), storage_timeout)
        self._mirror = path if isinstance(path, Mirror) else None
        self._given = path.folder if isinstance(path, Mirror) else None if path is None else Path(path)
        self._name = name
        if self._given is not None and self._given.exists() and not self._given.is_dir():
            raise ConfigError(f"run_dir={path}: is a file")

    @property
    def is_given(self) -> bool:
        """Whether other tasks may know the folder: the user chose it, or it has the name of the Slurm job."""
        return self._given is not None

    @property
    def storage(self) -> ObjectStorage | None:
        """What the folder is mirrored to; None if it is not."""
        return None if self._mirror is None else self._mirror.storage

    def lock(self) -> RunLock | Mirror:
        """What keeps other chiefs out while it is entered, and mirrors the folder."""
        return self._mirror or RunLock(self.path)

    @cached_property
    def path(self) -> Path:
        """The folder; created on first use."""
        if self._given is None:
            return make_new(Path("runs") / self._name / datetime.now().strftime("%Y-%m-%d_%H-%M-%S"))
        make_private(self._given)
        return self._given

    @property
    def logs(self) -> Path:
        """Folder for the logs of the tasks."""
        return self.path / "logs"

    def __str__(self) -> str:
        return str(self.path) if self._mirror is None else self._mirror.url

    def checkpoints(self) -> Checkpoints:
        folder = self.path / "checkpoints"
        return Checkpoints(folder) if self._mirror is None else MirroredCheckpoints(folder, self._mirror)

    def summaries(self) -> Summaries:
        return Summaries(self.path / "tb")

    def metrics(self) -> MetricsFile:
        return MetricsFile(self.path)

    @property
    def tensorboard_logdir(self) -> str:
        """The folder in which TensorBoard shows this run and its siblings."""
        return shlex.quote(self.path.parts[0] if self.path.parts and not self.path.is_absolute() else str(self.path))

    def write_plan(self, plan: PlacementPlan | None) -> None:
        """Writes `placement.txt` and `placement.png`; without a plan, removes those of an earlier run."""
        table, picture = files = self.path / "placement.txt", self.path / "placement.png"
        if plan is None:
            for path in files:
                path.unlink(missing_ok=True)
            return
        try:
            make_private(self.path)
            table.write_text(plan.table())
            plan.draw(picture)
        except OSError as error:
            # Training does not need them.
            for path in files:
                with suppress(OSError):
                    path.unlink(missing_ok=True)
            warn(f"{table}: cannot be written: {error.strerror or error}")

    def describe(self, summaries: Summaries, model: keras.Model, step: int) -> None:
        """Shows the run in TensorBoard: its config, the layers of its model, the placement of its variables."""
        config, table, picture = (self.path / n for n in (".hydra/config.yaml", "placement.txt", "placement.png"))
        for tag, path in (("config", config), ("placement", table)):
            if path.exists():
                # Markdown leaves indented text as it is.
                lines = [f"    {line}" for line in path.read_text().splitlines()]
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
            KdistError: the file cannot be written.
            ConfigError: another chief has taken over the run dir; so does `write_result`.
        """
        check_not_taken_over(self.path)
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

    def has_result_since(self, time: float) -> bool:
        """Whether `result.json` was written at `time`, in seconds since the epoch, or later."""
        written = self.result_written_at()
        return written is not None and written >= time

    def result_written_at(self) -> float | None:
        """When `result.json` was written, in seconds since the epoch by the file system's clock; None without one."""
        with suppress(FileNotFoundError):
            return (self.path / "result.json").stat().st_mtime
        return None

    def read_result(self) -> dict[str, Any]:
        """The content of `result.json`; empty if it is missing or unreadable.

        Raises:
            ConfigError: a newer version has written it.
        """
        found: dict[str, Any] = {}
        with suppress(OSError):
            found = content_of((self.path / "result.json").read_bytes())
        check_format(found, f"{self}/result.json")
        return found

    def write_result(self, result: Result) -> None:
        """Writes `result.json`. If the run has failed, a failure to write it is only a warning.

        Raises:
            KdistError: the result of a successful run cannot be written; the earlier file is untouched.
        """
        try:
            check_not_taken_over(self.path)
        except ConfigError as error:
            if result.status != "failed":
                raise
            warn(str(error))
            return
        try:
            make_private(self.path)
            write_whole(self.path / "result.json", result.to_json())
        except OSError as error:
            message = f"{self.path / 'result.json'}: cannot be written: {error.strerror or error}"
            if result.status != "failed":
                raise KdistError(message) from error
            warn(message)

    def upload(self) -> None:
        """Uploads what is not on object storage yet, if the run dir is there; raises `KdistError`."""
        if self._mirror is not None:
            self._mirror.push()


def name_of_program() -> str:
    """The name of a run that was given none."""
    stem = Path(sys.argv[0]).stem
    return "notebook" if stem == "ipykernel_launcher" else stem or "python"


_num_of_step: Counter[Path] = Counter()


def _numbered(path: Path) -> Path:
    """`path`, and `path-2` when it is asked for a second time: every program that is run again asks in this order."""
    _num_of_step[path] += 1
    return path if _num_of_step[path] == 1 else path.with_name(f"{path.name}-{_num_of_step[path]}")
