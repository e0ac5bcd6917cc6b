"""Fixtures of every test: quiet TensorFlow, and a check that no task and no environment variable is left behind."""

import fcntl
import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
# Keras imports matplotlib, which would write its list of fonts into the cache that a test has for itself.
os.environ.setdefault("MPLCONFIGDIR", str(Path.home() / ".cache" / "matplotlib"))

import drilling
import pytest
from helpers import tasks_running, wait_until

from kdist.cluster.processes.forkserver import share_fork_server

# A shell lets what it starts in the background ignore Ctrl-C, and the runs that tests interrupt would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def locks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all processes of this run of pytest share."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(autouse=True)
def alone_if_it_must_be(request: pytest.FixtureRequest, locks: Path) -> Iterator[None]:
    """Tests run beside each other; one that is marked `alone` waits for the others, and the next wait for it."""
    kind = fcntl.LOCK_EX if request.node.get_closest_marker("alone") else fcntl.LOCK_SH
    with (locks / "queue").open("w") as queue, (locks / "machine").open("w") as machine:
        # Who waits for the machine holds the queue, so that nobody overtakes.
        fcntl.flock(queue, fcntl.LOCK_EX)
        fcntl.flock(machine, kind)
        fcntl.flock(queue, fcntl.LOCK_UN)
        yield


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    before = dict(os.environ)
    running = tasks_running(under=os.getpid(), and_fork_servers=True)
    yield
    left = set(tasks_running(under=os.getpid(), and_fork_servers=True)) - set(running)
    assert not left, f"tasks still running: {left}"
    changed = {k for k in {*before, *os.environ} if before.get(k) != os.environ.get(k) and k != "PYTEST_CURRENT_TEST"}
    assert not changed, f"environment changed: {changed}"


@pytest.fixture(scope="session")
def tasks_prepared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The process from which the tasks of all clusters are forked: it imports TensorFlow once for all of them."""
    with share_fork_server(tmp_path_factory.mktemp("prepared") / "log", train=True):
        # A process that has just been started has no command line yet.
        wait_until(lambda: tasks_running(under=os.getpid(), and_fork_servers=True), 10, "it runs")
        yield


def pytest_collection_finish() -> None:
    """Spares Python to look again and again whether what was imported is garbage."""
    gc.collect()
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-programs", action="store_true", help="write the numbers of tests/programs for the docs")
    parser.addoption("--record-drills", metavar="TITLE", help="write the table of the drills, below TITLE in the docs")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config) -> None:
    """Prints the tables of the drills and of the programs that ran."""
    if hasattr(config, "workerinput"):
        # A worker of xdist knows of its own tests only, and would write their table although others failed.
        return
    # A drill reports when it has passed, and pytest tells of that when the test is torn down.
    ended = [report for report in terminalreporter.getreports("") if getattr(report, "when", "") == "teardown"]
    reported = [entry for report in ended for entry in report.user_properties]
    tables = {}
    if rows := [value for name, value in reported if name == "drill"]:
        tables["drills"] = drilling.table(rows)
        if exitstatus == 0 and (title := config.getoption("--record-drills")):
            drilling.write_table(title, tables["drills"])
    if found := [value for name, value in reported if name == "program"]:
        from programs import results

        numbers = results.collected(found)
        tables["programs"] = results.table(numbers)
        if config.getoption("--record-programs"):
            results.record(numbers)
    for title, lines in tables.items():
        terminalreporter.section(title)
        for line in lines:
            terminalreporter.write_line(line)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"
