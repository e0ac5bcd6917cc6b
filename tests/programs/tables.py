"""Programs on tables, ratings and graphs."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops
from programs.data import batches
from programs.program import EXAMPLES, Program
from programs.steps import OwnLoss

USERS, ITEMS, WIDTH = 20, 30, 8


def people() -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Numbers, and categories as numbers and as strings; the label depends on two of them."""
    rng = np.random.default_rng(11)
    age, city = rng.integers(20, 80, EXAMPLES), rng.choice(["Bonn", "Oslo", "Rome"], EXAMPLES)
    columns = {"age": age.astype(np.float32), "city": city, "rooms": rng.integers(1, 9, EXAMPLES)}
    return columns, ((age > 50) | (city == "Rome")).astype(np.float32)


def tabular() -> keras.Model:
    """Each column has a layer that was adapted to it, inside the model."""
    columns, _ = people()
    age, city, rooms = (
        layers.Input((1,), name=name, dtype=kind)
        for name, kind in {"age": "float32", "city": "string", "rooms": "int64"}.items()
    )
    scale, names, numbers = (
        layers.Normalization(axis=None),
        layers.StringLookup(output_mode="one_hot"),
        layers.IntegerLookup(),
    )
    scale.adapt(columns["age"])
    names.adapt(columns["city"])
    numbers.adapt(columns["rooms"])
    embedded = layers.Flatten()(layers.Embedding(numbers.vocabulary_size(), 4)(numbers(rooms)))
    x = layers.Dense(16, activation="relu")(layers.Concatenate()([scale(age), names(city), embedded]))
    model = keras.Model([age, city, rooms], layers.Dense(1, activation="sigmoid")(x))
    model.compile(keras.optimizers.Adam(0.02), "binary_crossentropy", metrics=["accuracy", keras.metrics.AUC()])
    return model


def columns_in_dicts(batch_size: int) -> tf.data.Dataset:
    columns, labels = people()
    return batches(({name: values[:, None] for name, values in columns.items()}, labels[:, None]), batch_size)


def _feature_space() -> keras.utils.FeatureSpace:
    kinds = keras.utils.FeatureSpace
    features = {
        "age": kinds.float_discretized(num_bins=8),
        "city": kinds.string_categorical(num_oov_indices=0),
        "rooms": kinds.integer_categorical(num_oov_indices=0),
    }
    space = kinds(features, crosses=[kinds.cross(("city", "rooms"), crossing_dim=16)], output_mode="concat")
    space.adapt(tf.data.Dataset.from_tensor_slices(people()[0]).batch(32))
    return space


def featured() -> keras.Model:
    encoded = _feature_space().get_encoded_features()
    model = keras.Model(encoded, layers.Dense(1, activation="sigmoid")(layers.Dense(16, activation="relu")(encoded)))
    model.compile(keras.optimizers.Adam(0.01), "binary_crossentropy", metrics=["accuracy"])
    return model


def encoded_in_the_data(batch_size: int) -> tf.data.Dataset:
    """The features are prepared on the way, by lookup tables of the dataset."""
    space = _feature_space()
    return batches(people(), batch_size).map(lambda x, y: (space(x), y), num_parallel_calls=tf.data.AUTOTUNE)


