"""Programs that read and write text."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops
from programs.data import batches, pictures, sentences, sequences, vocabulary
from programs.program import EXAMPLES, Program

LENGTH, TOKENS, WIDTH = 8, 16, 16
START, LETTERS = 1, "abcdefghi"


def source_and_target(batch_size: int) -> tuple[Any, Any]:
    """To translate: each token to the one after it, backwards; the target is also an input, one place later."""
    source = sequences(LENGTH, TOKENS)
    target = np.where(source > 0, (source - 1) % (TOKENS - 2) + 2, 0)[:, ::-1].copy()
    shifted = np.concatenate([np.full((len(target), 1), START, np.int32), target[:, :-1]], axis=1)
    return {"source": source, "shifted": shifted}, target


def both_inputs() -> tuple[Any, Any]:
    return layers.Input((LENGTH,), dtype="int32", name="source"), layers.Input((LENGTH,), dtype="int32", name="shifted")


def compiled(model: keras.Model, rate: Any = 0.01) -> keras.Model:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0)
    model.compile(keras.optimizers.Adam(rate), loss, weighted_metrics=["accuracy"])
    return model


def attentive() -> keras.Model:
    """A recurrent decoder that looks at what the encoder has read (Bahdanau et al., 2015)."""
    source, shifted = both_inputs()
    read = layers.Bidirectional(layers.GRU(WIDTH // 2, return_sequences=True))(layers.Embedding(TOKENS, WIDTH)(source))
    written = layers.GRU(WIDTH, return_sequences=True)(layers.Embedding(TOKENS, WIDTH)(shifted))
    looked = layers.AdditiveAttention()([written, read])
    return compiled(keras.Model([source, shifted], layers.Dense(TOKENS)(layers.Concatenate()([written, looked]))))


class Positions(layers.Layer):
    """Embeds tokens and their places; 0 is padding, and masked."""

    def __init__(self, length: int = LENGTH, tokens: int = TOKENS, **options: Any) -> None:
        super().__init__(**options)
        self.of_tokens, self.of_places = (
            layers.Embedding(tokens, WIDTH, mask_zero=True),
            layers.Embedding(length, WIDTH),
        )

    def call(self, tokens: Any) -> Any:
        return self.of_tokens(tokens) + self.of_places(ops.arange(ops.shape(tokens)[1]))

    def compute_mask(self, tokens: Any, mask: Any = None) -> Any:
        return self.of_tokens.compute_mask(tokens)


class Block(layers.Layer):
    """Attends to itself, and to another sequence if there is one (Vaswani et al., 2017); masks go with the inputs."""

    def __init__(self, causal: bool = False, dropout: float = 0.0, **options: Any) -> None:
        super().__init__(**options)
        self.supports_masking, self.causal = True, causal
        self.to_itself, self.to_others = (layers.MultiHeadAttention(2, WIDTH // 2, dropout=dropout) for _ in range(2))
        self.dense = keras.Sequential([layers.Dense(2 * WIDTH, "gelu"), layers.Dense(WIDTH)])
        self.norms = [layers.LayerNormalization() for _ in range(3)]

    def build(self, x_shape: Any, others_shape: Any = None) -> None:
        self.to_itself.build(x_shape, x_shape)
        if others_shape is not None:
            self.to_others.build(x_shape, others_shape)
        self.dense.build(x_shape)
        for norm in self.norms:
            norm.build(x_shape)

    def call(self, x: Any, others: Any = None) -> Any:
        x = self.norms[0](x + self.to_itself(x, x, use_causal_mask=self.causal))
        if others is not None:
            x = self.norms[1](x + self.to_others(x, others))
        return self.norms[2](x + self.dense(x))


def transformer() -> keras.Model:
    source, shifted = both_inputs()
    decoded = Block(causal=True)(Positions()(shifted), Block()(Positions()(source)))
    return compiled(keras.Model([source, shifted], layers.Dense(TOKENS)(decoded)))


class Warm(keras.optimizers.schedules.LearningRateSchedule):
    """Rises for some steps, and then falls with their root."""

    def __init__(self, steps: int, most: float) -> None:
        super().__init__()
        self.steps, self.most = steps, most

    def __call__(self, step: Any) -> Any:
        step = ops.cast(step, "float32") + 1
        return self.most * ops.minimum(step / self.steps, ops.sqrt(self.steps / step))


def language_model() -> keras.Model:
    """Two outputs, of which only one has a loss."""
    tokens = layers.Input((LENGTH - 1,), dtype="int32")
    x = Block(causal=True)(Positions()(tokens))
    model = keras.Model(tokens, [layers.Dense(TOKENS)(x), x])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(Warm(10, 0.02)), loss=[loss, None])
    return model


def next_tokens(batch_size: int) -> tf.data.Dataset:
    tokens = batches(sequences(LENGTH, TOKENS), batch_size)
    return tokens.map(lambda t: (t[:, :-1], t[:, 1:]), num_parallel_calls=tf.data.AUTOTUNE)


def sentiment() -> keras.Model:
    """Reads strings: the layer that makes tokens of them is part of the model."""
    split = layers.TextVectorization(max_tokens=20, output_sequence_length=6)
    split.adapt(sentences()[0])
    text = layers.Input((), dtype="string")
    x = layers.Embedding(20, WIDTH, mask_zero=True)(split(text))
    x = layers.Dense(8, activation="relu")(layers.GlobalAveragePooling1D()(x))
    model = keras.Model(text, layers.Dense(1, activation="sigmoid")(x))
    model.compile(keras.optimizers.Adam(0.02), "binary_crossentropy", metrics=["accuracy", "auc"])
    return model


def entities() -> keras.Model:
    """Marks each token; the loss of padding counts nothing, by a loss of one's own."""

    def of_tokens(y_true: Any, y_pred: Any) -> Any:
        known = ops.cast(y_true > 0, "float32")
        losses = keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)
        return ops.sum(losses * known) / ops.maximum(ops.sum(known), 1.0)

    tokens = layers.Input((LENGTH,), dtype="int32")
    x = layers.Bidirectional(layers.LSTM(8, return_sequences=True))(layers.Embedding(TOKENS, WIDTH)(tokens))
    model = keras.Model(tokens, layers.Dense(4)(x))
    model.compile(keras.optimizers.Adam(0.02), of_tokens)
    return model


