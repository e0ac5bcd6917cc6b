"""`Tracker`: what hooks that send a run to an experiment tracker share."""

from __future__ import annotations

import abc
import importlib.util
import json
import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from functools import partial
from pathlib import Path
from typing import Any

from kdist.config.checks import check_more_than_zero
from kdist.errors import ConfigError
from kdist.hooks.base import Hook, RunContext, RunValues, Session
from kdist.log import warn
from kdist.model.logs import scalars
from kdist.run.files import written_whole
from kdist.run.result import Result


class Tracker(Hook, abc.ABC):
    """Sends a run to an experiment tracker: its config at the start, metrics by global step, and how it ended.

    A thread of its own makes the calls, in their order, so that training does not wait for a network. The first call
    that fails costs a warning; the rest of the run is not tracked. A run that resumes continues in the tracker.

    Args:
        package: what has to be installed.
        extra: the extra of kdist that installs it; also the name of the file in the run dir that says which run of the
            tracker this one is.
        save_model: whether `model.keras` is sent, too.
        timeout: seconds that the tracker has at the end of the run.

    Raises:
        ConfigError: the package is not installed, or `timeout` is out of range.
    """

    def __init__(self, package: str, extra: str, save_model: bool, timeout: float) -> None:
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"{type(self).__name__}: {package} is not installed; run pip install 'kdist[{extra}]'")
        check_more_than_zero(f"{type(self).__name__}.timeout", timeout)
        self._extra = extra
        self._save_model = save_model
        self._timeout = timeout
        #: What the thread is to call; None between two fits.
        self._calls: queue.Queue[tuple[Callable[[], None], Future[None]] | None] | None = None
        self._error: Exception | None = None

    @abc.abstractmethod
    def _start(self, earlier: Mapping[str, Any], result: Result) -> Mapping[str, Any]:
        """Starts a run of the tracker, or continues one.

        Args:
            earlier: what the last `_start` for this run dir returned; empty in a new one.
            result: what is known at the start: config, strategy, cluster, seed.

        Returns:
            What is needed to continue.
        """

    @abc.abstractmethod
    def _log(self, metrics: Mapping[str, float], step: int) -> None:
        """Sends metrics of a global step."""

    @abc.abstractmethod
    def _finish(self, result: Result, files: list[Path]) -> None:
        """Ends the run of the tracker; `files` are to be kept with it."""

    @property
    def stays_with_user(self) -> bool:
        # There is the run that the user may have started.
        return True

    @property
    def _name(self) -> str:
        """The run dir, and the folder that it is in."""
        return "/".join(self._run_dir.absolute().parts[-2:])

    @property
    def _sweep_folder(self) -> Path | None:
        """The folder of the sweep whose trial this run is; None if it is none."""
        from hydra.core.hydra_config import HydraConfig
        from hydra.types import RunMode

        if not HydraConfig.initialized() or HydraConfig.get().mode != RunMode.MULTIRUN:
            return None
        return Path(HydraConfig.get().sweep.dir)

    def before_fit(self, run_dir: Path, result: Result) -> None:
        self._run_dir = run_dir
        self._calls = queue.Queue()
        self._error = None
        threading.Thread(target=self._work, args=[self._calls], daemon=True).start()
        self._send(partial(self._start_here, result))

    def after_run(self, context: RunContext, values: RunValues) -> None:
        self._report_error()

    def after_logging(self, session: Session, logs: Mapping[str, Any], steps_per_second: float | None) -> None:
        metrics = {f"train/{name}": value for name, value in scalars(logs)}
        metrics["train/learning_rate"] = session.learning_rate()
        if steps_per_second is not None:
            metrics["steps_per_second"] = steps_per_second
        self._send(partial(self._log, metrics, session.global_step))

    def after_validation(self, session: Session, logs: Mapping[str, Any]) -> None:
        metrics = {f"validation/{name}": value for name, value in scalars(logs)}
        self._send(partial(self._log, metrics, session.global_step))

    def after_fit(self, result: Result) -> None:
        if self._calls is None:
            # Another hook has failed before this one began.
            return
        names = ["result.json", "metrics.csv", "placement.png", *(["model.keras"] if self._save_model else [])]
        paths = [self._run_dir / name for name in names]
        ended = self._send(partial(self._finish, result, [path for path in paths if path.exists()]))
        self._calls.put(None)
        self._calls = None
        if wait_for([ended], self._timeout).not_done:
            name = type(self).__name__
            warn(f"{name}: the tracker did not take the end of the run within {self._timeout:g} s ({name}.timeout)")
        else:
            self._report_error()

    def _start_here(self, result: Result) -> None:
        file = self._run_dir / f"{self._extra}.json"
        earlier = json.loads(file.read_text()) if file.exists() else {}
        with written_whole(file) as path:
            path.write_text(json.dumps(dict(self._start(earlier, result))))

    def _send(self, call: Callable[[], None]) -> Future[None]:
        """Lets the thread make a call, unless an earlier one has failed."""
        done: Future[None] = Future()
        assert self._calls is not None
        self._calls.put((call, done))
        return done

    def _work(self, calls: queue.Queue[tuple[Callable[[], None], Future[None]] | None]) -> None:
        has_failed = False
        while (item := calls.get()) is not None:
            call, done = item
            try:
                if not has_failed:
                    call()
            except Exception as error:  # noqa: BLE001 - whatever a network or a package may raise
                self._error, has_failed = error, True
            done.set_result(None)

    def _report_error(self) -> None:
        if (error := self._error) is not None:
            self._error = None
            message = str(error).splitlines()[0] if str(error) else type(error).__name__
            warn(f"{type(self).__name__}: {message}; training goes on, and the rest of the run is not tracked")
