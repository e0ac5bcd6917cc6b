"""A run survives what surrounds it: no standard streams, a reader that ends, and the proxies of a company."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import environment
from helpers import result_of

pytestmark = pytest.mark.cluster
STEPS = 300
RUN = ["-m", "kdist", "+recipe=linear", f"train.steps={STEPS}", "run.dir=run"]


def run(*arguments: str, cwd: Path, **options: object) -> int:
    command = [sys.executable, *RUN, *arguments]
    done = subprocess.run(command, cwd=cwd, timeout=120, check=False, **options)  # type: ignore[call-overload]
    return int(done.returncode)


def check_is_done(folder: Path) -> None:
    result = result_of(folder / "run")
    assert (result["status"], result["global_step"]) == ("done", STEPS)
    assert "done  | step" in (folder / "run" / "logs" / "chief-0.log").read_text(encoding="utf-8")


def test_nobody_reads_its_console(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        assert run("cluster=1ps1w", cwd=tmp_path, env=environment(), stdout=writing, stderr=writing) == 0
    finally:
        os.close(writing)
    check_is_done(tmp_path)


@pytest.mark.long
def test_it_has_no_standard_streams(tmp_path: Path) -> None:
    script = f'exec "{sys.executable}" {" ".join(RUN)} cluster=1ps1w <&- >&- 2>&-'
    done = subprocess.run(["sh", "-c", script], cwd=tmp_path, env=environment(), timeout=120, check=False)
    assert done.returncode == 0
    check_is_done(tmp_path)


@pytest.mark.parametrize(
    ("variable", "cluster"),
    [
        ("https_proxy", "1ps1w"),
        pytest.param("grpc_proxy", "1ps1w", marks=pytest.mark.long),
        pytest.param("http_proxy", "2w", marks=pytest.mark.long),
    ],
)
def test_a_proxy_that_knows_nothing_of_this_machine(variable: str, cluster: str, tmp_path: Path) -> None:
    proxies = {**environment(), variable: "http://127.0.0.1:9"}
    assert run(f"cluster={cluster}", "cluster.start_timeout=40", cwd=tmp_path, env=proxies) == 0
    check_is_done(tmp_path)
