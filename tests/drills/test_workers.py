"""Workers that are killed, stopped or slow, with asynchronous training."""

import signal

import pytest
from drilling import MINE, Drill

pytestmark = pytest.mark.cluster

CALLS = ("train.steps_per_call=16", "hooks.checkpoint.every_steps=1000")


@pytest.mark.long
def test_a_killed_worker_that_is_not_started_again_is_done_without(drill: Drill) -> None:
    run = drill.start(*MINE, *CALLS, "cluster=1ps3w", "train.steps=4000", "cluster.max_worker_restarts=0")
    run.wait_for(r"train \| step +100")
    run.signal_task("worker:1")
    ended = run.end()
    assert (ended.code, ended.result["status"]) == (0, "done")
    # Stop lands on the step but for what the lost call repeats.
    assert 4000 <= ended.step == ended.result["gradients"]["applied"] <= 4000 + 16
    assert ended.step - 4000 <= ended.result["extra_steps"] <= 16
    said = "worker:1 died (signal 9, SIGKILL); training continues without it and its share of the data"
    assert ended.console.count(said) == 1
    assert "Traceback" not in ended.console
    drill.report(1, "kill -9 of an async worker, not restarted", "the others continued", ended)


@pytest.mark.long
def test_a_killed_worker_is_started_again_on_its_port(drill: Drill) -> None:
    run = drill.start(*MINE, *CALLS, "cluster=1ps2w", "train.steps=1000000")
    run.wait_for(r"train \| step +500")
    for number in (1, 2, 3):
        run.signal_task("worker:1")
        run.wait_for(rf"worker:1 died \(signal 9, SIGKILL\); restarting \({number} of 3\)")
        run.wait_for(rf"(?s)(worker:1 is back after .*){{{number}}}")
        if number == 1:
            at_return = len(run.console)
    # It has work to do again: without it nobody would take the calls that follow.
    run.wait_for_task("worker:1")
    run.signal_task("worker:0")
    run.wait_for(r"worker:0 is back after")
    run.process.terminate()
    ended = run.end()
    assert ended.code == 143
    assert ended.result["restarts"] == {"worker": 4, "cluster": 0}
    assert ended.result["extra_steps"] <= 4 * 16
    assert "train | step" in ended.console[at_return:]
    drill.report(2, "kill -9 of an async worker, restarted at once", "the other continued meanwhile", ended)
    drill.report(3, "an async worker killed three times", "restarted each time", ended)


@pytest.mark.long
def test_all_workers_killed_come_back(drill: Drill) -> None:
    run = drill.start(*MINE, *CALLS, "cluster=1ps2w", "train.steps=3000")
    run.wait_for(r"train \| step +500")
    for name in ("worker:0", "worker:1"):
        run.signal_task(name)
    ended = run.end(90)
    assert ended.code == 0
    assert 3000 <= ended.step <= 3000 + 2 * 16
    assert ended.result["restarts"] == {"worker": 2, "cluster": 0}
    drill.report(5, "all workers killed", "all restarted; training continued", ended)


@pytest.mark.long
def test_all_workers_killed_and_not_started_again_fail_the_run(drill: Drill) -> None:
    run = drill.start(
        *MINE, *CALLS, "cluster=1ps2w", "train.steps=1000000", "cluster.max_worker_restarts=0", "train.max_restarts=0"
    )
    run.wait_for(r"train \| step +500")
    for name in ("worker:0", "worker:1"):
        run.signal_task(name)
    ended = run.end(20)
    assert ended.code == 75
    assert "kdist: error: no worker is left: worker:0 died (signal 9, SIGKILL), worker:1" in ended.console
    assert "resumes from checkpoints/ckpt-" in ended.console
    drill.report(5, "all workers killed, restarts forbidden", "exited, naming them and the checkpoint to resume", ended)


@pytest.mark.long
def test_a_stopped_worker_is_found_and_replaced(drill: Drill) -> None:
    run = drill.start(*MINE, *CALLS, "cluster=1ps2w", "train.steps=1000000", "cluster.step_timeout=3")
    run.wait_for(r"train \| step +500")
    stopped = run.signal_task("worker:1", signal.SIGSTOP)
    # By time, before something is traced, or by the guard if it happened in the middle of that.
    run.wait_for(r"worker:1 (did not respond .*; killing it|was stopped for 23 s and killed)", 40)
    run.wait_for(r"worker:1 is back after")
    assert run.wait_for_task("worker:1") != stopped
    run.process.terminate()
    ended = run.end()
    assert ended.code == 143
    assert ended.result["restarts"] == {"worker": 1, "cluster": 0}
    drill.report(12, "SIGSTOP of an async worker", "named and replaced after cluster.step_timeout", ended)


@pytest.mark.long
def test_a_slow_worker_holds_up_nobody(drill: Drill) -> None:
    run = drill.start(
        *MINE, *CALLS, "cluster=1ps2w", "train.steps=6000", "+drill=slow_worker", "drill.task=worker:1",
        "drill.at_step=500", "drill.factor=5",
    )  # fmt: skip
    ended = run.end(120)
    assert (ended.code, ended.step) == (0, 6000)
    assert "drill | step    500 | worker:1 is 5 times slower" in ended.console
    assert ended.result["restarts"] == {"worker": 0, "cluster": 0}
    drill.report(14, "an async worker 5 times slower", "the other took more steps; none was replaced", ended)


@pytest.mark.long
def test_data_of_one_worker_that_ends_early_is_said(drill: Drill) -> None:
    run = drill.start(
        MINE[0],
        "run.trust=[user_code]",
        "data._target_=user_code.uneven_data",
        "cluster=1ps2w",
        "train.steps=600",
        "train.steps_per_call=4",
    )
    ended = run.end()
    assert (ended.code, ended.step) == (0, 600)
    assert ended.console.count("kdist: worker:1 has no data; training continues without it") == 1
    drill.report(17, "one async worker has no data", "the other continued", ended)
