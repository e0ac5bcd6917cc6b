"""One chief for each run dir: who holds the lock, and whether it is still there."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kdist.errors import ConfigError
from kdist.run_lock import Holder, RunLock

ME = Holder.this_process()


def write(run_dir: Path, content: str) -> None:
    run_dir.mkdir()
    (run_dir / ".lock").write_text(content)


def held_by(**other: object) -> str:
    return json.dumps({**vars(ME), **other})


def ended_process() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


def test_a_lock_is_there_while_it_is_held_and_can_be_taken_again(run_dir: Path) -> None:
    for _ in range(2):
        with RunLock(run_dir):
            assert json.loads((run_dir / ".lock").read_text())["pid"] == os.getpid()
        assert list(run_dir.iterdir()) == []


def test_it_is_released_when_what_it_guards_fails(run_dir: Path) -> None:
    with pytest.raises(KeyboardInterrupt), RunLock(run_dir):
        raise KeyboardInterrupt
    RunLock(run_dir).check()


def test_a_second_chief_is_refused_with_who_is_there(run_dir: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from kdist.run_lock import RunLock; RunLock(Path(sys.argv[1])).check()"
    )
    with RunLock(run_dir):
        for taking in (RunLock(run_dir).check, RunLock(run_dir).__enter__):
            with pytest.raises(ConfigError, match=rf"run\.dir={run_dir}: is in use by this process itself"):
                taking()
        other = subprocess.run(
            [sys.executable, "-c", code, str(run_dir)], capture_output=True, text=True, timeout=30, check=False
        )
        assert f"is in use by process {os.getpid()} on {socket.gethostname()} since 2" in other.stderr
        assert (run_dir / ".lock").exists()


@pytest.mark.parametrize("what", ["gone", "another process by now", "killed before it wrote", "no lock file of kdist"])
def test_a_stale_lock_is_taken_over(run_dir: Path, what: str) -> None:
    contents = {
        "gone": held_by(pid=ended_process()),
        "another process by now": held_by(started=(ME.started or 0) - 1),
        "killed before it wrote": "",
        "no lock file of kdist": '{"pid": 1}',
    }
    write(run_dir, contents[what])
    RunLock(run_dir).check()
    with RunLock(run_dir):
        assert json.loads((run_dir / ".lock").read_text()) == {**vars(ME), "since": ME.since} | {
            "since": json.loads((run_dir / ".lock").read_text())["since"]
        }
    assert not (run_dir / ".lock").exists()


def test_a_zombie_holds_nothing(run_dir: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    started = int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19])
    write(run_dir, held_by(pid=process.pid, started=started))
    with pytest.raises(ConfigError, match=f"in use by process {process.pid}"):
        RunLock(run_dir).check()
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    RunLock(run_dir).check()
    process.communicate()


def test_another_machine_cannot_be_asked_and_its_lock_is_kept(run_dir: Path) -> None:
    write(run_dir, held_by(host="elsewhere", pid=1))
    with pytest.raises(ConfigError, match=rf"(?s)process 1 on elsewhere.*if that is gone, remove {run_dir}/\.lock"):
        RunLock(run_dir).__enter__()
    assert json.loads((run_dir / ".lock").read_text())["host"] == "elsewhere"


def test_somebody_elses_lock_is_not_removed(run_dir: Path) -> None:
    with RunLock(run_dir):
        (run_dir / ".lock").write_text(held_by(host="elsewhere"))
    assert (run_dir / ".lock").exists()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"run\.dir=.*: cannot be written: Not a directory"):
        RunLock(tmp_path / "file" / "run").__enter__()
