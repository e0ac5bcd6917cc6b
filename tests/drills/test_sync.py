"""Synchronous updates when workers are lost, slow, or have no more data."""

import pytest
from drilling import MINE, Drill

pytestmark = pytest.mark.cluster

SYNC = (*MINE, "strategy=sync_replicas", "hooks.checkpoint.every_steps=200")


@pytest.mark.long
def test_a_slow_worker_with_a_backup_is_not_waited_for(drill: Drill) -> None:
    run = drill.start(
        *SYNC, "cluster=1ps3w", "strategy.backup_workers=1", "train.steps=600", "+drill=slow_worker",
        "drill.task=worker:2", "drill.at_step=100", "drill.factor=5",
    )  # fmt: skip
    ended = run.end(120)
    assert (ended.code, ended.step) == (0, 600)
    by_worker = ended.result["gradients"]["by_worker"]
    assert by_worker["worker:2"]["accepted"] < min(by_worker[f"worker:{other}"]["accepted"] for other in (0, 1))
    assert ended.result["gradients"]["dropped"] > 0
    drill.report(14, "a sync worker 5 times slower, with a backup", "its late gradients were dropped", ended)


@pytest.mark.long
def test_with_fewer_workers_than_gradients_updates_are_of_fewer(drill: Drill) -> None:
    run = drill.start(
        *SYNC, "cluster=1ps3w", "train.steps=1500", "cluster.max_worker_restarts=0", "strategy.worker_timeout=3"
    )
    run.wait_for(r"train \| step +100")
    run.signal_task("worker:1")
    ended = run.end(90)
    assert (ended.code, ended.step) == (0, 1500)
    late = "worker:1 did not come back within 3 s (strategy.worker_timeout); 2 gradients make an update until then"
    assert ended.console.count(late) == 1
    assert ended.result["gradients"]["by_worker"]["worker:1"]["accepted"] < 1500
    assert ended.result["extra_steps"] == 0
    drill.report(15, "sync, fewer workers than gradients, lower", "updates of fewer gradients", ended)


@pytest.mark.long
def test_with_fewer_workers_than_gradients_the_run_fails_if_told_so(drill: Drill) -> None:
    run = drill.start(
        *SYNC, "cluster=1ps2w", "train.steps=1000000", "cluster.max_worker_restarts=0", "strategy.worker_timeout=2",
        "strategy.on_lost_worker=fail", "train.max_restarts=0",
    )  # fmt: skip
    run.wait_for(r"train \| step +100")
    run.signal_task("worker:1")
    ended = run.end(30)
    assert ended.code == 75
    assert (
        "kdist: error: worker:1 did not come back within 2 s (strategy.worker_timeout); 2 gradients make an update "
        "(strategy.on_lost_worker=fail)"
    ) in ended.console
    drill.report(
        15, "sync, fewer workers than gradients, fail", "exited, naming it and the checkpoint to resume", ended
    )


@pytest.mark.long
@pytest.mark.parametrize("backup_workers", [0, 1])
def test_a_worker_that_dies_between_token_and_push_comes_back(drill: Drill, backup_workers: int) -> None:
    # Steps of workers are slow, so that the signal comes in the middle of one.
    run = drill.start(
        MINE[0], "run.trust=[user_code]", "data._target_=user_code.slow_batches", "strategy=sync_replicas",
        "cluster=1ps3w", "train.steps=150",
        f"strategy.backup_workers={backup_workers}", "train.steps_per_call=4", "hooks.logging.every_steps=10",
    )  # fmt: skip
    run.wait_for(r"train \| step +20")
    run.signal_task("worker:1")
    run.wait_for(r"worker:1 is back after", 60)
    ended = run.end(120)
    assert (ended.code, ended.step) == (0, 150)
    assert ended.result["extra_steps"] == 0
    assert ended.result["gradients"]["applied"] == 150
    assert ended.result["restarts"] == {"worker": 1, "cluster": 0}
    what = "with a backup" if backup_workers else "all needed"
    drill.report(16, f"sync, {what}: a worker dies in the middle of a step", "it returned; no step was lost", ended)


@pytest.mark.long
def test_data_of_one_worker_that_ends_early_lowers_the_quorum(drill: Drill) -> None:
    run = drill.start(
        MINE[0],
        "run.trust=[user_code]",
        "data._target_=user_code.uneven_data",
        "strategy=sync_replicas",
        "cluster=1ps2w",
        "train.steps=100",
    )
    ended = run.end()
    assert (ended.code, ended.step) == (0, 100)
    assert "worker:1 has no more data; 1 gradients make an update from now on" in ended.console
    assert ended.result["gradients"]["by_worker"] == {"worker:0": {"accepted": 100, "dropped": 0, "stale": 0}}
    drill.report(17, "one sync worker has no data", "updates of fewer gradients", ended)
