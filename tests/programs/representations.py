"""Programs that learn what pictures have in common, from few labels or none."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops
from programs.data import SIZE, batches, pictures
from programs.program import Program
from programs.steps import OwnLoss, follow, update

IMAGE = (SIZE, SIZE, 3)
WIDTH = 8
QUEUE = 64


def encoder() -> keras.Sequential:
    convolutions = [layers.Conv2D(8, 3, 2, activation="relu") for _ in range(2)]
    return keras.Sequential([layers.Input(IMAGE), *convolutions, layers.Flatten(), layers.Dense(WIDTH, "relu")])


def head(units: int = WIDTH) -> keras.Sequential:
    return keras.Sequential([layers.Input((WIDTH,)), layers.Dense(WIDTH, "relu"), layers.Dense(units)])


def changes(strength: float) -> keras.Sequential:
    """Random changes of a picture that leave it what it is."""
    return keras.Sequential([layers.RandomTranslation(strength, strength), layers.RandomBrightness(strength, (0, 1))])


def rows_of_length_one(values: np.ndarray) -> None:
    np.testing.assert_allclose(np.linalg.norm(values, axis=1), 1, atol=1e-3)


class SimCLR(keras.Model):
    """Two views of a picture are more alike than those of two pictures (Chen et al., 2020); a probe reads labels."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head, self.probe = (
            encoder(),
            head(),
            keras.Sequential([layers.Input((WIDTH,)), layers.Dense(4)]),
        )
        self.views, self.little = changes(0.2), changes(0.05)

    def compile(self, of_contrast: Any, of_probe: Any) -> None:
        super().compile()
        self.of_contrast, self.of_probe = of_contrast, of_probe
        self.label_loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.contrast, self.probe_loss = keras.metrics.Mean("contrast"), keras.metrics.Mean("probe_loss")
        self.accuracy = keras.metrics.SparseCategoricalAccuracy("probe_accuracy")

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return [self.contrast, self.probe_loss, self.accuracy]

    def contrast_of(self, one: Any, other: Any) -> Any:
        likeness = ops.matmul(ops.normalize(one, axis=1), ops.transpose(ops.normalize(other, axis=1))) / 0.2
        own = ops.arange(ops.shape(one)[0])
        both = [
            keras.losses.sparse_categorical_crossentropy(own, way, True) for way in (likeness, ops.transpose(likeness))
        ]
        return ops.mean(both[0] + both[1]) / 2

    def train_step(self, data: Any) -> dict[str, Any]:
        (unlabeled,), (labeled, labels) = data
        images = ops.concatenate([unlabeled, labeled])
        first, second = self.views(images, training=True), self.views(images, training=True)
        with tf.GradientTape() as tape:
            contrast = self.contrast_of(*(self.head(self.encoder(view, training=True)) for view in (first, second)))
        learning = self.encoder.trainable_weights + self.head.trainable_weights
        self.of_contrast.apply_gradients(zip(tape.gradient(contrast, learning), learning))
        features = self.encoder(self.little(labeled, training=True), training=False)
        with tf.GradientTape() as tape:
            logits = self.probe(features, training=True)
            probe_loss = self.label_loss(labels, logits)
        update(self.of_probe, tape, probe_loss, self.probe)
        self.contrast.update_state(contrast)
        self.probe_loss.update_state(probe_loss)
        self.accuracy.update_state(labels, logits)
        return {metric.name: metric.result() for metric in self.metrics}

    def test_step(self, data: Any) -> dict[str, Any]:
        _, (labeled, labels) = data
        logits = self.probe(self.encoder(labeled, training=False), training=False)
        self.probe_loss.update_state(self.label_loss(labels, logits))
        self.accuracy.update_state(labels, logits)
        return {metric.name: metric.result() for metric in self.metrics[1:]}


def sim_clr() -> keras.Model:
    model = SimCLR()
    model.compile(keras.optimizers.Adam(0.005), keras.optimizers.Adam(0.02))
    return model


