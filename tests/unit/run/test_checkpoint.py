import os
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from fakes import ValuesHere, held_by
from helpers import in_short

from kdist.errors import CheckpointError, ConfigError, NonFiniteError
from kdist.model.names import BESIDE
from kdist.parameters.placement.blocks import StoredShard
from kdist.run.checkpoint import Checkpoints

VALUES = {
    "global_step": np.array(5, np.int64),
    "parameters/dense/kernel": np.arange(6, dtype=np.float32).reshape(2, 3),
    "state/half": np.ones(2, np.float16),
}


def zeros() -> ValuesHere:
    """The same values, all zero."""
    return ValuesHere({name: np.zeros_like(value) for name, value in VALUES.items()})


@pytest.fixture(autouse=True, params=["at once", "in pieces"])
def way_of_saving(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that are small together are saved in another way than those that are large."""
    if request.param == "in pieces":
        monkeypatch.setattr(StoredShard, "slice_bytes", 12)


ODD = "[!x]*?{}$~'\" %#:;|&(,=\\"


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints")


def test_what_is_saved_is_restored(checkpoints: Checkpoints) -> None:
    checkpoints.write(5, ValuesHere(VALUES), keep=3)
    restored = zeros()
    path = checkpoints.restore(restored)
    assert path is not None
    assert path.name == "ckpt-5"
    for name, value in VALUES.items():
        np.testing.assert_array_equal(restored.values[name], value)
        assert restored.values[name].dtype == value.dtype


@pytest.mark.parametrize("name", in_short(["lr=[1]", "a\\b", ODD, "ü"], {"lr=[1]", ODD}))
def test_any_name_of_a_folder_is_taken_as_it_is(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # What the name would match as a pattern.
    for neighbour in ("lr=1", "ab"):
        Checkpoints(tmp_path / neighbour / "checkpoints").write(9, ValuesHere(VALUES))
    checkpoints = Checkpoints(tmp_path / name / "checkpoints")
    checkpoints.write(5, ValuesHere({**VALUES, "seed": np.array(7, np.int64)}), keep=3)
    restored = zeros()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        path = checkpoints.restore(restored)
    assert path == checkpoints.path(5)
    np.testing.assert_array_equal(restored.values["parameters/dense/kernel"], VALUES["parameters/dense/kernel"])
    assert checkpoints.seed() == 7
    read = checkpoints.read(5)
    assert read is not None
    assert read["global_step"] == 5


def test_a_folder_whose_name_needs_a_link_that_cannot_be_made_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    checkpoints = Checkpoints(tmp_path / "[x]" / "checkpoints")
    with pytest.raises(
        ConfigError, match=r"\[x\]/checkpoints: TensorFlow takes .* choose another run\.dir, or set XDG"
    ):
        checkpoints.write(5, ValuesHere({**VALUES, "global_step": np.array(5)}))


def test_tensorflow_reads_it_without_kdist(checkpoints: Checkpoints) -> None:
    checkpoints.write(5, ValuesHere(VALUES), keep=3)
    newest = tf.train.latest_checkpoint(str(checkpoints.folder))
    kernel = tf.train.load_checkpoint(newest).get_tensor("parameters/dense/kernel")
    np.testing.assert_array_equal(kernel, VALUES["parameters/dense/kernel"])


def test_only_the_newest_are_kept_and_nothing_else_is_left(checkpoints: Checkpoints) -> None:
    for step in (1, 2, 10, 9):
        checkpoints.write(step, ValuesHere(VALUES), keep=2)
    assert checkpoints.steps() == [9, 10]
    names = {path.name for path in checkpoints.folder.iterdir()}
    kept = {path.name for step in (9, 10) for path in files_of(checkpoints, step)}
    assert len(kept) >= 4
    assert names == {"checkpoint"} | kept


DATA, INDEX = ".data-00000-of-0000?", ".index"


def file_of(checkpoints: Checkpoints, step: int, suffix: str) -> Path:
    """The index of a checkpoint, or its data; what is not in variables may have a file of its own."""
    return next(checkpoints.folder.glob(f"ckpt-{step}{suffix}"))


def files_of(checkpoints: Checkpoints, step: int) -> list[Path]:
    """The index, and then the data."""
    return [file_of(checkpoints, step, INDEX), *sorted(checkpoints.folder.glob(f"ckpt-{step}.data-*"))]


def with_two(checkpoints: Checkpoints) -> Checkpoints:
    """Checkpoints of steps 1 and 2, whose kernels differ."""
    for step in (1, 2):
        values = {**VALUES, "parameters/dense/kernel": np.full((2, 3), step, np.float32)}
        checkpoints.write(step, ValuesHere(values), keep=3)
    return checkpoints


def restored_kernel(checkpoints: Checkpoints) -> float:
    """The step whose values are restored, as its kernel has it."""
    restored = zeros()
    path = checkpoints.restore(restored)
    assert path is not None
    kernel = restored.values["parameters/dense/kernel"]
    assert path.name == f"ckpt-{kernel[0, 0]:.0f}"
    assert (kernel == kernel[0, 0]).all()
    return float(kernel[0, 0])


def flip(path: Path, place: float) -> None:
    content = bytearray(path.read_bytes())
    content[int(len(content) * place)] ^= 0xFF
    path.write_bytes(bytes(content))


def cut(path: Path, part: float) -> None:
    os.truncate(path, int(path.stat().st_size * part))


DAMAGES: dict[str, Callable[[Path], None]] = {
    "a bit of the first third": lambda path: flip(path, 1 / 6),
    "a bit of the second third": lambda path: flip(path, 1 / 2),
    "a bit of the last third": lambda path: flip(path, 0.7),
    "empty": lambda path: cut(path, 0),
    "half": lambda path: cut(path, 0.5),
    "a byte short": lambda path: os.truncate(path, path.stat().st_size - 1),
    "garbage": lambda path: path.write_bytes(os.urandom(path.stat().st_size)),
    "text": lambda path: path.write_text("not a checkpoint\n"),
    "missing": Path.unlink,
    "of another checkpoint": lambda path: shutil.copy(str(path).replace("ckpt-2", "ckpt-1"), path),
}
#: The same at another place, or less of it.
ALIKE = {"a bit of the second third", "a bit of the last third", "a byte short", "text"}


@pytest.mark.parametrize("suffix", [DATA, INDEX])
@pytest.mark.parametrize("damage", in_short(DAMAGES, {*DAMAGES} - ALIKE))
def test_a_damaged_checkpoint_is_left_out_with_one_warning(checkpoints: Checkpoints, suffix: str, damage: str) -> None:
    with_two(checkpoints)
    DAMAGES[damage](file_of(checkpoints, 2, suffix))
    with pytest.warns(UserWarning, match="ckpt-2 is damaged; skipped") as warned:
        assert restored_kernel(checkpoints) == 1
    assert len(warned) == 1


@pytest.mark.parametrize("name", BESIDE)
def test_a_wrong_byte_in_what_is_beside_the_model_is_damage_as_well(checkpoints: Checkpoints, name: str) -> None:
    with_two(checkpoints)
    value = np.array(0x1122334455667788)
    checkpoints.write(3, ValuesHere({**VALUES, name: value}), keep=9)
    (path,) = (p for p in checkpoints.folder.glob("ckpt-3.data-*") if value.tobytes() in p.read_bytes())
    path.write_bytes(path.read_bytes().replace(value.tobytes(), (value + 1).tobytes()))
    with pytest.warns(UserWarning, match="ckpt-3 is damaged; skipped"):
        assert restored_kernel(checkpoints) == 2


# Of a prime number of bytes one is wrong in turn, which meets each part of a record.
@pytest.mark.parametrize("every", [13, pytest.param(1, marks=pytest.mark.long)])
def test_whatever_byte_is_wrong_no_wrong_value_is_restored(checkpoints: Checkpoints, every: int) -> None:
    with_two(checkpoints)
    for suffix in (DATA, INDEX):
        path = file_of(checkpoints, 2, suffix)
        good = path.read_bytes()
        for i in range(0, len(good), every):
            path.write_bytes(good[:i] + bytes([good[i] ^ 0x5A]) + good[i + 1 :])
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                kernel = restored_kernel(checkpoints)
            # Some bytes mean nothing.
            assert kernel == (1 if warned else 2)
        path.write_bytes(good)


def test_each_damaged_checkpoint_is_said_and_the_newest_good_one_taken(checkpoints: Checkpoints) -> None:
    with_two(checkpoints)
    for step in (3, 4):
        checkpoints.write(step, ValuesHere(VALUES), keep=9)
        cut(file_of(checkpoints, step, DATA), 0.5)
    with pytest.warns(UserWarning, match="damaged") as warned:
        assert restored_kernel(checkpoints) == 2
    said = [re.findall(r"ckpt-\d+", str(warning.message)) for warning in warned]
    assert said == [["ckpt-4"], ["ckpt-3"]]


@pytest.mark.parametrize("damage", ["empty", "half", "garbage", "missing"])
def test_tensorflows_state_file_is_not_needed(checkpoints: Checkpoints, damage: str) -> None:
    with_two(checkpoints)
    DAMAGES[damage](checkpoints.folder / "checkpoint")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert restored_kernel(checkpoints) == 2


@pytest.mark.parametrize("suffix", [DATA, INDEX])
@pytest.mark.parametrize("damage", ["empty", "missing"])
def test_all_damaged_is_an_error_and_never_step_0(checkpoints: Checkpoints, suffix: str, damage: str) -> None:
    with_two(checkpoints)
    for step in (1, 2):
        DAMAGES[damage](file_of(checkpoints, step, suffix))
    checkpoints.tidy()
    with (
        pytest.warns(UserWarning, match="damaged") as warned,
        pytest.raises(CheckpointError, match=r"every checkpoint.*run\.resume=never"),
    ):
        checkpoints.restore(zeros())
    assert len(warned) == 2


def test_a_save_that_did_not_end_is_no_checkpoint_and_removed(checkpoints: Checkpoints) -> None:
    checkpoints.write(1, ValuesHere(VALUES), keep=3)
    before = set(checkpoints.folder.iterdir())
    data = "unfinished-2.data-00000-of-00001"
    for name in (data, f"{data}.tempstate123", ".checkpoint", "ckpt-2_temp-7"):
        (checkpoints.folder / name).write_bytes(b"half")
    (checkpoints.folder / "ckpt-3_temp").mkdir()
    (checkpoints.folder / "ckpt-3_temp" / "part-00000-of-00001.index").write_bytes(b"half")
    assert checkpoints.steps() == [1]
    checkpoints.tidy()
    assert set(checkpoints.folder.iterdir()) == before


@pytest.mark.parametrize("num_moved", [0, 1, 2])
def test_a_save_that_was_complete_but_for_its_name_counts(checkpoints: Checkpoints, num_moved: int) -> None:
    with_two(checkpoints)
    index, *data = files_of(checkpoints, 2)
    for path in (index, *data[num_moved:]):
        path.rename(path.with_name(path.name.replace("ckpt-", "unfinished-")))
    checkpoints.tidy()
    assert restored_kernel(checkpoints) == 2
    assert not list(checkpoints.folder.glob("unfinished-*"))


def test_what_a_task_wrote_after_its_save_had_failed_is_removed_by_the_next(checkpoints: Checkpoints) -> None:
    late = checkpoints.folder / "unfinished-1-0a1b2c3d"
    late.mkdir(parents=True)
    (late / "0-1.data-00000-of-00001").write_bytes(b"late")
    checkpoints.write(2, ValuesHere({"value": np.array(2.0)}))
    assert not late.exists()
    assert checkpoints.steps() == [2]


def test_what_a_deletion_left_is_removed_and_what_lost_its_index_is_damaged(checkpoints: Checkpoints) -> None:
    with_two(checkpoints)
    checkpoints.write(3, ValuesHere(VALUES), keep=9)
    for step in (1, 3):
        Path(f"{checkpoints.path(step)}{INDEX}").unlink()
    checkpoints.tidy()
    assert not list(checkpoints.folder.glob("ckpt-1*"))
    with pytest.warns(UserWarning, match="ckpt-3 is damaged; skipped .its index is missing") as warned:
        assert restored_kernel(checkpoints) == 2
    assert len(warned) == 1


def test_what_lost_its_index_is_set_aside_as_well(checkpoints: Checkpoints) -> None:
    checkpoints.write(1, ValuesHere(VALUES), keep=3)
    Path(f"{checkpoints.path(1)}{INDEX}").unlink()
    checkpoints.set_aside()
    assert checkpoints.restore(zeros()) is None
    assert list(checkpoints.folder.with_name("checkpoints-before-1").glob("ckpt-1.data*"))


def test_the_seed_is_that_of_the_newest_readable_checkpoint(checkpoints: Checkpoints) -> None:
    assert checkpoints.seed() is None
    checkpoints.write(1, ValuesHere(VALUES), keep=3)
    assert checkpoints.seed() is None
    for step, seed in ((2, 20), (3, 2**32 - 1)):
        checkpoints.write(step, ValuesHere({**VALUES, "seed": np.array(seed, np.int64)}), keep=3)
    assert checkpoints.seed() == 2**32 - 1
    cut(Path(f"{checkpoints.path(3)}{INDEX}"), 0.5)
    assert checkpoints.seed() == 20


def test_another_model_is_refused_with_the_names(checkpoints: Checkpoints) -> None:
    checkpoints.write(1, ValuesHere(VALUES), keep=3)
    shapes = {"global_step": (), "parameters/dense/kernel": (2, 4), "parameters/other/bias": (3,)}
    with pytest.raises(CheckpointError) as error:
        checkpoints.restore(ValuesHere({name: np.zeros(shape) for name, shape in shapes.items()}))
    assert "missing: parameters/other/bias" in str(error.value)
    assert "unexpected: state/half" in str(error.value)
    assert "parameters/dense/kernel (2, 3) (the model has (2, 4))" in str(error.value)


def test_not_finite_is_never_saved(checkpoints: Checkpoints) -> None:
    checkpoints.write(1, ValuesHere(VALUES), keep=1)
    with pytest.raises(NonFiniteError, match=r"(?s)parameters/dense/kernel.*ckpt-1"):
        checkpoints.write(2, ValuesHere({**VALUES, "parameters/dense/kernel": np.array([np.nan], np.float32)}), keep=1)
    assert checkpoints.steps() == [1]


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"step 1 could not be saved to .*: Not a directory\n.*none was saved"):
        Checkpoints(tmp_path / "file" / "checkpoints").write(1, ValuesHere(VALUES), keep=1)


def test_a_failed_save_leaves_what_was_there_and_nothing_of_its_own(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints.write(1, ValuesHere(VALUES), keep=3)
    before = {path: path.read_bytes() for path in checkpoints.folder.iterdir()}

    def full(*, prefix: str, **_: object) -> None:
        written = Path(f"{prefix}.data-00000-of-00001.tempstate42")
        written.write_bytes(b"half")
        raise tf.errors.ResourceExhaustedError(None, None, f"{written}; No space left on device")

    monkeypatch.setattr(tf.raw_ops, "SaveV2", full)
    with pytest.raises(CheckpointError, match=r"step 2 .*No space left on device\n  last good checkpoint: .*ckpt-1"):
        checkpoints.write(2, ValuesHere(VALUES), keep=3)
    assert {path: path.read_bytes() for path in checkpoints.folder.iterdir()} == before


def test_set_aside_keeps_what_was_there(checkpoints: Checkpoints) -> None:
    checkpoints.write(1, ValuesHere(VALUES), keep=1)
    checkpoints.set_aside()
    assert checkpoints.newest() is None
    assert (checkpoints.folder.with_name("checkpoints-before-1") / "ckpt-1.index").exists()


def test_a_chief_that_was_replaced_writes_no_checkpoint(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.write(1, ValuesHere(VALUES))
    written = checkpoints.begin_save(2, ValuesHere(VALUES))
    written.result()
    before = {path: path.read_bytes() for path in checkpoints.folder.iterdir()}
    (tmp_path / ".lock").write_text(held_by(host="elsewhere", boot="another"))
    for save in (
        lambda: checkpoints.write(3, ValuesHere(VALUES)),
        lambda: checkpoints.begin_save(3, ValuesHere(VALUES)),
        lambda: checkpoints.finish_save(2, written.result),
    ):
        with pytest.raises(ConfigError, match="was taken over by process"):
            save()
    assert {path: path.read_bytes() for path in checkpoints.folder.iterdir()} == before
