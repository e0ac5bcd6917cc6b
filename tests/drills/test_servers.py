"""Parameter servers that are killed, stopped or replaced: what they held is gone, and training goes back."""

import re
import signal

import pytest
from drilling import MINE, Drill

pytestmark = pytest.mark.cluster

CALLS = ("train.steps_per_call=16", "hooks.checkpoint.every_steps=500")


@pytest.mark.long
def test_a_killed_server_starts_the_cluster_again_from_the_newest_checkpoint(drill: Drill) -> None:
    run = drill.start(*MINE, *CALLS, "cluster=2ps2w", "train.steps=4000")
    saved = int(run.wait_for(r"save  \| step +1000").split()[-1])
    run.signal_task("ps:1")
    ended = run.end(90)
    assert (ended.code, ended.step) == (0, 4000)
    assert ended.result["restarts"] == {"worker": 0, "cluster": 1}
    again = "kdist: ps:1 died (signal 9, SIGKILL); restarting the cluster from checkpoints/ckpt-"
    assert ended.console.count(again) == 1
    assert int(ended.console.split(again)[1].split()[0]) >= saved
    assert "(1 of 3)" in ended.console
    drill.report(6, "a ps killed", "resumed from the newest checkpoint", ended)


@pytest.mark.long
def test_a_server_that_is_killed_too_often_ends_the_run(drill: Drill) -> None:
    run = drill.start(*MINE, *CALLS, "cluster=1ps1w", "train.steps=1000000", "train.max_restarts=1")
    for number in (1, 2):
        run.wait_for(rf"(?s)(save  \| step .*){{{2 * number}}}")
        run.signal_task("ps:0", signal.SIGKILL)
        if number == 1:
            run.wait_for(r"\(1 of 1\)")
            run.wait_for_task("ps:0")
            run.wait_for(r"load  \| step")
    ended = run.end(30)
    assert ended.code == 75
    assert "kdist: error: ps:0 died (signal 9, SIGKILL)" in ended.console
    assert (ended.result["status"], ended.result["restarts"]["cluster"]) == ("failed", 1)
    drill.report(6, "a ps killed more often than train.max_restarts", "exited, naming the checkpoint to resume", ended)


@pytest.mark.long
def test_a_server_that_is_killed_while_a_worker_comes_back(drill: Drill) -> None:
    run = drill.start(*MINE, *CALLS, "cluster=1ps2w", "train.steps=20000")
    run.wait_for(r"save  \| step +500")
    run.signal_task("worker:0")
    run.wait_for(r"worker:0 died .* restarting")
    run.signal_task("ps:0")
    ended = run.end(90)
    assert (ended.code, ended.step) == (0, 20000)
    assert ended.result["restarts"]["cluster"] == 1
    drill.report(7, "a ps killed while a worker comes back", "resumed from the newest checkpoint", ended)


@pytest.mark.long
def test_a_stopped_server_is_found_and_the_cluster_started_again(drill: Drill) -> None:
    run = drill.start(*MINE, *CALLS, "cluster=2ps2w", "train.steps=4000", "cluster.step_timeout=3")
    run.wait_for(r"save  \| step +1000")
    run.signal_task("ps:1", signal.SIGSTOP)
    ended = run.end(90)
    assert (ended.code, ended.step) == (0, 4000)
    assert re.search(r"ps:1 (did not respond .*; killing it|was stopped)", ended.console)
    assert ended.result["restarts"] == {"worker": 0, "cluster": 1}
    drill.report(13, "SIGSTOP of a ps", "named and replaced after cluster.step_timeout; resumed", ended)
