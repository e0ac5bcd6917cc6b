"""Clusters that are resized while tasks are lost, and again and again."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from drilling import MINE, Drill, DrillRun
from helpers import environment

pytestmark = pytest.mark.cluster

_SOAK_SECS, _EVERY_SECS = 600.0, 10.0
#: Of gRPC, idle: TensorFlow starts four for each change of a cluster and never ends them, whoever changes it.
_THREADS_OF_TENSORFLOW = 6


def resize(run: DrillRun, *words: str) -> int:
    command = [sys.executable, "-m", "kdist", "resize", str(run.run_dir), *words]
    return subprocess.run(command, capture_output=True, check=False, timeout=120, env=environment()).returncode


@pytest.mark.long
def test_a_worker_that_is_told_to_leave_costs_nothing(drill: Drill) -> None:
    run = drill.start(*MINE, "cluster=2ps3w", "train.steps=6000")
    run.wait_for(r"train \| step +500")
    run.signal_task("worker:0", signal.SIGTERM)
    run.wait_for(r"resize \| .* 2ps3w -> 2ps2w")
    ended = run.end()
    assert (ended.code, ended.step, ended.result["extra_steps"]) == (0, 6000, 0)
    assert ended.result["restarts"] == {"worker": 0, "cluster": 0}
    drill.report(54, "SIGTERM to an async worker alone", "it left; the others continued", ended)


@pytest.mark.long
def test_a_server_killed_while_another_one_joins_costs_the_steps_since_the_checkpoint(drill: Drill) -> None:
    run = drill.start(*MINE, "cluster=1ps2w", "train.steps=8000", "hooks.checkpoint.every_steps=500")
    run.wait_for(r"save  \| step +500")
    asked = subprocess.Popen([sys.executable, "-m", "kdist", "resize", str(run.run_dir), "ps=3"], env=environment())
    run.wait_for_task("ps:2")
    run.signal_task("ps:0")
    ended = run.end()
    assert asked.wait(60) in (0, 2, 75)
    assert (ended.code, ended.step) == (0, 8000)
    assert ended.result["restarts"]["cluster"] == 1
    drill.report(55, "a server killed while others join", "resumed from the newest checkpoint", ended)


@pytest.mark.long
def test_ten_minutes_of_resizes_leave_nothing_behind(drill: Drill) -> None:
    hooks = "hooks.logging.every_steps=1000", "hooks.checkpoint.every_secs=60"
    run = drill.start(*MINE, "cluster=2ps2w", "train.steps=1000000", *hooks)
    changes = [*(f"workers={n}" for n in range(1, 5)), *(f"ps={n}" for n in range(1, 4)), "move=ps:0"]
    chance, sizes, number = random.Random(41), list[tuple[int, int, int]](), 0
    run.wait_for(r"train \| step")
    ends = time.monotonic() + _SOAK_SECS
    while time.monotonic() < ends:
        number += resize(run, chance.choice(changes)) == 0
        sizes.append(_sizes_of(run.process.pid))
        time.sleep(_EVERY_SECS / 2)
    run.process.terminate()
    ended = run.end()
    assert ended.code == 143
    assert ended.result["restarts"] == {"worker": 0, "cluster": 0}
    assert ended.result["gradients"]["applied"] == ended.step
    assert number > _SOAK_SECS / _EVERY_SECS / 2
    third = len(sizes) // 3
    print("memory (MB), descriptors, threads:", sizes[::5])
    memory, descriptors, threads = zip(*sizes)
    assert max(memory[2 * third :]) < 1.15 * max(memory[:third])
    assert max(descriptors[2 * third :]) <= max(descriptors[:third]) + 20
    assert max(threads) <= threads[0] + _THREADS_OF_TENSORFLOW * number + 20
    drill.report(56, f"{number} resizes in 10 minutes", "the chief keeps its size, and no files", ended)


def _sizes_of(pid: int) -> tuple[int, int, int]:
    """Resident memory of a process in MB, its open files, its threads."""
    status = Path(f"/proc/{pid}/status").read_text()
    memory, threads = (int(re.findall(rf"{key}:\s+(\d+)", status)[0]) for key in ("VmRSS", "Threads"))
    return memory >> 10, len(os.listdir(f"/proc/{pid}/fd")), threads
