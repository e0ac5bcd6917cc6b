"""Importing TensorFlow in less time: every process of a cluster does it, and it takes seconds."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def quick_import(*, keras: bool = True) -> Iterator[None]:
    """Within it, importing TensorFlow takes less time.

    Python does not look for garbage meanwhile: there is none among the million objects that are made, and looking costs
    a fifth of the time.

    Args:
        keras: whether TensorFlow is to import Keras, if nobody has: another quarter, with Matplotlib, which Keras
            imports. What only serves has no use for it.
    """
    was_enabled = gc.isenabled()
    modules: dict[str, Any] = sys.modules
    hidden = not keras and "keras" not in modules
    gc.disable()
    if hidden:
        # What Python takes for a module that does not exist; TensorFlow goes on without it.
        modules["keras"] = None
    try:
        yield
    finally:
        if hidden:
            del modules["keras"]
        if was_enabled:
            gc.enable()
