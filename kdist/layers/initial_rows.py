"""Initial values that do not depend on the process that draws them: of tables, and of rows without end."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from math import erf, sqrt
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.initializers import Constant, Ones, RandomNormal, RandomUniform, TruncatedNormal, VarianceScaling, Zeros

from kdist._compat.lazy_variable import lazy_above

#: Rows of tables are drawn in blocks of this size. It is part of what a seed means, and never changes. Larger variables
#: get no memory where a model is built for parameter servers.
_BLOCK_BYTES = 64 << 20


def made_on_servers() -> AbstractContextManager[None]:
    """A context in which large variables get no values: parameter servers make them."""
    return lazy_above(_BLOCK_BYTES)


def is_large(shape: Sequence[int], dtype: Any) -> bool:
    """True if a table is drawn in several blocks."""
    return int(np.prod(shape)) * tf.as_dtype(dtype).size > _BLOCK_BYTES


def _constant_of(initializer: Any) -> float | None:
    if type(initializer) in (Zeros, Ones):
        return float(type(initializer) is Ones)
    is_number = type(initializer) is Constant and np.ndim(initializer.value) == 0
    return float(initializer.value) if is_number else None


def _has_seed(initializer: Any) -> bool:
    """True for an initializer that draws each element by itself, from an integer."""
    return type(initializer) in (RandomUniform, RandomNormal, TruncatedNormal) and isinstance(initializer.seed, int)


class TableInitializer:
    """Draws a table in blocks of rows, each from its own seed, so that any rows can be drawn without the others.

    The first block equals the draw of the initializer, whose elements are independent, for a table of that length.
    """

    def __init__(self, initializer: keras.initializers.Initializer) -> None:
        self._initializer = initializer

    @staticmethod
    def of(given: Any, shape: Sequence[int]) -> TableInitializer | None:
        """For an initializer of Keras; None for one that may depend on the whole table."""
        if isinstance(given, VarianceScaling) and type(given).__module__ == VarianceScaling.__module__:
            given = _with_fans(given, *shape)
        return TableInitializer(given) if _constant_of(given) is not None or _has_seed(given) else None

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
            seed = int(np.random.SeedSequence([own.seed, number]).generate_state(1)[0]) if number else own.seed
            own.seed = _Seed(tf.constant([seed, 0], tf.uint32) + (0 if zero is None else zero))
        return own((stop - start, *shape[1:]), dtype)


class _Seed(keras.random.SeedGenerator):
    """A seed for one draw: Keras makes the same of an integer, but takes no tensor."""

    def __init__(self, seed: tf.Tensor) -> None:
        self._seed = seed

    def next(self, ordered: bool = True) -> tf.Tensor:
        return self._seed


def _with_fans(given: Any, fan_in: int, fan_out: int) -> keras.initializers.Initializer:
    """The distribution of a `VarianceScaling` for a matrix of this shape, as Keras computes it."""
    scale = given.scale / max(1.0, {"fan_in": fan_in, "fan_out": fan_out}.get(given.mode, (fan_in + fan_out) / 2))
    if given.distribution == "truncated_normal":
        # The standard deviation of a standard normal distribution that is cut off at 2.
        return TruncatedNormal(0.0, sqrt(scale) / 0.87962566103423978, given.seed)
    if given.distribution == "untruncated_normal":
        return RandomNormal(0.0, sqrt(scale), given.seed)
    return RandomUniform(-sqrt(3.0 * scale), sqrt(3.0 * scale), given.seed)


#: The increment of SplitMix64 (Steele, Lea and Flood 2014), and the factors of its finalizer, as signed numbers.
_INCREMENT, _FACTORS = -7046029254386353131, (-4658895280553007687, -7723592293110705685)
_RANDOM_BITS = 23


class RowInitializer:
    """Draws the row of an id as a pure function of a seed and the id, whoever draws it, and in whatever order.

    Args:
        initializer: one of Keras that draws each element by itself, and not by the length of a table.

    Attributes:
        kind: equal for initializers that differ in nothing but their seeds.
        seed: an integer.

    Raises:
        ValueError: any other initializer.
    """

    def __init__(self, initializer: keras.initializers.Initializer) -> None:
        self.seed = initializer.seed if _has_seed(initializer) else 0
        self._constant = _constant_of(initializer)
        if self._constant is None and not _has_seed(initializer):
            raise ValueError(
                f"{type(initializer).__name__} depends on how many rows there are, or on values that it does not "
                "name; use RandomUniform, RandomNormal, TruncatedNormal, Zeros, Ones or Constant"
            )
        self._initializer = initializer
        config = {k: v for k, v in initializer.get_config().items() if k != "seed"}
        self.kind: Hashable = (type(initializer).__name__, *map(str, config.items()))

    def rows(self, seeds: tf.Tensor, ids: tf.Tensor, dim: int, dtype: Any) -> tf.Tensor:
        """The rows `[n, dim]` of ids, int64 `[n]`, each drawn from a seed, int64 `[n]`."""
        dtype = tf.as_dtype(dtype)
        if self._constant is not None:
            return tf.fill([tf.size(ids), dim], tf.cast(self._constant, dtype))
        given = self._initializer
        uniform = _uniform(seeds, ids, dim)
        if type(given) is RandomUniform:
            return tf.cast(given.minval + uniform * (given.maxval - given.minval), dtype)
        if type(given) is TruncatedNormal:
            # The same distribution as that of Keras: cut off at two standard deviations.
            below = 0.5 * (1 + erf(-2 / sqrt(2)))
            uniform = below + uniform * (1 - 2 * below)
        return tf.cast(given.mean + given.stddev * tf.math.ndtri(uniform), dtype)


def _uniform(seeds: tf.Tensor, ids: tf.Tensor, dim: int) -> tf.Tensor:
    """Numbers in (0, 1), float32 `[n, dim]`."""
    starts = mix_bits(tf.bitwise.bitwise_xor(mix_bits(seeds), ids))
    columns = np.arange(1, dim + 1, dtype=np.uint64) * np.array(_INCREMENT).astype(np.uint64)
    bits = _shift_right(mix_bits(starts[:, tf.newaxis] + columns.astype(np.int64)), tf.int64.size * 8 - _RANDOM_BITS)
    # In the middle of an interval, so that neither end is drawn; float32 holds it exactly.
    return (tf.cast(bits, tf.float32) + 0.5) / 2**_RANDOM_BITS


def mix_bits(numbers: tf.Tensor) -> tf.Tensor:
    """int64 numbers whose bits all depend on all bits of the given ones, one to one: the finalizer of SplitMix64."""
    numbers = numbers + _INCREMENT
    for factor, shift in zip(_FACTORS, (30, 27)):
        numbers = tf.bitwise.bitwise_xor(numbers, _shift_right(numbers, shift)) * factor
    return tf.bitwise.bitwise_xor(numbers, _shift_right(numbers, 31))


def _shift_right(numbers: tf.Tensor, bits: int) -> tf.Tensor:
    """Shifts to the right, filling with zeros: TensorFlow fills int64 with the sign."""
    shifted = tf.bitwise.right_shift(numbers, tf.constant(bits, tf.int64))
    return tf.bitwise.bitwise_and(shifted, tf.constant((1 << (64 - bits)) - 1, tf.int64))
