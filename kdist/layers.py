"""Keras layers for models that do not fit one server."""

from __future__ import annotations

import keras


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

    Args: those of `keras.layers.Embedding`.
    """