def ratings() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Users, items, and how much each likes each, of 0 to 4; int32."""
    rng = np.random.default_rng(12)
    users, items = rng.integers(0, USERS, EXAMPLES), rng.integers(0, ITEMS, EXAMPLES)
    return users.astype(np.int32), items.astype(np.int32), ((users + items) % 5).astype(np.float32)


def cross_network() -> keras.Model:
    """Deep and cross (Wang et al., 2021): products of features, of an order that grows by layer."""
    import keras_rs

    user, item = layers.Input((), dtype="int32", name="user"), layers.Input((), dtype="int32", name="item")
    start = layers.Concatenate()([layers.Embedding(USERS, WIDTH)(user), layers.Embedding(ITEMS, WIDTH)(item)])
    x = keras_rs.layers.FeatureCross(projection_dim=4)(start, start)
    x = keras_rs.layers.FeatureCross()(start, x)
    model = keras.Model({"user": user, "item": item}, layers.Dense(1)(layers.Dense(16, activation="relu")(x)))
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=[keras.metrics.RootMeanSquaredError()])
    return model


def user_and_item(batch_size: int) -> tuple[Any, Any]:
    users, items, stars = ratings()
    return {"user": users, "item": items}, stars


def dlrm() -> keras.Model:
    """Products of each embedding with each other, and with the dense features (Naumov et al., 2019)."""
    import keras_rs

    numbers = layers.Input((2,), name="numbers")
    categories = [layers.Input((), dtype="int32", name=f"category_{i}") for i in range(3)]
    dense = layers.Dense(WIDTH, activation="relu")(numbers)
    embedded = [layers.Embedding(10, WIDTH)(category) for category in categories]
    x = layers.Concatenate()([dense, keras_rs.layers.DotInteraction()([dense, *embedded])])
    model = keras.Model([numbers, *categories], layers.Dense(1, "sigmoid")(layers.Dense(16, activation="relu")(x)))
    model.compile(keras.optimizers.Adagrad(0.1), "binary_crossentropy", metrics=["auc"])
    return model


def clicks(batch_size: int) -> tf.data.Dataset:
    rng = np.random.default_rng(13)
    columns = {f"category_{i}": rng.integers(0, 10, EXAMPLES).astype(np.int32) for i in range(3)}
    numbers = rng.normal(size=(EXAMPLES, 2)).astype(np.float32)
    clicked = ((columns["category_0"] > 5) | (numbers[:, 0] > 1)).astype(np.float32)[:, None]
    return batches(({"numbers": numbers, **columns}, clicked), batch_size)


class TwoTowers(keras.Model):
    """A vector for each user and item; in a batch, the items of others are what a user does not like."""

    def __init__(self) -> None:
        super().__init__()
        import keras_rs

        self.users = keras.Sequential([layers.Embedding(USERS, WIDTH), layers.Dense(WIDTH)])
        self.items = layers.Embedding(ITEMS, WIDTH)
        self.find = keras_rs.layers.BruteForceRetrieval(k=3, return_scores=False)
        self.loss_fn = keras.losses.CategoricalCrossentropy(from_logits=True)

    def build(self, shape: Any) -> None:
        self.users.build(shape)
        self.items.build(shape)
        self.find.candidate_embeddings = self.items.embeddings
        self.find.build(shape)
        super().build(shape)

    def call(self, users: Any, training: bool = False) -> dict[str, Any]:
        vectors = self.users(users)
        return {"vectors": vectors} if training else {"vectors": vectors, "found": self.find(vectors)}

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, **_: Any
    ) -> Any:
        likeness = ops.matmul(y_pred["vectors"], ops.transpose(self.items(y)))
        return self.loss_fn(ops.eye(ops.shape(y)[0]), likeness, sample_weight)


def two_towers() -> keras.Model:
    model = TwoTowers()
    model.compile(keras.optimizers.Adagrad(0.5))
    return model


def liked(batch_size: int) -> tf.data.Dataset:
    users, _, _ = ratings()
    return batches((users, (users + np.arange(EXAMPLES) % 2) % ITEMS), batch_size)


class Ranker(keras.Model):
    """Scores a list of items for a user; metrics compare the order of the lists."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = layers.Embedding(USERS, WIDTH), layers.Embedding(ITEMS, WIDTH)
        self.scores = keras.Sequential([layers.Dense(16, activation="relu"), layers.Dense(1)])

    def call(self, inputs: Any) -> Any:
        items = self.items(inputs["items"])
        users = ops.broadcast_to(self.users(inputs["user"])[:, None, :], ops.shape(items))
        return ops.squeeze(self.scores(ops.concatenate([users, items], -1)), -1)


def ranker() -> keras.Model:
    import keras_rs

    model = Ranker()
    ordered = [keras_rs.metrics.NDCG(k=3, name="ndcg"), keras_rs.metrics.MeanReciprocalRank(name="mrr")]
    model.compile(keras.optimizers.Adagrad(0.3), keras_rs.losses.ListMLELoss(), metrics=ordered)
    return model


