"""The origin of a run: the commit of its folder, whatever Git does."""

import subprocess
import time
from datetime import datetime, timezone
from pathlib import Path

import pytest

from kdist.run import result
from kdist.run.result import Origin, git_state


def git(*arguments: str) -> str:
    who = ["-c", "user.name=me", "-c", "user.email=me@example.com"]
    return subprocess.run(["git", *who, *arguments], check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    return tmp_path


def test_the_commit_and_whether_something_has_changed_since(folder: Path) -> None:
    git("init")
    # There is no commit yet.
    assert git_state() is None
    (folder / "train.py").write_text("1")
    git("add", ".")
    git("commit", "-m", "first")
    commit = git("rev-parse", "HEAD")
    (folder / "runs").mkdir()
    (folder / "runs" / "new").write_text("not of the repository")
    assert git_state() == {"commit": commit, "dirty": False}
    (folder / "train.py").write_text("2")
    assert Origin.here_and_now().git == {"commit": commit, "dirty": True}


def test_without_a_repository_or_git_nothing_is_known(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert git_state() is None
    monkeypatch.setenv("PATH", str(folder))
    assert git_state() is None


def test_git_has_seconds_and_runs_no_program_of_the_repository(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git("init")
    git("commit", "--allow-empty", "-m", "first")
    monitor = folder / "monitor"
    monitor.write_text(f"#!/bin/sh\ntouch {folder}/was-run\n")
    monitor.chmod(0o700)
    git("config", "core.fsmonitor", str(monitor))
    assert git_state() == {"commit": git("rev-parse", "HEAD"), "dirty": False}
    assert not (folder / "was-run").exists()
    slow = folder / "bin"
    slow.mkdir()
    (slow / "git").write_text("#!/bin/sh\nexec sleep 60\n")
    (slow / "git").chmod(0o700)
    monkeypatch.setenv("PATH", str(slow), prepend=":")
    monkeypatch.setattr(result, "_GIT_SECS", 0.2)
    began = time.monotonic()
    assert git_state() is None
    assert time.monotonic() - began < 10


def test_times_are_utc(folder: Path) -> None:
    begun = datetime.fromisoformat(Origin.here_and_now().started)
    assert begun.tzinfo == timezone.utc
    assert abs((datetime.now(timezone.utc) - begun).total_seconds()) < 60
