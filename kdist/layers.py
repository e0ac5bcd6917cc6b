"""Keras layers for models that do not fit one server."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from math import sqrt
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kdist._compat.reserved import reserved_above
from kdist.pooling import COMBINERS, Combiner, Ragged, as_rows, pool

#: Rows of tables are drawn in blocks of this size. It is part of what a seed means, and never changes. Larger variables
#: get no memory where a model is built for parameter servers.
_BLOCK_BYTES = 64 << 20

_UNIFORM, _NORMAL = keras.initializers.RandomUniform, keras.initializers.RandomNormal
_TRUNCATED = keras.initializers.TruncatedNormal
_BY_FANS = (
    keras.initializers.VarianceScaling,
    keras.initializers.GlorotUniform,
    keras.initializers.GlorotNormal,
    keras.initializers.HeUniform,
    keras.initializers.HeNormal,
    keras.initializers.LecunUniform,
    keras.initializers.LecunNormal,
)


def made_on_servers() -> AbstractContextManager[None]:
    """A context in which large variables get no values: parameter servers make them."""
    return reserved_above(_BLOCK_BYTES)


@keras.saving.register_keras_serializable("kdist")
class Embedding(keras.layers.Embedding):
    """A `keras.layers.Embedding` for tables of any length: the cost of a training step depends only on the rows of its
    batch.

    On parameter servers, the table is split by rows over all of them; a step fetches the rows of its batch and sends
    back their gradients. Under every strategy, the optimizer updates only those rows and their slots: moments of other
    rows do not decay, and weight decay and moving averages do not change them (as with TF1's sparse optimizers and
    LazyAdam). The gradients of a row that occurs several times in a batch are added up first.

    A table with a regularizer, a constraint or LoRA, or one that the model also uses outside this layer (tied weights),
    is needed as a whole in every step, and is treated as in Keras; `placement.txt` says so.

    Tables of more than 64 MB are drawn in blocks, each from a seed of its own. In a model that parameter servers train,
    the servers draw them; where the model is built, they have neither values nor memory.

    Ids are dense, a `tf.RaggedTensor` or a `tf.SparseTensor`. With a combiner, the vectors of the last dimension of the
    ids are pooled to one, as `tf.nn.embedding_lookup_sparse` does; no ids give zeros. Called with ids and weights, each
    vector counts by its weight. With `mask_zero`, id 0 does not count, and the pooled vectors have no mask.

    Call arguments:
        inputs: integer ids: `[batch, ...]`, ragged `[batch, None]`, or, with a combiner, sparse `[batch, k]`, whose
            indices are sorted.
        weights: floating point, with a combiner only: of the kind of the ids, with their shape, row splits or indices.

    Returns:
        `[..., dim]` in the compute dtype for ids `[...]`, ragged for ragged ones; with a combiner `[..., dim]` for ids
        `[..., k]`: dense `[batch, dim]` for ragged `[batch, None]`.

    Args: those of `keras.layers.Embedding`, and by name
        combiner: `sum`, `mean` or `sqrtn`; None for one vector per id.

    Raises:
        ValueError: an unknown combiner; ids without a dimension to pool over; weights or sparse ids without a combiner;
            weights of another kind or shape than the ids.
    """

    def __init__(self, *args: Any, combiner: Combiner | None = None, **kwargs: Any) -> None:
        if combiner is not None and combiner not in COMBINERS:
            raise ValueError(f"combiner={combiner!r}: must be {', '.join(map(repr, COMBINERS))} or None")
        super().__init__(*args, **kwargs)
        self.combiner = combiner

    def build(self, input_shape: Any = None) -> None:
        shape, given = (self.input_dim, self.output_dim), vars(self)["embeddings_initializer"]
        initializer = TableInitializer.of(given, shape)
        is_large = self.input_dim * self.output_dim * tf.as_dtype(self.variable_dtype).size > _BLOCK_BYTES
        if self.built or initializer is None or not is_large or self.quantization_mode is not None:
            super().build(input_shape)
            return
        self.embeddings_initializer = initializer
        try:
            super().build(input_shape)
        finally:
            self.embeddings_initializer = given

    def call(self, inputs: Any, weights: Any = None) -> Ragged:
        self._check(inputs, weights)
        if isinstance(inputs, tf.SparseTensor):
            inputs, weights = as_rows(inputs, weights)
        vectors = tf.ragged.map_flat_values(self.look_up, inputs)
        if self.combiner is None:
            return vectors
        if self.mask_zero:
            weights = tf.ragged.map_flat_values(_zero_at_0, inputs, 1.0 if weights is None else weights)
        return pool(vectors, weights, self.combiner)

    def quantized_call(self, inputs: Any, weights: Any = None) -> Ragged:
        return self.call(inputs, weights)

    def look_up(self, ids: tf.Tensor) -> tf.Tensor:
        """The vectors of dense ids, `[..., dim]`; while kdist trains, a function that fetches rows is in its place."""
        return super().call(ids) if self.quantization_mode is None else super().quantized_call(ids)

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


def _zero_at_0(ids: tf.Tensor, weights: Any) -> tf.Tensor:
    """The weights of ids, 0 for id 0."""
    weights = tf.convert_to_tensor(weights)
    return tf.where(ids != 0, weights, tf.zeros([], weights.dtype))


class TableInitializer:
    """Draws a table in blocks of rows, each from a seed of its own, so that any rows can be drawn without the others.

    The first block is what the initializer draws for a table of that length.

    Args:
        initializer: draws each element independently of the others.
    """

    def __init__(self, initializer: keras.initializers.Initializer) -> None:
        self._initializer = initializer

    @staticmethod
    def of(given: Any, shape: Sequence[int]) -> TableInitializer | None:
        """For an initializer of Keras; None for one that may depend on the whole table."""
        if type(given) in _BY_FANS:
            given = _with_fans(given, *shape)
        is_constant = type(given) in (keras.initializers.Zeros, keras.initializers.Ones)
        is_constant |= type(given) is keras.initializers.Constant and np.ndim(given.value) == 0
        is_random = type(given) in (_UNIFORM, _NORMAL, _TRUNCATED) and isinstance(given.seed, int)
        return TableInitializer(given) if is_constant or is_random else None

    def __call__(self, shape: Sequence[int], dtype: Any = None) -> tf.Tensor:
        """The whole table."""
        return tf.concat([self.block(block, shape, dtype) for block in range(len(self.blocks(shape, dtype)))], 0)

    @staticmethod
    def blocks(shape: Sequence[int], dtype: Any) -> list[tuple[int, int]]:
        """The first row of each block, and the row after its last one."""
        step = max(1, _BLOCK_BYTES // (int(np.prod(shape[1:])) * tf.as_dtype(dtype).size))
        return list(pairwise([*range(0, shape[0], step), shape[0]]))

    def block(self, number: int, shape: Sequence[int], dtype: Any, zero: tf.Tensor | None = None) -> tf.Tensor:
        """The rows of a block of a table of this shape.

        Args:
            zero: uint32 scalar; in a graph whose optimization must not draw the rows beforehand, an argument of it.
        """
        start, stop = self.blocks(shape, dtype)[number]
        own = copy.copy(self._initializer)
        if hasattr(own, "seed"):
            seed = own.seed
            if number:
                seed = int(np.random.SeedSequence([seed, number]).generate_state(1)[0])
            own.seed = _Seed(tf.constant([seed, 0], tf.uint32) + (0 if zero is None else zero))
        return own((stop - start, *shape[1:]), dtype)


class _Seed(keras.random.SeedGenerator):
    """A seed for one draw: Keras makes the same of an integer, but takes no tensor."""

    def __init__(self, seed: tf.Tensor) -> None:
        self._seed = seed

    def next(self, ordered: bool = True) -> tf.Tensor:
        return self._seed


def _with_fans(given: Any, fan_in: int, fan_out: int) -> keras.initializers.Initializer:
    """The same distribution as that of a `VarianceScaling` for a matrix of this shape, as Keras computes it."""
    scale = given.scale / max(1.0, {"fan_in": fan_in, "fan_out": fan_out}.get(given.mode, (fan_in + fan_out) / 2))
    if given.distribution == "truncated_normal":
        # The standard deviation of a standard normal distribution that is cut off at 2.
        return _TRUNCATED(0.0, sqrt(scale) / 0.87962566103423978, given.seed)
    if given.distribution == "untruncated_normal":
        return _NORMAL(0.0, sqrt(scale), given.seed)
    return _UNIFORM(-sqrt(3.0 * scale), sqrt(3.0 * scale), given.seed)
