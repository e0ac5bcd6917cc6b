"""The common part of embedding layers: all kinds of ids, and the combiners of `tf.nn.embedding_lookup_sparse`."""

from __future__ import annotations

import abc
from typing import Any, Literal, TypeAlias, get_args

import keras
import tensorflow as tf

Combiner: TypeAlias = Literal["sum", "mean", "sqrtn"]
COMBINERS: tuple[str, ...] = get_args(Combiner)

#: Dense, or ragged: with another number of ids for each example.
Ragged: TypeAlias = tf.Tensor | tf.RaggedTensor


class PooledLookup(keras.layers.Layer):
    """A layer that looks up a vector for each id, and pools the vectors of an example if it has a combiner.

    Attributes:
        output_dim: the length of a vector.
        mask_zero: True if some ids are padding.
        padding: the id that is, then.
    """

    output_dim: int
    mask_zero: bool
    built: bool
    padding: int | str = 0

    def __init__(self, *args: Any, combiner: Combiner | None = None, **kwargs: Any) -> None:
        if combiner is not None and combiner not in COMBINERS:
            raise ValueError(f"combiner={combiner!r}: must be {', '.join(map(repr, COMBINERS))} or None")
        super().__init__(*args, **kwargs)
        self.combiner = combiner

    @abc.abstractmethod
    def look_up(self, ids: tf.Tensor) -> tf.Tensor:
        """The vectors of dense ids, `[..., dim]`; while kdist trains, a function that fetches rows is in its place."""

    def look_up_flat(self, ids: tf.Tensor) -> tf.Tensor:
        """The vectors of the flat values of ragged ids, of which examples may have any number."""
        return self.look_up(ids)

    def call(self, inputs: Any, weights: Any = None) -> Ragged:
        self._check(inputs, weights)
        if isinstance(inputs, tf.SparseTensor):
            inputs, weights = as_rows(inputs, weights)
        if weights is not None:
            weights = tf.ragged.map_flat_values(tf.debugging.check_numerics, weights, f"layer {self.name}: the weights")
        look_up = self.look_up_flat if isinstance(inputs, tf.RaggedTensor) else self.look_up
        vectors = tf.ragged.map_flat_values(look_up, inputs)
        if self.combiner is None:
            return vectors
        if self.mask_zero:
            weights = tf.ragged.map_flat_values(self._without_padding, inputs, 1.0 if weights is None else weights)
        return pool(vectors, weights, self.combiner)

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        return keras.ops.not_equal(inputs, self.padding) if self.mask_zero and self.combiner is None else None

    def compute_output_shape(self, input_shape: Any, weights_shape: Any = None) -> tuple[int | None, ...]:
        of_vectors = input_shape if self.combiner is None else input_shape[:-1]
        return (*of_vectors, self.output_dim)

    def compute_output_spec(self, inputs: Any, weights: Any = None) -> keras.KerasTensor:
        self._check(inputs, weights)
        shape = self.compute_output_shape(inputs.shape)
        ragged = inputs.ragged and (self.combiner is None or len(shape) > 2)
        return keras.KerasTensor(shape, self.compute_dtype, ragged=ragged)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "combiner": self.combiner}

    def _without_padding(self, ids: tf.Tensor, weights: Any) -> tf.Tensor:
        """The weights of ids, 0 for padding."""
        weights = tf.convert_to_tensor(weights)
        return tf.where(tf.equal(ids, self.padding), tf.zeros([], weights.dtype), weights)

    def _check(self, ids: Any, weights: Any) -> None:
        """Refuses, with a `ValueError`, ids and weights that do not fit the combiner, or each other."""
        where, shape = f"layer {self.name}", tuple(ids.shape)
        if self.combiner is None:
            allowed = f"; give the layer a combiner: {', '.join(map(repr, COMBINERS))}"
            if weights is not None:
                raise ValueError(f"{where}: weights are for pooling{allowed}")
            if _kind(ids) == "sparse":
                raise ValueError(f"{where}: sparse ids have no vectors of their own shape{allowed}, or use ragged ids")
            return
        if len(shape) < 2:
            raise ValueError(
                f"{where}: combiner={self.combiner!r} pools the ids of each example, but ids of shape {shape} are one "
                "for each; give dense [batch, k], ragged or sparse ids, or leave out the combiner"
            )
        if _kind(ids) == "sparse" and len(shape) > 2:
            raise ValueError(f"{where}: sparse ids have the shape {shape}, and must have [batch, k]")
        if weights is None:
            return
        if _kind(weights) != _kind(ids):
            raise ValueError(f"{where}: the ids are {_kind(ids)}, but the weights {_kind(weights)}; both must be alike")
        if not tf.TensorShape(ids.shape).is_compatible_with(weights.shape):
            raise ValueError(f"{where}: the weights have the shape {tuple(weights.shape)}, and the ids {shape}")


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


def _kind(tensor: Any) -> str:
    if isinstance(tensor, tf.SparseTensor) or getattr(tensor, "sparse", False):
        return "sparse"
    return "ragged" if isinstance(tensor, tf.RaggedTensor) or getattr(tensor, "ragged", False) else "dense"
