"""`fit` in processes of its own, for strategies whose workers run the program themselves.

What `Trainer.fit` was given travels to each process by cloudpickle, in a file. Worker 0 is the chief; what it prints
appears here, and what it comes to (history, values, result) comes back in a file. Each process is
`python -m kdist.program '<ProgramOptions as JSON>'`.
"""

from __future__ import annotations

import gc
import io
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn

import cloudpickle

from kdist import live_line, signals
from kdist.checks import STOP_SIGNALS
from kdist.cluster.guard import Stopped
from kdist.cluster.local import available_cores, thread_budget
from kdist.cluster.process import (
    end_children,
    end_with_parent,
    free_ports,
    how_it_ended,
    name_process,
    start_child,
    task_environment,
)
from kdist.cluster.spec import ClusterShape, ClusterSpec, Membership, Task
from kdist.errors import ClusterError, ConfigError, KdistError, TaskError
from kdist.quick_import import quick_import
from kdist.signals import ForwardedSignals
from kdist.warn import warn

if TYPE_CHECKING:
    from kdist.schema import DevicesConfig

_POLL_SECS = 0.1
_STOP_SECS = 5.0
_LOG_LINES = 12
# Begins a line of the chief that is a warning.
_WARNING = "\x1e"


@dataclass(frozen=True)
class ProgramOptions:
    """What a process of a program needs to know before it may import TensorFlow.

    Attributes:
        index: of this worker.
        workers: addresses of all; with one there is nobody to meet.
        start_timeout: seconds within which all have to be there.
        num_cpus: logical CPU devices to make; 0 leaves the CPU as it is.
        intra_op_threads, inter_op_threads: see `kdist.cluster.local.thread_budget`.
        folder: where `program` is, and `started-<index>` and `outcome-<index>` will be.
        path: Python's import path.
        live_line: descriptor of a pipe to a terminal that shows the chief's live line; None if there is none.
    """

    index: int
    workers: list[str]
    start_timeout: float
    num_cpus: int
    intra_op_threads: int
    inter_op_threads: int
    folder: str
    path: list[str]
    live_line: int | None


@dataclass(frozen=True)
class Outcome:
    """What a process of a program came to.

    Attributes:
        error: what it raised; None if it ended well.
        value: what the chief returns.
    """

    error: BaseException | None = None
    value: Any = None


