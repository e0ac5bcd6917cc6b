"""The chief: killed, told to end, twice, in the middle of things; and what else may run on its machine."""

import os
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path

import pytest
from drilling import MINE, Drill, DrillRun
from helpers import catches, descendants, wait_until

pytestmark = pytest.mark.cluster

_SIGNALS = [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.long)]
LONG = (*MINE, "cluster=1ps2w", "train.steps=1000000", "train.steps_per_call=16")


def newest_step(run: DrillRun) -> int:
    return max(int(path.stem.removeprefix("ckpt-")) for path in (run.run_dir / "checkpoints").glob("ckpt-*.index"))


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.long
def test_a_chief_killed_ten_times_leaves_nothing_and_goes_on_each_time(drill: Drill) -> None:
    sizes, reached = [], 0
    for number in range(10):
        run = drill.start(*LONG, "hooks.checkpoint.every_steps=200")
        if number:
            assert int(run.wait_for(r"load  \| step +\d+").split()[-1]) >= reached
        run.wait_for(rf"save  \| step +{200 * (number + 1)}\b")
        sizes.append(resident_bytes(run.wait_for_task("ps:0")))
        run.process.kill()
        ended = run.end()
        assert ended.code == -signal.SIGKILL
        assert newest_step(run) > reached
        reached = newest_step(run)
    # Each run has servers of its own; nothing of the ones before is in them.
    assert max(sizes) < 1.1 * min(sizes)
    drill.report(9, "chief killed -9, 10 times in a row", f"nothing left, resumed each time, last at {reached}", ended)


@pytest.mark.long
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_run_in_good_order(drill: Drill, number: signal.Signals, code: int) -> None:
    run = drill.start(*LONG)
    run.wait_for(r"train \| step +300")
    run.process.send_signal(number)
    ended = run.end(30)
    assert (ended.code, ended.result["status"], ended.result["stopped_by"]) == (code, "preempted", number.name)
    assert newest_step(run) == ended.step
    assert "Traceback" not in ended.console
    fault = "SIGTERM" if number is signal.SIGTERM else "Ctrl-C"
    drill.report(10 if number is signal.SIGTERM else 11, fault, "saved and exited", ended)


def signal_all(run: DrillRun, number: signal.Signals) -> None:
    """Sends a signal twice to every process of a run, as a scheduler does."""
    pids = [run.process.pid, *descendants(run.process.pid)]
    for _ in range(2):
        for pid in pids:
            # Some exit at the first one.
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("number", "arguments"),
    [
        (signal.SIGTERM, ["cluster=2ps2w"]),
        pytest.param(signal.SIGUSR1, ["cluster=2ps2w", "strategy=sync_replicas"], marks=pytest.mark.long),
        pytest.param(signal.SIGUSR2, ["cluster=2w"], marks=pytest.mark.long),
        pytest.param(
            signal.SIGTERM, ["cluster=local", "strategy=mirrored", "strategy.devices=2"], marks=pytest.mark.long
        ),
    ],
)
def test_a_signal_to_every_process_of_a_run_saves_the_step_that_was_reached(
    drill: Drill, number: signal.Signals, arguments: list[str]
) -> None:
    run = drill.start(*MINE, "train.steps=1000000", *arguments)
    run.wait_for(r"train \| step +300")
    signal_all(run, number)
    ended = run.end(30)
    assert (ended.code, ended.result["status"], ended.result["stopped_by"]) == (143, "preempted", number.name)
    assert newest_step(run) == ended.step
    assert ended.step is not None
    assert ended.step >= 300
    assert "is lost" not in ended.console
    assert " died " not in ended.console
    drill.report(10, f"{number.name} to all processes, {' '.join(arguments)}", "saved and exited", ended)


@pytest.mark.long
def test_a_signal_to_every_process_ten_times_in_a_row(drill: Drill) -> None:
    step = 0
    for _ in range(10):
        run = drill.start(*MINE, "train.steps=1000000", "cluster=2ps2w")
        run.wait_for(rf"train \| step +{100 * (step // 100 + 2)}")
        signal_all(run, signal.SIGTERM)
        ended = run.end(30)
        assert ended.code == 143, ended.console
        assert ended.step is not None
        assert newest_step(run) == ended.step > step
        step = ended.step
    drill.report(10, "SIGTERM to all processes, 10 times in a row", "saved and resumed each time", ended)


