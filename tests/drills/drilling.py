"""Runs of `python -m kdist` that a test does something to, watched from outside: console, tasks, files, exit code."""

from __future__ import annotations

import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from helpers import FORK_SERVER, REPO, environment, process_name, result_of, wait_until

from kdist.storage.object_storage import working_folder

PAGE = REPO / "docs" / "drills.md"
#: A small model of the tests' own; validated rarely, so that steps take the time.
MINE = (
    "model._target_=user_code.build",
    "data._target_=user_code.data",
    "run.trust=[user_code]",
    "train.steps_per_epoch=2000",
)

# Three drills at once on two slow cores: a process that starts needs half a minute of CPU.
_PATIENCE_SECS = 150.0


@dataclass(frozen=True)
class Ended:
    """The outcome of a run.

    Attributes:
        code: its exit code.
        console: what it printed, errors included.
        result: `result.json`; empty if there is none.
        seconds: from its start to its end.
    """

    code: int
    console: str
    result: dict[str, Any]
    seconds: float

    @property
    def step(self) -> int | None:
        return self.result.get("global_step")


class DrillRun:
    """One run, in the background; its run dir is `<cwd>/D`, or at a URL.

    Args:
        cwd: where it runs.
        arguments: of the command line; `run.dir` is added.
        given: variables for its environment.
        url: of its run dir; `run_dir` is where it works then.
    """

    def __init__(
        self, cwd: Path, *arguments: str, given: Mapping[str, str] | None = None, url: str | None = None
    ) -> None:
        self.run_dir = cwd / "D" if url is None else working_folder(url)
        self._console = cwd / "console.txt"
        self._began_at = self._console.stat().st_size if self._console.exists() else 0
        self._started = time.monotonic()
        self._seen: dict[int, str] = {}
        with self._console.open("a") as console:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kdist", *arguments, f"run.dir={url or 'D'}"],
                cwd=cwd,
                stdout=console,
                stderr=subprocess.STDOUT,
                env={**environment(), **(given or {})},
                # As from a terminal: Ctrl-C reaches only those it is sent to.
                start_new_session=True,
            )

    @property
    def console(self) -> str:
        """The text that it has printed so far."""
        with self._console.open() as console:
            console.seek(self._began_at)
            return console.read()

    def wait_for(self, pattern: str, timeout: float = _PATIENCE_SECS) -> str:
        """Waits until it has printed what matches `pattern`; returns that."""
        found: list[str] = []

        def is_there() -> bool:
            if match := re.search(pattern, self.console, re.MULTILINE):
                found.append(match[0])
            assert found or self.process.poll() is None, f"ended without {pattern!r}:\n{self.console}"
            return bool(found)

        wait_until(is_there, timeout, lambda: f"{pattern!r} in:\n{self.console}")
        return found[0]

    def tasks(self) -> dict[str, int]:
        """Process ids of the tasks that run now, by name (`worker:1`): a task writes to a log of its name."""
        found = {}
        logs = str(self.run_dir / "logs") + os.sep
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal() or int(entry.name) == self.process.pid:
                continue
            try:
                log = os.readlink(entry / "fd" / "2")
                name = process_name(int(entry.name))
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if log.startswith(logs):
                self._seen[int(entry.name)] = log
                # What forks the tasks has the log of the first of them.
                if name != FORK_SERVER or parent != self.process.pid:
                    found[Path(log).stem.replace("-", ":")] = int(entry.name)
        return found

    def wait_for_task(self, name: str, *, other_than: int | None = None, timeout: float = _PATIENCE_SECS) -> int:
        """Waits until task `name` runs, as another process than `other_than`; returns its process id."""
        wait_until(lambda: self.tasks().get(name, other_than) != other_than, timeout, f"{name} runs")
        return self.tasks()[name]

    def signal_task(self, name: str, number: signal.Signals = signal.SIGKILL) -> int:
        """Sends a signal to a task; returns its process id."""
        pid = self.tasks()[name]
        os.kill(pid, number)
        return pid

    def end(self, timeout: float = 120.0) -> Ended:
        """Waits for its end, and that nothing of it is left 5 s later."""
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout} s:\n{self.console}") from None
        seconds = time.monotonic() - self._started
        wait_until(self.nothing_is_left, 5, f"no process of the run is left: {self._seen}")
        has_result = (self.run_dir / "result.json").exists()
        return Ended(code, self.console, result_of(self.run_dir) if has_result else {}, seconds)

    def nothing_is_left(self) -> bool:
        """Whether no process that was ever seen of it is there any more."""
        self.tasks()
        return not [pid for pid, log in self._seen.items() if _still_writes_to(pid, log)]

    def abandon(self) -> None:
        """Ends it however it stands."""
        self.tasks()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        for pid, log in self._seen.items():
            if _still_writes_to(pid, log):
                os.kill(pid, signal.SIGKILL)


