"""Hooks that send a run to an experiment tracker: MLflow, Weights & Biases, or a custom one."""

from __future__ import annotations

import abc
import importlib.util
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from kdist.config.checks import check_more_than_zero, check_one_of
from kdist.config.hparams import flat, sweep_of_job
from kdist.errors import ConfigError, install_command
from kdist.hooks.base import Hook, RunContext, RunValues, Session
from kdist.log import warn
from kdist.model.logs import scalars
from kdist.run.result import Result, final_metrics
from kdist.storage.files import write_whole


class Tracker(Hook, abc.ABC):
    """Sends a run to an experiment tracker: its config at the start, metrics by global step, and how it ended.

    A background thread makes the calls, in their order, so that training does not wait for a network. The first call
    that fails costs a warning; the rest of the run is not tracked. A run that resumes continues in the tracker.

    Args:
        package: the package to install.
        extra: the extra of kdist that installs it; also the name of the file in the run dir that says which run of the
            tracker this one is.
        save_model: whether `model.keras` is sent, too.
        timeout: seconds that the tracker has at the end of the run.

    Raises:
        ConfigError: the package is not installed, or `timeout` is out of range.
    """

    def __init__(self, package: str, extra: str, save_model: bool, timeout: float) -> None:
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"{type(self).__name__}: {package} is not installed; run {install_command(extra)}")
        check_more_than_zero(f"{type(self).__name__}.timeout", timeout)
        self._extra = extra
        self._save_model = save_model
        self._timeout = timeout
        #: Makes the calls; None between two fits.
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @abc.abstractmethod
    def _start(self, earlier: Mapping[str, Any], result: Result) -> Mapping[str, Any]:
        """Starts a run of the tracker, or continues one.

        Args:
            earlier: the result of the last `_start` for this run dir; empty in a new one.
            result: the facts of the start: config, strategy, cluster, seed.

        Returns:
            The data to continue from.
        """

    @abc.abstractmethod
    def _log(self, metrics: Mapping[str, float], step: int) -> None:
        """Sends metrics of a global step."""

    @abc.abstractmethod
    def _finish(self, result: Result, files: list[Path]) -> None:
        """Ends the run of the tracker; the tracker keeps `files` with it."""

    @property
    def _name(self) -> str:
        """The run dir, and the folder that it is in."""
        return "/".join(self._run_dir.absolute().parts[-2:])

    def before_fit(self, run_dir: Path, result: Result) -> None:
        self._run_dir = run_dir
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._error = None
        self._thread = threading.Thread(target=self._work, args=[self._calls], daemon=True)
        self._thread.start()
        self._calls.put(partial(self._start_here, result))

    def after_run(self, context: RunContext, values: RunValues) -> None:
        self._report_error()

    def after_logging(self, session: Session, logs: Mapping[str, Any], steps_per_second: float | None) -> None:
        metrics = {f"train/{name}": value for name, value in scalars(logs)}
        metrics["train/learning_rate"] = session.learning_rate()
        if steps_per_second is not None:
            metrics["steps_per_second"] = steps_per_second
        self._calls.put(partial(self._log, metrics, session.global_step))

    def after_validation(self, session: Session, logs: Mapping[str, Any]) -> None:
        metrics = {f"validation/{name}": value for name, value in scalars(logs)}
        self._calls.put(partial(self._log, metrics, session.global_step))

    def after_fit(self, result: Result) -> None:
        if self._thread is None:
            # Another hook has failed before this one began.
            return
        names = ["result.json", "metrics.csv", "placement.png", *(["model.keras"] if self._save_model else [])]
        paths = [self._run_dir / name for name in names]
        self._calls.put(partial(self._finish, result, [path for path in paths if path.exists()]))
        self._calls.put(None)
        thread, self._thread = self._thread, None
        thread.join(self._timeout)
        if thread.is_alive():
            name = type(self).__name__
            warn(f"{name}: the tracker did not confirm the end of the run within {self._timeout:g} s ({name}.timeout)")
        else:
            self._report_error()

    def _start_here(self, result: Result) -> None:
        file = self._run_dir / f"{self._extra}.json"
        earlier = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        write_whole(file, json.dumps(dict(self._start(earlier, result))))

    def _work(self, calls: queue.SimpleQueue[Callable[[], None] | None]) -> None:
        """Makes calls until None comes, or one fails; those after that are discarded."""
        has_failed = False
        while (call := calls.get()) is not None:
            try:
                if not has_failed:
                    call()
            except BaseException as error:  # noqa: BLE001 - whatever a network or a package raises, `sys.exit` too
                self._error, has_failed = error, True

    def _report_error(self) -> None:
        if (error := self._error) is not None:
            self._error = None
            message = str(error).splitlines()[0] if str(error) else type(error).__name__
            warn(f"{type(self).__name__}: {message}; training goes on, and the rest of the run is not tracked")


