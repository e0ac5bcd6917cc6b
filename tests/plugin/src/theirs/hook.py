"""A hook that keeps the best validation accuracy in a file."""

from collections.abc import Mapping
from typing import Any

from kdist.hooks import Hook


class BestAccuracy(Hook):
    """Writes the best validation accuracy so far to `best-accuracy.txt` in the run dir.

    Args:
        digits: of the number.
    """

    needs_validation = True

    def __init__(self, digits: int = 4) -> None:
        self._digits = digits

    def begin(self, session: Any) -> None:
        self._best = 0.0

    def after_validation(self, session: Any, logs: Mapping[str, float]) -> None:
        self._best = max(self._best, logs["accuracy"])
        (session.run_dir / "best-accuracy.txt").write_text(f"{self._best:.{self._digits}f}\n")
