"""The state of checkpoints after disks fill up, processes are killed, files are damaged and clusters change."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from drilling import MINE, Drill, DrillRun, Ended
from helpers import wait_until

from kdist.model.names import DATA_FINGERPRINT

pytestmark = pytest.mark.cluster

LARGE = ("model._target_=user_code.build_large", "data._target_=user_code.data", "run.trust=[user_code]")
DATA, INDEX = ".data-00000-of-00001", ".index"


class Disk:
    """A file system of its own, of few bytes."""

    def __init__(self, path: Path, size: str) -> None:
        self.path = path
        path.mkdir(parents=True)
        try:
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"needs the right to mount a file system ({error})")

    def set(self, option: str) -> None:
        """Changes it: `size=...`, `ro`, `rw`."""
        subprocess.run(["mount", "-o", f"remount,{option}", str(self.path)], check=True)

    def fill(self) -> None:
        """Leaves no byte free."""
        with (self.path / "ballast").open("wb", buffering=0) as ballast:
            try:
                while True:
                    ballast.write(bytes(2**16))
            except OSError:
                pass

    def empty(self) -> None:
        (self.path / "ballast").unlink()

    def remove(self) -> None:
        subprocess.run(["umount", "--lazy", str(self.path)], check=True)


@pytest.fixture
def disk(drill: Drill) -> Iterator[Disk]:
    """The run dir as a file system of 3 MB."""
    disk = Disk(drill.cwd / "D", "3m")
    yield disk
    disk.remove()


@pytest.fixture
def checkpoint_disk(drill: Drill) -> Iterator[Disk]:
    """The folder of the checkpoints as a file system of its own."""
    disk = Disk(drill.cwd / "D" / "checkpoints", "64m")
    yield disk
    disk.remove()


def steps_saved(folder: Path) -> list[int]:
    return sorted(int(path.stem.removeprefix("ckpt-")) for path in folder.glob("ckpt-*.index"))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def whole(folder: Path) -> set[str]:
    """The entries of a folder that holds complete checkpoints, and nothing else."""
    found = {"checkpoint"}
    for step in steps_saved(folder):
        # Each task that saves has files of its own.
        number = max(path.name.rpartition("-")[2] for path in folder.glob(f"ckpt-{step}.data-*"))
        found |= {f"ckpt-{step}.data-{i:05}-of-{number}" for i in range(int(number))} | {f"ckpt-{step}{INDEX}"}
    return found


def values(folder: Path, step: int) -> dict[str, np.ndarray]:
    reader = tf.train.load_checkpoint(str(folder / f"ckpt-{step}"))
    # The fingerprint of the data is a text.
    names = reader.get_variable_to_shape_map().keys() - {DATA_FINGERPRINT}
    return {name: reader.get_tensor(name) for name in names}


def flip(path: Path, place: float = 0.5) -> None:
    content = bytearray(path.read_bytes())
    content[int(len(content) * place)] ^= 0xFF
    path.write_bytes(bytes(content))


def lines(ended: Ended, *having: str) -> list[str]:
    return [line for line in ended.console.splitlines() if all(part in line for part in having)]


@pytest.mark.long
def test_a_full_disk_costs_warnings_and_at_the_last_save_the_run(drill: Drill, disk: Disk) -> None:
    arguments = (*LARGE, "hooks.checkpoint.every_steps=10", "train.steps=40")
    failed = drill.start(*arguments).end()
    folder = disk.path / "checkpoints"
    assert steps_saved(folder) == [0, 10]
    assert names(folder) == whole(folder)
    said = lines(
        failed, "could not be saved", "No space left on device", "; last good checkpoint: D/checkpoints/ckpt-10"
    )
    assert [re.findall(r"step \d+", line)[0] for line in said] == ["step 20", "step 30"]
    assert all(line.startswith("kdist: step ") and line.endswith("; training continues") for line in said)
    assert lines(failed, "kdist: error: step 40 could not be saved to D/checkpoints", "No space left on device")
    assert "Traceback" not in failed.console
    assert (failed.code, failed.result["status"], failed.step) == (1, "failed", 40)
    assert "step 40 could not be saved" in failed.result["error"]
    drill.report(19, "disk full at periodic and last save", "2 warnings, then the error", failed)
    disk.set("size=16m")
    done = drill.start(*arguments).end()
    assert lines(done, "load ", "checkpoints/ckpt-10")
    assert (done.code, done.step) == (0, 40)
    drill.report(19, "the same command with more disk", "resumed from step 10", done)


@pytest.mark.long
def test_a_disk_that_is_full_to_the_last_byte_for_a_while(drill: Drill, disk: Disk) -> None:
    """Nothing at all can be written: no save, no TensorBoard, no result."""
    arguments = [*MINE, "hooks.checkpoint.every_secs=1", "train.steps=1000000"]
    run = drill.start(*arguments)
    run.wait_for("train | step")
    disk.fill()
    run.wait_for("TensorBoard's files cannot be written: No space left on device")
    run.wait_for(r"(?s)(could not be saved.*){2}")
    disk.empty()
    run.wait_for(r"(?s)could not be saved.*save  \| step")
    disk.fill()
    result = run.run_dir / "result.json"
    run.process.send_signal(signal.SIGTERM)
    ended = run.end()
    assert ended.code == 1
    assert not result.exists()
    assert not (run.run_dir / ".result.json").exists()
    assert len(lines(ended, "TensorBoard's files cannot be written")) == 1
    assert len(lines(ended, "result.json: cannot be written: No space left on device")) == 1
    assert len(lines(ended, "kdist: error: step ", "could not be saved")) == 1
    assert "Traceback" not in ended.console
    folder = run.run_dir / "checkpoints"
    disk.empty()
    drill.report(
        19, "disk full to the last byte, twice", "training continued; the failed last save was reported", ended
    )
    newest = steps_saved(folder)[-1]
    done = drill.start(*MINE, f"train.steps={newest + 5}").end()
    assert lines(done, "load ", f"ckpt-{newest}")
    assert done.code == 0


@pytest.mark.long
def test_a_model_that_does_not_fit_on_the_disk_is_an_error(drill: Drill, disk: Disk) -> None:
    disk.set("size=2900k")
    ended = drill.start(*LARGE, "+model.megabytes=1.2", "train.steps=5").end()
    assert lines(ended, "kdist: error: D/model.keras: cannot be written: No space left on device"), ended.console
    assert "last checkpoint: D/checkpoints/ckpt-5" in ended.console
    assert (ended.code, ended.result["status"], ended.step) == (1, "failed", 5)
    assert names(disk.path) >= {"result.json"}
    assert not {"model.keras", ".unfinished.keras", ".lock"} & names(disk.path)
    drill.report(19, "disk full at model.keras", "error; the checkpoint is there", ended)
    disk.set("size=16m")
    assert drill.start(*LARGE, "+model.megabytes=1.2", "train.steps=5").end().code == 0
    assert (disk.path / "model.keras").exists()


@pytest.mark.long
def test_a_folder_that_becomes_read_only_costs_warnings_until_it_can_be_written(
    drill: Drill, checkpoint_disk: Disk
) -> None:
    run = drill.start(*MINE, "hooks.checkpoint.every_secs=1", "train.steps=1000000")
    run.wait_for(r"save  \| step +[1-9]")
    wait_until(lambda: _becomes(checkpoint_disk, "ro"), 20, "the file system is read-only")
    said = run.wait_for(r"kdist: step .*could not be saved.*")
    assert "Read-only file system" in said
    assert "training continues" in said
    checkpoint_disk.set("rw")
    run.wait_for(r"(?s)Read-only.*save  \| step")
    wait_until(lambda: _becomes(checkpoint_disk, "ro"), 20, "the file system is read-only")
    # If no step followed the save before, there would be nothing to save at the end.
    run.wait_for(r"(?s)Read-only.*save  \| step.*Read-only")
    run.process.send_signal(signal.SIGTERM)
    ended = run.end()
    assert lines(ended, "kdist: error: step ", "Read-only file system")
    assert "Traceback" not in ended.console
    assert (ended.code, ended.result["status"]) == (1, "failed")
    assert names(checkpoint_disk.path) == whole(checkpoint_disk.path)
    drill.report(19, "checkpoints/ read-only, twice", "training continued; the failed last save was reported", ended)


def _becomes(disk: Disk, option: str) -> bool:
    """Whether a file system could be changed: not while a file is open for writing."""
    done = subprocess.run(["mount", "-o", f"remount,{option}", str(disk.path)], check=False, capture_output=True)
    return done.returncode == 0


def test_a_run_dir_that_cannot_be_written_is_refused(drill: Drill, disk: Disk) -> None:
    disk.set("ro")
    ended = drill.start(*MINE, "train.steps=5").end()
    assert lines(ended, "kdist: error: run.dir", "Read-only file system")
    assert ended.code == 2
    drill.report(19, "run dir read-only from the start", "refused", ended)


def kill_while_saving(drill: Drill, arguments: tuple[str, ...], delay: float) -> int:
    """Starts a run and kills its chief `delay` seconds after it has begun to save; returns the step it got to."""
    folder = drill.cwd / "D" / "checkpoints"
    before = steps_saved(folder)
    run = drill.start(*arguments)
    if before:
        assert f"ckpt-{before[-1]}" in run.wait_for(r"load  \| .*")
    run.wait_for(r"save  \| step")
    for is_saving in (False, True):
        wait_until(lambda want=is_saving: is_under_way(folder) == want, 20, f"saving: {is_saving}")
    time.sleep(delay)
    run.process.kill()
    assert run.end().code == -signal.SIGKILL
    saved = steps_saved(folder)
    assert int(values(folder, saved[-1])["global_step"]) == saved[-1]
    return saved[-1]


def is_under_way(folder: Path) -> bool:
    return any(folder.glob("unfinished-*"))


@pytest.mark.long
def test_kill_9_while_saving_leaves_the_checkpoint_before(drill: Drill) -> None:
    arguments = (*LARGE, "+model.megabytes=200", "hooks.checkpoint.every_steps=1", "hooks.checkpoint.keep=2")
    folder = drill.cwd / "D" / "checkpoints"
    left = 0
    for delay in (0.0, 0.02, 0.05, 0.1, 0.2):
        step = kill_while_saving(drill, (*arguments, "train.steps=1000000"), delay)
        left += names(folder) > whole(folder)
    # A kill may come when the save has just ended.
    assert left >= 2
    done = drill.start(*arguments, f"train.steps={step + 2}").end()
    assert done.code == 0
    assert lines(done, "load ", "checkpoints/ckpt-")
    assert steps_saved(folder) == [step + 1, step + 2]
    assert names(folder) == whole(folder)
    drill.report(20, "kill -9 of the chief while it saves, 5 times", f"half a save left {left} times; resumed", done)


SHARDED = (*LARGE, "+model.megabytes=200", "cluster=2ps1w", "strategy.placement=partitioned", "hooks.checkpoint.keep=2")


@pytest.mark.long
def test_a_server_that_is_killed_while_it_saves_leaves_the_checkpoint_before(drill: Drill) -> None:
    run = drill.start(*SHARDED, "hooks.checkpoint.every_steps=20", "train.steps=60")
    folder = drill.cwd / "D" / "checkpoints"
    run.wait_for(r"save  \| step +20")
    for is_saving in (False, True):
        wait_until(lambda want=is_saving: any(folder.glob("unfinished-*/[01]-*")) == want, 60, f"saving: {is_saving}")
    run.signal_task("ps:1")
    ended = run.end(300)
    assert (ended.code, ended.step) == (0, 60)
    assert lines(ended, "ps:1 died (signal 9, SIGKILL); restarting the cluster from checkpoints/ckpt-")
    assert names(folder) == whole(folder)
    drill.report(29, "a ps killed while it saves", "resumed from the checkpoint before", ended)


@pytest.mark.long
def test_kill_9_during_a_save_in_the_background_leaves_the_checkpoint_before(drill: Drill) -> None:
    arguments = (*SHARDED, "hooks.checkpoint.every_steps=20", "hooks.checkpoint.background=true")
    folder = drill.cwd / "D" / "checkpoints"
    for task in ("chief", "ps:1"):
        run = drill.start(*arguments, "train.steps=100000")
        run.wait_for(r"save  \| step +[1-9]")
        for is_saving in (False, True):
            wait_until(
                lambda want=is_saving: any(folder.glob("unfinished-*/[01]-*")) == want, 60, f"saving: {is_saving}"
            )
        if task == "chief":
            run.process.kill()
            assert run.end().code == -signal.SIGKILL
        else:
            run.signal_task(task)
            run.wait_for("ps:1 died .*; restarting the cluster from checkpoints/ckpt-")
            os.kill(run.process.pid, signal.SIGTERM)
            assert run.end().code == 143
        saved = steps_saved(folder)
        assert int(values(folder, saved[-1])["global_step"]) == saved[-1]
    ended = drill.start(*arguments, f"train.steps={saved[-1] + 20}").end(300)
    assert ended.code == 0
    assert names(folder) == whole(folder)
    drill.report(
        29, "chief, then a ps, killed during a save in the background", "the checkpoint before; resumed", ended
    )


@pytest.mark.long
def test_a_disk_that_is_full_on_one_server_costs_a_warning_and_leaves_the_checkpoint_before(drill: Drill) -> None:
    run = drill.start(*SHARDED, "hooks.checkpoint.every_steps=20", "train.steps=100000")
    folder = drill.cwd / "D" / "checkpoints"
    run.wait_for(r"save  \| step +20")
    # It can write no more than this to a file, as if its disk were full.
    pid = run.tasks()["ps:1"]
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    run.wait_for(r"could not be saved to .*File too large; last good checkpoint: .*ckpt-\d+; training continues")
    before = steps_saved(folder)
    assert before
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    wait_until(lambda: steps_saved(folder)[-1] > before[-1], 60, "a later checkpoint")
    os.kill(run.process.pid, signal.SIGTERM)
    ended = run.end()
    assert ended.code == 143
    assert names(folder) == whole(folder)
    drill.report(30, "the disk of one ps full", "a warning; saved again when there was room", ended)


@pytest.mark.long
@pytest.mark.parametrize("place", [0.1, 0.5, 0.9])
def test_damaged_checkpoints_cost_a_warning_each_and_never_the_way_back_to_step_0(drill: Drill, place: float) -> None:
    folder = drill.cwd / "D" / "checkpoints"
    arguments = (*MINE, "hooks.checkpoint.every_steps=10")
    assert drill.start(*arguments, "train.steps=40").end().code == 0
    flip(folder / f"ckpt-40{DATA}", place)
    os.truncate(folder / f"ckpt-30{INDEX}", 20)
    os.truncate(folder / "checkpoint", 0)
    done = drill.start(*arguments, "train.steps=50").end()
    assert [re.findall(r"ckpt-\d+", line) for line in lines(done, "is damaged; skipped")] == [
        ["ckpt-40"],
        ["ckpt-30"],
    ]
    assert lines(done, "load ", "step     20")
    assert (done.code, done.step) == (0, 50)
    assert steps_saved(folder.with_name("checkpoints-before-1")) == [30, 40]
    drill.report(21, "two damaged, no state file", "a warning each; resumed from step 20", done)
    before = {}
    for step in steps_saved(folder):
        os.truncate(folder / f"ckpt-{step}{DATA}", 7)
        before[step] = (folder / f"ckpt-{step}{INDEX}").read_bytes()
    failed = drill.start(*arguments, "train.steps=60").end()
    assert lines(failed, "kdist: error: every checkpoint in D/checkpoints is damaged", "run.resume=never")
    assert len(lines(failed, "is damaged; skipped")) == len(before)
    assert {step: (folder / f"ckpt-{step}{INDEX}").read_bytes() for step in steps_saved(folder)} == before
    assert failed.code == 1
    drill.report(21, "all damaged", "error; nothing is overwritten", failed)
    anew = drill.start(*arguments, "train.steps=5", "run.resume=never").end()
    assert (anew.code, anew.step, steps_saved(folder)) == (0, 5, [0, 5])
    assert steps_saved(folder.with_name("checkpoints-before-2")) == list(before)


@pytest.mark.long
def test_any_cluster_and_strategy_goes_on_from_any_others_checkpoint(drill: Drill) -> None:
    clusters = (
        ("cluster=2ps2w", "strategy.placement=partitioned", "strategy.partition_min_bytes=8"),
        ("cluster=local",),
        ("cluster=1ps2w", "strategy=sync_replicas"),
        ("cluster=2w", "strategy=multi_worker_mirrored"),
        ("cluster=3ps1w",),
    )
    folder = drill.cwd / "D" / "checkpoints"
    adam = (*MINE, "optimizer.name=adam", "optimizer.learning_rate=0.01")
    for number, cluster in enumerate(clusters):
        step = 10 * (number + 1)
        done = drill.start(*adam, *cluster, f"train.steps={step}").end()
        assert (done.code, done.step) == (0, step), done.console
        if number:
            assert lines(done, "load ", f"ckpt-{step - 10}")
            assert done.result["gradients"]["applied"] == 10
        # The pair says where epochs begin.
        assert {v.shape for v in values(folder, step).values()} == {(), (10,), (6, 3), (3,)}
        drill.report(22, f"resumed with {cluster[0]}", f"{done.result['strategy']} to step {step}", done)


@pytest.mark.long
def test_a_changed_model_is_refused_with_what_is_missing_and_unexpected(drill: Drill) -> None:
    folder = drill.cwd / "D" / "checkpoints"
    assert drill.start(*MINE, "train.steps=10").end().code == 0
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    failed = drill.start("model._target_=user_code.build_other", *MINE[1:], "train.steps=20").end()
    assert lines(failed, "kdist: error: D/checkpoints/ckpt-10 is of another model or optimizer:")
    assert lines(failed, "  missing: ", "parameters/dense_1/kernel", "slots/dense/kernel/")
    assert lines(failed, "  of another shape: ", "parameters/dense/kernel (6, 3) (the model has (6, 4))")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert "Traceback" not in failed.console
    assert failed.code == 1
    drill.report(23, "another model", "error with the names; checkpoints untouched", failed)


def touched(run_dir: Path) -> dict[Path, int]:
    """The time of the last write to each file, without curves and logs, which the first chief's run continues."""
    files = [
        path for path in run_dir.rglob("*") if not {"tb", "logs", "metrics.csv"} & {*path.relative_to(run_dir).parts}
    ]
    return {path: path.stat().st_mtime_ns for path in files if path != run_dir}


