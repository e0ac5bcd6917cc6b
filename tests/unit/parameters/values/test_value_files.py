"""Values that are saved in pieces and restored as they were, wherever their rows are by then; damage is noticed."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import tensorflow as tf
from helpers import in_short

from kdist.errors import NonFiniteError
from kdist.parameters.placement.blocks import StoredShard
from kdist.parameters.placement.messages import Wire
from kdist.parameters.values.named_values import NamedValues
from kdist.parameters.values.value_files import ValueFiles
from kdist.threads import in_thread

WHOLE = {
    "parameters/table": np.arange(511 * 7, dtype=np.float32).reshape(511, 7),
    "parameters/kernel": np.arange(200, dtype=np.float32).reshape(10, 20),
    "parameters/bias": np.arange(800, dtype=np.float32),
    "state/half": np.ones(3, np.float16),
    "state/flags": np.array([True, False]),
    "state/scalar": np.array(5, np.int32),
    "global_step": np.array(9, np.int64),
}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StoredShard, "slice_bytes", 1024)


def stored(cuts: Sequence[int] = (0, 511), *, is_set: bool = True, are_remote: bool = True) -> NamedValues:
    """The values, or zeros: the rows of the table cut at `cuts`, kernel and bias in one vector."""
    whole = WHOLE if is_set else {name: np.zeros_like(value) for name, value in WHOLE.items()}
    table, kernel, bias = (whole[f"parameters/{name}"] for name in ("table", "kernel", "bias"))
    vector = tf.Variable(np.concatenate([kernel.ravel(), bias]))
    parts = {
        name: [StoredShard.whole(tf.Variable(value))] for name, value in whole.items() if name.startswith("state/")
    }
    parts["parameters/table"] = [StoredShard.whole(tf.Variable(table[a:b])) for a, b in pairwise(cuts)]
    parts["parameters/kernel"] = [StoredShard(vector, 0, kernel.shape)]
    parts["parameters/bias"] = [StoredShard(vector, 200, bias.shape)]
    copies = [tf.Variable(whole["global_step"]), tf.Variable(whole["global_step"])]
    return NamedValues(parts, {"global_step": copies}, are_remote=are_remote)


def save(values: NamedValues, folder: Path) -> Path:
    ValueFiles(values).begin_save(folder / "saved", {"seed": np.array(3, np.int64)}, copies=False)()
    return folder / "saved"


def test_each_value_is_one_tensor_for_tensorflow(tmp_path: Path) -> None:
    path = save(stored(), tmp_path)
    assert len(list(tmp_path.glob("saved.data-*"))) > 3
    assert {path.name.partition(".")[0] for path in tmp_path.iterdir()} == {"saved"}
    reader = tf.train.load_checkpoint(str(path))
    assert set(reader.get_variable_to_shape_map()) == {*WHOLE, "seed"}
    for name, value in WHOLE.items():
        np.testing.assert_array_equal(reader.get_tensor(name), value)


@pytest.mark.parametrize("cuts", in_short([(0, 511), (0, 255, 511), (0, 1, 100, 510, 511)], {(0, 1, 100, 510, 511)}))
def test_rows_may_be_elsewhere_when_they_are_restored(cuts: Sequence[int], tmp_path: Path) -> None:
    path = save(stored((0, 300, 511)), tmp_path)
    values = stored(cuts, is_set=False)
    ValueFiles(values).restore(path)
    for name, value in values.read().items():
        # What several variables hold is restored by the chief.
        np.testing.assert_array_equal(value, 0 if name == "global_step" else WHOLE[name], err_msg=name)


def test_a_checkpoint_in_one_piece_is_restored_in_pieces(tmp_path: Path) -> None:
    names = list(WHOLE)
    tf.raw_ops.SaveV2(
        prefix=str(tmp_path / "saved"),
        tensor_names=names,
        shape_and_slices=[""] * len(names),
        tensors=list(WHOLE.values()),
    )
    values = stored((0, 255, 511), is_set=False)
    ValueFiles(values).restore(tmp_path / "saved")
    np.testing.assert_array_equal(values.read()["parameters/table"], WHOLE["parameters/table"])


def test_whatever_byte_is_wrong_no_wrong_value_is_restored(tmp_path: Path) -> None:
    path = save(stored((0, 300, 511)), tmp_path)
    values = stored(is_set=False)
    files = ValueFiles(values)
    for data in tmp_path.glob("saved.*"):
        good = data.read_bytes()
        for i in range(0, len(good), 97):
            data.write_bytes(good[:i] + bytes([good[i] ^ 0x5A]) + good[i + 1 :])
            try:
                files.restore(path)
            except tf.errors.OpError:
                continue
            for name, value in values.read().items():
                assert name == "global_step" or np.array_equal(value, WHOLE[name]), (data.name, i, name)
        data.write_bytes(good)


def test_values_that_are_not_finite_are_named_and_nothing_is_written(tmp_path: Path) -> None:
    values = stored((0, 300, 511))
    for name, wrong in (("parameters/table", np.inf), ("parameters/bias", np.nan)):
        values.write({name: np.where(np.arange(len(WHOLE[name])) == 310, wrong, WHOLE[name].T).T.astype(np.float32)})
    # Finite, though its sum is not.
    values.write({"state/half": np.full(3, 60000, np.float16)})
    with pytest.raises(NonFiniteError, match=r"^parameters/(table, parameters/bias|bias, parameters/table) are not"):
        save(values, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("slice_bytes", [1024, 1 << 30])
def test_what_is_copied_is_written_whatever_becomes_of_the_values(
    slice_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StoredShard, "slice_bytes", slice_bytes)
    values = stored((0, 300, 511))
    files = ValueFiles(values)
    for number in range(3):
        name = f"saved-{number}"
        write = files.begin_save(tmp_path / name, {"seed": np.array(3, np.int64)})
        before = values.read()
        values.write({name: value + 1 for name, value in before.items() if name.startswith("parameters/")})
        in_thread(write).result()
        reader = tf.train.load_checkpoint(str(tmp_path / name))
        for name, value in before.items():
            np.testing.assert_array_equal(reader.get_tensor(name), value, err_msg=name)
    assert {path.name.partition(".")[0] for path in tmp_path.iterdir()} == {"saved-0", "saved-1", "saved-2"}


def test_copies_take_no_memory_when_they_are_written_or_could_not_be(tmp_path: Path) -> None:
    files = ValueFiles(stored((0, 300, 511)))
    write = files.begin_save(tmp_path / "saved", {"seed": np.array(3)})
    copies = [piece.variable for piece in files._whole[0]._snapshot[0]._slices]
    assert sum(tf.size(copy.read_value()).numpy() for copy in copies) > 511 * 7
    write()
    assert not any(tf.size(copy.read_value()).numpy() for copy in copies)
    write = files.begin_save(tmp_path / "again", {"seed": np.array(3)})
    shutil.rmtree(next(path for path in tmp_path.iterdir() if path.is_dir()))
    with pytest.raises(tf.errors.OpError):
        write()
    assert not any(tf.size(copy.read_value()).numpy() for copy in copies)


def test_copies_that_are_not_finite_are_not_written(tmp_path: Path) -> None:
    values = stored((0, 300, 511))
    values.write({"parameters/bias": np.full(800, np.nan, np.float32)})
    write = ValueFiles(values).begin_save(tmp_path / "saved", {"seed": np.array(3)})
    values.write({"parameters/bias": WHOLE["parameters/bias"]})
    with pytest.raises(NonFiniteError, match=r"^parameters/bias is not finite"):
        write()
    assert not (tmp_path / "saved.index").exists()


def test_tasks_that_do_not_see_the_files_send_them_through_the_chief(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on a disk of their own that has another file under that name.
    monkeypatch.setattr(tf.io, "read_file", lambda path: tf.constant(b"other"))
    with pytest.warns(UserWarning, match=r"localhost:0 does not see .*: checkpoints travel through the chief"):
        path = save(stored((0, 300, 511)), tmp_path)
    values = stored(is_set=False)
    with pytest.warns(UserWarning, match="through the chief"):
        ValueFiles(values).restore(path)
    np.testing.assert_array_equal(values.read()["parameters/table"], WHOLE["parameters/table"])


def test_small_values_travel_in_tensors_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Wire, "max_bytes", 100)
    variables = {f"parameters/{i}": tf.Variable(np.full(10, i, np.float32)) for i in range(5)}
    whole = {name: [StoredShard.whole(variable)] for name, variable in variables.items()}
    values = NamedValues(whole, {}, are_remote=True)
    assert [tensor.shape.num_elements() for tensor in values._fuse_small()] == [20, 20, 10]
    found = values.read()
    assert found.keys() == variables.keys()
    for name, variable in variables.items():
        np.testing.assert_array_equal(found[name], variable.numpy(), err_msg=name)


@pytest.mark.parametrize("are_remote", [True, False])
def test_small_values_of_this_process_are_read_without_a_function(
    are_remote: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StoredShard, "slice_bytes", 1 << 20)
    values, function = stored(are_remote=are_remote), Mock(wraps=tf.function)
    monkeypatch.setattr(tf, "function", function)
    found = values.read()
    assert function.call_count == are_remote
    assert found.keys() == WHOLE.keys()
    for name, value in WHOLE.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape)
