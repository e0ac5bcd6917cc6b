"""Tasks start, answer, and end with their chief."""

import ctypes
import errno
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers import catches, descendants, ignores, in_short, tasks_running, wait_until

from kdist.cluster.local import LocalCluster, share_of_machine
from kdist.cluster.processes import forkserver
from kdist.cluster.processes.child import Child
from kdist.cluster.processes.forkserver import share_fork_server
from kdist.cluster.spec import ClusterShape, ClusterSpec, Task
from kdist.config.schema import ClusterConfig
from kdist.errors import ClusterError

pytestmark = pytest.mark.cluster

CHIEF = """
import sys, time
from pathlib import Path
from kdist.cluster.local import LocalCluster
from kdist.cluster.spec import ClusterShape
cluster = LocalCluster(ClusterShape(1, 2), Path(sys.argv[1]))
cluster.launch()
try:
    cluster.wait()
    print("started", flush=True)
    mode = sys.argv[2]
    if mode == "raise":
        raise RuntimeError("chief failed")
    if mode == "wait":
        time.sleep(60)
finally:
    cluster.stop()
"""


@contextmanager
def running(shape: ClusterShape, log_dir: Path, config: ClusterConfig | None = None) -> Iterator[LocalCluster]:
    cluster = LocalCluster(shape, log_dir, config)
    try:
        cluster.launch()
        cluster.wait()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(autouse=True)
