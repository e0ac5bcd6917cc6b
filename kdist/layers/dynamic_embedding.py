"""An embedding layer for an unknown number of ids."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeVar, get_args

import keras
import numpy as np
import tensorflow as tf

from kdist._compat.lazy_variable import is_building
from kdist.layers.initial_rows import RowInitializer
from kdist.layers.pooling import PooledLookup

T = TypeVar("T")

KeyDtype = Literal["int64", "string"]

_LAST = tf.int64.max


@dataclass(frozen=True)
class Admission:
    """Conditions for a row. Until an id meets them, its lookup returns zeros, and it is not trained.

    With both, an id must pass the second one each time after it has passed the first.

    Attributes:
        min_count: the number of batches that an id must have been in. The number is estimated by a count-min sketch
            (Cormode and Muthukrishnan 2005) on the server, which may count too many but never too few; from time to
            time it is halved, so that ids that were rare long ago do not add up.
        probability: the chance of an id to pass, in (0, 1], each time it is in a batch.

    Raises:
        ValueError: nothing would ever pass.
    """

    min_count: int = 1
    probability: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.min_count, int) or not 1 <= self.min_count < 2**31:
            raise ValueError(f"admission: min_count={self.min_count}: must be a whole number from 1 to 2147483647")
        if not 0 < self.probability <= 1:
            raise ValueError(f"admission: probability={self.probability}: must be more than 0 and at most 1")


@dataclass(frozen=True)
class Eviction:
    """Conditions under which ids lose their rows and slots; the rows are used again. An id that comes back starts anew.

    Servers look for them in the background, every second or less often. An update of a row that was evicted after a
    worker has read it is dropped.

    Attributes:
        unseen_steps: evicts rows not updated for so many global steps.
        min_norm: evicts updated rows whose L2 norm falls below it.
        max_rows: keeps at most so many rows, over all servers: the most recently updated, in steps of about a
            thousandth of the largest age; until there is room, new ids are not admitted.

    Raises:
        ValueError: no condition, or a value that is not more than 0.
    """

    unseen_steps: int | None = None
    min_norm: float | None = None
    max_rows: int | None = None

    def __post_init__(self) -> None:
        given = {name: value for name, value in asdict(self).items() if value is not None}
        if not given:
            raise ValueError("eviction: must have at least one of unseen_steps, min_norm and max_rows")
        for name, value in given.items():
            if not value > 0 or (name != "min_norm" and not isinstance(value, int)):
                kind = "more than 0" if name == "min_norm" else "a whole number, and more than 0"
                raise ValueError(f"eviction: {name}={value}: must be {kind}")


@keras.saving.register_keras_serializable("kdist")
class DynamicEmbedding(PooledLookup):
    """An embedding without a size: an id gets a row when training first sees it.

    While `kdist.Trainer` trains, rows are on the parameter servers, or in the process of `strategy=single`, with the
    slots of the optimizer, which updates only the rows of a batch. A row begins as a pure function of the initializer's
    seed and the id, so that the number of servers and the order of ids do not matter. The lookup of an id without a
    row returns zeros: of ids that are not admitted yet, and in evaluation, prediction and an exported model of all ids
    that training has not seen.

    After `fit` the layer has the trained rows, sorted by id, and looks them up by itself, in plain Keras, too; only
    `kdist.Trainer` trains them. Checkpoints have ids and rows as tensors, in the same order:
    `parameters/<layer>/embeddings_ids`, int64 `[n]`, and `parameters/<layer>/embeddings`, `[n, dim]`.

    An id takes about 70 bytes on its server, beside its row and the slots.

    Call arguments: as in `kdist.layers.Embedding`; ids are any integers of 64 bits, or strings.

    Returns: as `kdist.layers.Embedding`.

    Args:
        output_dim: the length of a vector.
        key_dtype: `int64`, for all integers, or `string`. Strings are stored as hashes of 63 bits: of a billion
            strings, two share a row with a probability of about 5 %.
        embeddings_initializer: random uniform, normal or truncated normal, or a constant.
        admission: conditions for a row; None for all ids; or its attributes.
        eviction: conditions for losing a row; None for none; or its attributes.
        mask_zero: if True, id 0, or the empty string, is padding: it does not count when vectors are pooled; without a
            combiner the vectors have a mask.
        combiner: as in `kdist.layers.Embedding`.

    Raises:
        ValueError: a value is not allowed; ids are strings and should be integers, or the reverse.
        TypeError: `admission` or `eviction` is something else.
    """

    def __init__(
        self,
        output_dim: int,
        key_dtype: KeyDtype = "int64",
        embeddings_initializer: Any = "uniform",
        admission: Admission | Mapping[str, Any] | None = None,
        eviction: Eviction | Mapping[str, Any] | None = None,
        mask_zero: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if key_dtype not in get_args(KeyDtype):
            raise ValueError(f"key_dtype={key_dtype!r}: must be {' or '.join(map(repr, get_args(KeyDtype)))}")
        if not (isinstance(output_dim, int) and output_dim > 0):
            raise ValueError(f"output_dim={output_dim!r}: must be a whole number, and more than 0")
        self.output_dim = output_dim
        self.key_dtype = key_dtype
        self.embeddings_initializer = keras.initializers.get(embeddings_initializer)
        self.row_initializer = RowInitializer(self.embeddings_initializer)
        self.admission = _options(Admission, "admission", admission)
        self.eviction = _options(Eviction, "eviction", eviction)
        self.mask_zero = self.supports_masking = mask_zero
        self.padding = "" if key_dtype == "string" else 0
        #: The number of ids with a row: here, or, as far as is known, on the servers that train it.
        self.num_rows = 0
        self._averages: np.ndarray | None = None
        self._elsewhere: Exception | None = None
        self.autocast = False

    def build(self, input_shape: Any = None) -> None:
        if self.built:
            return
        # It stands for the rows where Keras and kdist deal in variables, and has none of them.
        self._embeddings = self.add_weight(shape=(0, self.output_dim), initializer="zeros", name="embeddings")
        # Not Keras's variables, whose shapes are fixed. One more than there are: it is found for all other ids.
        zeros = tf.zeros([1, self.output_dim], self.variable_dtype)
        self._ids = tf.Variable(tf.constant([_LAST]), trainable=False, shape=[None])
        self._rows = tf.Variable(zeros, trainable=False, shape=[None, self.output_dim])
        self.built = True

    @property
    def ids(self) -> np.ndarray:
        """The ids that have a row, or the hashes of strings, in ascending order: int64 `[n]`."""
        return self._ids[:-1].numpy()

    @property
    def rows(self) -> np.ndarray:
        """Their rows, `[n, dim]`."""
        return self._rows[:-1].numpy()

    @property
    def row_bytes(self) -> int:
        """The size of a row with its id."""
        return tf.int64.size + self.output_dim * tf.as_dtype(self.variable_dtype).size

    def set_rows(self, ids: np.ndarray, rows: np.ndarray, averages: np.ndarray | None = None) -> None:
        """Replaces all rows.

        Args:
            ids: int64 `[n]`, each once; hashes of strings, as `as_keys` returns them.
            rows: `[n, dim]`.
            averages: `[n, dim]`, moving averages of the rows, for `use_averages`.

        Raises:
            ValueError: another shape, or an id twice.
        """
        ids, rows = np.asarray(ids), np.asarray(rows)
        if ids.shape != rows.shape[:1] or rows.shape[1:] != (self.output_dim,):
            raise ValueError(
                f"layer {self.name}: ids of shape {ids.shape} and rows of shape {rows.shape}; they must have [n] and "
                f"[n, {self.output_dim}]"
            )
        order = np.argsort(ids, kind="stable")
        ids = ids[order]
        if (ids[1:] == ids[:-1]).any():
            raise ValueError(f"layer {self.name}: id {ids[1:][ids[1:] == ids[:-1]][0]} has more than one row")
        self._elsewhere, self._averages = None, None if averages is None else averages[order]
        self.num_rows = len(ids)
        self._ids.assign(np.append(ids.astype(np.int64), _LAST))
        self._rows.assign(tf.concat([tf.cast(rows[order], self._rows.dtype), self._rows[-1:]], 0))

    def hand_over(self, why: Exception) -> None:
        """Raises `why` if rows are looked up here, because they are elsewhere now, until they are set."""
        self._elsewhere = why

    def use_averages(self) -> None:
        """Sets the rows to their moving averages, if there are any."""
        if self._averages is not None:
            self.set_rows(self.ids, self._averages)

    def as_keys(self, ids: tf.Tensor) -> tf.Tensor:
        """The keys of ids: int64, of the same shape."""
        if (ids.dtype == tf.string) != (self.key_dtype == "string"):
            raise ValueError(f"layer {self.name}: key_dtype={self.key_dtype!r}, but the ids are {ids.dtype.name}")
        if ids.dtype == tf.string:
            return tf.strings.to_hash_bucket_fast(ids, tf.int64.max)
        return tf.cast(ids, tf.int64)

    def look_up(self, ids: tf.Tensor) -> tf.Tensor:
        if self._elsewhere is not None and not is_building.get():
            raise copy.copy(self._elsewhere)
        keys = self.as_keys(ids)
        places = tf.reshape(tf.searchsorted(self._ids, tf.reshape(keys, [-1])), tf.shape(keys))
        is_there = tf.equal(tf.gather(self._ids, places), keys)
        vectors = tf.gather(self._rows, tf.where(is_there, places, tf.shape(self._ids)[0] - 1))
        return tf.cast(vectors, self.compute_dtype)

    def save_own_variables(self, store: Any) -> None:
        store["ids"], store["rows"] = self.ids, self.rows

    def load_own_variables(self, store: Any) -> None:
        self.set_rows(store["ids"][:], store["rows"][:])

    def get_config(self) -> dict[str, Any]:
        own = {
            "output_dim": self.output_dim,
            "key_dtype": self.key_dtype,
            "embeddings_initializer": keras.initializers.serialize(self.embeddings_initializer),
            "admission": self.admission and asdict(self.admission),
            "eviction": self.eviction and asdict(self.eviction),
            "mask_zero": self.mask_zero,
        }
        return {**super().get_config(), **own}


def _options(kind: type[T], name: str, given: T | Mapping[str, Any] | None) -> T | None:
    if given is None or isinstance(given, kind):
        return given
    if not isinstance(given, Mapping):
        raise TypeError(f"{name}={given!r}: must be kdist.layers.{kind.__name__}, its attributes in a dict, or None")
    return kind(**given)
