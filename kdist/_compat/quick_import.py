"""Imports TensorFlow faster: every process of a cluster does it, and it takes seconds."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def quick_import(*, keras: bool = True) -> Iterator[None]:
    """Lets the import of TensorFlow take less time.

    Garbage collection is off in the meantime: there is no garbage among the million objects that are created, and
    looking for it costs a fifth of the time.

    Args:
        keras: whether TensorFlow may import Keras, unless it is already imported: another quarter of the time,
            including Matplotlib, which Keras imports. A process that only serves does not need it.
    """
    was_enabled = gc.isenabled()
    modules: dict[str, Any] = sys.modules
    hidden = not keras and "keras" not in modules
    gc.disable()
    if hidden:
        # Python treats it as a module that does not exist; TensorFlow continues without it.
        modules["keras"] = None
    try:
        yield
    finally:
        if hidden:
            del modules["keras"]
        if was_enabled:
            gc.enable()
