"""Warnings about what happens in a run: each is shown, also when the same happened before."""

from __future__ import annotations

import warnings


def warn(message: str, *, prefix: str = "kdist: ") -> None:
    """Warns, as `warnings.warn` does but for what Python leaves out: a message that it has shown already.

    A worker that is lost twice is said to be lost twice.

    Args:
        message: what happened, on which task.
        prefix: who says so.
    """
    # Without a registry nobody remembers what was shown.
    warnings.warn_explicit(prefix + message, UserWarning, filename="kdist", lineno=1)