@dataclass
class ProgramTasks:
    """Runs a program in processes of this machine.

    Args:
        num_workers: how many.
        log_dir: folder for their logs, `worker-<index>.log`.
        start_timeout: seconds within which all must have met.
        step_timeout: seconds for which one may be stopped.
        num_cpus: logical CPU devices of each; 0 for the devices there are.
        devices: which GPUs they may use.
        stop_signals: names of the signals that go to the chief.
        print_line: takes what the chief prints.
    """

    num_workers: int
    log_dir: Path
    start_timeout: float
    step_timeout: float = 300.0
    num_cpus: int = 0
    devices: DevicesConfig | None = None
    stop_signals: Sequence[str] = STOP_SIGNALS
    print_line: Any = print

    def run(self, program: Mapping[str, Any]) -> Any:
        """Runs `program` to its end.

        Args:
            program: what `kdist.remote_fit.run_program` takes in each process.

        Returns:
            What it returned on the chief.

        Raises:
            ConfigError: something in the program cannot travel.
            ClusterError: a process was lost, is stopped or did not start in time.
            KeyboardInterrupt, SystemExit: after Ctrl-C or SIGTERM, when the chief had saved.
        """
        with tempfile.TemporaryDirectory(prefix="kdist-") as folder:
            (Path(folder) / "program").write_bytes(pickled(program))
            with ExitStack() as at_end:
                live = at_end.enter_context(live_line.LivePipe())
                processes = self._launch(folder, live)
                live.show()
                # Who reads from it closes it: to close it beside that would wait for what the chief left behind.
                printed, processes[0].stdout = processes[0].stdout, None
                assert printed is not None
                relay = threading.Thread(target=self._relay, args=[printed], daemon=True)
                relay.start()
                at_end.callback(relay.join, _STOP_SECS)
                at_end.callback(end_children, processes, _STOP_SECS)
                with ForwardedSignals(processes[0], self.stop_signals):
                    outcome = self._wait(processes, Path(folder))
            if outcome.error is not None:
                raise outcome.error
            return outcome.value

    def _launch(self, folder: str, live: live_line.LivePipe) -> list[subprocess.Popen[str]]:
        self.log_dir.mkdir(parents=True, exist_ok=True)
        ports = free_ports(self.num_workers) if self.num_workers > 1 else []
        workers = [f"127.0.0.1:{port}" for port in ports]
        intra_op, inter_op = thread_budget("worker", ClusterShape(0, self.num_workers), available_cores())
        processes: list[subprocess.Popen[str]] = []
        for index in range(self.num_workers):
            options = ProgramOptions(
                index,
                workers,
                self.start_timeout,
                self.num_cpus,
                intra_op,
                inter_op,
                folder,
                path=sys.path,
                live_line=live.descriptor if index == 0 else None,
            )
            try:
                processes.append(self._start(options))
            except BaseException:
                end_children(processes, _STOP_SECS)
                raise
        return processes

    def _start(self, options: ProgramOptions) -> subprocess.Popen[str]:
        with self._log(options.index).open("wb") as log:
            return start_child(
                [sys.executable, "-m", "kdist.program", json.dumps(asdict(options))],
                stdout=subprocess.PIPE if options.index == 0 else log,
                stderr=log,
                env=task_environment(Task("worker", options.index), self.devices),
                pass_fds=[] if options.live_line is None else [options.live_line],
                text=True,
                errors="replace",
            )

    def _wait(self, processes: Sequence[subprocess.Popen[str]], folder: Path) -> Outcome:
        """Waits for the chief, and for the others until they met."""
        deadline = time.monotonic() + self.start_timeout
        stopped = Stopped()
        while (code := processes[0].poll()) is None:
            for index, process in enumerate(processes):
                if process.poll() not in (None, 0):
                    # The chief may have more to say of the same.
                    processes[0].terminate()
                    return self._failure_of(index, process.wait(), folder)
            missing = [i for i in range(len(processes)) if not (folder / f"started-{i}").exists()]
            if not missing:
                # It may be large, and nobody could remove it after a signal that ends everything at once.
                (folder / "program").unlink(missing_ok=True)
            if missing and time.monotonic() > deadline:
                names = ", ".join(str(Task("worker", i)) for i in missing)
                raise ClusterError(
                    f"{names} did not answer within {self.start_timeout:g} s (cluster.start_timeout)"
                    + self._log_tail(missing[0])
                )
            # A chief that is stopped finds out nothing, and others wait for it.
            pids = [process.pid for process in processes]
            for pid in stopped.longer_than(self.step_timeout, pids):
                raise ClusterError(
                    f"{Task('worker', pids.index(pid))} is stopped for {self.step_timeout:g} s (cluster.step_timeout)"
                )
            time.sleep(_POLL_SECS)
        # A chief that fails because another worker was killed knows less of it than this process.
        for index, process in enumerate(processes[1:], start=1):
            ended = process.poll()
            if code != 0 and ended is not None and ended < 0:
                return self._failure_of(index, ended, folder)
        return self._failure_of(0, code, folder)

    def _failure_of(self, index: int, code: int, folder: Path) -> Outcome:
        """What a process that has ended says of it, or what can be said of it."""
        try:
            outcome: Outcome = pickle.loads((folder / f"outcome-{index}").read_bytes())
        except FileNotFoundError:
            error = f"{Task('worker', index)} is lost ({how_it_ended(code)})"
            return Outcome(error=ClusterError(error + self._log_tail(index)))
        return outcome

    def _relay(self, printed: IO[str]) -> None:
        with printed:
            for line in printed:
                # A warning may come behind something that is no whole line yet.
                text, is_warning, warning = line.rstrip("\n").partition(_WARNING)
                # With a console that is gone, or warnings that are errors, the chief would wait for ever for a reader.
                with suppress(OSError, ValueError, Warning):
                    if text or not is_warning:
                        self.print_line(text)
                    if is_warning:
                        warn(warning, prefix="")

    def _log(self, index: int) -> Path:
        return self.log_dir / f"worker-{index}.log"

    def _log_tail(self, index: int) -> str:
        lines = self._log(index).read_text(errors="replace").splitlines()[-_LOG_LINES:]
        return f"\n  log: {self._log(index)}" + (" (last lines follow)\n" + "\n".join(lines) if lines else " (empty)")


