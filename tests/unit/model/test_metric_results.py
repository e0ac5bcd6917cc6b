"""Results of metrics: those that Keras computes, whether kdist asks Keras or computes means itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import pytest

from kdist.model.metrics import MetricReader


class Root(keras.metrics.Mean):
    """A mean with a result of its own."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        super().update_state(keras.ops.square(y_true - y_pred), sample_weight)

    def result(self) -> Any:
        return keras.ops.sqrt(super().result())


class Lasting(keras.metrics.MeanAbsoluteError):
    """A mean over all epochs."""

    def reset_state(self) -> None:
        pass


class Doubled(keras.Model):
    """A model that reports twice the values of its metrics."""

    def get_metrics_result(self) -> dict[str, Any]:
        return {f"twice_{name}": 2 * value for name, value in super().get_metrics_result().items()}


def trained(model_class: type[keras.Model] = keras.Model, **compiled: Any) -> keras.Model:
    """A model with two outputs whose metrics have counted some examples."""
    inputs = keras.Input((3,))
    outputs = {name: keras.layers.Dense(1, name=name)(inputs) for name in ("one", "two")}
    model = model_class(inputs, outputs)
    model.compile("sgd", {"one": "mse", "two": "mae"}, **compiled)
    x = np.random.default_rng(0).random((10, 3), np.float32)
    model.train_on_batch(x, {"one": x[:, :1], "two": x[:, 1:2]})
    return model


def read(model: keras.Model) -> tuple[MetricReader, list[np.ndarray]]:
    """A reader, and values of its variables as several steps add them up."""
    reader = MetricReader(model)
    return reader, [np.array(0.1 + index / 3) for index in range(len(reader.variables))]


def by_keras(reader: MetricReader, values: Sequence[np.ndarray]) -> dict[str, float]:
    """Keras's own results for these values."""
    for variable, value in zip(reader.variables, values):
        variable.assign(value)
    return {name: float(result) for name, result in reader.model.get_metrics_result().items()}


@pytest.mark.parametrize(
    ("model_class", "compiled"),
    [
        (keras.Model, {}),
        (keras.Model, {"metrics": {"one": ["mae", "mape"], "two": "mse"}, "weighted_metrics": {"two": ["mae"]}}),
        (keras.Model, {"metrics": {"one": ["mae", Root()]}}),
        (keras.Model, {"metrics": {"one": [keras.metrics.RootMeanSquaredError()]}}),
        (Doubled, {"metrics": {"one": ["mae"]}}),
    ],
    ids=["losses", "means", "a result of its own", "another metric of Keras", "a model's own results"],
)
def test_results_are_those_of_keras(model_class: type[keras.Model], compiled: dict[str, Any]) -> None:
    reader, values = read(trained(model_class, **compiled))
    assert reader.results(values) == by_keras(reader, values)
    for extreme in (0.0, 1e-50, 1e39):
        same = [np.array(extreme) for _ in values]
        np.testing.assert_equal(reader.results(same), by_keras(reader, same))


def test_means_need_no_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, values = read(trained(metrics={"one": ["mae"]}))
    expected = reader.results(values)
    # In it, Keras computes.
    monkeypatch.setattr(MetricReader, "scope", None)
    assert reader.results(values) == expected
    assert reader.reset(values) == tuple(reader.initial_values)


def test_an_epoch_begins_with_what_a_metric_keeps() -> None:
    reader, values = read(trained(metrics={"one": [Lasting("kept"), "mse"]}))
    kept = [v.path.startswith("kept") or "/kept" in v.path for v in reader.variables]
    after = reader.reset(values)
    assert any(kept)
    assert [float(value) for value in after] == [
        pytest.approx(float(value)) if is_kept else 0.0 for value, is_kept in zip(values, kept)
    ]
