"""`Subprocesses`: runs a fit in processes of its own, for strategies whose workers run the program themselves.

The request travels to each process by cloudpickle, in a file. Worker 0 is the chief: what it prints appears here, it
calls the user's hooks and callbacks here, and its outcome (history, values, result) comes back in a file.
`kdist.launch.worker_main` is the process.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import keras

from kdist import forks, log
from kdist._compat import op_libraries
from kdist.cluster.forkserver import TaskProgram
from kdist.cluster.held_ports import HeldPorts
from kdist.cluster.local import available_cores, own_cores_of, thread_budget
from kdist.cluster.process import end_children, how_it_ended, log_tail, task_environment
from kdist.cluster.sigstop_watchdog import Stopped
from kdist.cluster.spec import ClusterShape, Task
from kdist.cluster.task_processes import TaskProcess, TaskProcesses
from kdist.console import lines, live
from kdist.data.pickling import packed_program, unpickled
from kdist.errors import ClusterError
from kdist.hooks.keras_callbacks import as_hooks
from kdist.launch.base import FitOutcome, FitRequest, Launcher
from kdist.launch.conversation import Conversation
from kdist.launch.signals import ForwardedSignals
from kdist.launch.stand_ins import METRICS, SESSION
from kdist.launch.users_hooks import SessionElsewhere, UsersHooks
from kdist.launch.worker_messages import (
    LINE,
    WARNING,
    WorkerOptions,
    WorkerOutcome,
    WorkerRequest,
    set_values,
    values_of,
)
from kdist.log import Line, warn
from kdist.model.metrics import MetricReader
from kdist.run.result import Result
from kdist.run.run_dir import RunDir
from kdist.strategies.prepared_training import prepare

if TYPE_CHECKING:
    from kdist.config.schema import DevicesConfig

_POLL_SECS = 0.1
_STOP_SECS = 5.0


class Subprocesses(Launcher):
    """Runs the fit in processes of this machine, and again from the newest checkpoint when one of them is lost.

    Args:
        num_cpus: logical CPU devices to create in each process; 0 for the devices that exist.
    """

    def __init__(self, num_cpus: int) -> None:
        self._num_cpus = num_cpus

    def launch(self, request: FitRequest) -> FitOutcome:
        data = request.training_data
        # Builds the model, and finds what is wrong with it and the data before anything starts.
        prepared = prepare(request.training_spec(data), 1)
        prepared.check_fixed_tables(request.strategy.name)
        callbacks, hooks = as_hooks(request.arguments.callbacks, request.hooks)
        metrics = MetricReader(request.source.model, prepared.replica_step.returned)
        users_hooks = UsersHooks(hooks, callbacks, prepared.spec, metrics, prepared.replica_step.outside)
        arguments = replace(request.arguments, x=data, y=None, sample_weight=None, class_weight=None, callbacks=())
        try:
            users_hooks.before_fit(request.files.path, request.result(status="running"))
            outcome = self._run(replace(request.with_config(), arguments=arguments, hooks=()), users_hooks)
        finally:
            users_hooks.close()
        users_hooks.after_fit(outcome.result)
        return outcome

    def _run(self, request: FitRequest, users_hooks: UsersHooks) -> FitOutcome:
        """Runs a request without hooks and callbacks; they are in `users_hooks`."""
        strategy, model, files = request.strategy, request.source.model, request.files
        processes = WorkerProcesses(
            num_workers=max(1, strategy.shape.num_workers),
            log_dir=files.logs,
            start_timeout=strategy.cluster.start_timeout,
            step_timeout=strategy.cluster.step_timeout,
            num_cpus=self._num_cpus,
            devices=strategy.cluster.devices,
            bind=strategy.cluster.bind,
            grace_secs=request.grace_secs,
            stop_signals=request.stop_signals,
            print_line=_print,
        )
        # The command line's lock, and restarts, are here.
        fit = replace(request, max_restarts=0)
        started, restarts = time.time(), 0
        while True:
            outcome = WorkerOutcome()
            try:
                outcome = processes.run(WorkerRequest(fit, users_hooks.stand_ins(), values_of(model)), users_hooks)
                if outcome.error is not None:
                    raise outcome.error
                break
            except ClusterError as error:
                newest = _checkpoint_to_resume(files, fit.resume, started)
                if newest is None or restarts == request.max_restarts:
                    return self._failed(request, error, started)
                restarts, fit = restarts + 1, replace(fit, resume="auto")
                warn(lines.again_line(error, newest, restarts, request.max_restarts))
            except BaseException as error:  # noqa: BLE001 - in the outcome, and raised by the caller
                return FitOutcome(outcome.result or Result(), request.resume, error=users_hooks.error or error)
        set_values(model, outcome.values)
        result = replace(outcome.result or Result(), restarts={"worker": 0, "cluster": restarts})
        if restarts:
            files.write_result(result)
        history = keras.callbacks.History()
        vars(history).update(outcome.history)
        history.set_model(model)
        return FitOutcome(result, resume=None, history=history)

    @staticmethod
    def _failed(request: FitRequest, error: ClusterError, started: float) -> FitOutcome:
        """The outcome of a fit whose processes were lost. A chief that was lost has written no result."""
        result = Result()
        if not request.files.has_result_since(started):
            result = request.result(error)
            request.files.write_result(result)
        return FitOutcome(result, request.resume, error=error)


def _print(line: str) -> None:
    """Prints a line of the chief; what the user's code prints stays as it is, and is not logged."""
    if isinstance(line, Line):
        log.say(line)
    else:
        print(line, flush=True)


