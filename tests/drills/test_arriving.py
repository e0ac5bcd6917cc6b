"""Files that keep arriving, and a chief that is killed, or told to end while it waits for them."""

import os
import signal
import time
from pathlib import Path

import counted
import keras
import numpy as np
import pytest
from drilling import Drill

pytestmark = [pytest.mark.cluster, pytest.mark.long]

ARRIVING = (
    "model._target_=counted.counting_model",
    "data._target_=counted.arriving_data",
    "+data.folder=incoming",
    "run.trust=[counted]",
    "train.steps=null",
    "cluster=2ps2w",
)


def write(folder: Path, numbers: range) -> None:
    for number in numbers:
        counted.write_file(folder / f"{number}.parquet", range(100 * number, 100 * number + 95))


@pytest.mark.parametrize("strategy", ["parameter_server", "sync_replicas"])
def test_a_chief_that_is_killed_again_and_again_trains_on_every_record_once(drill: Drill, strategy: str) -> None:
    folder = drill.cwd / "incoming"
    folder.mkdir()
    arguments = (*ARRIVING, f"strategy={strategy}", "train.batch_size=1", "hooks.checkpoint.every_steps=20")
    for number in range(4):
        run = drill.start(*arguments)
        run.wait_for(r"(save|load)  \| step")
        write(folder, range(2 * number, 2 * number + 2))
        run.wait_for(r"save  \| step +[1-9]")
        # Somewhere between two checkpoints.
        time.sleep(0.05 * number)
        run.process.kill()
        assert run.end().code == -signal.SIGKILL
    (folder / "_END").touch()
    ended = drill.start(*arguments).end()
    assert (ended.code, ended.result["stopped_by"]) == (0, str(folder / "_END"))
    expected = np.zeros(counted.NUM_RECORDS)
    for number in range(8):
        expected[100 * number : 100 * number + 95] = 1
    model = keras.models.load_model(drill.cwd / "D" / "model.keras")
    np.testing.assert_array_equal(counted.counts(model), expected)
    drill.report(9, f"chief killed -9 while files arrive, {strategy}, 4 times", "each record once", ended)


@pytest.mark.parametrize("cluster", ["cluster=2ps2w", "cluster=local"])
def test_a_chief_that_waits_for_files_ends_at_once_and_uses_no_cpu(drill: Drill, cluster: str) -> None:
    folder = drill.cwd / "incoming"
    folder.mkdir()
    write(folder, range(2))
    run = drill.start(*ARRIVING, cluster, "train.batch_size=10")
    run.wait_for(r"wait  \| step +20 ")
    pids = [run.process.pid, *run.tasks().values()]
    before = sum(cpu_secs(pid) for pid in pids)
    time.sleep(5)
    used = sum(cpu_secs(pid) for pid in pids) - before
    assert used < 1.0
    signalled = time.monotonic()
    run.process.send_signal(signal.SIGTERM)
    ended = run.end(30)
    assert time.monotonic() - signalled < 15
    assert (ended.code, ended.result["status"], ended.step) == (143, "preempted", 20)
    drill.report(10, f"SIGTERM while it waits for files, {cluster}", f"ended; {used / 5:.0%} of a core before", ended)


def cpu_secs(pid: int) -> float:
    """The seconds of CPU time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
