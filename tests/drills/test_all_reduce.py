"""All-reduce has no servers: when one worker is lost, all of them begin again at the newest checkpoint."""

import pytest
from drilling import MINE, Drill

pytestmark = pytest.mark.cluster


@pytest.mark.long
def test_a_killed_worker_starts_all_again_from_the_newest_checkpoint(drill: Drill) -> None:
    run = drill.start(*MINE, "cluster=2w", "train.steps=3000", "hooks.checkpoint.every_steps=500")
    run.wait_for(r"save  \| step +1000", 90)
    run.signal_task("worker:1")
    ended = run.end(120)
    assert (ended.code, ended.step) == (0, 3000)
    again = "kdist: worker:1 died (signal 9, SIGKILL); restarting the cluster from checkpoints/ckpt-"
    assert ended.console.count(again) == 1
    assert int(ended.console.split(again)[1].split()[0]) >= 1000
    assert ended.result["restarts"] == {"worker": 0, "cluster": 1}
    drill.report(26, "multi_worker_mirrored: a worker killed", "all resumed from the newest checkpoint", ended)