def some_labeled(batch_size: int) -> tf.data.Dataset:
    """Nested tuples: many pictures, and a few with labels."""
    images, labels = pictures()
    labeled = (images[:64], labels[:64])
    unlabeled = batches((images,), batch_size)
    return tf.data.Dataset.zip((unlabeled, batches(labeled, batch_size // 2).repeat(2)))


class NNCLR(SimCLR):
    """The other view is replaced by its nearest neighbour in a queue of earlier ones (Dwibedi et al., 2021)."""

    def __init__(self) -> None:
        super().__init__()
        start = ops.normalize(keras.random.normal((QUEUE, WIDTH), seed=1), axis=1)
        self.queue = keras.Variable(start, trainable=False, name="queue")

    def neighbour(self, vectors: Any) -> Any:
        likeness = ops.matmul(vectors, ops.transpose(self.queue))
        nearest = ops.take(self.queue, ops.argmax(likeness, axis=1), axis=0)
        return vectors + ops.stop_gradient(nearest - vectors)

    def contrast_of(self, one: Any, other: Any) -> Any:
        one, other = ops.normalize(one, axis=1), ops.normalize(other, axis=1)
        loss = super().contrast_of(self.neighbour(one), other) + super().contrast_of(self.neighbour(other), one)
        self.queue.assign(ops.concatenate([ops.stop_gradient(one), self.queue[: -ops.shape(one)[0]]]))
        return loss / 2


def nn_clr() -> keras.Model:
    model = NNCLR()
    model.compile(keras.optimizers.Adam(0.005), keras.optimizers.Adam(0.02))
    return model


class MoCo(OwnLoss):
    """Compares with keys of earlier batches, from an encoder that follows slowly (He et al., 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.slow = encoder(), encoder()
        self.slow.set_weights(self.encoder.get_weights())
        self.changes = changes(0.1)
        start = ops.normalize(keras.random.normal((QUEUE, WIDTH), seed=1), axis=1)
        self.queue = self.add_weight(
            shape=(QUEUE, WIDTH), initializer=lambda shape, dtype=None: start, trainable=False, name="queue"
        )
        self.place = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False, name="place")

    def train_step(self, images: Any) -> dict[str, Any]:
        size = ops.shape(images)[0]
        keys = ops.normalize(self.slow(self.changes(images, training=True)) + 1e-3, axis=1)
        with tf.GradientTape() as tape:
            queries = ops.normalize(self.encoder(self.changes(images, training=True), training=True) + 1e-3, axis=1)
            own = ops.sum(queries * keys, axis=1, keepdims=True)
            logits = ops.concatenate([own, ops.matmul(queries, ops.transpose(self.queue))], axis=1) / 0.2
            loss = ops.mean(keras.losses.sparse_categorical_crossentropy(ops.zeros((size,)), logits, True))
        update(self.optimizer, tape, loss, self.encoder)
        follow(self.slow, self.encoder)
        rows = (self.place + ops.arange(size)) % QUEUE
        self.queue.assign(ops.scatter_update(self.queue, rows[:, None], keys))
        self.place.assign((self.place + size) % QUEUE)
        return self.show(loss)


def mo_co() -> keras.Model:
    model = MoCo()
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9))
    return model


def queue_is_whole(model: keras.Model) -> None:
    rows_of_length_one(model.queue.numpy())
    assert 0 <= int(model.place.numpy()) < QUEUE


class SimSiam(OwnLoss):
    """Predicts one view from the other, with no negatives (Chen and He, 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.predictor = encoder(), head()
        self.norm = layers.BatchNormalization()

    def train_step(self, data: Any) -> dict[str, Any]:
        one, other = data
        with tf.GradientTape() as tape:
            vectors = [self.norm(self.encoder(view, training=True), training=True) for view in (one, other)]
            loss = sum(
                keras.losses.cosine_similarity(ops.stop_gradient(vectors[1 - i]), self.predictor(vectors[i])) / 2
                for i in (0, 1)
            )
        weights = self.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return self.show(loss)


def sim_siam() -> keras.Model:
    model = SimSiam()
    model.norm.build((None, WIDTH))
    model.compile(keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.05, 60), momentum=0.6))
    return model


def two_views(batch_size: int) -> tf.data.Dataset:
    images = pictures()[0]
    rng = np.random.default_rng(5)
    views = tuple(images + rng.normal(0, 0.1, images.shape).astype(np.float32) for _ in range(2))
    return batches(views, batch_size)


class Siamese(OwnLoss):
    """A picture is nearer to one of its kind than to another (Schroff et al., 2015); half of the network is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = encoder()
        self.encoder.layers[0].trainable = False

    def call(self, triple: Any) -> Any:
        anchor, like, unlike = (self.encoder(image) for image in triple)
        return ops.sum((anchor - like) ** 2, -1), ops.sum((anchor - unlike) ** 2, -1)

    def margin(self, triple: Any) -> Any:
        near, far = self(triple)
        return ops.maximum(near - far + 0.5, 0.0)

    def train_step(self, triple: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = self.margin(triple)
        update(self.optimizer, tape, loss, self.encoder)
        return self.show(loss)

    def test_step(self, triple: Any) -> dict[str, Any]:
        return self.show(self.margin(triple))


def siamese() -> keras.Model:
    model = Siamese()
    model.compile(keras.optimizers.Adam(1e-4), weighted_metrics=[])
    return model


def triples(batch_size: int) -> tf.data.Dataset:
    images, labels = pictures()
    rng = np.random.default_rng(6)
    like = [rng.choice(np.flatnonzero(labels == label)) for label in labels]
    unlike = [rng.choice(np.flatnonzero(labels != label)) for label in labels]
    return batches((images, images[like], images[unlike]), batch_size)


class Similar(keras.Model):
    """Finds to each anchor of a batch its positive; the elements of the data are dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = encoder()

    def train_step(self, pair: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            anchors, positives = (
                ops.normalize(self.encoder(pair[name], training=True) + 1e-3, axis=1) for name in ("anchor", "positive")
            )
            likeness = ops.einsum("ae,pe->ap", anchors, positives) / 0.2
            loss = self.compute_loss(y=ops.arange(ops.shape(anchors)[0]), y_pred=likeness)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        for metric in self.metrics:
            metric.update_state(loss)
        return {metric.name: metric.result() for metric in self.metrics}


def similar() -> keras.Model:
    model = Similar()
    model.compile(keras.optimizers.Adam(1e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def dicts(batch_size: int) -> tf.data.Dataset:
    return two_views(batch_size).map(lambda one, other: {"anchor": one, "positive": other})


class Distiller(keras.Model):
    """A small network learns labels, and the opinion of a large one about them (Hinton et al., 2015)."""

    def __init__(self, teacher: keras.Model, student: keras.Model) -> None:
        super().__init__()
        self.teacher, self.student = teacher, student

    def compile(self, of_opinion: Any, share: float, **options: Any) -> None:
        super().compile(**options)
        self.of_opinion, self.share = of_opinion, share

    def call(self, images: Any) -> Any:
        return self.student(images)

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        of_labels = super().compute_loss(x, y, y_pred, sample_weight, training)
        soft = [ops.softmax(logits / 3) for logits in (self.teacher(x, training=False), y_pred)]
        return (1 - self.share) * of_labels + self.share * 9 * self.of_opinion(*soft)


def distiller() -> keras.Model:
    teacher, student = (keras.Sequential([encoder(), layers.Dense(4)]) for _ in range(2))
    of_labels = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    teacher.compile(keras.optimizers.Adam(0.01), of_labels)
    teacher.fit(*pictures(), epochs=2, shuffle=False, verbose=0)
    teacher.trainable = False
    model = Distiller(teacher, student)
    model.compile(
        keras.losses.KLDivergence(), 0.8, optimizer=keras.optimizers.Adam(0.005), loss=of_labels, metrics=["accuracy"]
    )
    return model


PROGRAMS = [
    Program("SimCLR", sim_clr, some_labeled, draws=True, shows="contrast", validates=True, epochs=5, compares=True),
    Program(
        "NNCLR",
        nn_clr,
        some_labeled,
        draws=True,
        shows="contrast",
        near=1.0,
        epochs=5,
        compares=True,
        check=lambda model: rows_of_length_one(model.queue.numpy()),
    ),
    Program(
        "MoCo: a queue and a slow encoder",
        mo_co,
        lambda size: batches(pictures()[0], size),
        True,
        near=1.0,
        check=queue_is_whole,
    ),
    Program("SimSiam", sim_siam, two_views),
    Program("siamese network, triplet loss", siamese, triples, validates=True),
    Program("metric learning, dicts of pictures", similar, dicts, compares=True),
    Program("knowledge distillation", distiller, lambda size: pictures()),
]
