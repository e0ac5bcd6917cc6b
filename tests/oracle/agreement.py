"""One model, some data and several optimizers with which all strategies must come to the same parameters.

Run as a program it trains in a process that a strategy needs for itself, as `mirrored` over logical CPU devices, or as
one worker of `multi_worker_mirrored` (with TF_CONFIG), and saves what it came to.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

EXAMPLES, BATCH, STEPS = 320, 64, 30

#: The model has a `train_step` of its own; it has several optimizers.
OWN_STEP, SEVERAL = "own_train_step", "several_optimizers"
#: Each variable has one of several optimizers.
MULTI = "multi_optimizer"
#: The scale of the loss is dynamic, and the gradients of one replica overflow in one of the steps.
SCALED = "loss_scaled"
#: Each example continues where that of the batch before has ended.
STATEFUL = "stateful"
#: The loss of a replica is divided by what another replica's is not, or by nothing.
REDUCED = ("masked", "weighted", "summed")


def optimizers() -> dict[str, Callable[[], Any]]:
    from keras import optimizers as o

    decay = o.schedules.ExponentialDecay(0.1, decay_steps=5, decay_rate=0.8)
    return {
        "sgd": lambda: o.SGD(decay),
        "momentum": lambda: o.SGD(decay, momentum=0.9, use_ema=True, ema_momentum=0.8),
        "adam": lambda: o.Adam(0.01, global_clipnorm=0.5),
        "adagrad": lambda: o.Adagrad(0.1, clipnorm=0.05),
        "rmsprop": lambda: o.RMSprop(0.01, clipvalue=0.01),
        "accumulating": lambda: o.SGD(decay, gradient_accumulation_steps=2, clipnorm=0.05),
        "ftrl": lambda: o.Ftrl(0.1),
        "adamw": lambda: o.AdamW(0.01, weight_decay=0.1),
        OWN_STEP: lambda: o.Adam(0.01),
        SEVERAL: lambda: o.Adam(0.01, clipnorm=0.05),
        MULTI: multi_optimizer,
        STATEFUL: lambda: o.Adam(0.01),
        SCALED: lambda: o.LossScaleOptimizer(o.Adam(decay, clipvalue=0.01), 1024.0, dynamic_growth_steps=2),
        **dict.fromkeys(REDUCED, lambda: o.SGD(0.002, momentum=0.9)),
    }


def multi_optimizer() -> Any:
    from keras import optimizers as o

    of_tables, of_others = o.SGD(0.1, momentum=0.9), o.Adam(0.01, clipnorm=0.05)
    return o.MultiOptimizer(lambda variable: of_tables if "embeddings" in variable.path else of_others)


def data() -> tuple[dict[str, np.ndarray], np.ndarray]:
    rng = np.random.default_rng(5)
    numbers = rng.normal(size=(EXAMPLES, 6)).astype(np.float32)
    ids = rng.integers(0, 40, (EXAMPLES, 3)).astype(np.int32)
    return {"numbers": numbers, "ids": ids}, ((numbers.sum(1) > 0) + ids[:, 0] % 2).astype(np.int64)


def build(optimizer: str, batch_size: int) -> Any:
    """Dense layers with L2, Keras's embedding and kdist's; the same initial values each time.

    Args:
        batch_size: of a replica; only stateful layers need to know it.
    """
    import keras
    from keras import layers

    from kdist.layers import Embedding

    keras.utils.set_random_seed(11)
    numbers, ids = layers.Input((6,), name="numbers"), layers.Input((3,), dtype="int32", name="ids")
    tables = [layers.Embedding(50, 4), layers.Embedding(40, 4), Embedding(50, 3)]
    parts = [numbers, *(layers.Flatten()(table(ids)) for table in tables)]
    hidden = layers.Dense(8, activation="tanh", kernel_regularizer="l2")(layers.Concatenate()(parts))
    if optimizer in REDUCED:
        return reduced(optimizer, numbers, ids)
    if optimizer == STATEFUL:
        sizes = {"batch_size": batch_size}
        numbers, ids = layers.Input((6,), name="numbers", **sizes), layers.Input((3,), name="ids", **sizes)
        steps = layers.LSTM(5, stateful=True, return_sequences=True)(layers.Reshape((3, 2))(numbers))
        hidden = layers.Bidirectional(layers.GRU(4, stateful=True))(steps)
    kind = {OWN_STEP: own_step_model, SEVERAL: several_optimizers_model}.get(optimizer, lambda: keras.Model)()
    model = kind({"numbers": numbers, "ids": ids}, layers.Dense(3, activation="softmax")(hidden))
    model.compile(optimizers()[optimizer](), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def reduced(how: str, numbers: Any, ids: Any) -> Any:
    """A label for each id; masked ids have none, and the first replica masks other ids than the second one."""
    import keras
    from keras import layers

    vectors = layers.Add()([layers.Embedding(rows, 4, mask_zero=how == "masked")(ids) for rows in (50, 40)])
    # Layers that keep the mask.
    hidden = layers.LSTM(5, return_sequences=True)(vectors)
    model = keras.Model({"numbers": numbers, "ids": ids}, layers.Dense(3, activation="softmax")(hidden))
    reduction = {"weighted": "mean_with_sample_weight", "summed": "sum"}.get(how, "sum_over_batch_size")
    loss = keras.losses.SparseCategoricalCrossentropy(reduction=reduction)
    model.compile(optimizers()[how](), loss, weighted_metrics=[])
    return model


def own_step_model() -> type[Any]:
    import keras
    import tensorflow as tf

    class OwnStep(keras.Model):
        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            with tf.GradientTape() as tape:
                y_pred = self(x, training=True)
                loss = self.compute_loss(x, y, y_pred)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
            return {**self.compute_metrics(x, y, y_pred), "own_loss": loss}

    return OwnStep


def several_optimizers_model() -> type[Any]:
    import keras
    import tensorflow as tf

    class SeveralOptimizers(keras.Model):
        """Updates the head, then the rest with another optimizer, and shows a weight as it is then."""

        def compile(self, *arguments: Any, **options: Any) -> None:
            super().compile(*arguments, **options)
            self.other = keras.optimizers.SGD(0.1, global_clipnorm=0.5)

        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            head = self.layers[-1].trainable_variables
            rest = [v for v in self.trainable_variables if all(v is not own for own in head)]
            for optimizer, variables in ((self.optimizer, head), (self.other, rest), (self.optimizer, head)):
                with tf.GradientTape() as tape:
                    loss = self.compute_loss(x, y, self(x, training=True))
                optimizer.apply(tape.gradient(loss, variables), variables)
            return {"loss": loss, "norm": keras.ops.sum(head[0] ** 2)}

    return SeveralOptimizers


def train(optimizer: str, run_dir: Path, cluster: str, num_replicas: int, **options: Any) -> list[np.ndarray]:
    """The parameters after STEPS steps of BATCH examples, shared out over replicas; unshuffled."""
    import kdist

    x, y = data()
    weights = None
    if optimizer == SCALED:
        weights = np.where(np.arange(EXAMPLES) == BATCH + 1, 3e37, 1.0)
    if optimizer in REDUCED:
        y = np.stack([y, x["ids"][:, 1] % 3, x["ids"][:, 2] % 2], axis=1)
        x["ids"] = x["ids"] // 20
        # Shared out, no two replicas have the same sum of weights in a step.
        weights = np.where(np.arange(EXAMPLES) % 5 < 2, 1.0, 0.2)[:, None] if optimizer == "weighted" else None
    batch_size = BATCH // num_replicas
    trainer = kdist.Trainer(lambda: build(optimizer, batch_size), cluster=cluster, run_dir=run_dir, **options)
    trainer.fit(x, y, sample_weight=weights, batch_size=batch_size, steps=STEPS, shuffle=False, verbose=0)
    return trainer.model.get_weights()


def assert_same(ours: list[np.ndarray], theirs: list[np.ndarray]) -> None:
    """Equal to 1e-5, relative to each variable."""
    assert len(ours) == len(theirs)
    for mine, others in zip(ours, theirs):
        assert np.linalg.norm(mine - others) <= 1e-5 * np.linalg.norm(others)


def main(kind: str, folder: Path, chosen: Sequence[str]) -> None:
    if kind == "mirrored":
        from kdist.strategies.mirrored import make_logical_cpus

        make_logical_cpus(2)
        cluster, options = "local", {"strategy": "mirrored", "devices": 2}
    else:
        cluster, options = "tf_config", {}
        from kdist.trainer import Trainer

        # TensorFlow has to meet the other worker before it runs its first op.
        Trainer(lambda: build("sgd"), cluster=cluster)
    for optimizer in chosen:
        weights = train(optimizer, folder / f"run-{optimizer}", cluster, 2, **options)
        np.savez(folder / f"{kind}-{optimizer}.npz", *weights)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
