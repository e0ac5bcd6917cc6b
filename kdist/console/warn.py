"""Warnings about events in a run: each one is shown, even if the same one was shown before."""

from __future__ import annotations

import warnings


def warn(message: str, *, prefix: str = "kdist: ") -> None:
    """Warns like `warnings.warn`, but also shows a message again that was shown before.

    A worker that is lost twice is reported twice.

    Args:
        message: what happened, on which task.
        prefix: put before the message.
    """
    # Without a registry, Python does not remember what was shown.
    warnings.warn_explicit(prefix + message, UserWarning, filename="kdist", lineno=1)
