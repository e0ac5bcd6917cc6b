"""Warnings about events in a run."""

from __future__ import annotations

import logging
import warnings

from kdist.console.log import Line, record


def warn(message: str, *, prefix: str = "kdist: ") -> None:
    """Warns like `warnings.warn`, but shows a message again: a worker that is lost twice is reported twice."""
    line = Line(prefix + message, "warning")
    record(line, logging.WARNING)
    # Without a registry, Python does not remember what was shown.
    warnings.warn_explicit(str(line), UserWarning, filename="kdist", lineno=1)
