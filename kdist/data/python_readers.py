"""Functions of Python that read data in the process of a worker, called from a dataset by their names.

A dataset that is traced here and runs on a worker cannot hold a Python function of this process. Every process of
kdist offers the same ones under the same names, so that a name is all that has to travel.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from kdist._compat.tensorflow import offer_python_function
from kdist.errors import reason


def _function(module: str, name: str) -> Callable[..., Any]:
    """A function of a module, which is imported when it reads."""

    def read(*arguments: Any) -> Any:
        return getattr(importlib.import_module(module), name)(*arguments)

    return read


_READERS = {
    "kdist.kafka.messages": _function("kdist.extras.kafka", "messages"),
    "kdist.parquet.groups": _function("kdist.data.parquet", "groups"),
    "kdist.parquet.rows": _function("kdist.data.parquet", "rows"),
    "kdist.files.text": _function("kdist.data.file_blocks", "text"),
    "kdist.files.tfrecords": _function("kdist.data.file_blocks", "tfrecords"),
}


def offer_readers() -> None:
    """Offers all readers to functions that run in this process."""
    for name, reader in _READERS.items():
        offer_python_function(name, reader)


def read_by(name: str, arguments: Sequence[Any], specs: Sequence[tf.TensorSpec]) -> list[tf.Tensor]:
    """Calls a reader in the process that runs the function being traced, with arrays, of bytes for strings."""
    results = tf.raw_ops.PyFunc(input=list(arguments), token=name, Tout=[spec.dtype for spec in specs])
    return [tf.ensure_shape(result, spec.shape) for result, spec in zip(results, specs)]


def raised_by_reader(error: tf.errors.OpError, kind: type[Exception]) -> str | None:
    """The message of an exception of a kind that a reader has raised; None if an error is not that."""
    text = reason(error).splitlines()[0]
    prefix = f"{kind.__name__}: "
    is_that = isinstance(error, tf.errors.UnknownError) and text.startswith(prefix)
    return text.removeprefix(prefix) if is_that else None