@pytest.mark.long
def test_a_second_chief_is_refused_and_a_killed_one_keeps_nobody_out(drill: Drill) -> None:
    first = drill.start(*MINE, "cluster=1ps1w", "train.steps=1000000")
    first.wait_for(r"train \| step +100")
    other = drill.cwd / "other"
    other.mkdir()
    (other / "D").symlink_to(first.run_dir)
    lock = first.run_dir / ".lock"
    before, holder = touched(first.run_dir), lock.read_bytes()
    second = DrillRun(other, *MINE, "train.steps=5")
    drill.runs.append(second)
    refused = second.end()
    assert lines(refused, f"kdist: error: run.dir=D: is in use by process {first.process.pid} on ")
    assert refused.code == 2
    # The first chief touches its lock now and then.
    assert {**touched(first.run_dir), lock: before[lock]} == before
    assert lock.read_bytes() == holder
    drill.report(24, "a second chief on the run dir", "refused; nothing of the first is touched", refused)
    first.process.kill()
    first.end()
    assert (first.run_dir / ".lock").exists()
    done = drill.start(*MINE, "train.steps=5").end()
    assert (done.code, done.step) == (0, 5)
    assert not (first.run_dir / ".lock").exists()
    drill.report(24, "kill -9 of the chief, then the next", "its lock is taken over", done)


@pytest.mark.long
def test_nan_never_overwrites_the_last_good_checkpoint(drill: Drill) -> None:
    folder = drill.cwd / "D" / "checkpoints"
    arguments = (*MINE, "hooks.checkpoint.every_steps=1", "hooks.checkpoint.keep=1")
    assert drill.start(*arguments, "train.steps=10").end().code == 0
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    failed = drill.start(*arguments, "+data.scale=1e38", "train.steps=20").end()
    assert lines(failed, "kdist: error: NanTensor: the loss became ")
    assert lines(failed, "last good checkpoint, which is kept: D/checkpoints/ckpt-10")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert (failed.code, failed.result["status"]) == (1, "failed")
    drill.report(18, "NaN, with NanTensor", "error; the last good checkpoint is kept", failed)
    failed = drill.start(*arguments, "hooks.nan=null", "+data.scale=1e38", "train.steps=20").end()
    assert lines(failed, "is not saved: parameters/dense/kernel, parameters/dense/bias are not finite")
    assert (failed.code, failed.result["status"]) == (1, "failed")
    (newest,) = steps_saved(folder)
    assert all(np.isfinite(value).all() for value in values(folder, newest).values())
    drill.report(18, "NaN, without NanTensor", "error; what is kept is finite", failed)
