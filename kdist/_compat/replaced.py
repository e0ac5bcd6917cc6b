"""Replaces attributes of what belongs to others for some time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """In this context, a class, module or object has other attributes; then its own again, or those it inherits."""
    # Keras and TensorFlow would track what is set otherwise.
    kind: Any = type if isinstance(owner, type) else object
    before = {name: vars(owner)[name] for name in values if name in vars(owner)}
    try:
        for name, value in values.items():
            kind.__setattr__(owner, name, value)
        yield
    finally:
        for name in values:
            if name in before:
                kind.__setattr__(owner, name, before[name])
            else:
                kind.__delattr__(owner, name)
