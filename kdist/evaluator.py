"""The evaluator: a task beside the cluster that evaluates each new checkpoint while training goes on.

After Estimator's evaluator. It reads checkpoints and writes nothing: what it finds it says on its standard output, and
the chief prints it and writes it to TensorBoard. This is the chief's side; `kdist.evaluator_task` is the task. The
evaluator of a cluster whose tasks others start is `kdist.joined_evaluator`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from kdist import console
from kdist.best_values import BestValues
from kdist.checkpoint_evaluator import Evaluation
from kdist.cluster.process import end_children, how_it_ended, start_child, task_environment
from kdist.cluster.spec import EVALUATOR
from kdist.hooks.base import Hook, RunContext, RunValues
from kdist.program import pickled
from kdist.warn import warn

if TYPE_CHECKING:
    import keras

    from kdist.fit_arguments import FitArguments
    from kdist.session import TrainSession

_NAME = EVALUATOR.job
_POLL_SECS = 0.1
_STOP_SECS = 5.0


class Evaluator(Hook):
    """Runs the evaluator as long as a session, and tells what it finds.

    Args:
        build_model: what the trainer was given: a function, or a model.
        arguments: of the fit; its validation data is what is evaluated.
        log_dir: folder for the evaluator's log.
        best: gets what it finds.
        max_restarts: how often it is started again when it is lost.
        last_secs: seconds for which the end of training waits for it.
    """

    def __init__(
        self,
        build_model: Callable[[], keras.Model] | keras.Model,
        arguments: FitArguments,
        log_dir: Path,
        best: BestValues,
        *,
        max_restarts: int,
        last_secs: float,
    ) -> None:
        self._program = {"build_model": build_model, "arguments": arguments}
        self._log = log_dir / f"{_NAME}-0.log"
        self._best = best
        self._restarts_left = max_restarts
        self._last_secs = last_secs
        self._process: subprocess.Popen[bytes] | None = None
        self._unread = b""
        self._last_step = -1

    def begin(self, session: TrainSession) -> None:
        self._packed = pickled(self._program)

    def after_create_session(self, session: TrainSession) -> None:
        if self._process is None:
            self._start(session)

    def after_run(self, context: RunContext, values: RunValues) -> None:
        self._tell(context.session)

    def end(self, session: TrainSession) -> None:
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

    def idle_in(self, step: int) -> int | None:
        return None

    def _start(self, session: TrainSession) -> None:
        try:
            self._process = self._started(session)
        except OSError as error:
            # As when the disk is full.
            warn(f"{_NAME}: cannot be started: {error.strerror or error}; training goes on without it")

    def _started(self, session: TrainSession) -> subprocess.Popen[bytes]:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        # Not through a pipe, which a process that is stopped would leave full.
        with tempfile.TemporaryFile() as program, self._log.open("ab") as log:
            program.write(self._packed)
            program.flush()
            program.seek(0)
            options = {
                "program": program.fileno(),
                "checkpoints": str(session.checkpoints.folder.absolute()),
                "after": self._last_step,
                "path": sys.path,
            }
            process = start_child(
                [sys.executable, "-m", "kdist.evaluator_task", json.dumps(options)],
                stdout=subprocess.PIPE,
                stderr=log,
                env=task_environment(EVALUATOR),
                pass_fds=[program.fileno()],
            )
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        return process

    def _tell(self, session: TrainSession) -> None:
        for found in self._new_evaluations():
            self._last_step = found.step
            self._best.add(found.step, found.logs)
            session.print_line(console.evaluation_line(found.step, session.last_step, found.logs))
            session.summaries.evaluation(found.logs, found.step)
        if self._process is not None and (code := self._process.poll()) is not None:
            self._is_lost(session, code)

    def _new_evaluations(self) -> list[Evaluation]:
        if self._process is None or self._process.stdout is None:
            return []
        while new := self._process.stdout.read(1 << 16):
            self._unread += new
        *lines, self._unread = self._unread.split(b"\n")
        return [Evaluation(**json.loads(line)) for line in lines]

    def _is_lost(self, session: TrainSession, code: int) -> None:
        self.close()
        how = f"{_NAME} is lost ({how_it_ended(code)}); log: {self._log}"
        # Its own error would come again.
        if code < 0 and self._restarts_left > 0:
            self._restarts_left -= 1
            warn(f"{how}; it is started again")
            self._unread = b""
            self._start(session)
        else:
            warn(f"{how}; training goes on without it")
