"""More programs in the form of those on keras.io, on small data of their shapes: vision, text, tables, time series.

Only what Keras would download, pretrained weights and data sets, is drawn at random instead.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

EXAMPLES = 192
_random = np.random.default_rng(8)


def pictures(size: int = 32, classes: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """The class is the brightest quarter: float32 `(examples, size, size, 3)` of 0 to 255, and int64 labels."""
    labels = _random.integers(0, classes, EXAMPLES)
    images = _random.uniform(0, 100, (EXAMPLES, size, size, 3)).astype(np.float32)
    half = size // 2
    for image, label in zip(images, labels):
        row, column = half * (label // 2), half * (label % 2)
        image[row : row + half, column : column + half] += 120
    return images, labels


# Image similarity with a Siamese network and a triplet loss ----------------------------------------------------------


class DistanceLayer(layers.Layer):
    """The distances between an anchor and a positive, and between the anchor and a negative embedding."""

    def call(self, anchor: Any, positive: Any, negative: Any) -> tuple[Any, Any]:
        return ops.sum(ops.square(anchor - positive), -1), ops.sum(ops.square(anchor - negative), -1)


class SiameseModel(keras.Model):
    """Its trainable weights are those of the network that it holds, of which only the last layers are trained."""

    def __init__(self, siamese_network: keras.Model, margin: float = 0.5) -> None:
        super().__init__()
        self.siamese_network, self.margin = siamese_network, margin
        self.loss_tracker = keras.metrics.Mean(name="loss")

    def call(self, inputs: Any) -> Any:
        return self.siamese_network(inputs)

    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = self._compute_loss(data)
        gradients = tape.gradient(loss, self.siamese_network.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.siamese_network.trainable_weights))
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}

    def test_step(self, data: Any) -> dict[str, Any]:
        self.loss_tracker.update_state(self._compute_loss(data))
        return {"loss": self.loss_tracker.result()}

    def _compute_loss(self, data: Any) -> Any:
        to_positive, to_negative = self.siamese_network(data)
        return tf.maximum(to_positive - to_negative + self.margin, 0.0)

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return [self.loss_tracker]


def siamese() -> keras.Model:
    shape = (32, 32, 3)
    base = keras.applications.ResNet50(weights=None, input_shape=shape, include_top=False)
    dense = layers.BatchNormalization()(layers.Dense(32, activation="relu")(layers.Flatten()(base.output)))
    embedding = keras.Model(base.input, layers.Dense(16)(dense), name="embedding")
    trainable = False
    for layer in base.layers:
        trainable = trainable or layer.name == "conv5_block3_1_conv"
        layer.trainable = trainable
    preprocess = keras.applications.resnet.preprocess_input
    inputs = [layers.Input(shape, name=name) for name in ("anchor", "positive", "negative")]
    distances = DistanceLayer()(*(embedding(preprocess(each)) for each in inputs))
    model = SiameseModel(keras.Model(inputs, distances))
    model.compile(optimizer=keras.optimizers.Adam(0.001), weighted_metrics=[])
    return model


def triplets() -> tf.data.Dataset:
    images, labels = pictures()
    same = np.array([_random.choice(np.flatnonzero(labels == label)) for label in labels])
    others = np.array([_random.choice(np.flatnonzero(labels != label)) for label in labels])
    parts = (tf.data.Dataset.from_tensor_slices(part) for part in (images, images[same], images[others]))
    return tf.data.Dataset.zip(tuple(parts)).batch(16, drop_remainder=False).prefetch(8)


# Vision transformer --------------------------------------------------------------------------------------------------


class Patches(layers.Layer):
    def __init__(self, patch_size: int) -> None:
        super().__init__()
        self.patch_size = patch_size

    def call(self, images: Any) -> Any:
        shape, size = ops.shape(images), self.patch_size
        patches = ops.image.extract_patches(images, size=size)
        return ops.reshape(patches, (shape[0], (shape[1] // size) * (shape[2] // size), size * size * shape[3]))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "patch_size": self.patch_size}


class PatchEncoder(layers.Layer):
    def __init__(self, num_patches: int, projection_dim: int) -> None:
        super().__init__()
        self.num_patches = num_patches
        self.projection = layers.Dense(units=projection_dim)
        self.position_embedding = layers.Embedding(input_dim=num_patches, output_dim=projection_dim)

    def call(self, patch: Any) -> Any:
        positions = ops.expand_dims(ops.arange(0, self.num_patches, 1), 0)
        return self.projection(patch) + self.position_embedding(positions)


def vision_transformer() -> keras.Model:
    augmentation = keras.Sequential(
        [
            layers.Normalization(),
            layers.Resizing(24, 24),
            layers.RandomFlip("vertical"),
            layers.RandomZoom(height_factor=0.1, width_factor=0.1),
        ],
        name="data_augmentation",
    )
    augmentation.layers[0].adapt(pictures()[0])
    inputs = layers.Input((32, 32, 3))
    encoded = PatchEncoder(16, 16)(Patches(6)(augmentation(inputs)))
    for _ in range(2):
        x1 = layers.LayerNormalization(epsilon=1e-6)(encoded)
        x2 = layers.Add()([layers.MultiHeadAttention(num_heads=2, key_dim=16, dropout=0.1)(x1, x1), encoded])
        x3 = layers.LayerNormalization(epsilon=1e-6)(x2)
        for units in (32, 16):
            x3 = layers.Dropout(0.1)(layers.Dense(units, activation=keras.activations.gelu)(x3))
        encoded = layers.Add()([x3, x2])
    features = layers.Flatten()(layers.LayerNormalization(epsilon=1e-6)(encoded))
    model = keras.Model(inputs, layers.Dense(4)(layers.Dense(32, activation=keras.activations.gelu)(features)))
    model.compile(
        optimizer=keras.optimizers.AdamW(learning_rate=0.003, weight_decay=0.0001),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[
            keras.metrics.SparseCategoricalAccuracy(name="accuracy"),
            keras.metrics.SparseTopKCategoricalAccuracy(2, name="top-2-accuracy"),
        ],
    )
    return model


# Transfer learning and fine-tuning -----------------------------------------------------------------------------------


def mobilenet() -> keras.Model:
    """The base is frozen, and runs in inference mode."""
    base = keras.applications.MobileNetV2(weights=None, input_shape=(32, 32, 3), include_top=False)
    base.trainable = False
    inputs = keras.Input((32, 32, 3))
    x = layers.RandomFlip("horizontal")(inputs)
    x = layers.Rescaling(scale=1 / 127.5, offset=-1)(x)
    x = layers.Dropout(0.2)(layers.GlobalAveragePooling2D()(base(x, training=False)))
    model = keras.Model(inputs, layers.Dense(1)(x))
    # The base has random weights, and gives next to nothing: with the rate of the program, the loss hardly moves.
    model.compile(keras.optimizers.Adam(0.01), keras.losses.BinaryCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


def unfrozen(model: keras.Model) -> keras.Model:
    """The same model, whole, with a low learning rate."""
    model.trainable = True
    model.compile(keras.optimizers.Adam(1e-5), keras.losses.BinaryCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


def efficientnet() -> keras.Model:
    """Trained from scratch."""
    model = keras.applications.EfficientNetB0(weights=None, input_shape=(32, 32, 3), classes=4)
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def halves() -> tuple[np.ndarray, np.ndarray]:
    """Pictures, and whether the bright quarter is in the upper half."""
    images, labels = pictures()
    return images, (labels < 2).astype(np.float32)[:, None]


# Text generation with a miniature GPT --------------------------------------------------------------------------------

VOCABULARY, LENGTH, WIDTH = 40, 12, 16


def causal_attention_mask(length: Any) -> Any:
    """Which positions each position sees, bool `[1, length, length]`."""
    return (ops.arange(length)[:, None] >= ops.arange(length))[None]


class TransformerBlock(layers.Layer):
    def __init__(self, embed_dim: int, num_heads: int, feed_forward_dim: int, rate: float = 0.1) -> None:
        super().__init__()
        self.att = layers.MultiHeadAttention(num_heads, embed_dim)
        self.ffn = keras.Sequential([layers.Dense(feed_forward_dim, activation="relu"), layers.Dense(embed_dim)])
        self.layernorm1, self.layernorm2 = (layers.LayerNormalization(epsilon=1e-6) for _ in range(2))
        self.dropout1, self.dropout2 = layers.Dropout(rate), layers.Dropout(rate)

    def call(self, inputs: Any) -> Any:
        mask = causal_attention_mask(ops.shape(inputs)[1])
        out1 = self.layernorm1(inputs + self.dropout1(self.att(inputs, inputs, attention_mask=mask)))
        return self.layernorm2(out1 + self.dropout2(self.ffn(out1)))


class TokenAndPositionEmbedding(layers.Layer):
    def __init__(self, maxlen: int, vocab_size: int, embed_dim: int) -> None:
        super().__init__()
        self.token_emb = layers.Embedding(vocab_size, embed_dim)
        self.pos_emb = layers.Embedding(maxlen, embed_dim)

    def call(self, x: Any) -> Any:
        return self.token_emb(x) + self.pos_emb(ops.arange(0, ops.shape(x)[-1], 1))


class WarmUp(keras.optimizers.schedules.LearningRateSchedule):
    """Rises, and then falls with the root of the step."""

    def __init__(self, d_model: int, warmup_steps: int = 20) -> None:
        super().__init__()
        self.d_model, self.warmup_steps = ops.cast(d_model, "float32"), warmup_steps

    def __call__(self, step: Any) -> Any:
        step = ops.cast(step, "float32") + 1
        return ops.rsqrt(self.d_model) * ops.minimum(ops.rsqrt(step), step * (self.warmup_steps**-1.5))


def language_model() -> keras.Model:
    inputs = layers.Input((LENGTH,), dtype="int32")
    x = TransformerBlock(WIDTH, 2, 32)(TokenAndPositionEmbedding(LENGTH, VOCABULARY, WIDTH)(inputs))
    model = keras.Model(inputs, [layers.Dense(VOCABULARY)(x), x])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # No loss and no optimization of the embeddings of words.
    model.compile(keras.optimizers.Adam(WarmUp(WIDTH), beta_2=0.98, epsilon=1e-9), loss=[loss, None])
    return model


def texts() -> tf.data.Dataset:
    """Numbers that count up; the label is the next one."""
    tokens = (_random.integers(0, 10, (EXAMPLES, 1)) + np.arange(LENGTH + 1)) % VOCABULARY
    dataset = tf.data.Dataset.from_tensor_slices(tokens.astype(np.int32)).batch(32)
    return dataset.map(lambda t: (t[:, :-1], t[:, 1:]), num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)


# Time series forecasting ---------------------------------------------------------------------------------------------


def forecast() -> keras.Model:
    inputs = keras.layers.Input((20, 7))
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.LSTM(16)(inputs)))
    model.compile(optimizer=keras.optimizers.Adam(learning_rate=0.01), loss="mse")
    return model


def weather() -> tf.data.Dataset:
    series = np.sin(np.arange(500)[:, None] / np.arange(3, 10)).astype(np.float32)
    return keras.preprocessing.timeseries_dataset_from_array(
        series[:-20], series[20:, 1:2], sequence_length=20, sampling_rate=1, batch_size=32
    )


# Structured data with FeatureSpace -----------------------------------------------------------------------------------


def patients() -> tf.data.Dataset:
    """Numbers, and categories as numbers and as strings."""
    age = _random.integers(20, 80, EXAMPLES)
    features = {
        "age": age,
        "sex": _random.integers(0, 2, EXAMPLES),
        "chol": _random.normal(200, 30, EXAMPLES).astype(np.float32),
        "thal": _random.choice(["fixed", "normal", "reversible"], EXAMPLES),
    }
    return tf.data.Dataset.from_tensor_slices((features, (age > 50).astype(np.float32))).batch(32)


def feature_space() -> keras.utils.FeatureSpace:
    space = keras.utils.FeatureSpace
    return space(
        features={
            "sex": space.integer_categorical(num_oov_indices=0),
            "thal": space.string_categorical(num_oov_indices=0),
            "age": space.float_discretized(num_bins=30),
            "chol": space.float_normalized(),
        },
        crosses=[space.cross(feature_names=("sex", "age"), crossing_dim=64)],
        output_mode="concat",
    )


def adapted(features: keras.utils.FeatureSpace) -> tf.data.Dataset:
    """The data, with features that are prepared on the way, by the lookup tables that `features` makes for that."""
    dataset = patients()
    features.adapt(dataset.map(lambda x, _: x))
    return dataset.map(lambda x, y: (features(x), y), num_parallel_calls=tf.data.AUTOTUNE).prefetch(-1)


def diagnosis(encoded: Any) -> keras.Model:
    """A model of the encoded features, a symbolic tensor of Keras."""
    x = layers.Dropout(0.5)(layers.Dense(32, activation="relu")(encoded))
    model = keras.Model(inputs=encoded, outputs=layers.Dense(1, activation="sigmoid")(x))
    model.compile(optimizer=keras.optimizers.Adam(0.01), loss="binary_crossentropy", metrics=["accuracy"])
    return model


# Knowledge distillation ----------------------------------------------------------------------------------------------


class Distiller(keras.Model):
    """The loss of the student has a part of the difference from its teacher."""

    def __init__(self, student: keras.Model, teacher: keras.Model) -> None:
        super().__init__()
        self.teacher, self.student = teacher, student

    def compile(  # type: ignore[override]
        self, optimizer: Any, metrics: Any, student_loss_fn: Any, distillation_loss_fn: Any, alpha: float = 0.1
    ) -> None:
        super().compile(optimizer=optimizer, metrics=metrics)
        self.student_loss_fn, self.distillation_loss_fn = student_loss_fn, distillation_loss_fn
        self.alpha, self.temperature = alpha, 3

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, allow_empty: bool = False
    ) -> Any:
        teacher_pred = self.teacher(x, training=False)
        student_loss = self.student_loss_fn(y, y_pred)
        distillation_loss = self.distillation_loss_fn(
            ops.softmax(teacher_pred / self.temperature, axis=1), ops.softmax(y_pred / self.temperature, axis=1)
        ) * (self.temperature**2)
        return self.alpha * student_loss + (1 - self.alpha) * distillation_loss

    def call(self, x: Any) -> Any:
        return self.student(x)


def distiller() -> keras.Model:
    def network(channels: int, name: str) -> keras.Model:
        return keras.Sequential(
            [
                keras.Input((32, 32, 3)),
                layers.Rescaling(1 / 255),
                layers.Conv2D(channels, (3, 3), strides=(2, 2), padding="same"),
                layers.LeakyReLU(negative_slope=0.2),
                layers.MaxPooling2D(pool_size=(2, 2), strides=(1, 1), padding="same"),
                layers.Conv2D(2 * channels, (3, 3), strides=(2, 2), padding="same"),
                layers.Flatten(),
                layers.Dense(4),
            ],
            name=name,
        )

    teacher, student = network(8, "teacher"), network(4, "student")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    teacher.compile(keras.optimizers.Adam(0.01), loss)
    teacher.fit(*pictures(), batch_size=32, epochs=3, verbose=0)
    model = Distiller(student=student, teacher=teacher)
    model.compile(
        optimizer=keras.optimizers.Adam(0.01),
        metrics=[keras.metrics.SparseCategoricalAccuracy()],
        student_loss_fn=loss,
        distillation_loss_fn=keras.losses.KLDivergence(),
        alpha=0.1,
    )
    return model


# Reading captchas with the CTC loss ----------------------------------------------------------------------------------


def ctc_batch_cost(y_true: Any, y_pred: Any, input_length: Any, label_length: Any) -> Any:
    """The loss of each text, from labels that are made sparse."""
    label_length = ops.cast(ops.squeeze(label_length, axis=-1), "int32")
    input_length = ops.cast(ops.squeeze(input_length, axis=-1), "int32")
    present = tf.sequence_mask(label_length, ops.shape(y_true)[1])
    indices = tf.where(present)
    shape = tf.cast(tf.shape(y_true), "int64")
    sparse = tf.SparseTensor(indices, ops.cast(tf.gather_nd(y_true, indices), "int32"), shape)
    y_pred = ops.log(ops.transpose(y_pred, axes=[1, 0, 2]) + keras.config.epsilon())
    return ops.expand_dims(tf.compat.v1.nn.ctc_loss(inputs=y_pred, labels=sparse, sequence_length=input_length), axis=1)


class CTCLayer(layers.Layer):
    """An endpoint: adds the loss, and hands the predictions on."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name=name)
        self.loss_fn = ctc_batch_cost

    def call(self, y_true: Any, y_pred: Any) -> Any:
        batch_len = ops.cast(ops.shape(y_true)[0], dtype="int64")
        input_length = ops.cast(ops.shape(y_pred)[1], dtype="int64") * ops.ones((batch_len, 1), dtype="int64")
        label_length = ops.cast(ops.shape(y_true)[1], dtype="int64") * ops.ones((batch_len, 1), dtype="int64")
        self.add_loss(self.loss_fn(y_true, y_pred, input_length, label_length))
        return y_pred