@pytest.mark.long
@pytest.mark.parametrize("secs", [0.5, 2.0, 4.0])
def test_a_signal_to_every_process_before_training(drill: Drill, secs: float) -> None:
    run = drill.start(*MINE, "train.steps=1000000", "cluster=2ps2w")
    wait_until(lambda: catches(run.process.pid, signal.SIGTERM), 60, "it handles signals")
    time.sleep(secs)
    signal_all(run, signal.SIGTERM)
    ended = run.end(30)
    assert ended.code == 143, ended.console
    assert "kdist: error" not in ended.console
    drill.report(10, f"SIGTERM to all processes {secs:g} s after the start", "exited in order", ended)


@pytest.mark.long
@pytest.mark.parametrize(("number", "code"), _SIGNALS)
def test_a_signal_while_a_worker_does_not_answer_ends_the_run_in_time(
    drill: Drill, number: signal.Signals, code: int
) -> None:
    run = drill.start(*LONG, "run.grace_secs=8")
    run.wait_for(r"train \| step +1500")
    run.signal_task("worker:1", signal.SIGSTOP)
    run.wait_for(r"(?s)(train \| step .*){6}")
    run.process.send_signal(number)
    ended = run.end(8 + 5)
    assert ended.code == code
    assert newest_step(run) == ended.step
    assert "calls in flight did not end in time (run.grace_secs); discarding them" in ended.console
    drill.report(
        10, f"{number.name} while a worker is stopped", "its call was cancelled; saved and exited in time", ended
    )


@pytest.mark.long
@pytest.mark.parametrize(("number", "code"), _SIGNALS)
def test_a_second_signal_ends_the_run_at_once(drill: Drill, number: signal.Signals, code: int) -> None:
    run = drill.start(*LONG)
    run.wait_for(r"train \| step +1500")
    # What is in flight will not end by itself.
    run.signal_task("worker:1", signal.SIGSTOP)
    run.process.send_signal(number)
    with pytest.raises(AssertionError, match="not within"):
        run.wait_for("no such line", 1.5)
    run.process.send_signal(number)
    assert run.process.wait(3) == code
    ended = run.end()
    drill.report(10 if number is signal.SIGTERM else 11, f"{number.name} twice", "exited at once", ended)


@pytest.mark.long
def test_two_runs_at_once_on_one_machine_do_not_meet(drill: Drill) -> None:
    runs = []
    for folder in ("one", "other"):
        (drill.cwd / folder).mkdir()
        runs.append(drill.start(*MINE, "cluster=1ps1w", "train.steps=2000", folder=folder))
    for run in runs:
        ended = run.end(90)
        assert (ended.code, ended.step) == (0, 2000)
    drill.report(24, "two runs at once on one machine", "neither affected the other", ended)


@pytest.mark.long
def test_an_address_that_is_taken_is_said(drill: Drill) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        run = drill.start(
            *MINE, "cluster=hosts", f"cluster.ps=[{address}]", "cluster.worker=[127.0.0.1:1]", "cluster.job=ps"
        )
        ended = run.end()
    assert ended.code == 75
    assert f"kdist: error: ps:0 cannot serve at {address}: the address is in use" in ended.console
    drill.report(24, "a port that is taken", "named", ended)


@pytest.mark.long
def test_what_strays_in_the_environment_does_not_matter(drill: Drill) -> None:
    stray = {
        "GRPC_FAIL_FAST": "false",
        "TF_CONFIG": '{"cluster": {"worker": ["10.0.0.1:1", "10.0.0.2:1"]}, "task": {"type": "worker", "index": 1}}',
    }
    keys = ("cluster=1ps2w", "cluster.started_by=kdist", "train.steps=3000", "train.steps_per_call=16")
    run = drill.start(*MINE, *keys, given=stray)
    run.wait_for(r"train \| step +300")
    # With GRPC_FAIL_FAST=false the loss of a worker would be waited for, and not noticed.
    run.signal_task("worker:1")
    ended = run.end(60)
    assert ended.code == 0
    assert 3000 <= ended.step <= 3000 + 16
    assert "worker:1 died (signal 9, SIGKILL)" in ended.console
    drill.report(25, "GRPC_FAIL_FAST=false and a stray TF_CONFIG", "no difference", ended)
