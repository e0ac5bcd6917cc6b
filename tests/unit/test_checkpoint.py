from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from kdist.checkpoint import Checkpoints
from kdist.errors import CheckpointError, NonFiniteError

VALUES = {
    "global_step": np.array(5, np.int64),
    "parameters/dense/kernel": np.arange(6, dtype=np.float32).reshape(2, 3),
    "state/half": np.ones(2, np.float16),
}
SHAPES = {name: value.shape for name, value in VALUES.items()}


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints")


def test_what_is_saved_is_restored(checkpoints: Checkpoints) -> None:
    checkpoints.save(5, VALUES, keep=3)
    restored = checkpoints.restore(SHAPES)
    assert restored is not None
    path, values = restored
    assert path.name == "ckpt-5"
    for name, value in VALUES.items():
        np.testing.assert_array_equal(values[name], value)
        assert values[name].dtype == value.dtype


def test_tensorflow_reads_it_without_kdist(checkpoints: Checkpoints) -> None:
    checkpoints.save(5, VALUES, keep=3)
    newest = tf.train.latest_checkpoint(str(checkpoints.folder))
    kernel = tf.train.load_checkpoint(newest).get_tensor("parameters/dense/kernel")
    np.testing.assert_array_equal(kernel, VALUES["parameters/dense/kernel"])


def test_only_the_newest_are_kept_and_nothing_else_is_left(checkpoints: Checkpoints) -> None:
    for step in (1, 2, 10, 9):
        checkpoints.save(step, VALUES, keep=2)
    assert checkpoints.steps() == [9, 10]
    names = {path.name for path in checkpoints.folder.iterdir()}
    assert names == {"checkpoint"} | {f"ckpt-{s}.{e}" for s in (9, 10) for e in ("index", "data-00000-of-00001")}


@pytest.mark.parametrize("suffix", [".data-00000-of-00001", ".index"])
def test_a_damaged_checkpoint_is_left_out_with_a_warning(checkpoints: Checkpoints, suffix: str) -> None:
    checkpoints.save(1, VALUES, keep=3)
    checkpoints.save(2, VALUES, keep=3)
    damaged = Path(f"{checkpoints.path(2)}{suffix}")
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 0xFF
    damaged.write_bytes(bytes(content))
    with pytest.warns(UserWarning, match="ckpt-2 is damaged"):
        restored = checkpoints.restore(SHAPES)
    assert restored is not None
    assert restored[0].name == "ckpt-1"


def test_all_damaged_is_an_error_and_never_step_0(checkpoints: Checkpoints) -> None:
    checkpoints.save(1, VALUES, keep=3)
    Path(f"{checkpoints.path(1)}.data-00000-of-00001").write_bytes(b"")
    with (
        pytest.warns(UserWarning, match="damaged"),
        pytest.raises(CheckpointError, match=r"every checkpoint.*run\.resume=never"),
    ):
        checkpoints.restore(SHAPES)


def test_an_unfinished_save_is_no_checkpoint(checkpoints: Checkpoints) -> None:
    checkpoints.save(1, VALUES, keep=3)
    (checkpoints.folder / "ckpt-2.data-00000-of-00001").write_bytes(b"half")
    assert checkpoints.steps() == [1]


def test_another_model_is_refused_with_the_names(checkpoints: Checkpoints) -> None:
    checkpoints.save(1, VALUES, keep=3)
    shapes = {"global_step": (), "parameters/dense/kernel": (2, 4), "parameters/other/bias": (3,)}
    with pytest.raises(CheckpointError) as error:
        checkpoints.restore(shapes)
    assert "missing: parameters/other/bias" in str(error.value)
    assert "unexpected: state/half" in str(error.value)
    assert "parameters/dense/kernel (2, 3) (the model has (2, 4))" in str(error.value)


def test_not_finite_is_never_saved(checkpoints: Checkpoints) -> None:
    checkpoints.save(1, VALUES, keep=1)
    with pytest.raises(NonFiniteError, match=r"(?s)parameters/dense/kernel.*ckpt-1"):
        checkpoints.save(2, {**VALUES, "parameters/dense/kernel": np.array([np.nan], np.float32)}, keep=1)
    assert checkpoints.steps() == [1]


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="could not be saved"):
        Checkpoints(tmp_path / "file" / "checkpoints").save(1, VALUES, keep=1)


def test_set_aside_keeps_what_was_there(checkpoints: Checkpoints) -> None:
    checkpoints.save(1, VALUES, keep=1)
    checkpoints.set_aside()
    assert checkpoints.newest() is None
    assert (checkpoints.folder.with_name("checkpoints-before-1") / "ckpt-1.index").exists()