class _Pickler(cloudpickle.Pickler):
    """Knows datasets, which travel as their graph."""

    def reducer_override(self, obj: Any) -> Any:
        import tensorflow as tf

        if isinstance(obj, tf.data.Dataset):
            from kdist.dataset_graph import dataset_graph

            return _dataset, (dataset_graph(obj).numpy(), obj.element_spec)
        return super().reducer_override(obj)


def _dataset(graph: bytes, element_spec: Any) -> Any:
    import tensorflow as tf

    from kdist.dataset_graph import dataset_of_graph

    return dataset_of_graph(tf.constant(graph), element_spec)


def pickled(program: Mapping[str, Any]) -> bytes:
    """A program as it travels.

    Raises:
        ConfigError: something in it cannot.
    """
    buffer = io.BytesIO()
    try:
        _Pickler(buffer).dump(dict(program))
    except KdistError:
        raise
    except Exception as error:
        raise ConfigError(
            f"the model, data or hooks cannot travel to the processes that train: {type(error).__name__}: {error}"
        ) from error
    return buffer.getvalue()


def unpickled(packed: bytes) -> dict[str, Any]:
    """Undoes `pickled`; for what the chief sent."""
    program: dict[str, Any] = pickle.loads(packed)
    return program


def main(options: ProgramOptions) -> NoReturn:
    """Runs the program as one of its workers; ends the process."""
    is_chief = options.index == 0
    if is_chief:
        # The others end with it, and ignore what a scheduler sends to all of them.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signals.stop_before_training()
    end_with_parent(ignored=()) if is_chief else end_with_parent()
    name_process(str(Task("worker", options.index)))
    sys.path[:] = options.path
    if is_chief:
        # In one piece: other threads print, too.
        warnings.showwarning = lambda message, *_, **__: print(f"{_WARNING}{message}\n", end="", flush=True)
    if options.live_line is not None:
        live_line.relay = live_line.pipe_writer(options.live_line)
    folder = Path(options.folder)
    try:
        outcome = Outcome(value=_run(options, folder))
    except BaseException as error:  # noqa: BLE001 - raised where the program came from
        traceback.print_exc()
        error = signals.asked_to_exit() or error
        outcome = Outcome(error=_travelling(error, str(Task("worker", options.index))))
    unfinished = folder / f".outcome-{options.index}"
    unfinished.write_bytes(cloudpickle.dumps(outcome))
    unfinished.replace(folder / f"outcome-{options.index}")
    sys.stdout.flush()
    sys.stderr.flush()
    # At a normal exit TensorFlow may wait for a worker that is gone.
    os._exit(0 if outcome.error is None else 1)


def _run(options: ProgramOptions, folder: Path) -> Any:
    with quick_import():
        import tensorflow as tf

        from kdist import remote_fit

    gc.freeze()
    tf.config.threading.set_intra_op_parallelism_threads(options.intra_op_threads)
    tf.config.threading.set_inter_op_parallelism_threads(options.inter_op_threads)
    packed = (folder / "program").read_bytes()
    membership = None
    if options.num_cpus:
        from kdist.strategies.mirrored import make_logical_cpus

        make_logical_cpus(options.num_cpus)
    if options.workers:
        from kdist.strategies.multi_worker_mirrored import join

        membership = Membership(ClusterSpec((), tuple(options.workers)), Task("worker", options.index))
        # Before the program is read: models and tensors in it run TensorFlow's first ops.
        join(membership, options.start_timeout)
    (folder / f"started-{options.index}").touch()
    program = unpickled(packed)
    del packed
    signals.exit_at_once = os._exit
    return remote_fit.run_program(program, membership)


def _travelling(error: BaseException, task: str) -> BaseException:
    """The error itself if it is one of kdist's or a signal's, else a `TaskError` that says what it was."""
    return error if isinstance(error, (KdistError, KeyboardInterrupt, SystemExit)) else TaskError(task, error)


if __name__ == "__main__":
    main(ProgramOptions(**json.loads(sys.argv[1])))