def _still_writes_to(pid: int, log: str) -> bool:
    """Whether `pid` is still the process that was seen, and not another one that has its number now."""
    try:
        return os.readlink(f"/proc/{pid}/fd/2") == log
    except OSError:
        return False


@dataclass
class Report:
    """The outcome of a drill: a row of the table at the end of the tests.

    Attributes:
        number, fault: which drill.
        happened: what came of it, in a few words.
        step: the global step reached.
        seconds: how long it took.
        code: the exit code; None if it ran in the test's own process.
    """

    number: int
    fault: str
    happened: str = ""
    step: int | None = None
    seconds: float = 0.0
    code: int | None = None


@dataclass
class Drill:
    """The tools of a drill's test; see the fixture `drill`."""

    cwd: Path
    reports: list[Report] = field(default_factory=list)
    runs: list[DrillRun] = field(default_factory=list)

    def start(
        self, *arguments: str, given: Mapping[str, str] | None = None, folder: str = ".", url: str | None = None
    ) -> DrillRun:
        """Starts a run of the command line in the test's folder, or in a folder in there."""
        run = DrillRun(self.cwd / folder, *arguments, given=given, url=url)
        self.runs.append(run)
        return run

    def report(self, number: int, fault: str, happened: str, ended: Ended) -> None:
        """Adds a row to the table."""
        self.reports.append(Report(number, fault, happened, ended.step, ended.seconds, ended.code))


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The lines of a Markdown table of reports."""
    lines = ["| drill | fault | what happened | step | seconds | code |", "| --- | --- | --- | --- | --- | --- |"]
    for row in sorted(rows, key=lambda row: (row["number"], row["fault"])):
        step, code = ("" if row[key] is None else row[key] for key in ("step", "code"))
        lines.append(
            f"| {row['number']} | {row['fault']} | {row['happened']} | {step} | {row['seconds']:.0f} | {code} |"
        )
    return lines


def write_table(title: str, lines: Sequence[str], page: Path = PAGE) -> None:
    """Replaces the table of `title` in docs/drills.md, and the line with the machine above it."""
    head, begin, rest = page.read_text().partition(f"<!-- {title} -->\n")
    _, end, tail = rest.partition("<!-- end -->\n")
    if not (begin and end):
        raise ValueError(f"{page}: no <!-- {title} --> with an <!-- end --> after it")
    page.write_text("".join([head, begin, "\n", _machine(), "\n\n", *(f"{line}\n" for line in lines), "\n", end, tail]))


def _machine() -> str:
    model = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    versions = ", ".join(f"{name} {metadata.version(name.lower())}" for name in ("TensorFlow", "Keras"))
    where = f"{os.cpu_count()} cores ({model[1] if model else platform.machine()})"
    return f"{time.strftime('%Y-%m-%d')}, {where}, {versions}, Python {platform.python_version()}"


def record(request: pytest.FixtureRequest, reports: Sequence[Report]) -> None:
    """Hands reports to whoever prints the table, in another process if tests run in several."""
    for report in reports:
        request.node.user_properties.append(("drill", asdict(report)))
