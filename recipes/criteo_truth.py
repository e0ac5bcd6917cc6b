"""Clicks made from a known truth, in the columns of Criteo's files, for the recipe `criteo`.

They are made where they are needed, by the workers, batch by batch: a batch is a function of the seed and its number
alone. So nothing is stored or sent, no row comes twice, and a resumed run continues with the next batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from kdist.recipes.criteo_files import NUM_COUNTS, NUM_IDS, Rows

if TYPE_CHECKING:
    import tensorflow as tf

#: How many ids each column of the Kaggle data set (Display Advertising Challenge) has; the table sizes of Meta's DLRM
#: for it, https://github.com/facebookresearch/dlrm.
CRITEO_CARDINALITIES = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
# No column is scaled down to less.
_MIN_IDS = 1000
# An id of popularity rank r comes in a share of rows like (r + offset) ** -exponent: of 100 000 ids, 7 % come in four
# fifths of the rows.
_EXPONENT, _OFFSET = 1.1, 10.0
# A count is exp(range * u ** 2) - 1, rounded down, with u uniform in 0..1: half of them are under 5, a few are 1000.
_LOG_RANGE = 7.0
_LOG_MEAN, _LOG_STDDEV = _LOG_RANGE / 3, _LOG_RANGE * (1 / 5 - 1 / 9) ** 0.5
_EMPTY_SHARE = 0.2

# Standard deviations of what all counts, all ids and all pairs of ids add to the log-odds. With the bias, a quarter of
# the labels are 1, as in the Kaggle data set.
_COUNTS, _IDS, _PAIRS, _BIAS = 0.6, 1.25, 0.35, -1.6
# A column of ids matters so much as that before it: with 26 of the same weight, each effect would be too small to be
# learned from the rows of a minute.
_DECAY = 0.6
# Columns with few ids interact, by vectors of this length.
_MAX_PAIRED_IDS, _RANK = 100, 2


class Truth:
    """The distribution that rows are drawn from: their log-odds are a sum over counts, ids and pairs of ids.

    It is made in the graph that uses it, or outside of any.

    Args:
        scale: share of Criteo's ids that there are.
        seed: the same seed gives the same rows.
    """

    def __init__(self, scale: float, seed: int) -> None:
        import tensorflow as tf

        self._seed = seed
        self._num_ids = np.array(scaled_cardinalities(scale))
        self._first = np.cumsum(self._num_ids) - self._num_ids
        total = int(self._num_ids.sum())

        def normal(shape: list[int], number: int) -> tf.Tensor:
            return tf.random.stateless_normal(shape, tf.constant([seed, number], tf.int64))

        stddevs = _DECAY ** np.arange(NUM_IDS)
        stddevs *= _IDS / np.sqrt((stddevs**2).sum())
        self._effects = normal([total], 1) * np.repeat(stddevs, self._num_ids).astype(np.float32)
        self._paired = np.flatnonzero(self._num_ids <= _MAX_PAIRED_IDS)
        num_products = _RANK * len(self._paired) * (len(self._paired) - 1) / 2
        self._factors = normal([total, _RANK], 2) * (_PAIRS**2 / num_products) ** 0.25
        self._weights = normal([NUM_COUNTS], 3) * (_COUNTS / NUM_COUNTS**0.5)
        two_digits = tf.constant([f"{number:02x}" for number in range(256)])
        # The 65536 words of four digits, of which an id is two.
        self._words = tf.strings.join([tf.repeat(two_digits, 256), tf.tile(two_digits, [256])])

    def rows(self, number: tf.Tensor, length: int) -> tuple[Rows, tf.Tensor]:
        """A batch of `length` rows, and how likely each of its labels is 1.

        Args:
            number: int64 scalar; which batch.

        Returns:
            The rows, and float32 [length].
        """
        import tensorflow as tf

        seed = tf.stack([tf.constant(self._seed, tf.int64), number])
        uniform = tf.random.stateless_uniform([length, NUM_IDS + 2 * NUM_COUNTS + 1], seed)
        for_ids, for_counts, for_gaps, for_label = tf.split(uniform, [NUM_IDS, NUM_COUNTS, NUM_COUNTS, 1], 1)
        ranks = self._ranks(for_ids)
        counts = tf.floor(tf.math.expm1(_LOG_RANGE * for_counts**2))
        counts = tf.where(for_gaps < _EMPTY_SHARE, np.nan, counts)
        probabilities = tf.sigmoid(self._log_odds(ranks, counts))
        labels = tf.cast(for_label[:, 0] < probabilities, tf.float32)
        return Rows(labels, counts, self._names(ranks)), probabilities

    def _ranks(self, uniform: tf.Tensor) -> tf.Tensor:
        """Popularity ranks of ids, int64 [n, 26], of numbers in 0..1, by the inverse of their distribution."""
        import tensorflow as tf

        power = 1.0 - _EXPONENT
        first, last = _OFFSET**power, ((self._num_ids + _OFFSET) ** power).astype(np.float32)
        ranks = (first + uniform * (last - first)) ** (1 / power) - _OFFSET
        return tf.clip_by_value(tf.cast(ranks, tf.int64), 0, self._num_ids - 1)

    def _log_odds(self, ranks: tf.Tensor, counts: tf.Tensor) -> tf.Tensor:
        import tensorflow as tf

        logs = (tf.math.log1p(counts) - _LOG_MEAN) / _LOG_STDDEV
        of_counts = tf.reduce_sum(tf.where(tf.math.is_nan(logs), 0.0, logs * self._weights), 1)
        ids = ranks + self._first
        of_ids = tf.reduce_sum(tf.gather(self._effects, ids), 1)
        factors = tf.gather(self._factors, tf.gather(ids, self._paired, axis=1))
        # The sum of the dot products of all pairs is half of (sum ** 2 - sum of squares).
        of_pairs = tf.reduce_sum(tf.reduce_sum(factors, 1) ** 2 - tf.reduce_sum(factors**2, 1), 1) / 2
        return _BIAS + of_counts + of_ids + of_pairs

    def _names(self, ranks: tf.Tensor) -> tf.Tensor:
        """Ids as in Criteo's files, eight hexadecimal digits; in every third column, the most frequent one is empty."""
        import tensorflow as tf

        columns = np.arange(NUM_IDS)
        # The factor is odd, so that the ids of a column differ.
        numbers = ((ranks + 1) * 2654435761 + columns * 40503) % 2**32
        names = tf.strings.join([tf.gather(self._words, half) for half in (numbers // 2**16, numbers % 2**16)])
        return tf.where((ranks == 0) & (columns % 3 == 2), "", names)


def scaled_cardinalities(scale: float) -> list[int]:
    """The number of ids of each column if there are `scale` times as many as Criteo's."""
    return [max(min(_MIN_IDS, num_ids), round(num_ids * scale)) for num_ids in CRITEO_CARDINALITIES]


def exact_auc(labels: np.ndarray, scores: np.ndarray) -> float:
    """The area under the ROC curve: how likely a random 1 has a higher score than a random 0.

    NaN if all labels are equal. Both arguments are [n].
    """
    ranks = np.empty(len(scores))
    ranks[np.argsort(scores)] = np.arange(1, len(scores) + 1)
    is_positive = labels > 0.5
    num_positive = int(is_positive.sum())
    num_pairs = num_positive * (len(labels) - num_positive)
    num_in_order = ranks[is_positive].sum() - num_positive * (num_positive + 1) / 2
    return float(num_in_order / num_pairs) if num_pairs else float("nan")
