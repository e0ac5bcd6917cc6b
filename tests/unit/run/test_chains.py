"""Chains of a full checkpoint and its deltas: what is restored, kept and deleted, whatever is missing or damaged."""

from __future__ import annotations

import itertools
import os
import shutil
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from helpers import in_short

from kdist.errors import CheckpointError
from kdist.parameters.tables.changed_rows import DeltaBase
from kdist.run.checkpoint import Checkpoints, replay, values_of

TABLE, IDS = "parameters/table", "delta/ids/table"


class Table:
    """A table of 8 rows, of which row `step` gets the number of the step, and a value that is always saved whole."""

    def __init__(self) -> None:
        self.values = {"global_step": np.array(0), TABLE: np.zeros((8, 2)), "state/sum": np.array(0.0)}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: value.shape for name, value in self.values.items()}

    def train_to(self, step: int) -> None:
        for number in range(int(self.values["global_step"]) + 1, step + 1):
            self.values[TABLE][number % 8] = number
            self.values["state/sum"] = self.values["state/sum"] + number
        self.values["global_step"] = np.array(step)

    def begin_save(self, prefix: Path, since: DeltaBase | None = None, *, aside: bool = True) -> None:
        written = {**self.values, "seed": np.array(int(self.values["global_step"]) + 100)}
        if since is not None:
            ids = np.flatnonzero(self.values[TABLE][:, 0] > since.step)
            written |= {"delta/follows": np.array(since.step), IDS: ids, TABLE: self.values[TABLE][ids]}
        tf.raw_ops.SaveV2(
            prefix=str(prefix),
            tensor_names=list(written),
            shape_and_slices=[""] * len(written),
            tensors=list(written.values()),
        )

    def restore(self, path: Path, deltas: Sequence[Path] = ()) -> None:
        self.values = values_of(path)
        for delta in deltas:
            self.values = replay(self.values, values_of(delta))


def at(step: int) -> Table:
    table = Table()
    table.train_to(step)
    return table


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints")


def save(checkpoints: Checkpoints, *names: str, keep: int | None = None) -> None:
    """Saves, in this order, full checkpoints and deltas of what was saved before."""
    before = 0
    for name in names:
        step = int(name.rpartition("-")[2])
        since = DeltaBase(before, 0) if name.startswith("delta") else None
        assert checkpoints.write(step, at(step), keep=keep, since=since).name == name  # type: ignore[arg-type]
        before = step


def restored(checkpoints: Checkpoints) -> str:
    """The name of what is restored; all values are of its step."""
    table = Table()
    path = checkpoints.restore(table)  # type: ignore[arg-type]
    assert path is not None
    step = int(path.name.rpartition("-")[2])
    for name, value in at(step).values.items():
        np.testing.assert_array_equal(table.values[name], value)
        read = checkpoints.read(step)
        assert read is not None
        np.testing.assert_array_equal(read[name], value)
    return path.name


def names_in(checkpoints: Checkpoints) -> set[str]:
    return {path.name.partition(".")[0] for path in checkpoints.folder.iterdir()} - {"checkpoint"}


CHAINS = ("ckpt-2", "delta-3", "delta-5", "ckpt-6", "delta-7", "delta-9", "delta-12")


def test_the_newest_full_checkpoint_and_its_deltas_are_restored(checkpoints: Checkpoints) -> None:
    for end in range(1, len(CHAINS) + 1):
        save(checkpoints, *CHAINS[:end])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert restored(checkpoints) == CHAINS[end - 1]
    assert checkpoints.steps() == [2, 3, 5, 6, 7, 9, 12]
    assert checkpoints.newest() == checkpoints.folder / "delta-12"
    assert checkpoints.seed() == 112
    # TensorFlow's tools see the full ones.
    assert tf.train.latest_checkpoint(str(checkpoints.folder)) == str(checkpoints.path(6))
    np.testing.assert_array_equal(
        tf.train.load_checkpoint(str(checkpoints.path(6))).get_tensor(TABLE), at(6).values[TABLE]
    )


