"""The chief's side of the evaluator: a task that evaluates each new checkpoint while training continues.

After Estimator's evaluator. The task only reads checkpoints and reports the results on its standard output; the chief
prints them and writes them to TensorBoard. `kdist.evaluation.evaluator_main` is the task, and
`kdist.evaluation.external_evaluator` is the evaluator of a cluster whose tasks others start.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from kdist.cluster.processes.child import Child, end_children, start_child, task_environment
from kdist.cluster.spec import EVALUATOR
from kdist.console import lines
from kdist.data.pickling import packed_program
from kdist.evaluation.checkpoint_evaluator import Evaluation
from kdist.evaluation.evaluate import ValidationArguments
from kdist.hooks.base import Hook, RunContext, RunValues, Session
from kdist.log import warn
from kdist.model.source import ModelSource
from kdist.run.statistics import BestValues

_NAME = EVALUATOR.job
_POLL_SECS = 0.1
_STOP_SECS = 5.0


class Evaluator(Hook):
    """Runs the evaluator for as long as a session, and reports its results.

    Args:
        source: the model.
        validation: the data, and how to evaluate it.
        log_dir: folder for the evaluator's log.
        best: gets the results.
        max_restarts: how often it is restarted after it died.
        last_secs: seconds that the end of training waits for it.
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
        self._packed = packed_program(self._request)

    def after_create_session(self, session: Session) -> None:
        if self._process is None:
            self._start(session)

    def after_run(self, context: RunContext, values: RunValues) -> None:
        self._tell(context.session)

    def end(self, session: Session) -> None:
        """Waits for the last checkpoint, which was saved before."""
        steps = session.checkpoints.steps()
        deadline = time.monotonic() + self._last_secs
        while self._process is not None and steps and self._last_step < steps[-1] and not session.interrupted:
            if time.monotonic() > deadline:
                warn(f"{_NAME}: did not evaluate step {steps[-1]} within {self._last_secs:g} s (cluster.step_timeout)")
                return
            time.sleep(_POLL_SECS)
            self._tell(session)

    def close(self) -> None:
        if self._process is not None:
            end_children([self._process], _STOP_SECS)
            self._process = None

    def _start(self, session: Session) -> None:
        try:
            self._process = self._started(session)
        except OSError as error:
            # As when the disk is full.
            warn(f"{_NAME}: cannot be started: {error.strerror or error}; training continues without it")

    def _started(self, session: Session) -> Child:
        # Not through a pipe: a process that is stopped would leave it full.
        with tempfile.TemporaryFile() as request:
            request.write(self._packed)
            request.flush()
            request.seek(0)
            options = {
                "request": request.fileno(),
                "checkpoints": str(session.checkpoints.folder.absolute()),
                "after": self._last_step,
                "path": sys.path,
            }
            process = start_child(
                [sys.executable, "-m", "kdist.evaluation.evaluator_main", json.dumps(options)],
                self._log,
                stdout=subprocess.PIPE,
                env=task_environment(EVALUATOR),
                pass_fds=[request.fileno()],
            )
        os.set_blocking(process.stdout.fileno(), False)
        return process

    def _tell(self, session: Session) -> None:
        for found in self._new_evaluations():
            self._last_step = found.step
            self._best.add(found.step, found.logs)
            session.print_line(lines.evaluation_line(found.step, session.last_step, found.logs))
            session.summaries.evaluation(found.logs, found.step)
        if self._process is not None and self._process.poll() is not None:
            self._is_lost(session, self._process)

    def _new_evaluations(self) -> list[Evaluation]:
        if self._process is None:
            return []
        while new := self._process.stdout.read(1 << 16):
            self._unread += new
        *lines, self._unread = self._unread.split(b"\n")
        return [Evaluation(**json.loads(line)) for line in lines]

    def _is_lost(self, session: Session, process: Child) -> None:
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
