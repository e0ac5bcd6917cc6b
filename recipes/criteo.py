"""Clicks on ads for the recipe `criteo`: models in the shape of DLRM and of DCN v2, and data as Criteo's.

`python -m kdist.recipes.criteo FILE` writes rows of the generated data to a TSV file.

Keras and TensorFlow are imported when they are used, so that a config that names these functions can be checked without
them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from kdist.recipes.criteo_files import (
    HELD_OUT,
    NUM_COUNTS,
    NUM_IDS,
    Rows,
    Transform,
    find_files,
    read_rows,
    reader,
    write_rows,
)
from kdist.recipes.criteo_truth import CRITEO_CARDINALITIES, Truth, exact_auc, scaled_cardinalities

from kdist.config.checks import check_more_than_zero, check_one_of, check_seed, check_whole_number
from kdist.errors import ConfigError
from kdist.log import say

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

    from kdist.data.base import DataContext

INTERACTIONS = ("dot", "cross")
IDS = ("hashed", "dynamic")
_BOTTOM, _TOP = (64,), (64, 32)
_CROSS_LAYERS, _CROSS_RANK = 2, 32
# With so many rows for each id of a small column, few of them share a row.
_ROWS_PER_ID = 40
# As many as TensorFlow's hash function has.
_HASHES = 2**63 - 1
# Training batches have numbers from 0.
_VALIDATION_BATCH, _SAMPLE_BATCH = -1, -2


def build_model(
    interaction: str = "dot",
    ids: str = "hashed",
    max_rows: int = 40_000,
    dim: int = 16,
    learning_rate: float = 0.05,
) -> keras.Model:
    """The probability of a click; compiled with Adagrad on the cross-entropy, with the AUC as its metric.

    Input: a dict of `counts`, float32 [batch, 13], logarithms, and `ids`, int64 [batch, 26], rows of the tables, or
    hashes of 63 bits of dynamic ids.
    Output: float32 [batch, 1].

    Args:
        interaction: `dot`: dot products of all pairs of vectors, as in DLRM (Naumov et al. 2019); `cross`: cross layers
            of low rank, as in DCN v2 (Wang et al. 2021). Either has an embedding table for each column of ids, and a
            dense layer that makes a vector of the counts.
        ids: `hashed`: an id's row is its hash, so that some ids share a row; `dynamic`: each id gets a row when it is
            first seen.
        max_rows: of a table of hashed ids; it has 40 rows for each of Criteo's ids if these are fewer.
        dim: length of a row.

    Raises:
        ConfigError: a value is not allowed.
    """
    import keras

    from kdist.layers import DynamicEmbedding, Embedding

    check_one_of("model.interaction", interaction, INTERACTIONS)
    check_one_of("model.ids", ids, IDS)
    check_whole_number("model.dim", dim, required=True)
    counts = keras.Input((NUM_COUNTS,), name="counts")
    rows = keras.Input((NUM_IDS,), dtype="int64", name="ids")
    vectors = [_dense(counts, *_BOTTOM, dim)]
    for column, length in enumerate(table_lengths(max_rows)):
        name = f"ids_{column + 1}"
        layer = DynamicEmbedding(dim, name=name) if ids == "dynamic" else Embedding(length, dim, name=name)
        vectors.append(layer(rows[:, column]))
    mixed = _dot_products(vectors) if interaction == "dot" else _crossed(vectors)
    click = keras.layers.Dense(1, activation="sigmoid", name="click")(_dense(mixed, *_TOP))
    model = keras.Model({"counts": counts, "ids": rows}, click, name="criteo")
    # A row's gradient is that of a few of the batch's examples, so it is small: Keras's default, 0.1, would all but
    # freeze it.
    optimizer = keras.optimizers.Adagrad(learning_rate, initial_accumulator_value=1e-5)
    model.compile(optimizer=optimizer, loss="binary_crossentropy", metrics=[keras.metrics.AUC(name="auc")])
    return model


def load_data(
    path: str | None = None,
    validation_path: str | None = None,
    ids: str = "hashed",
    max_rows: int = 40_000,
    num_validation: int = 50_000,
    shuffle_rows: int = 16_384,
    scale: float = 0.001,
    seed: int = 0,
) -> dict[str, Any]:
    """Clicks as the data arguments of `fit`: x a function that makes each worker's batches, validation data in arrays.

    Prints what the data is; of generated data also the AUC of the true probabilities, which no model can exceed.

    Args:
        path: a file, a folder or a glob of Criteo's TSV files, compressed if their names end with `.gz`; None: rows
            are generated, see `criteo_truth`.
        validation_path: as `path`; None: the 1st, 21st, 41st, ... line of each file is not trained on, but validated.
        ids, max_rows: as for the model.
        num_validation: rows to validate with, at most; the first ones of files.
        shuffle_rows: lines of files that are shuffled at once.
        scale: of generated data: share of Criteo's ids that there are, in columns of more than 1000.
        seed: of generated data and shuffling.

    Raises:
        ConfigError: a value is not allowed, there are no files, or a line of the validation data is wrong.
    """
    check_whole_number("data.num_validation", num_validation, required=True)
    check_whole_number("data.shuffle_rows", shuffle_rows, required=True)
    check_more_than_zero("data.scale", scale)
    check_seed("data.seed", seed)
    check_one_of("data.ids", ids, IDS)
    if path is None and validation_path is not None:
        raise ConfigError(f"data.validation_path={validation_path}: data.path is missing")
    transform = features([_HASHES] * NUM_IDS if ids == "dynamic" else table_lengths(max_rows))
    if path is None:
        return _generated(num_validation, scale, seed, transform)
    holds_out = validation_path is None
    files = find_files("data.path", path, min_lines=2 if holds_out else 1)
    others = files if validation_path is None else find_files("data.validation_path", validation_path, min_lines=1)
    validation = read_rows(others, is_held_out=holds_out, num_rows=num_validation, transform=transform)
    where = f"every {HELD_OUT}th line" if holds_out else validation_path
    number = f"{len(files)} file{'s' * (len(files) > 1)}"
    say(f"data      {number} in {path}, {len(validation[1])} rows of {where} to validate with")
    x = reader(files, holds_out=holds_out, shuffle_rows=shuffle_rows, seed=seed, transform=transform)
    return {"x": x, "validation_data": validation}


def table_lengths(max_rows: int) -> list[int]:
    """The number of rows of the table of each column."""
    check_whole_number("model.max_rows", max_rows, required=True)
    return [min(max_rows, _ROWS_PER_ID * num_ids) for num_ids in CRITEO_CARDINALITIES]


def features(lengths: Sequence[int]) -> Transform:
    """A transform of rows to inputs and labels, float32 [n, 1]; it hashes ids to tables of these lengths."""

    def transform(rows: Rows) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
        import tensorflow as tf

        # An empty count is less than any other; a few of Criteo's are negative.
        logs = tf.math.log1p(tf.maximum(rows.counts, 0.0))
        counts = tf.where(tf.math.is_nan(rows.counts), -1.0, logs)
        columns = zip(tf.unstack(rows.ids, axis=1), lengths)
        ids = tf.stack([tf.strings.to_hash_bucket_fast(column, length) for column, length in columns], 1)
        return {"counts": counts, "ids": ids}, rows.labels[:, tf.newaxis]

    return transform


def batches(scale: float, seed: int, transform: Transform) -> Callable[[DataContext], tf.data.Dataset]:
    """A dataset function that generates endless batches, transformed; no two workers get the same."""

    def generate(context: DataContext) -> tf.data.Dataset:
        import tensorflow as tf

        truth = Truth(scale, seed)
        first = tf.cast(context.first_batch, tf.int64)

        def batch(number: tf.Tensor) -> Any:
            rows, _ = truth.rows(number * context.num_workers + context.worker_index, context.batch_size or 32)
            return transform(rows)

        # Endless, so that nothing is skipped once more in a resumed run.
        return tf.data.Dataset.range(first, tf.int64.max // context.num_workers).repeat().map(batch)

    return generate


def write_sample(path: Path, num_rows: int, scale: float = 0.001, seed: int = 0) -> None:
    """Writes generated rows to a TSV file; compressed if its name ends with `.gz`."""
    import tensorflow as tf

    rows, _ = Truth(scale, seed).rows(tf.constant(_SAMPLE_BATCH, tf.int64), num_rows)
    write_rows(path, rows)


def _generated(num_validation: int, scale: float, seed: int, transform: Transform) -> dict[str, Any]:
    import tensorflow as tf

    rows, probabilities = Truth(scale, seed).rows(tf.constant(_VALIDATION_BATCH, tf.int64), num_validation)
    auc = exact_auc(rows.labels.numpy(), probabilities.numpy())
    validation = tf.nest.map_structure(lambda tensor: tensor.numpy(), transform(rows))
    say(
        f"data      generated, {sum(scaled_cardinalities(scale))} ids in {NUM_IDS} columns, {num_validation} rows to "
        f"validate with: the AUC of the true probabilities is {auc:.4f}",
    )
    return {"x": batches(scale, seed, transform), "validation_data": validation}


def _dense(x: Any, *units: int) -> Any:
    import keras

    for number in units:
        x = keras.layers.Dense(number, activation="relu")(x)
    return x


def _dot_products(vectors: Sequence[Any]) -> Any:
    """The first vector, and the dot products of all pairs of vectors [batch, dim]: [batch, dim + pairs]."""
    import keras

    number = len(vectors)
    stacked = keras.ops.stack(vectors, axis=1)
    products = keras.ops.matmul(stacked, keras.ops.transpose(stacked, (0, 2, 1)))
    rows, columns = np.tril_indices(number, -1)
    pairs = keras.ops.take(keras.ops.reshape(products, (-1, number**2)), rows * number + columns, axis=1)
    return keras.layers.Concatenate()([vectors[0], pairs])


def _crossed(vectors: Sequence[Any]) -> Any:
    """All vectors [batch, dim] in one, crossed with itself in each layer: [batch, vectors * dim]."""
    import keras

    whole = crossed = keras.layers.Concatenate()(vectors)
    for _ in range(_CROSS_LAYERS):
        narrow = keras.layers.Dense(_CROSS_RANK, use_bias=False)(crossed)
        crossed = crossed + whole * keras.layers.Dense(whole.shape[-1])(narrow)
    return crossed


def main() -> None:
    """Writes generated rows to a file."""
    parser = argparse.ArgumentParser(prog="python -m kdist.recipes.criteo", description=main.__doc__)
    parser.add_argument("file", type=Path, help="TSV file to write; compressed if its name ends with .gz")
    parser.add_argument("--rows", type=int, default=10_000, help="number of lines")
    parser.add_argument("--scale", type=float, default=0.001, help="share of Criteo's ids")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    write_sample(options.file, options.rows, options.scale, options.seed)


if __name__ == "__main__":
    main()
