"""Keras layers for models that do not fit one server."""

from kdist.layers.embedding import Embedding

__all__ = ["Embedding"]