@pytest.mark.parametrize("suffix", [".index", ".data-00000-of-00001"])
@pytest.mark.parametrize(
    "damage",
    [
        Path.unlink,
        lambda path: shutil.copy(str(path).replace("delta-9", "delta-7"), path),
        lambda path: os.truncate(path, path.stat().st_size // 2),
        lambda path: path.write_bytes(b"no delta"),
    ],
)
def test_a_damaged_delta_ends_the_chain_before_it(
    checkpoints: Checkpoints, suffix: str, damage: Callable[[Path], None]
) -> None:
    save(checkpoints, *CHAINS)
    damage(checkpoints.folder / f"delta-9{suffix}")
    with pytest.warns(UserWarning, match=r"checkpoints/delta-9 is damaged; it and later deltas are left out") as warned:
        assert restored(checkpoints) == "delta-7"
    assert len(warned) == 1
    assert checkpoints.read(12) is None


def test_a_delta_under_the_name_of_another_one_is_damaged(checkpoints: Checkpoints) -> None:
    save(checkpoints, *CHAINS)
    for path in checkpoints.folder.glob("delta-12.*"):
        shutil.copy(path, str(path).replace("delta-12", "delta-9"))
    with pytest.warns(UserWarning, match=r"delta-9 is damaged; it and later deltas are left out"):
        assert restored(checkpoints) == "delta-7"


def test_whatever_byte_of_a_delta_is_wrong_no_wrong_value_is_restored(checkpoints: Checkpoints) -> None:
    save(checkpoints, *CHAINS[:3])
    for path in checkpoints.folder.glob("delta-5.*"):
        good = path.read_bytes()
        for i in range(len(good)):
            path.write_bytes(good[:i] + bytes([good[i] ^ 0x5A]) + good[i + 1 :])
            table = Table()
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                checkpoints.restore(table)  # type: ignore[arg-type]
            expected = at(3 if warned else 5).values
            assert all(np.array_equal(table.values[name], value) for name, value in expected.items())
        path.write_bytes(good)


def test_a_hole_ends_the_chain_with_a_warning_that_names_the_delta(checkpoints: Checkpoints) -> None:
    save(checkpoints, *CHAINS)
    for path in checkpoints.folder.glob("delta-9.*"):
        path.unlink()
    with pytest.warns(UserWarning, match=r"delta-12 follows step 9, which is missing; it and later deltas are"):
        assert restored(checkpoints) == "delta-7"


def test_a_delta_that_another_one_has_caught_up_with_is_not_needed(checkpoints: Checkpoints) -> None:
    """As when it could not be uploaded: it is here, and counts as failed."""
    save(checkpoints, "ckpt-2", "delta-3")
    checkpoints.write(5, at(5), since=DeltaBase(2, 0))  # type: ignore[arg-type]
    checkpoints.write(7, at(7), since=DeltaBase(5, 0))  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert restored(checkpoints) == "delta-7"


def test_without_its_full_checkpoint_a_chain_is_left_out(checkpoints: Checkpoints) -> None:
    save(checkpoints, *CHAINS)
    (checkpoints.folder / "ckpt-6.index").unlink()
    with pytest.warns(UserWarning, match=r"ckpt-6 is damaged; skipped \(its index is missing\)") as warned:
        assert restored(checkpoints) == "delta-5"
    assert len(warned) == 1
    for path in checkpoints.folder.glob("ckpt-6.*"):
        path.unlink()
    with pytest.warns(UserWarning, match=r"delta-7 follows step 6, which is missing"):
        assert restored(checkpoints) == "delta-5"
    for path in checkpoints.folder.glob("ckpt-2.*"):
        path.unlink()
    checkpoints.tidy()
    with pytest.raises(CheckpointError, match=r"every checkpoint.*run\.resume=never"):
        checkpoints.restore(Table())  # type: ignore[arg-type]


def test_deltas_go_with_their_full_checkpoint_the_newest_first(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(checkpoints, *CHAINS)
    deleted: list[str] = []
    delete = Checkpoints._delete
    monkeypatch.setattr(Checkpoints, "_delete", lambda self, path: [deleted.append(path.name), delete(self, path)])
    save(checkpoints, "ckpt-13", "delta-14", keep=2)
    assert deleted == ["delta-5", "delta-3", "ckpt-2"]
    assert names_in(checkpoints) == {*CHAINS[3:], "ckpt-13", "delta-14"}
    checkpoints.keep_only(13)
    # Other folders of a run have full checkpoints only.
    assert checkpoints.steps() == [7, 9, 12, 13, 14]


def test_training_that_comes_back_to_an_earlier_step_removes_the_deltas_after_it(checkpoints: Checkpoints) -> None:
    save(checkpoints, *CHAINS)
    os.truncate(checkpoints.folder / "delta-9.index", 5)
    # It goes on from step 7, and the next one is full.
    save(checkpoints, "ckpt-8", "delta-10")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert restored(checkpoints) == "delta-10"
    assert names_in(checkpoints) == {*CHAINS[:5], "ckpt-8", "delta-10"}


def test_deltas_without_a_full_checkpoint_before_them_are_tidied_away(checkpoints: Checkpoints) -> None:
    save(checkpoints, *CHAINS)
    for path in checkpoints.folder.glob("ckpt-2.*"):
        path.unlink()
    # A process was killed while it deleted the delta of a step that is saved in full now.
    for path in checkpoints.folder.glob("delta-7.*"):
        path.with_name(path.name.replace("7", "6", 1)).write_bytes(path.read_bytes())
    checkpoints.tidy()
    assert names_in(checkpoints) == set(CHAINS[3:])


@pytest.mark.parametrize("num_moved", [0, 1])
def test_a_delta_that_was_complete_but_for_its_name_counts(checkpoints: Checkpoints, num_moved: int) -> None:
    save(checkpoints, *CHAINS)
    for path in sorted(checkpoints.folder.glob("delta-12.*"))[num_moved:][::-1]:
        path.rename(path.with_name(f"unfinished-{path.name}"))
    checkpoints.tidy()
    assert restored(checkpoints) == "delta-12"
    assert names_in(checkpoints) == set(CHAINS)


@pytest.mark.parametrize("keep", in_short([1, 2, 3], {2}))
@pytest.mark.parametrize("sets_aside", [True, False])
def test_whatever_is_damaged_the_newest_state_that_loads_survives_every_save(
    checkpoints: Checkpoints, tmp_path: Path, keep: int, sets_aside: bool
) -> None:
    save(checkpoints, *CHAINS)
    whole, of_2, of_6 = tmp_path / "whole", CHAINS[:3], CHAINS[3:]
    shutil.copytree(checkpoints.folder, whole)
    for number in range(1, 2 ** len(CHAINS)):
        for folder in tmp_path.glob("checkpoints*"):
            shutil.rmtree(folder)
        shutil.copytree(whole, checkpoints.folder)
        damaged = {name for i, name in enumerate(CHAINS) if number >> i & 1}
        good = set(CHAINS) - damaged
        for name in damaged:
            os.truncate(checkpoints.folder / f"{name}{('.index', '.data-00000-of-00001')[number % 3 % 2]}", 9)
        loads = [list(itertools.takewhile(good.__contains__, chain)) for chain in (of_2, of_6)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if not any(loads):
                continue
            newest = restored(checkpoints)
            assert newest == (loads[1] or loads[0])[-1]
            step = int(newest.rpartition("-")[2])
            if sets_aside:
                checkpoints.set_aside(after=step)
                aside = {path.name.partition(".")[0] for path in tmp_path.glob("checkpoints-before-1/*")}
                assert aside == {name for name in CHAINS if int(name.rpartition("-")[2]) > step}
        save(checkpoints, f"ckpt-{step + 1}", f"delta-{step + 2}", keep=keep)
        with warnings.catch_warnings():
            warnings.simplefilter("error" if sets_aside else "ignore")
            assert restored(checkpoints) == f"delta-{step + 2}"
        if keep > 1 and sets_aside:
            os.truncate(checkpoints.folder / f"ckpt-{step + 1}.index", 9)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                assert restored(checkpoints) == newest


def test_a_delta_counts_until_the_full_checkpoint_of_its_step_has_loaded(checkpoints: Checkpoints) -> None:
    """A machine that goes down in the middle of a save may lose what was written last."""
    save(checkpoints, *CHAINS[:3])
    checkpoints.write(5, at(5), keep=3)  # type: ignore[arg-type]
    assert names_in(checkpoints) == {"ckpt-2", "delta-3", "ckpt-5"}
    checkpoints.write(5, at(5), since=DeltaBase(3, 0))  # type: ignore[arg-type]
    os.truncate(checkpoints.folder / "ckpt-5.data-00000-of-00001", 0)
    checkpoints.tidy()
    with pytest.warns(UserWarning, match="ckpt-5 is damaged"):
        assert restored(checkpoints) == "delta-5"


def test_a_delta_that_was_not_complete_is_removed(checkpoints: Checkpoints) -> None:
    save(checkpoints, *CHAINS)
    (checkpoints.folder / "unfinished-delta-13.data-00000-of-00001").write_bytes(b"half")
    (checkpoints.folder / "unfinished-delta-13-0a1b2c3d").mkdir()
    checkpoints.tidy()
    assert names_in(checkpoints) == set(CHAINS)
    assert restored(checkpoints) == "delta-12"
