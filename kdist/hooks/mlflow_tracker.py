"""`MlflowTracker`: the run in MLflow."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kdist.hooks.tracker import Tracker
from kdist.run.result import Result, final_metrics

#: What MLflow takes in one request.
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
        if (folder := self._sweep_folder) is not None:
            tags["mlflow.parentRunId"] = self._parent(identity, folder)
        created: str = self._client.create_run(identity, tags=tags, run_name=self._name).info.run_id
        return created

    def _parent(self, experiment: str, folder: Path) -> str:
        """The run of the sweep, which the first of its trials has created."""
        file = folder / "mlflow-parent"
        if not file.exists():
            tags = {"kdist.sweep": str(folder.absolute())}
            mine = self._client.create_run(experiment, tags=tags, run_name=folder.name).info.run_id
            self._client.set_terminated(mine)
            unfinished = folder / f".mlflow-parent-{os.getpid()}"
            unfinished.write_text(mine)
            try:
                # Complete at once, and only for one of several trials that start at the same time.
                os.link(unfinished, file)
            except FileExistsError:
                self._client.delete_run(mine)
            finally:
                unfinished.unlink()
        return file.read_text()


def _params(result: Result) -> Iterator[tuple[str, str]]:
    """The config, by the names of its keys, as far as a value is set."""
    yield "strategy", result.strategy
    yield "cluster", result.cluster
    yield "seed", str(result.seed)
    for name, value in _leaves(result.config):
        if value is not None and name not in ("strategy.name", "cluster.name", "run.seed"):
            yield name, str(value)[:_LONGEST]


def _leaves(node: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield from _leaves(value, f"{name}.{key}" if name else str(key))
    elif name:
        yield name, node


def _parts(items: list[Any]) -> Iterator[list[Any]]:
    return (items[i : i + _AT_ONCE] for i in range(0, len(items), _AT_ONCE))