def lists(batch_size: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(14)
    items = np.stack([rng.permutation(ITEMS)[:5] for _ in range(EXAMPLES)]).astype(np.int32)
    users = rng.integers(0, USERS, EXAMPLES).astype(np.int32)
    return {"user": users, "items": items}, (4 - (items + users[:, None] // 10) % 5).astype(np.float32)


class NextItem(OwnLoss):
    """Predicts the next item of a session, by a recurrent network; its own loss is over the items of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.read = keras.Sequential([layers.Embedding(ITEMS, WIDTH, mask_zero=True), layers.GRU(WIDTH)])
        self.items = layers.Embedding(ITEMS, WIDTH)

    def build(self, shape: Any) -> None:
        self.read.build(shape)
        self.items.build(())
        super().build(shape)

    def call(self, session: Any) -> Any:
        return self.read(session)

    def train_step(self, data: Any) -> dict[str, Any]:
        session, following = data
        with tf.GradientTape() as tape:
            likeness = ops.matmul(self(session, training=True), ops.transpose(self.items(following)))
            loss = self.loss(ops.arange(ops.shape(following)[0]), likeness)
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return self.show(loss)


def next_item() -> keras.Model:
    model = NextItem()
    model.build((None, 4))
    model.compile(keras.optimizers.Adam(0.02), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def sessions(batch_size: int) -> tf.data.Dataset:
    starts = np.random.default_rng(15).integers(1, ITEMS - 5, EXAMPLES)
    counted = (starts[:, None] + np.arange(5)).astype(np.int32)
    return batches((counted[:, :4], counted[:, 4]), batch_size)


# Graphs --------------------------------------------------------------------------------------------------------------

NODES = 40


def graph() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features `(nodes, 6)`, edges `(edges, 2)`, and a class of each node."""
    rng = np.random.default_rng(16)
    classes = np.arange(NODES) % 3
    features = rng.normal(size=(NODES, 6)).astype(np.float32)
    features[np.arange(NODES), classes] += 1
    near = [
        (i, j)
        for i in range(NODES)
        for j in range(NODES)
        if i == j or (classes[i] == classes[j] and rng.random() < 0.2)
    ]
    return features, np.array(near, np.int32), classes


class Attend(layers.Layer):
    """Each node takes in its neighbours, each by how much it matters (Velickovic et al., 2018)."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.units = units

    def build(self, nodes_shape: Any, edges_shape: Any) -> None:
        self.kernel = self.add_weight(shape=(nodes_shape[-1], self.units), name="kernel")
        self.matters = self.add_weight(shape=(2 * self.units, 1), name="matters")

    def call(self, nodes: Any, edges: Any) -> Any:
        nodes = tf.matmul(nodes, self.kernel)
        ends = tf.reshape(tf.gather(nodes, edges), (tf.shape(edges)[0], -1))
        scores = tf.exp(tf.clip_by_value(tf.squeeze(tf.nn.leaky_relu(tf.matmul(ends, self.matters)), -1), -2, 2))
        whole = tf.math.unsorted_segment_sum(scores, edges[:, 0], tf.shape(nodes)[0])
        shares = scores / tf.gather(whole, edges[:, 0])
        taken = tf.gather(nodes, edges[:, 1]) * shares[:, None]
        return tf.math.unsorted_segment_sum(taken, edges[:, 0], tf.shape(nodes)[0])


class GAT(keras.Model):
    """The model holds the whole graph; a batch is numbers of nodes."""

    def __init__(self) -> None:
        super().__init__()
        features, edges, _ = graph()
        self.features, self.edges = tf.constant(features), tf.constant(edges)
        self.attend, self.again, self.last = Attend(8), Attend(8), layers.Dense(3)

    def call(self, inputs: Any) -> Any:
        nodes, edges = inputs
        nodes = ops.elu(self.attend(nodes, edges))
        return self.last(ops.elu(self.again(nodes, edges)) + nodes)

    def train_step(self, data: Any) -> dict[str, Any]:
        numbers, labels = data
        with tf.GradientTape() as tape:
            logits = tf.gather(self([self.features, self.edges]), numbers)
            loss = self.loss(labels, logits)
        self.optimizer.apply_gradients(zip(tape.gradient(loss, self.trainable_weights), self.trainable_weights))
        right = ops.mean(keras.metrics.sparse_categorical_accuracy(labels, logits))
        return {"node_loss": loss, "node_accuracy": right}


def gat() -> keras.Model:
    model = GAT()
    model.compile(keras.optimizers.Adam(0.02), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def nodes(batch_size: int) -> tuple[np.ndarray, np.ndarray]:
    numbers = np.random.default_rng(17).integers(0, NODES, EXAMPLES)
    return numbers.astype(np.int32), graph()[2][numbers]


class Neighbours(layers.Layer):
    """Averages over the neighbours in a fixed graph, which it keeps in a variable of TensorFlow, as older code does."""

    def __init__(self) -> None:
        super().__init__()
        links = np.eye(5) + np.eye(5, k=1) + np.eye(5, k=-1)
        self.shares = tf.Variable(links / links.sum(1, keepdims=True), dtype=tf.float32, trainable=False)
        self.dense = layers.Dense(WIDTH, activation="relu")

    def call(self, speeds: Any) -> Any:
        return self.dense(ops.einsum("ij,btjf->btif", self.shares, speeds))


def traffic() -> keras.Model:
    """Predicts the traffic of five roads: a graph convolution, then an LSTM for each road."""
    speeds = layers.Input((6, 5, 1))
    x = layers.Reshape((6, 5 * WIDTH))(Neighbours()(speeds))
    model = keras.Model(speeds, layers.Dense(5)(layers.LSTM(16)(x)))
    model.compile(keras.optimizers.RMSprop(0.005), keras.losses.MeanSquaredError())
    return model


def roads(batch_size: int) -> tuple[np.ndarray, np.ndarray]:
    series = np.sin(np.arange(EXAMPLES + 6)[:, None] / 4 + np.arange(5)).astype(np.float32)
    windows = np.stack([series[start : start + 6] for start in range(EXAMPLES)])
    return windows[..., None], series[6:]


PROGRAMS = [
    Program("table with adapted columns", tabular, columns_in_dicts, validates=True),
    Program("table with FeatureSpace in the data", featured, encoded_in_the_data),
    Program("keras-rs: deep and cross network", cross_network, user_and_item, needs="keras_rs"),
    Program("keras-rs: DLRM", dlrm, clicks, needs="keras_rs"),
    Program("keras-rs: two-tower retrieval", two_towers, liked, needs="keras_rs", compares=True),
    Program("keras-rs: ranking of lists with NDCG", ranker, lists, needs="keras_rs"),
    Program("next item of a session", next_item, sessions, compares=True),
    Program("graph attention (GAT)", gat, nodes, shows="node_loss", of_batches=True),
    Program("traffic of a graph of roads", traffic, roads),
]
