"""Evaluators: tasks that evaluate each new checkpoint while training continues. After Estimator's evaluator.

The chief starts one as its own child, `kdist.evaluation.evaluator_main`: that only reads checkpoints and reports the
results on its standard output; the hook `Evaluator` prints them and writes them to TensorBoard.

In a cluster of externally started tasks, `evaluate_until_done` is the evaluator's process. It is not part of the
cluster: all that it shares with the chief is the run dir, on a disk or on object storage.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from kdist.cluster.processes.chief_board import chief_server
from kdist.cluster.processes.child import Child, end_children, start_child, task_environment
from kdist.cluster.spec import EVALUATOR, Membership
from kdist.console import lines
from kdist.data.pickling import pack_program
from kdist.errors import ClusterError, ConfigError
from kdist.evaluation.evaluate import ValidationArguments, evaluations
from kdist.hooks.base import Hook, RunContext, RunValues, Session
from kdist.log import warn
from kdist.model.source import ModelSource
from kdist.run.run_dir import RunDir
from kdist.run.statistics import BestValues
from kdist.storage.lock import RunLock
from kdist.storage.object_storage import StorageError
from kdist.version import __version__

_NAME = EVALUATOR.job
_POLL_SECS = 0.1
_STOP_SECS = 5.0


class Evaluator(Hook):
    """Runs the evaluator for as long as a session, and reports its results, also to `best`.

    It is restarted `max_restarts` times if it dies; the end of training waits `last_secs` for it.
    """

    def __init__(
        self,
        source: ModelSource,
        validation: ValidationArguments,
        log_dir: Path,
        best: BestValues,
        *,
        max_restarts: int,
        last_secs: float,
    ) -> None:
        self._request = {"source": source, "arguments": validation}
        self._log = log_dir / f"{_NAME}-0.log"
        self._best = best
        self._restarts_left = max_restarts
        self._last_secs = last_secs
        self._process: Child | None = None
        self._unread = b""
        self._last_step = -1

    def begin(self, session: Session) -> None:
        self._packed = pack_program(self._request)

    def after_create_session(self, session: Session) -> None:
        if self._process is None:
            self._start(session)

    def after_run(self, context: RunContext, values: RunValues) -> None:
        self._report(context.session)

    def end(self, session: Session) -> None:
        """Waits for the last checkpoint, which was saved before."""
        steps = session.checkpoints.steps()
        deadline = time.monotonic() + self._last_secs
        while self._process is not None and steps and self._last_step < steps[-1] and not session.interrupted:
            if time.monotonic() > deadline:
                warn(f"{_NAME}: did not evaluate step {steps[-1]} within {self._last_secs:g} s (cluster.step_timeout)")
                return
            time.sleep(_POLL_SECS)
            self._report(session)

    def close(self) -> None:
        if self._process is not None:
            end_children([self._process], _STOP_SECS)
            self._process = None

    def _start(self, session: Session) -> None:
        options = {
            "checkpoints": str(session.checkpoints.folder.absolute()),
            "after": self._last_step,
            "path": sys.path,
        }
        try:
            # Not through a pipe: a process that is stopped would leave it full.
            with tempfile.TemporaryFile() as request:
                request.write(self._packed)
                request.flush()
                request.seek(0)
                options["request"] = request.fileno()
                process = start_child(
                    [sys.executable, "-m", "kdist.evaluation.evaluator_main", json.dumps(options)],
                    self._log,
                    stdout=subprocess.PIPE,
                    env=task_environment(EVALUATOR),
                    pass_fds=[request.fileno()],
                )
        except OSError as error:
            # As when the disk is full.
            warn(f"{_NAME}: cannot be started: {error.strerror or error}; training continues without it")
            return
        os.set_blocking(process.stdout.fileno(), False)
        self._process = process

    def _report(self, session: Session) -> None:
        if self._process is None:
            return
        while new := self._process.stdout.read(1 << 16):
            self._unread += new
        *results, self._unread = self._unread.split(b"\n")
        for result in results:
            self._last_step, logs = json.loads(result)
            self._best.add(self._last_step, logs)
            session.print_line(lines.evaluation_line(self._last_step, session.last_step, logs))
            session.summaries.evaluation(logs, self._last_step)
        if self._process.poll() is not None:
            self._restart(session, self._process)

    def _restart(self, session: Session, process: Child) -> None:
        """Restarts a process that has died, if a signal ended it."""
        self.close()
        how = f"{_NAME} died ({process.how_it_ended()}); log: {self._log}"
        # An error of its own would occur again.
        if process.wait() < 0 and self._restarts_left > 0:
            self._restarts_left -= 1
            warn(f"{how}; restarting")
            self._unread = b""
            self._start(session)
        else:
            warn(f"{how}; training continues without it")


_LATE_SECS = 10.0
#: Seconds between two looks for news.
_LOOK_SECS = 0.5
_COSTLY_LOOK_SECS = 5.0


def evaluate_until_done(
    source: ModelSource,
    validation: ValidationArguments,
    files: RunDir,
    membership: Membership,
    *,
    start_timeout: float,
    print_line: Callable[[str], None],
) -> None:
    """Prints the results of each new checkpoint and writes them to `tb/evaluator`, until the chief has finished.

    Args:
        files: the chief's run dir.
        start_timeout: seconds to wait for a chief.

    Raises:
        ConfigError: no validation data, or no run dir, or one on object storage that refuses or cannot be reached.
        ClusterError: no chief started in the run dir in time, or it failed or died; or object storage failed.
    """
    if validation.data is None:
        raise ConfigError(f"{membership.task}: an evaluator needs validation data; give validation_data")
    if not files.is_given:
        raise ConfigError(f"{membership.task}: an evaluator reads what the chief saves; give the chief's run_dir")
    try:
        with files.open_for(str(membership.task)) as run, closing(run.summaries()) as summaries:
            chief, checkpoints = ChiefWatch(run, membership, start_timeout), run.checkpoints()
            role = f"{membership.task} of {membership.spec.shape}"
            print_line(f"kdist {__version__} | {role} | evaluates {checkpoints.place}")
            new_evaluations = evaluations(source, validation, checkpoints)
            pause = _LOOK_SECS if run.folder.looks_are_free else _COSTLY_LOOK_SECS
            while True:
                # Asked first: a checkpoint that the chief saved before it exited is evaluated as well.
                is_done = chief.is_done()
                found = next(new_evaluations)
                if found is not None:
                    step, logs = found
                    chief.was_heard()
                    print_line(lines.evaluation_line(step, None, logs))
                    summaries.evaluation(logs, step)
                    events = (run.path / "tb").rglob("events*")
                    run.folder.publish([path.relative_to(run.path).as_posix() for path in events])
                elif is_done:
                    break
                else:
                    time.sleep(pause)
    except StorageError as error:
        raise ClusterError(f"{membership.task}: run.dir={error}") from None
    print_line(f"done  | {membership.task} | the chief has finished")


class ChiefWatch:
    """Watches the chief of a membership by its run dir, where its lock has a heartbeat."""

    def __init__(self, run: RunDir, membership: Membership, start_timeout: float) -> None:
        self._run, self._lock = run, RunLock(run.folder)
        address, task = chief_server(membership.spec)
        self._chief = f"the chief ({task} at {address})"
        self._who = membership.task
        self._start_timeout = start_timeout
        # That of an earlier run, if there is one.
        self._earlier_result = run.result_written_at()
        self._has_come = False
        self._heard_at = time.monotonic()
        self._missing_since: float | None = None

    def was_heard(self) -> None:
        """Takes anything new in the run dir as a sign of life."""
        self._heard_at = time.monotonic()

    def is_done(self) -> bool:
        """True if it started and has finished, or had finished before and did not start again.

        Raises `ClusterError` if it did not start, it failed, or it died.
        """
        if self._lock.living() is not None:
            self._has_come, self._missing_since = True, None
            self.was_heard()
            return False
        if not self._lock.exists and self._run.result_written_at() != self._earlier_result:
            if self._run.read_result().get("status") == "failed":
                raise ClusterError(f"{self._who}: {self._chief} has failed; see {self._run}/result.json")
            return True
        now = time.monotonic()
        if self._has_come:
            # Files that another machine has written may appear late on a shared file system.
            self._missing_since = self._missing_since or now
            if now - self._missing_since > _LATE_SECS:
                raise ClusterError(f"{self._who}: {self._chief} exited without reporting completion")
            return False
        silent_secs = now - self._heard_at
        if silent_secs <= self._start_timeout:
            return False
        if self._run.read_result().get("status") == "done":
            return True
        raise ClusterError(
            f"{self._who}: no chief trains in {self._run} for {silent_secs:.0f} s (cluster.start_timeout); "
            "run.dir has to be that of the chief, where both reach it"
        )
