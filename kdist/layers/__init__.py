"""Keras layers for models that do not fit one server."""

from kdist.layers.dynamic_embedding import Admission, DynamicEmbedding, Eviction
from kdist.layers.embedding import Embedding

__all__ = ["Admission", "DynamicEmbedding", "Embedding", "Eviction"]
