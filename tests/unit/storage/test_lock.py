"""One chief for each run dir: who holds the lock, and whether it is still there."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from fakes import ME, ended_process, held_by, write_lock
from helpers import wait_until

from kdist.errors import ConfigError
from kdist.storage import lock as run_lock
from kdist.storage.folder import Folder
from kdist.storage.lock import RunLock, check_not_taken_over
from kdist.storage.object_storage import ObjectStorage


@pytest.fixture(params=["{}", "file://{}"])
def folder(request: pytest.FixtureRequest, run_dir: Path, tmp_path: Path) -> Folder:
    """The run dir, on a disk or at a URL."""
    place = request.param.format(run_dir)
    return Folder(run_dir) if place == str(run_dir) else ObjectStorage(place, 1.0, tmp_path / "copies")


def test_a_lock_is_there_while_it_is_held_and_can_be_taken_again(run_dir: Path, folder: Folder) -> None:
    for _ in range(2):
        with RunLock(folder):
            assert json.loads((run_dir / ".lock").read_text())["pid"] == os.getpid()
        assert list(run_dir.iterdir()) == []


def test_it_is_released_when_what_it_guards_fails(run_dir: Path, folder: Folder) -> None:
    with pytest.raises(KeyboardInterrupt), RunLock(folder):
        raise KeyboardInterrupt
    RunLock(folder).check()


def test_a_second_chief_is_refused_with_who_is_there(run_dir: Path) -> None:
    imports = "import sys, pathlib; from kdist.storage.lock import Folder, RunLock"
    code = f"{imports}; RunLock(Folder(pathlib.Path(sys.argv[1]))).check()"
    with RunLock(Folder(run_dir)):
        for taking in (RunLock(Folder(run_dir)).check, RunLock(Folder(run_dir)).__enter__):
            with pytest.raises(ConfigError, match=rf"run\.dir={run_dir}: is in use by this process itself"):
                taking()
        other = subprocess.run(
            [sys.executable, "-c", code, str(run_dir)], capture_output=True, text=True, timeout=30, check=False
        )
        assert f"is in use by process {os.getpid()} on {socket.gethostname()} since 2" in other.stderr
        assert (run_dir / ".lock").exists()


@pytest.mark.parametrize("what", ["gone", "another process by now", "killed before it wrote", "no lock file of kdist"])
def test_a_stale_lock_is_taken_over(run_dir: Path, folder: Folder, what: str) -> None:
    contents = {
        "gone": held_by(pid=ended_process()),
        "another process by now": held_by(started=(ME.started or 0) - 1),
        "killed before it wrote": "",
        "no lock file of kdist": '{"pid": 1}',
    }
    write_lock(run_dir, contents[what])
    RunLock(folder).check()
    with RunLock(folder):
        assert json.loads((run_dir / ".lock").read_text()) == {**vars(ME), "since": ME.since} | {
            "since": json.loads((run_dir / ".lock").read_text())["since"]
        }
    assert not (run_dir / ".lock").exists()


def test_a_zombie_holds_nothing(run_dir: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    started = int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19])
    write_lock(run_dir, held_by(pid=process.pid, started=started))
    with pytest.raises(ConfigError, match=f"in use by process {process.pid}"):
        RunLock(Folder(run_dir)).check()
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    RunLock(Folder(run_dir)).check()
    process.communicate()


ELSEWHERE = ({"host": "elsewhere"}, {"boot": "another"}, {"namespace": "pid:[1]"})


class Clock:
    """Time of this process that passes when somebody sleeps; nobody may ask it for the time of day.

    Attributes:
        beats_at: when the chief of another machine touches its lock.
        elsewhere: the time of day there.
    """

    def __init__(self, lock: Path) -> None:
        self._lock = lock
        self.now = 1000.0
        self.beats_at = float("inf")
        self.elsewhere = 2_000_000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.now >= self.beats_at:
            os.utime(self._lock, (self.elsewhere, self.elsewhere))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, run_dir: Path) -> Clock:
    clock = Clock(run_dir / ".lock")
    monkeypatch.setattr(run_lock, "time", clock)
    monkeypatch.setattr(run_lock, "_heard", {})
    return clock


@pytest.mark.parametrize("difference", ELSEWHERE, ids=lambda difference: next(iter(difference)))
def test_a_chief_elsewhere_with_a_heartbeat_is_refused(run_dir: Path, clock: Clock, difference: dict[str, str]) -> None:
    # Its process id is that of this process, as of any container: it is not taken for this process.
    write_lock(run_dir, held_by(**difference))
    clock.beats_at = clock.now + 5
    with (
        pytest.warns(UserWarning, match=r"was in use by process .* waiting for its heartbeat, at most 60 s"),
        pytest.raises(ConfigError, match=rf"is in use by process {os.getpid()} on "),
    ):
        RunLock(Folder(run_dir)).__enter__()
    assert clock.now < 1000 + 10
    assert {**json.loads((run_dir / ".lock").read_text()), **difference} == json.loads((run_dir / ".lock").read_text())


@pytest.mark.parametrize("ahead", [-1e6, 0.0, 1e6])
def test_a_chief_elsewhere_without_a_heartbeat_is_waited_for_a_minute(
    run_dir: Path, folder: Folder, clock: Clock, ahead: float
) -> None:
    write_lock(run_dir, held_by(host="elsewhere"))
    at = time.time() + ahead
    os.utime(run_dir / ".lock", (at, at))
    with pytest.warns(UserWarning, match="process .* on elsewhere"):
        RunLock(folder).check()
    assert 60 <= clock.now - 1000 <= 70
    # Another lock of the same process knows it, and does not wait again.
    before = clock.now
    with RunLock(folder):
        assert json.loads((run_dir / ".lock").read_text())["host"] == ME.host
    assert clock.now == before


@pytest.mark.parametrize("jump", [-300, -60, -0.5, 0.5, 60, 300])
@pytest.mark.parametrize("at", range(1, 60, 7))
def test_a_clock_that_is_set_while_somebody_waits_is_a_heartbeat_at_most(
    run_dir: Path, clock: Clock, at: int, jump: float
) -> None:
    write_lock(run_dir, held_by(host="elsewhere"))
    os.utime(run_dir / ".lock", (clock.elsewhere, clock.elsewhere))
    clock.beats_at, clock.elsewhere = clock.now + at, clock.elsewhere + jump
    with pytest.warns(UserWarning, match="waiting"), pytest.raises(ConfigError, match="is in use by process"):
        RunLock(Folder(run_dir)).check()
    assert clock.now - 1000 <= at + 1
    # A process that watches it, as an evaluator, takes it for living until it is silent.
    watched, clock.beats_at = RunLock(Folder(run_dir)), float("inf")
    for _ in range(59):
        assert watched.living() is not None
        clock.sleep(1)
    clock.sleep(1)
    assert watched.living() is None


@pytest.mark.parametrize(
    ("job", "restarts", "is_taken_over"), [("17", 0, True), ("17", 1, True), ("17", 2, False), ("18", 0, False)]
)
def test_a_job_that_was_requeued_replaces_its_predecessor_at_once(
    run_dir: Path, folder: Folder, monkeypatch: pytest.MonkeyPatch, job: str, restarts: int, is_taken_over: bool
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    write_lock(run_dir, held_by(host="elsewhere", job=job, job_restarts=restarts))
    assert (RunLock(folder).living() is None) is is_taken_over


def test_a_process_of_the_same_job_on_this_machine_keeps_its_lock(
    run_dir: Path, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    with RunLock(folder), pytest.raises(ConfigError, match="in use by this process itself"):
        RunLock(folder).check()


def test_a_lock_that_is_held_has_a_heartbeat(run_dir: Path, folder: Folder) -> None:
    with RunLock(folder, heartbeat_secs=0.01):
        os.utime(run_dir / ".lock", (1, 1))
        wait_until(lambda: (run_dir / ".lock").stat().st_mtime > 1, 10, "a heartbeat")


def test_the_lock_of_another_chief_gets_no_heartbeat(run_dir: Path) -> None:
    with RunLock(Folder(run_dir), heartbeat_secs=0.01):
        (run_dir / ".lock").write_text(held_by(host="elsewhere"))
        taken_over = (run_dir / ".lock").read_text()
        # The last one may be on its way while the other chief takes the lock.
        wait_until(lambda: "kdist-run-lock" not in {t.name for t in threading.enumerate()}, 10, "no more heartbeats")
        assert (run_dir / ".lock").read_text() == taken_over


def test_a_run_whose_lock_was_taken_over_is_told_so(run_dir: Path, folder: Folder) -> None:
    check_not_taken_over(folder)
    with RunLock(folder):
        check_not_taken_over(folder)
        # The host has got another name.
        (run_dir / ".lock").write_text(held_by(host="elsewhere"))
        check_not_taken_over(folder)
        (run_dir / ".lock").write_text(held_by(host="elsewhere", boot="another"))
        with pytest.raises(ConfigError, match=r"was taken over by process \d+ on elsewhere"):
            check_not_taken_over(folder)


def test_somebody_elses_lock_is_not_removed(run_dir: Path, folder: Folder) -> None:
    with RunLock(folder):
        (run_dir / ".lock").write_text(held_by(host="elsewhere"))
    assert (run_dir / ".lock").exists()


def test_the_lock_to_delete_is_named_by_its_place(run_dir: Path, clock: Clock) -> None:
    write_lock(run_dir, held_by(host="elsewhere"))
    clock.beats_at = clock.now + 5
    # The folder on this machine of a run at a URL.
    lock = RunLock(Folder(run_dir, "s3://bucket/run"))
    message = rf"^run\.dir=s3://bucket/run: is in use by .*\n.*delete {run_dir}/\.lock to take over"
    with pytest.warns(UserWarning, match="waiting for its heartbeat"), pytest.raises(ConfigError, match=message):
        lock.__enter__()


def test_a_folder_of_a_run_at_a_url_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    message = rf"run\.dir=s3://bucket/run: {tmp_path}/file/run: cannot be written: Not a directory"
    with pytest.raises(ConfigError, match=message):
        RunLock(Folder(tmp_path / "file" / "run", "s3://bucket/run")).__enter__()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"run\.dir=.*: cannot be written: Not a directory"):
        RunLock(Folder(tmp_path / "file" / "run")).__enter__()