#: The most entries of one request to MLflow.
_AT_ONCE = 100
#: The longest value of a parameter.
_LONGEST = 6000
_STATUS = {"done": "FINISHED", "failed": "FAILED", "preempted": "KILLED"}


class MlflowTracker(Tracker):
    """Sends config, metrics by global step, system metrics and the result to MLflow.

    If the program has a run active (`mlflow.start_run()`), that is used, and the program ends it. The trials of a sweep
    are children of one run.

    Args:
        tracking_uri: a server, a folder or a database; None is MLflow's own, from MLFLOW_TRACKING_URI.
        experiment: its name; None is MLflow's own, from MLFLOW_EXPERIMENT_NAME.
        save_model: whether `model.keras` becomes an artifact.
        system_metrics: whether CPU, memory and GPUs of this machine are recorded; this needs psutil.
        timeout: seconds that MLflow has at the end of the run.

    Raises:
        ConfigError: MLflow is not installed, or `timeout` is out of range.
    """

    def __init__(
        self,
        tracking_uri: str | None = None,
        experiment: str | None = None,
        save_model: bool = False,
        system_metrics: bool = True,
        timeout: float = 30.0,
    ) -> None:
        super().__init__("mlflow", "mlflow", save_model, timeout)
        self._tracking_uri = tracking_uri
        self._experiment = experiment
        self._has_system_metrics = system_metrics and importlib.util.find_spec("psutil") is not None

    def before_fit(self, run_dir: Path, result: Result) -> None:
        # It belongs to this thread; a program that has started one has imported MLflow.
        mlflow = sys.modules.get("mlflow")
        active = None if mlflow is None else mlflow.active_run()
        self._active: str | None = None if active is None else active.info.run_id
        super().before_fit(run_dir, result)

    def _start(self, earlier: Mapping[str, Any], result: Result) -> Mapping[str, Any]:
        import mlflow

        self._client = mlflow.MlflowClient(self._tracking_uri)
        self._run = self._active or earlier.get("run_id") or self._new_run(result)
        if self._active is None:
            self._client.update_run(self._run, status="RUNNING")
        known = self._client.get_run(self._run).data.params
        params = {name: value for name, value in _params(result) if name not in known}
        for some in _parts(list(params.items())):
            self._client.log_batch(self._run, params=[mlflow.entities.Param(name, value) for name, value in some])
        self._client.log_dict(self._run, dict(result.config), "config.json")
        self._monitor: Any = None
        if self._has_system_metrics:
            from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

            self._monitor = SystemMetricsMonitor(self._run, resume_logging=True, tracking_uri=self._client.tracking_uri)
            self._monitor.start()
        return {"run_id": self._run}

    def _log(self, metrics: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        for some in _parts(list(metrics.items())):
            self._client.log_batch(self._run, metrics=[Metric(name, value, now, step) for name, value in some])

    def _finish(self, result: Result, files: list[Path]) -> None:
        if self._monitor is not None:
            self._monitor.finish()
        self._log(final_metrics(result), result.global_step)
        for file in files:
            self._client.log_artifact(self._run, str(file))
        if self._active is None:
            self._client.set_terminated(self._run, _STATUS[result.status])

    def _new_run(self, result: Result) -> str:
        name = self._experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "Default"
        experiment = self._client.get_experiment_by_name(name)
        identity = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        tags = {"mlflow.source.name": " ".join(sys.argv), "kdist.run_dir": str(self._run_dir.absolute())}
        if result.git is not None:
            tags["mlflow.source.git.commit"] = result.git["commit"]
        if (folder := sweep_of_job()) is not None:
            tags["mlflow.parentRunId"] = self._parent(identity, folder)
        return str(self._client.create_run(identity, tags=tags, run_name=self._name).info.run_id)

    def _parent(self, experiment: str, folder: Path) -> str:
        """The run of the sweep, which the first of its trials has created."""
        file = folder / "mlflow-parent"
        if not file.exists():
            tags = {"kdist.sweep": str(folder.absolute())}
            mine = self._client.create_run(experiment, tags=tags, run_name=folder.name).info.run_id
            self._client.set_terminated(mine)
            unfinished = folder / f".mlflow-parent-{os.getpid()}"
            unfinished.write_text(mine, encoding="utf-8")
            try:
                # Complete at once, and only for one of several trials that start at the same time.
                os.link(unfinished, file)
            except FileExistsError:
                self._client.delete_run(mine)
            finally:
                unfinished.unlink()
        return file.read_text(encoding="utf-8")


def _params(result: Result) -> Iterator[tuple[str, str]]:
    """The config, by the names of its keys, as far as a value is set."""
    yield "strategy", result.strategy
    yield "cluster", result.cluster
    yield "seed", str(result.seed)
    for name, value in flat(result.config).items():
        if value is not None and name not in ("strategy.name", "cluster.name", "run.seed"):
            yield name, str(value)[:_LONGEST]


def _parts(items: list[Any]) -> Iterator[list[Any]]:
    return (items[i : i + _AT_ONCE] for i in range(0, len(items), _AT_ONCE))


class WandbTracker(Tracker):
    """Sends config, metrics by global step, system metrics and the result to Weights & Biases.

    If the program has a run (`wandb.init()`), that is used, and the program finishes it. The trials of a sweep are a
    group.

    Args:
        project: its name; None is W&B's own, from WANDB_PROJECT.
        entity: the user or team; None is the default of the account.
        mode: `online`, `offline` (`wandb sync` sends it later) or `disabled`; None is W&B's own, from WANDB_MODE.
        save_model: whether `model.keras` becomes an artifact.
        timeout: seconds that W&B has at the end of the run.

    Raises:
        ConfigError: W&B is not installed, the mode is unknown, or `timeout` is out of range.
    """

    def __init__(
        self,
        project: str | None = None,
        entity: str | None = None,
        mode: Any = None,
        save_model: bool = False,
        timeout: float = 30.0,
    ) -> None:
        super().__init__("wandb", "wandb", save_model, timeout)
        check_one_of("WandbTracker.mode", mode, (None, "online", "offline", "disabled"))
        self._project = project
        self._entity = entity
        self._mode = mode

    def _start(self, earlier: Mapping[str, Any], result: Result) -> Mapping[str, Any]:
        import wandb

        self._is_ours = wandb.run is None
        self._had_service = "WANDB_SERVICE" in os.environ
        if self._is_ours:
            folder = sweep_of_job()
            self._run: Any = wandb.init(
                project=self._project,
                entity=self._entity,
                mode=self._mode,
                id=earlier.get("id"),
                resume="allow",
                name=self._name,
                group=None if folder is None else folder.name,
                dir=self._run_dir,
                # The console has the lines of kdist.
                settings=wandb.Settings(console="off", silent=True),
            )
        else:
            self._run = wandb.run
        resolved = {"strategy": result.strategy, "cluster": result.cluster, "seed": result.seed}
        self._run.config.update({**result.config, "resolved": resolved}, allow_val_change=True)
        # A step may have several lines, and a run that resumes goes back to its last checkpoint.
        self._run.define_metric("*", step_metric="global_step")
        return {"id": self._run.id}

    def _log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log({**metrics, "global_step": step})

    def _finish(self, result: Result, files: list[Path]) -> None:
        import wandb

        self._run.summary.update({**final_metrics(result), "status": result.status, "global_step": result.global_step})
        artifact = wandb.Artifact(f"run-{self._run.id}", "run")
        for file in files:
            artifact.add_file(str(file))
        self._run.log_artifact(artifact)
        if self._is_ours:
            self._run.finish(0 if result.status == "done" else 1)
        if not self._had_service:
            # It ends the service of W&B, and forgets where that is.
            wandb.teardown()
