"""Warnings about events in a run."""

from __future__ import annotations

import warnings


def warn(message: str, *, prefix: str = "kdist: ") -> None:
    """Warns like `warnings.warn`, but shows a message again: a worker that is lost twice is reported twice."""
    # Without a registry, Python does not remember what was shown.
    warnings.warn_explicit(prefix + message, UserWarning, filename="kdist", lineno=1)