def captcha_reader() -> keras.Model:
    image = layers.Input((32, 12, 1), name="image", dtype="float32")
    labels = layers.Input((None,), name="label", dtype="float32")
    x = layers.Conv2D(8, (3, 3), activation="relu", kernel_initializer="he_normal", padding="same")(image)
    x = layers.MaxPooling2D((2, 2))(x)
    x = layers.Dropout(0.2)(layers.Dense(16, activation="relu")(layers.Reshape((16, 48))(x)))
    x = layers.Bidirectional(layers.LSTM(16, return_sequences=True, dropout=0.25))(x)
    x = layers.Dense(6, activation="softmax", name="dense2")(x)
    model = keras.Model([image, labels], CTCLayer(name="ctc_loss")(labels, x), name="ocr_model_v1")
    model.compile(optimizer=keras.optimizers.Adam(0.01))
    return model


def captchas() -> tf.data.Dataset:
    """Four characters of five, each a bright stripe."""
    texts = _random.integers(0, 5, (EXAMPLES, 4))
    images = _random.uniform(0, 0.1, (EXAMPLES, 32, 12, 1)).astype(np.float32)
    for image, text in zip(images, texts):
        for place, character in enumerate(text):
            image[8 * place + 2 : 8 * place + 6, 2 * character : 2 * character + 3] += 0.9
    data = {"image": images, "label": texts.astype(np.int64)}
    return tf.data.Dataset.from_tensor_slices(data).batch(32).prefetch(tf.data.AUTOTUNE)