def marked(batch_size: int) -> tf.data.Dataset:
    tokens = sequences(LENGTH, TOKENS)
    return batches((tokens, np.where(tokens > 0, tokens % 3 + 1, 0)), batch_size)


class Captioner(keras.Model):
    """Writes about a picture: several captions for each, with a step of its own and losses that leave padding out."""

    def __init__(self) -> None:
        super().__init__()
        self.look = keras.Sequential([layers.Conv2D(WIDTH, 3, 3, activation="relu"), layers.Reshape((-1, WIDTH))])
        self.embed, self.decode, self.name_tokens = Positions(), Block(causal=True), layers.Dense(TOKENS)
        self.losses_seen, self.right = keras.metrics.Mean("loss"), keras.metrics.Mean("accuracy")

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return [self.losses_seen, self.right]

    def call(self, data: Any) -> Any:
        images, tokens = data
        return self.name_tokens(self.decode(self.embed(tokens), self.look(images)))

    def scores(self, images: Any, captions: Any) -> tuple[Any, Any]:
        loss = right = 0.0
        for number in range(2):
            tokens, wanted = captions[:, number, :-1], captions[:, number, 1:]
            logits = self((images, tokens))
            known = ops.cast(wanted > 0, "float32")
            hits = ops.cast(ops.cast(ops.argmax(logits, -1), "int32") == wanted, "float32")
            loss += ops.sum(self.loss(wanted, logits) * known) / ops.sum(known) / 2
            right += ops.sum(hits * known) / ops.sum(known) / 2
        return loss, right

    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss, right = self.scores(*data)
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return self.seen(loss, right)

    def test_step(self, data: Any) -> dict[str, Any]:
        return self.seen(*self.scores(*data))

    def seen(self, loss: Any, right: Any) -> dict[str, Any]:
        self.losses_seen.update_state(loss)
        self.right.update_state(right)
        return {"loss": self.losses_seen.result(), "accuracy": self.right.result()}


def captioner() -> keras.Model:
    model = Captioner()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    model.compile(keras.optimizers.Adam(0.01), loss)
    return model


def captioned(batch_size: int) -> tf.data.Dataset:
    """Pictures, and two captions of each that say which quarter is bright."""
    images, labels = pictures()
    one = np.stack([np.full(len(labels), START), labels + 2, np.full(len(labels), 7), np.zeros(len(labels))], 1)
    other = np.stack([np.full(len(labels), START), np.full(len(labels), 8), np.full(len(labels), 9), labels + 2], 1)
    return batches((images, np.stack([one, other], 1).astype(np.int32)), batch_size)


# What keras-hub would download, a vocabulary and weights, is made here.


def bert_classifier() -> keras.Model:
    import keras_hub

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *vocabulary()]
    tokenizer = keras_hub.models.BertTokenizer(vocabulary=words)
    backbone = keras_hub.models.BertBackbone(
        len(words),
        num_layers=1,
        num_heads=2,
        hidden_dim=WIDTH,
        intermediate_dim=32,
        max_sequence_length=LENGTH,
        dropout=0.0,
    )
    preprocessor = keras_hub.models.BertTextClassifierPreprocessor(tokenizer, sequence_length=LENGTH)
    model = keras_hub.models.BertTextClassifier(backbone, num_classes=2, preprocessor=preprocessor, dropout=0.0)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.005), loss, metrics=["accuracy"], jit_compile=False)
    return model


def gpt2() -> keras.Model:
    import keras_hub

    letters = {token: number for number, token in enumerate(["<|endoftext|>", *LETTERS, "ab"])}
    tokenizer = keras_hub.models.GPT2Tokenizer(vocabulary=letters, merges=["a b"])
    backbone = keras_hub.models.GPT2Backbone(len(letters), 1, 2, WIDTH, 32, dropout=0.0, max_sequence_length=LENGTH)
    preprocessor = keras_hub.models.GPT2CausalLMPreprocessor(tokenizer, sequence_length=LENGTH)
    model = keras_hub.models.GPT2CausalLM(backbone, preprocessor)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, weighted_metrics=["accuracy"], jit_compile=False)
    return model


def spelled(batch_size: int) -> tf.data.Dataset:
    """Texts alone: the alphabet from some letter on."""
    return batches([LETTERS[start % 5 : start % 5 + 5] for start in range(EXAMPLES)], batch_size)


def texts(batch_size: int) -> tf.data.Dataset:
    return batches(sentences(), batch_size)


PROGRAMS = [
    Program("sequence to sequence with attention", attentive, source_and_target),
    Program("translation with a transformer, masked", transformer, source_and_target),
    Program("small GPT with a schedule of its own", language_model, next_tokens),
    Program("text classification from strings", sentiment, texts, validates=True),
    Program("marking of tokens with a loss without padding", entities, marked),
    Program("captions of pictures", captioner, captioned, validates=True),
    Program("keras-hub: BERT classifier, preprocessor included", bert_classifier, texts, needs="keras_hub"),
    Program("keras-hub: GPT-2, preprocessor included", gpt2, spelled, refused=("2w",), needs="keras_hub"),
]
