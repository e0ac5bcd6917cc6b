"""Pools the vectors of several ids into one: the combiners of `tf.nn.embedding_lookup_sparse`, for any kind of ids."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

import tensorflow as tf

Combiner: TypeAlias = Literal["sum", "mean", "sqrtn"]
COMBINERS: tuple[str, ...] = get_args(Combiner)

#: Dense, or ragged: with another number of ids for each example.
Ragged: TypeAlias = tf.Tensor | tf.RaggedTensor


def pool(vectors: Ragged, weights: Ragged | None, combiner: Combiner) -> Ragged:
    """Pools over the last dimension of ids; no ids, or weights of 0 alone, give zeros.

    Vectors of less than 32 bits are added up in float32.

    Args:
        vectors: floating point `[..., k, dim]`; k may be ragged.
        weights: `[..., k]`, with the row splits of `vectors`; None for weights of 1.
        combiner: `sum` of weights times vectors; `mean`, divided by the sum of the weights; `sqrtn`, divided by the
            square root of the sum of their squares.

    Returns:
        `[..., dim]`, of the dtype of `vectors`.

    Raises:
        tf.errors.InvalidArgumentError: when it runs, the row splits differ.
    """
    dtype = vectors.dtype
    vectors = tf.cast(vectors, tf.float32 if dtype.size < 4 else dtype)
    if weights is not None:
        weights = tf.cast(weights, vectors.dtype)
        vectors = tf.ragged.map_flat_values(lambda v, w: v * w[..., tf.newaxis], vectors, weights)
    pooled = tf.reduce_sum(vectors, -2)
    if combiner != "sum":
        if weights is None:
            weights = tf.ragged.map_flat_values(lambda v: tf.ones(tf.shape(v)[:-1], v.dtype), vectors)
        divisor = tf.reduce_sum(weights, -1) if combiner == "mean" else tf.sqrt(tf.reduce_sum(weights * weights, -1))
        pooled = tf.ragged.map_flat_values(lambda p, d: tf.math.divide_no_nan(p, d[..., tf.newaxis]), pooled, divisor)
    return tf.cast(pooled, dtype)


def as_rows(ids: tf.SparseTensor, weights: tf.SparseTensor | None) -> tuple[tf.RaggedTensor, tf.RaggedTensor | None]:
    """Sparse ids `[batch, k]` and their weights as ragged ones, `[batch, None]`.

    Raises:
        tf.errors.InvalidArgumentError: when it runs, the rows are not in ascending order (`tf.sparse.reorder` sorts
            them), or the weights have other indices than the ids.
    """
    num_rows = ids.dense_shape[0] if ids.shape[0] is None else ids.shape[0]
    rows = tf.RaggedTensor.from_value_rowids(ids.values, ids.indices[:, 0], num_rows)
    if weights is None:
        return rows, None
    tf.debugging.assert_equal(weights.indices, ids.indices, "sparse weights must have the indices of their ids")
    return rows, rows.with_flat_values(weights.values)
