"""Warnings about events in a run."""

from __future__ import annotations

import logging
import warnings

from kdist.console.log import Line, record


def warn(message: str, *, prefix: str = "kdist: ") -> None:
    """Warns like `warnings.warn`, but shows a message again: a worker that is lost twice is reported twice."""
    record(Line(prefix + message, "warning"), logging.WARNING)
    # Without a registry, Python does not remember what was shown.
    warnings.warn_explicit(prefix + message, UserWarning, filename="kdist", lineno=1)