def _checkpoint_to_resume(files: RunDir, resume: str | None, started: float) -> Path | None:
    """The newest checkpoint, if it is of this run or of one that this run resumes."""
    checkpoints = files.checkpoints()
    # They were saved by another process.
    checkpoints.refresh()
    newest = checkpoints.newest()
    if newest is None or resume in ("auto", "must"):
        return newest
    index = Path(f"{newest}.index")
    return newest if index.exists() and index.stat().st_mtime >= started else None


@dataclass
class WorkerProcesses:
    """The processes of a fit, on this machine.

    Args:
        num_workers: how many.
        log_dir: folder for their logs, `worker-<index>.log`.
        start_timeout: seconds within which all must have joined.
        step_timeout: seconds for which one may be stopped (SIGSTOP).
        num_cpus: logical CPU devices of each; 0 for the devices that exist.
        devices: which GPUs they may use.
        grace_secs: seconds that the chief has to save and exit after a stop signal.
        stop_signals: names of the signals that are forwarded to the chief.
        print_line: takes what the chief prints: kdist's own as `Line`, and other lines.
        bind: the network interface at which they listen; None for all.
    """

    num_workers: int
    log_dir: Path
    start_timeout: float
    step_timeout: float
    num_cpus: int
    devices: DevicesConfig | None
    grace_secs: float
    stop_signals: Sequence[str]
    print_line: Any = print
    bind: str | None = None

    def __post_init__(self) -> None:
        self._task_processes = TaskProcesses(self._log(0), train=True)
        #: Where the part of the present process begins in each log.
        self._log_starts: dict[int, int] = {}

    def run(self, request: WorkerRequest, users_hooks: UsersHooks) -> WorkerOutcome:
        """Runs a request to its end; the chief calls the user's hooks and callbacks here.

        Returns:
            The chief's outcome, or that of another worker that has failed, or of processes that were lost, are stopped
            or did not start in time; after a stop signal, that of the signal.

        Raises:
            ConfigError: something in the request cannot be sent to another process.
        """
        with tempfile.TemporaryDirectory(prefix="kdist-") as folder:
            (Path(folder) / "request").write_bytes(packed_program(request))
            with ExitStack() as at_end:
                live_pipe = at_end.enter_context(live.LivePipe())
                here, there = (at_end.enter_context(end) for end in Pipe())
                forks.keep_from_children(here)
                ports = at_end.enter_context(HeldPorts(self.num_workers if self.num_workers > 1 else 0))
                processes = self._launch(folder, ports.numbers, live_pipe, there)
                # As the chief has the only other copy, it has ended when the pipe is at its end.
                there.close()
                live_pipe.show()
                assert processes[0].stdout is not None
                # The relay closes its own: closing that here would wait for what the chief left behind.
                printed = os.fdopen(os.dup(processes[0].stdout.fileno()), errors="replace")
                relay = threading.Thread(target=self._relay, args=[printed], daemon=True)
                relay.start()
                at_end.callback(relay.join, _STOP_SECS)
                at_end.callback(self._task_processes.close)
                at_end.callback(end_children, processes, _STOP_SECS)
                with ForwardedSignals(processes[0], self.grace_secs, self.stop_signals) as signals:
                    try:
                        outcome = self._wait(processes, Path(folder), here, users_hooks)
                    except ClusterError as error:
                        outcome = WorkerOutcome(error)
                if isinstance(outcome.error, ClusterError) and signals.error is not None:
                    # It was to end, and is not started again.
                    outcome = WorkerOutcome(signals.error)
            return outcome

    def _launch(
        self, folder: str, ports: Sequence[int], live_pipe: live.LivePipe, pipe_of_chief: Connection
    ) -> list[TaskProcess]:
        self.log_dir.mkdir(parents=True, exist_ok=True)
        workers = [f"127.0.0.1:{port}" for port in ports]
        shape = ClusterShape(0, self.num_workers)
        intra_op, inter_op = thread_budget("worker", shape, available_cores())
        processes: list[TaskProcess] = []
        for index in range(self.num_workers):
            options = WorkerOptions(
                index,
                workers,
                self.start_timeout,
                self.num_cpus,
                intra_op,
                inter_op,
                folder,
                path=sys.path,
                live_line=live_pipe.descriptor if index == 0 else None,
                conversation=pipe_of_chief.fileno() if index == 0 else None,
                bind=self.bind,
                # One process with several devices uses all of them.
                cores=own_cores_of(Task("worker", index), shape) if self.num_workers > 1 else None,
                op_libraries=op_libraries.loaded_by(),
            )
            try:
                processes.append(self._start(options))
            except BaseException:
                end_children(processes, _STOP_SECS)
                raise
        return processes

    def _start(self, options: WorkerOptions) -> TaskProcess:
        log = self._log(options.index)
        self._log_starts[options.index] = log.stat().st_size if log.exists() else 0
        program = TaskProgram(
            "kdist.launch.worker_main",
            json.dumps(asdict(options)),
            task_environment(Task("worker", options.index), self.devices),
            log,
            prints_to_log=options.index > 0,
            pass_fds=[fd for fd in (options.live_line, options.conversation) if fd is not None],
        )
        return self._task_processes.start(program)

    def _wait(
        self, processes: Sequence[TaskProcess], folder: Path, pipe: Connection, users_hooks: UsersHooks
    ) -> WorkerOutcome:
        """Answers the chief until it has ended, and watches all of them."""
        deadline, stopped = time.monotonic() + self.start_timeout, Stopped()

        def check() -> None:
            self._check(processes, folder, deadline, stopped)

        objects: dict[str, Any] = {}
        shared = {SessionElsewhere: SESSION, MetricReader: METRICS}
        conversation = Conversation(pipe, users_hooks.answer, shared, objects, check)
        objects |= users_hooks.objects(conversation.call)
        while (code := processes[0].poll()) is None:
            check()
            conversation.answer_for(_POLL_SECS)
        # A chief that fails because another worker was killed knows less about it than this process.
        for index, process in enumerate(processes[1:], start=1):
            ended = process.poll()
            if code != 0 and ended is not None and ended < 0:
                return self._outcome_of(index, ended, folder)
        return self._outcome_of(0, code, folder)

    def _check(self, processes: Sequence[TaskProcess], folder: Path, deadline: float, stopped: Stopped) -> None:
        """Checks processes whose chief runs.

        Raises:
            ClusterError: another one has ended, has not started by the deadline, or one is stopped.
        """
        for index, process in enumerate(processes):
            if process.poll() not in (None, 0) and processes[0].poll() is None:
                # The chief may have more to say about it.
                processes[0].terminate()
                raise self._outcome_of(index, process.wait(), folder).error or ClusterError(str(Task("worker", index)))
        missing = [i for i in range(len(processes)) if not (folder / f"started-{i}").exists()]
        if not missing:
            # It may be large, and a signal that ends everything at once would leave it behind.
            (folder / "request").unlink(missing_ok=True)
        if missing and time.monotonic() > deadline:
            names = ", ".join(str(Task("worker", i)) for i in missing)
            raise ClusterError(
                f"{names} did not respond within {self.start_timeout:g} s (cluster.start_timeout)"
                + self._log_tail(missing[0])
            )
        # A chief that is stopped finds out nothing, and others wait for it.
        pids = [process.pid for process in processes]
        for pid in stopped.longer_than(self.step_timeout, pids):
            raise ClusterError(
                f"{Task('worker', pids.index(pid))} has been stopped for {self.step_timeout:g} s (cluster.step_timeout)"
            )

    def _outcome_of(self, index: int, code: int, folder: Path) -> WorkerOutcome:
        """The outcome that a process has left, or what is known about one that was lost."""
        try:
            outcome: WorkerOutcome = unpickled((folder / f"outcome-{index}").read_bytes())
        except FileNotFoundError:
            message = f"{Task('worker', index)} died ({how_it_ended(code)})" + self._log_tail(index)
            return WorkerOutcome(ClusterError(message))
        return outcome

    def _relay(self, printed: IO[str]) -> None:
        with printed:
            for line in printed:
                # A warning, or a line of kdist, may come in the middle of what else is printed.
                text, is_warning, warning = line.rstrip("\n").partition(WARNING)
                text, is_own, own = text.partition(LINE)
                # Without a console, or with warnings that are errors, the chief would wait for ever for a reader.
                with suppress(OSError, ValueError, Warning):
                    if text or not (is_warning or is_own):
                        self.print_line(text)
                    if is_own:
                        self.print_line(Line.from_json(own))
                    if is_warning:
                        warn(warning, prefix="")

    def _log_tail(self, index: int) -> str:
        """The end of the log of a process that was started."""
        return log_tail(self._log(index), self._log_starts.get(index, 0))

    def _log(self, index: int) -> Path:
        return self.log_dir / f"worker-{index}.log"
