"""The histograms that are counted in pieces are those that TensorBoard counts of the whole."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from tensorboard.plugins.histogram.summary_v2 import histogram_pb

from kdist.parameters.placement.blocks import StoredShard
from kdist.parameters.values.histograms import histograms_of
from kdist.parameters.values.named_values import NamedValues

VALUES = {
    "parameters/table": np.random.default_rng(1).normal(size=(500, 7)).astype(np.float32),
    "parameters/half": np.arange(100, dtype=np.float16),
    "parameters/double": np.linspace(0, 1, 57),
    "parameters/scalar": np.array(3.0, np.float32),
    "parameters/equal": np.full(9, 2.0, np.float32),
}


def test_pieces_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StoredShard, "slice_bytes", 1024)
    parts = {name: [StoredShard.whole(tf.Variable(value))] for name, value in VALUES.items()}
    table = VALUES["parameters/table"]
    parts["parameters/table"] = [
        StoredShard.whole(tf.Variable(table[:123])),
        StoredShard.whole(tf.Variable(table[123:])),
    ]
    parts["parameters/number"] = [StoredShard.whole(tf.Variable(np.arange(5)))]
    parts["state/mean"] = [StoredShard.whole(tf.Variable(np.ones(5, np.float32)))]
    found = histograms_of(NamedValues(parts, {}))()
    assert found.keys() == VALUES.keys()
    for name, value in VALUES.items():
        expected = tf.make_ndarray(histogram_pb("x", value).value[0].tensor)
        assert found[name][:, 2].sum() == value.size
        np.testing.assert_allclose(found[name][:, :2], expected[:, :2], rtol=1e-6, err_msg=name)
        # An element at the edge of a bucket may be on either side of it.
        np.testing.assert_allclose(found[name][:, 2], expected[:, 2], atol=2, err_msg=name)


def test_what_is_not_finite_is_left_out() -> None:
    wrong = {"parameters/nan": [0.0, np.nan], "parameters/inf": [0.0, np.inf], "parameters/good": [0.0, 1.0]}
    parts = {name: [StoredShard.whole(tf.Variable(np.array(value, np.float32)))] for name, value in wrong.items()}
    assert histograms_of(NamedValues(parts, {}))().keys() == {"parameters/good"}
