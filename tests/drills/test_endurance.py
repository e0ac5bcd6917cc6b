"""Long runs: nothing grows, and faults that keep coming do not change where a run ends."""

import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path

import keras
import pytest
from drilling import Drill, Report
from helpers import REPO, toy_data, wait_until

import kdist

pytestmark = [pytest.mark.cluster, pytest.mark.long]

_SOAK_SECS = 600.0
_FAULT_EVERY_SECS = 20.0


def test_ten_minutes_of_faults_end_at_the_step_with_the_right_accuracy(drill: Drill) -> None:
    part = REPO / "recipes" / "mnist_part.npz"
    run = drill.start(
        "+recipe=mnist_mlp", f"data.path={part}", "cluster=2ps3w", "train.steps=1000000", "train.epochs=null",
        "cluster.step_timeout=10", "cluster.max_worker_restarts=1000", "train.max_restarts=1000",
        "hooks.checkpoint.every_secs=5", "train.steps_per_epoch=5000", "hooks.logging.every_steps=500",
    )  # fmt: skip
    chance = random.Random(28)
    run.wait_for(r"train \| step")
    ends, faults = time.monotonic() + _SOAK_SECS, 0
    while time.monotonic() < ends:
        time.sleep(_FAULT_EVERY_SECS)
        name = chance.choice(["worker:0", "worker:1", "worker:2", "worker:0", "worker:1", "worker:2", "ps:0", "ps:1"])
        if name in run.tasks() and run.process.poll() is None:
            run.signal_task(name, chance.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP]))
            faults += 1
    # A server that is stopped when the run is told to end cannot be saved: the last fault is survived first.
    lines = run.console.count("train | step")
    wait_until(lambda: run.console.count("train | step") > lines + 1, 90, "training goes on")
    run.process.terminate()
    first = run.end(60)
    assert first.code == 143, first.console
    # To a step of its own, in the same run dir, and undisturbed.
    last_step = first.step + 500
    run = drill.start(
        "+recipe=mnist_mlp", f"data.path={part}", "cluster=2ps3w", f"train.steps={last_step}", "train.epochs=null"
    )
    ended = run.end(120)
    assert (ended.code, ended.step) == (0, last_step)
    assert ended.result["metrics"]["validation"]["accuracy"] > 0.9
    restarts = first.result["restarts"]
    happened = (
        f"{faults} faults; worker restarts {restarts['worker']}, cluster restarts {restarts['cluster']}; "
        f"accuracy {ended.result['metrics']['validation']['accuracy']:.3f}"
    )
    both = replace(ended, seconds=first.seconds + ended.seconds)
    drill.report(28, "10 minutes of 2ps3w with a random fault every 20 s", happened, both)


@pytest.mark.alone
def test_short_calls_leave_nothing_in_the_chief(drill: Drill, run_dir: Path) -> None:
    """Memory after 20 000 calls is what it was after the first 2 000."""

    def build() -> keras.Model:
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    x, y = toy_data(num_features=4)
    trainer = kdist.Trainer(build, "1ps2w", run_dir=run_dir, steps_per_call=1)
    with trainer.session(x, y, batch_size=1, steps=20_000, verbose=0) as session:
        while session.global_step < 2000:
            session.run()
        before = _resident_bytes()
        while not session.should_stop():
            session.run()
        # A hundred bytes a call would be 1.8 MB.
        grown = _resident_bytes() - before
        assert grown < 1_500_000
    drill.reports.append(
        Report(
            27,
            "20 000 short calls",
            f"memory of the chief grew by {grown / 1e6:.1f} MB",
            20_000,
            trainer.result.seconds,
        )
    )


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
