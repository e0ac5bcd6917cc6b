"""An embedding layer for tables of any length."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from kdist.layers.initial_rows import TableInitializer, is_large
from kdist.layers.pooling import PooledLookup, Ragged


@keras.saving.register_keras_serializable("kdist")
class Embedding(PooledLookup, keras.layers.Embedding):
    """A `keras.layers.Embedding` for tables of any length: the cost of a training step depends only on the rows of its
    batch.

    On parameter servers, the table is split by rows over all of them; a step fetches the rows of its batch and sends
    back their gradients. Under every strategy, the optimizer updates only those rows and their slots: moments of other
    rows do not decay, and weight decay and moving averages do not change them (as with TF1's sparse optimizers and
    LazyAdam). The gradients of a row that occurs several times in a batch are added up first.

    A table with a regularizer, a constraint or LoRA, or one that the model also uses outside this layer (tied weights),
    is needed as a whole in every step, and is treated as in Keras; `placement.txt` says so.

    Tables of more than 64 MB are drawn in blocks, each from its own seed. With parameter servers, the servers draw
    them; in the process that builds the model, they have neither values nor memory.

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

    Args:
        *args, **kwargs: as in `keras.layers.Embedding`.
        combiner: `sum`, `mean` or `sqrtn`; None for one vector per id.

    Raises:
        ValueError: an unknown combiner; ids without a dimension to pool over; weights or sparse ids without a combiner;
            weights of another kind or shape than the ids.
    """

    def build(self, input_shape: Any = None) -> None:
        shape, given = (self.input_dim, self.output_dim), vars(self)["embeddings_initializer"]
        is_drawn_here = not self.built and self.quantization_mode is None and is_large(shape, self.variable_dtype)
        if is_drawn_here and (in_blocks := TableInitializer.of(given, shape)) is not None:
            self.embeddings_initializer = in_blocks
        try:
            super().build(input_shape)
        finally:
            self.embeddings_initializer = given

    def quantized_call(self, inputs: Any, weights: Any = None) -> Ragged:
        return self.call(inputs, weights)

    def look_up(self, ids: tf.Tensor) -> tf.Tensor:
        of_keras = keras.layers.Embedding
        return of_keras.call(self, ids) if self.quantization_mode is None else of_keras.quantized_call(self, ids)
