"""Models that begin with the weights of a checkpoint of TF1, which TF1's own Saver has written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import kdist
from kdist.errors import CheckpointError, ConfigError


def saved(folder: Path, partitioned: bool = False, scope: str = "", **shapes: tuple[int, ...]) -> str:
    """A checkpoint with the variables `a__b` as `a/b`, Adam's slots and step 7."""
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session, v1.variable_scope(scope):
        partitioner = v1.fixed_size_partitioner(2) if partitioned else None
        variables = [
            v1.get_variable(name.replace("__", "/"), shape, partitioner=partitioner, use_resource=True)
            for name, shape in shapes.items()
        ]
        step = v1.train.get_or_create_global_step()
        loss = tf.add_n([tf.reduce_sum(tf.convert_to_tensor(v)) for v in variables])
        train = v1.train.AdamOptimizer().minimize(loss, step)
        session.run(v1.global_variables_initializer())
        for _ in range(7):
            session.run(train)
        return v1.train.Saver().save(session, str(folder / "model.ckpt"), global_step=step)


def mlp() -> keras.Model:
    layers = [keras.layers.Dense(3, name="hidden"), keras.layers.Dense(2, name="logits")]
    return keras.Sequential([keras.layers.Input((4,)), *layers], name="mlp")


SHAPES: dict[str, Any] = {
    "hidden__kernel": (4, 3), "hidden__bias": (3,), "logits__kernel": (3, 2), "logits__bias": (2,)
}  # fmt: skip


@pytest.mark.parametrize("scope", ["", "tower"])
@pytest.mark.parametrize("partitioned", [False, True])
def test_weights_are_found_by_their_names(tmp_path: Path, scope: str, partitioned: bool) -> None:
    path = saved(tmp_path, partitioned, scope, **SHAPES)
    model = mlp()
    # The folder will do: its newest checkpoint counts.
    report = kdist.load_tf1_checkpoint(model, tmp_path)
    prefix = f"{scope}/" if scope else ""
    paths = ["hidden/kernel", "hidden/bias", "logits/kernel", "logits/bias"]
    assert report.names == {weight: f"{prefix}{weight}" for weight in paths}
    assert (report.missing, report.global_step) == ((), None if scope else 7)
    assert any(name.endswith("/Adam") for name in report.unused)
    for weight, name in zip(model.weights, report.names.values()):
        np.testing.assert_array_equal(weight.numpy(), tf.train.load_variable(path, name))
    assert f"{tmp_path}{'' if scope else ' of step 7'}: 4 weights loaded" in str(report)


def test_names_of_other_libraries_are_found_by_role_and_shape(tmp_path: Path) -> None:
    saved(tmp_path, layer1__weights=(4, 3), layer1__biases=(3,), out__weights=(3, 2), other=(5,))
    model = mlp()
    before = model.weights[3].numpy()
    report = kdist.load_tf1_checkpoint(model, tmp_path)
    assert report.names == {
        "hidden/kernel": "layer1/weights", "hidden/bias": "layer1/biases", "logits/kernel": "out/weights"
    }  # fmt: skip
    assert report.missing == ("logits/bias",)
    assert "other" in report.unused
    np.testing.assert_array_equal(model.weights[3].numpy(), before)
    assert "logits/bias    not in the checkpoint, kept" in str(report)


def test_what_is_ambiguous_is_left_to_the_map(tmp_path: Path) -> None:
    saved(tmp_path, a__weights=(4, 4), b__weights=(4, 4))
    layers = [keras.layers.Dense(4, use_bias=False, name=name) for name in ("first", "second")]
    model = keras.Sequential([keras.layers.Input((4,)), *layers])
    with pytest.raises(CheckpointError, match=r"has none of the weights of model .*give name_map"):
        kdist.load_tf1_checkpoint(model, tmp_path)
    report = kdist.load_tf1_checkpoint(model, tmp_path, {"first/kernel": "b/weights"})
    # Then only one is left.
    assert report.names == {"first/kernel": "b/weights", "second/kernel": "a/weights"}
    names = {"first": "a", "second": "b"}
    report = kdist.load_tf1_checkpoint(model, tmp_path, lambda path: f"{names[path.split('/')[0]]}/weights")
    assert report.names == {"first/kernel": "a/weights", "second/kernel": "b/weights"}


@pytest.mark.parametrize(
    ("name_map", "message"),
    [
        ({"hiden/kernel": "hidden/kernel"}, r"name_map\['hiden/kernel'\]: the model has no such weight; it has hidden"),
        ({"hidden/kernel": "kernel"}, r"name_map\['hidden/kernel'\]='kernel': not in the checkpoint, which has "),
        ({"hidden/kernel": "hidden/bias"}, r"has shape \(3,\), the weight \(4, 3\)"),
    ],
)
def test_a_wrong_map_changes_nothing(tmp_path: Path, name_map: dict[str, str], message: str) -> None:
    saved(tmp_path, **SHAPES)
    model = mlp()
    before = [weight.numpy() for weight in model.weights]
    with pytest.raises(ConfigError, match=message):
        kdist.load_tf1_checkpoint(model, tmp_path, name_map)
    for weight, values in zip(model.weights, before):
        np.testing.assert_array_equal(weight.numpy(), values)


def test_a_folder_without_a_checkpoint_and_a_model_without_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint of TF1 can be read"):
        kdist.load_tf1_checkpoint(mlp(), tmp_path)
    with pytest.raises(ConfigError, match="has no weights yet; build it"):
        kdist.load_tf1_checkpoint(keras.Sequential([keras.layers.Dense(2)]), tmp_path)


@pytest.mark.cluster
def test_training_on_servers_begins_with_what_the_function_of_the_model_loads(tmp_path: Path, run_dir: Path) -> None:
    path = saved(tmp_path, **SHAPES)

    def build() -> keras.Model:
        model = mlp()
        kdist.load_tf1_checkpoint(model, path)
        model.compile(keras.optimizers.SGD(0.0), "mse")
        return model

    trainer = kdist.Trainer(build, cluster="2ps1w", run_dir=run_dir)
    trainer.fit(np.ones((8, 4)), np.ones((8, 2)), batch_size=4, steps=2, verbose=0)
    for weight, name in zip(trainer.model.weights, SHAPES):
        np.testing.assert_array_equal(weight.numpy(), tf.train.load_variable(path, name.replace("__", "/")))
