"""Keras layers for models that do not fit one server."""

from __future__ import annotations

import keras


@keras.saving.register_keras_serializable("kdist")
class Embedding(keras.layers.Embedding):
    """A `keras.layers.Embedding` for tables of any length: a training step costs the rows of its batch, no more.

    On parameter servers the table is cut by rows over all of them, a step fetches the rows that its batch looks up and
    sends back the gradient of those rows. Under every strategy the optimizer touches those rows and their slots only:
    moments of other rows do not decay, and weight decay and moving averages leave them alone (as TF1's sparse
    optimizers and LazyAdam had it), and the gradients of a row that a batch has several times are added up first.

    A table with a regularizer, a constraint or LoRA, or one that the model uses outside of this layer (tied weights),
    is needed whole at every step, and is treated as Keras treats it; `placement.txt` says so.

    Args: those of `keras.layers.Embedding`.
    """
