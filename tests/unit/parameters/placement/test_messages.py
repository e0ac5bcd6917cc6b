"""Tensors that are packed for the way between tasks."""

import numpy as np
import pytest
import tensorflow as tf

from kdist.parameters.placement.messages import Wire, cut, fuse_by, fuse_rows, unfuse_rows


def rows(indices: list[int], num_columns: int, dtype: str) -> tf.IndexedSlices:
    values = np.random.default_rng(len(indices)).random([len(indices), num_columns])
    return tf.IndexedSlices(tf.constant(values, dtype), tf.constant(indices, tf.int64))


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("in_graph", [False, True])
def test_rows_of_tables_and_dense_tensors_travel_as_one(dtype: str, in_graph: bool) -> None:
    # Indices past 32 bits, and such whose bits are a NaN in any of the types.
    sent = {
        "table": rows([3, 2**40 + 1, -1, 2**63 - 1], 5, dtype),
        "dense": tf.constant([[1.0, 2.0], [np.nan, -0.0]], dtype),
        "untouched": rows([], 3, dtype),
        "bias": tf.constant(7.0, dtype),
        "pairs": tf.IndexedSlices(tf.ones([2, 2, 2], dtype), tf.constant([0, 1], tf.int32)),
    }

    def travel(sent: dict[str, tf.Tensor | tf.IndexedSlices]) -> dict[str, tf.Tensor | tf.IndexedSlices]:
        ((tensor, layout),) = fuse_by(sent, lambda key: "", on_source=False)
        assert tensor.dtype == dtype
        return layout.split(tensor)

    arrived = (tf.function(travel, autograph=False) if in_graph else travel)(sent)
    assert arrived.keys() == sent.keys()
    for key, tensor in sent.items():
        if isinstance(tensor, tf.IndexedSlices):
            np.testing.assert_array_equal(arrived[key].indices, tensor.indices, key)
        values, expected = (getattr(t, "values", t) for t in (arrived[key], tensor))
        np.testing.assert_array_equal(tf.cast(values, tf.float64), tf.cast(expected, tf.float64), key)
        assert values.shape == expected.shape


def test_rows_travel_rounded_and_their_indices_do_not() -> None:
    sent = {"table": rows([1, 2**33 + 3], 4, "float32")}
    ((tensor, layout),) = fuse_by(sent, lambda key: "", on_source=False, wire=Wire(tf.bfloat16))
    arrived = layout.split(tensor)["table"]
    assert tensor.dtype == tf.bfloat16
    assert arrived.dtype == tf.float32
    np.testing.assert_array_equal(arrived.indices, sent["table"].indices)
    np.testing.assert_array_equal(arrived.values, tf.cast(tf.cast(sent["table"].values, tf.bfloat16), tf.float32))


def test_tensors_travel_by_device_and_dtype() -> None:
    sent = {"a": tf.zeros([2]), "b": tf.zeros([3], tf.int32), "c": tf.zeros([4]), "d": rows([1], 2, "float32")}
    fused = fuse_by(sent, {"a": "x", "b": "x", "c": "x", "d": "y"}.__getitem__, on_source=False)
    assert [set(layout.split(tensor)) for tensor, layout in fused] == [{"a", "c"}, {"b"}, {"d"}]


def test_what_is_too_large_together_travels_in_several_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Wire, "max_bytes", 40)
    sent = {name: tf.range(size, dtype=tf.float32) for name, size in {"a": 5, "b": 4, "c": 30, "d": 1}.items()}
    fused = fuse_by(sent, lambda key: "", on_source=False)
    assert [list(layout.shapes) for _, layout in fused] == [["a", "b"], ["c"], ["d"]]
    arrived = {key: value for tensor, layout in fused for key, value in layout.split(tensor).items()}
    for name, value in sent.items():
        np.testing.assert_array_equal(arrived[name], value)


def test_groups_hold_as_much_as_fits() -> None:
    half = Wire.max_bytes // 2
    assert cut([half, half, 1, 3 * half, 1], lambda size: size) == [[half, half], [1], [3 * half], [1]]
    assert cut([], lambda size: size) == []


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_rows_of_tables_that_are_exchanged_as_one_stay_in_their_tables(dtype: str) -> None:
    # A wrong id may be negative, or beyond the table.
    indices = [[3, 3, 0], [], [-1, 7, 2**33], [0]], [[], [5, -2], [1], [0, 2]]
    of_one, of_other = ([rows(numbers, 5, dtype) for numbers in of_replica] for of_replica in indices)
    fused = [fuse_rows(tables) for tables in (of_one, of_other)]
    gathered = tf.IndexedSlices(*(tf.concat([getattr(f, part) for f in fused], 0) for part in ("values", "indices")))
    for i, table in enumerate(unfuse_rows(gathered, [tf.int64, tf.int32, tf.int64, tf.int32])):
        assert table.indices.dtype == (tf.int32 if i % 2 else tf.int64)
        assert table.values.shape[1:] == [5]
        np.testing.assert_array_equal(table.indices, [*of_one[i].indices.numpy(), *of_other[i].indices.numpy()])
        np.testing.assert_array_equal(table.values, np.concatenate([of_one[i].values, of_other[i].values]))


def test_rows_of_one_table_are_exchanged_as_they_are() -> None:
    table = rows([2, 5], 3, "float32")
    assert fuse_rows([table]) is table
    assert unfuse_rows(table, [tf.int64]) == [table]
