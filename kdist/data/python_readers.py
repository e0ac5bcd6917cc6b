"""Functions of Python that read data in the process of a worker, called from a dataset by their names.

A dataset that is traced here and runs on a worker cannot hold a Python function of this process. Every process of
kdist offers the same ones under the same names, so that a name is all that has to travel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from kdist._compat.tensorflow import offer_python_function
from kdist.data import parquet

_READERS: dict[str, Callable[..., Any]] = {
    "kdist.parquet.groups": parquet.groups,
    "kdist.parquet.rows": parquet.rows,
}


def offer_readers() -> None:
    """Offers all readers to functions that run in this process."""
    for name, reader in _READERS.items():
        offer_python_function(name, reader)


def read_by(name: str, arguments: Sequence[Any], specs: Sequence[tf.TensorSpec]) -> list[tf.Tensor]:
    """Calls a reader, in the process that runs the function which is being traced.

    Args:
        name: one of those that `offer_readers` offers.
        arguments: passed to it as arrays, and strings as bytes.
        specs: of what it returns.
    """
    results = tf.raw_ops.PyFunc(input=list(arguments), token=name, Tout=[spec.dtype for spec in specs])
    return [tf.ensure_shape(result, spec.shape) for result, spec in zip(results, specs)]
