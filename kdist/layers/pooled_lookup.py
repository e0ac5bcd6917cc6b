"""The common part of embedding layers: all kinds of ids, and pooling."""

from __future__ import annotations

import abc
from typing import Any

import keras
import tensorflow as tf

from kdist.layers.pooling import COMBINERS, Combiner, Ragged, as_rows, pool


class PooledLookup(keras.layers.Layer):
    """A layer that looks up a vector for each id, and pools the vectors of an example if it has a combiner.

    Args:
        combiner: as in `kdist.layers.Embedding`; by name. The next class takes the others.

    Attributes:
        output_dim: the length of a vector.
        mask_zero: whether some ids are padding.
    """

    output_dim: int
    mask_zero: bool
    built: bool

    def __init__(self, *args: Any, combiner: Combiner | None = None, **kwargs: Any) -> None:
        if combiner is not None and combiner not in COMBINERS:
            raise ValueError(f"combiner={combiner!r}: must be {', '.join(map(repr, COMBINERS))} or None")
        super().__init__(*args, **kwargs)
        self.combiner = combiner

    @abc.abstractmethod
    def look_up(self, ids: tf.Tensor) -> tf.Tensor:
        """The vectors of dense ids, `[..., dim]`; while kdist trains, a function that fetches rows is in its place."""

    def is_padding(self, ids: tf.Tensor) -> tf.Tensor:
        """True for padding, if `mask_zero`: id 0."""
        return tf.equal(ids, 0)

    def call(self, inputs: Any, weights: Any = None) -> Ragged:
        self._check(inputs, weights)
        if isinstance(inputs, tf.SparseTensor):
            inputs, weights = as_rows(inputs, weights)
        if weights is not None:
            weights = tf.ragged.map_flat_values(tf.debugging.check_numerics, weights, f"layer {self.name}: the weights")
        vectors = tf.ragged.map_flat_values(self.look_up, inputs)
        if self.combiner is None:
            return vectors
        if self.mask_zero:
            weights = tf.ragged.map_flat_values(self._without_padding, inputs, 1.0 if weights is None else weights)
        return pool(vectors, weights, self.combiner)

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        return super().compute_mask(inputs, mask) if self.combiner is None else None

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
        return tf.where(self.is_padding(ids), tf.zeros([], weights.dtype), weights)

    def _check(self, ids: Any, weights: Any) -> None:
        """Raises `ValueError` for ids and weights that do not go with the combiner, or with each other."""
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


def _kind(tensor: Any) -> str:
    """Of a tensor or a `KerasTensor`."""
    if isinstance(tensor, tf.SparseTensor) or getattr(tensor, "sparse", False):
        return "sparse"
    return "ragged" if isinstance(tensor, tf.RaggedTensor) or getattr(tensor, "ragged", False) else "dense"