def nothing_is_prepared(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides what other tests have prepared, unless a test uses it."""
    if "tasks_prepared" not in request.fixturenames:
        monkeypatch.setattr(forkserver, "_shared", [])


def running_since(earlier: list[int]) -> list[int]:
    """The processes of clusters that have been started since."""
    return [pid for pid in tasks_running(under=os.getpid(), and_fork_servers=True) if pid not in earlier]


def test_tasks_serve_log_and_end(tmp_path: Path) -> None:
    with running(ClusterShape(1, 2), tmp_path) as cluster:
        cores = sorted(os.sched_getaffinity(0))
        for task, pid in cluster.pids.items():
            assert os.sched_getaffinity(pid) == set(share_of_machine(task, cluster.shape, cores)[2] or cores)
        assert {str(task) for task in cluster.pids} == {"ps:0", "worker:0", "worker:1"}
        for task in cluster.shape.tasks:
            host, port = cluster.spec.address(task).split(":")
            socket.create_connection((host, int(port)), timeout=2).close()
        assert cluster.lost_tasks() == {}
        os.kill(cluster.pids[Task("worker", 1)], signal.SIGKILL)
        wait_until(cluster.lost_tasks, 5, "the loss is seen")
        assert cluster.lost_tasks() == {Task("worker", 1): "died (signal 9, SIGKILL)"}
        pids = list(cluster.pids.values())
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert {path.name for path in tmp_path.iterdir()} == {"ps-0.log", "worker-0.log", "worker-1.log"}
    assert "serves at" in (tmp_path / "ps-0.log").read_text()


def test_tasks_end_by_themselves_although_a_process_that_was_forked_meanwhile_lives_on(tmp_path: Path) -> None:
    with running(ClusterShape(1, 1), tmp_path):
        child = os.fork()
        if not child:
            signal.pause()
        began = time.monotonic()
    # They are killed after 2 s.
    assert time.monotonic() - began < 2
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM


@pytest.mark.long
@pytest.mark.parametrize(("mode", "code"), [("return", 0), pytest.param("raise", 1, marks=pytest.mark.long)])
def test_tasks_end_when_the_chief_returns_or_raises(tmp_path: Path, mode: str, code: int) -> None:
    chief = subprocess.run(
        [sys.executable, "-c", CHIEF, str(tmp_path), mode], capture_output=True, text=True, timeout=60, check=False
    )
    assert chief.returncode == code
    assert "started" in chief.stdout


@pytest.mark.parametrize("number", in_short([signal.SIGKILL, signal.SIGTERM], {signal.SIGKILL}))
def test_tasks_end_within_five_seconds_when_the_chief_is_killed(tmp_path: Path, number: signal.Signals) -> None:
    chief = subprocess.Popen(
        [sys.executable, "-c", CHIEF, str(tmp_path), "wait"],
        stdout=subprocess.PIPE,
        text=True,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert chief.stdout is not None
        assert chief.stdout.readline() == "started\n"
        pids = tasks_running(under=chief.pid)
        assert len(pids) == 3
        chief.send_signal(number)
        wait_until(lambda: not [pid for pid in pids if Path(f"/proc/{pid}").exists()], 5, "every task has ended")
    finally:
        chief.kill()
        chief.wait()
        chief.stdout.close()


def test_tasks_end_when_the_chief_is_killed_while_they_start(tmp_path: Path) -> None:
    chief = subprocess.Popen(
        [sys.executable, "-c", CHIEF, str(tmp_path), "wait"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        wait_until(lambda: len(tasks_running(under=chief.pid)) == 3, 30, "every task is started")
        pids = tasks_running(under=chief.pid)
        chief.kill()
        wait_until(lambda: not [pid for pid in pids if Path(f"/proc/{pid}").exists()], 5, "every task has ended")
    finally:
        chief.kill()
        chief.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends children with their parent")
def test_nothing_is_left_when_all_processes_were_stopped_and_the_chief_is_killed(tmp_path: Path) -> None:
    chief = subprocess.Popen(
        [sys.executable, "-c", CHIEF, str(tmp_path), "wait"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert chief.stdout is not None
        assert chief.stdout.readline() == "started\n"
        pids = descendants(chief.pid)
        # Three tasks, what forks them, and what watches over them.
        assert len(pids) == 5
        wait_until(
            lambda: all(ignores(pid, signal.SIGTERM) or catches(pid, signal.SIGTERM) for pid in pids),
            10,
            "each is ready to end with its parent",
        )
        for pid in [chief.pid, *pids]:
            os.kill(pid, signal.SIGSTOP)
        chief.kill()
        wait_until(lambda: not [pid for pid in pids if Path(f"/proc/{pid}").exists()], 5, "every process has ended")
    finally:
        chief.kill()
        chief.wait()
        chief.stdout.close()


def test_a_task_that_does_not_answer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = LocalCluster(ClusterShape(1, 1), tmp_path, ClusterConfig(start_timeout=0.01))
    cluster.launch()
    with pytest.raises(
        ClusterError, match=r"ps:0, worker:0 did not respond within 0\.01 s \(cluster\.start_timeout\)"
    ) as error:
        cluster.wait()
    assert error.value.exit_code == 75
    assert cluster.pids == {}


@pytest.mark.usefixtures("tasks_prepared")
def test_a_task_that_ends_at_its_start_is_named_with_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kdist.cluster.processes.server.TaskOptions.to_json", lambda self: "not json")
    cluster = LocalCluster(ClusterShape(1, 1), tmp_path)
    cluster.launch()
    with pytest.raises(ClusterError, match=r"(?s)(ps|worker):0 exited while starting \(exit code 1\).*JSONDecodeError"):
        cluster.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux keeps a port and lets a server have it")
@pytest.mark.usefixtures("tasks_prepared")
def test_nobody_else_gets_the_port_of_the_chief_or_of_a_task_that_is_restarted(tmp_path: Path) -> None:
    worker = Task("worker", 0)
    with running(ClusterShape(1, 1), tmp_path) as cluster:
        cluster.kill([worker])
        # Nothing serves at either of them now.
        for address in (cluster.chief_address, cluster.spec.worker[0]):
            with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
                other.bind(("", int(address.rpartition(":")[2])))
        cluster.restart(worker)
        wait_until(lambda: not cluster.starting_tasks(), 60, "it serves again")
        assert cluster.lost_tasks() == {}
    with socket.socket() as other:
        other.bind(("", int(cluster.chief_address.rpartition(":")[2])))


def test_a_stray_environment_does_not_reach_the_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPC_FAIL_FAST", "false")
    monkeypatch.setenv("TF_CONFIG", "{broken")
    with running(ClusterShape(1, 1), tmp_path) as cluster:
        for pid in cluster.pids.values():
            environment = Path(f"/proc/{pid}/environ").read_bytes()
            assert b"GRPC_FAIL_FAST" not in environment
            assert b"TF_CONFIG" not in environment


def test_clusters_that_follow_each_other_use_what_was_prepared(tmp_path: Path) -> None:
    earlier = tasks_running(under=os.getpid(), and_fork_servers=True)
    with share_fork_server(tmp_path / "log"):
        wait_until(lambda: running_since(earlier), 10, "it runs")
        waiting = running_since(earlier)
        assert len(waiting) == 1
        for shape in (ClusterShape(1, 1), ClusterShape(1, 2)):
            with running(shape, tmp_path) as cluster:
                present = running_since(earlier)
                assert set(present) == {*waiting, *cluster.pids.values()}
                assert cluster.lost_tasks() == {}
            assert running_since(earlier) == waiting
    assert running_since(earlier) == []


def test_a_cluster_needs_nothing_that_was_prepared_and_killed(tmp_path: Path) -> None:
    earlier = tasks_running(under=os.getpid(), and_fork_servers=True)
    with share_fork_server(tmp_path / "log"):
        wait_until(lambda: running_since(earlier), 10, "it runs")
        (waiting,) = running_since(earlier)
        os.kill(waiting, signal.SIGKILL)
        wait_until(lambda: not running_since(earlier), 5, "it is gone")
        with running(ClusterShape(1, 1), tmp_path) as cluster:
            assert cluster.lost_tasks() == {}
    assert running_since(earlier) == []


def test_nothing_is_left_of_tasks_that_cannot_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = LocalCluster._launch

    def fails_for_the_second(self: LocalCluster, task: Task, spec: ClusterSpec) -> Child:
        if task == Task("worker", 2):
            raise OSError(errno.ENOSPC, "No space left on device")
        return launch(self, task, spec)

    with running(ClusterShape(0, 1), tmp_path) as cluster:
        before = cluster.spec, cluster.pids
        with monkeypatch.context() as patched:
            patched.setattr(LocalCluster, "_launch", fails_for_the_second)
            with pytest.raises(OSError, match="No space left"):
                cluster.begin_to_add(0, 2)
        assert (cluster.spec, cluster.pids) == before
        joining = cluster.begin_to_add(0, 2)
        wait_until(lambda: cluster.are_ready(joining), 30, "they serve")
        cluster.admit(joining)
        assert [str(task) for task in cluster.spec.tasks] == ["worker:0", "worker:1", "worker:2"]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux binds tasks")
@pytest.mark.usefixtures("tasks_prepared")
def test_workers_share_the_cores_with_those_that_join(tmp_path: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))

    def check(cluster: LocalCluster) -> None:
        for task, pid in cluster.pids.items():
            wanted = set(share_of_machine(task, cluster.spec.shape, cores)[2] or cores)
            assert {frozenset(os.sched_getaffinity(int(thread))) for thread in os.listdir(f"/proc/{pid}/task")} == {
                frozenset(wanted)
            }

    with running(ClusterShape(1, 1), tmp_path) as cluster:
        check(cluster)
        joining = cluster.begin_to_add(0, len(cores))
        wait_until(lambda: cluster.are_ready(joining), 30, "they serve")
        cluster.admit(joining)
        check(cluster)
        cluster.dismiss(joining)
        check(cluster)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a test choose the thread")
@pytest.mark.usefixtures("tasks_prepared")
def test_a_worker_says_that_it_was_told_to_leave_whichever_of_its_threads_got_the_signal(tmp_path: Path) -> None:
    worker = Task("worker", 1)
    with running(ClusterShape(0, 2), tmp_path) as cluster:
        assert not cluster.tasks_to_leave()
        pid = cluster.pids[worker]
        other = max(int(thread) for thread in os.listdir(f"/proc/{pid}/task"))
        assert other != pid
        # SYS_tgkill, of asm/unistd_64.h or asm-generic/unistd.h.
        number = 234 if os.uname().machine == "x86_64" else 131
        assert ctypes.CDLL(None).syscall(number, pid, other, int(signal.SIGTERM)) == 0
        wait_until(lambda: cluster.tasks_to_leave() == {worker}, 10, (tmp_path / "worker-1.log").read_text)
        assert not cluster.lost_tasks()
    assert "worker:1 was told to leave (SIGTERM)" in (tmp_path / "worker-1.log").read_text()


def test_tasks_have_the_environment_of_the_moment_they_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Task("worker", 0)
    # gRPC says when it is told to be talkative.
    monkeypatch.setenv("GRPC_VERBOSITY", "debug")
    with running(ClusterShape(1, 1), tmp_path) as cluster:
        log = tmp_path / "worker-0.log"
        first = log.read_text()
        monkeypatch.delenv("GRPC_VERBOSITY")
        os.kill(cluster.pids[worker], signal.SIGKILL)
        wait_until(cluster.lost_tasks, 5, "the loss is seen")
        cluster.restart(worker)
        wait_until(lambda: not cluster.starting_tasks(), 30, "it serves")
        assert cluster.lost_tasks() == {}
        second = log.read_text().removeprefix(first)
    says_much = re.compile("DEBUG|polling engine|gRPC experiments")
    assert says_much.search(first)
    assert "serves at" in second
    assert not says_much.search(second)


@pytest.mark.usefixtures("tasks_prepared")
def test_a_task_that_is_stopped_while_nobody_looks_is_killed_also_after_it_was_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kdist.cluster.local._GUARD_EXTRA_SECS", 0.5)
    server, worker = Task("ps", 0), Task("worker", 0)
    with running(ClusterShape(1, 1), tmp_path, ClusterConfig(step_timeout=0.5)) as cluster:
        cluster.kill([worker])
        cluster.restart(worker)
        wait_until(lambda: not cluster.starting_tasks(), 60, "it serves again")
        for task in (server, worker):
            os.kill(cluster.pids[task], signal.SIGSTOP)
        wait_until(lambda: len(cluster.lost_tasks()) == 2, 10, "the tasks that are stopped are lost")
        assert cluster.lost_tasks() == dict.fromkeys((server, worker), "was stopped for 1 s and killed")


def watchdogs() -> list[int]:
    commands = {pid: Path(f"/proc/{pid}/cmdline") for pid in descendants(os.getpid())}
    return [pid for pid, command in commands.items() if command.exists() and b"watchdog.py" in command.read_bytes()]


@pytest.mark.usefixtures("tasks_prepared")
def test_a_watchdog_that_was_killed_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kdist.cluster.local._GUARD_EXTRA_SECS", 0.5)
    worker = Task("worker", 0)
    with running(ClusterShape(1, 1), tmp_path, ClusterConfig(step_timeout=0.5)) as cluster:
        # It may not have its own program yet.
        wait_until(watchdogs, 10, "it runs")
        (watchdog,) = watchdogs()
        os.kill(watchdog, signal.SIGKILL)
        with pytest.warns(UserWarning, match=r"watchdog of stopped tasks died \(signal 9, SIGKILL\)"):
            wait_until(lambda: cluster.lost_tasks() or not Path(f"/proc/{watchdog}").exists(), 10, "it is missed")
        os.kill(cluster.pids[worker], signal.SIGSTOP)
        wait_until(lambda: worker in cluster.lost_tasks(), 10, "the new one has killed the task")
