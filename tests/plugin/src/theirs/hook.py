"""A hook that keeps the best validation accuracy in a file, and prints it."""

from collections.abc import Mapping
from typing import Any

from kdist.console.lines import event_line
from kdist.hooks import Hook


class BestAccuracy(Hook):
    """Writes the best validation accuracy so far to `best-accuracy.txt` in the run dir, and prints each new one.

    Args:
        digits: of the number.
    """

    needs_validation = True

    def __init__(self, digits: int = 4) -> None:
        self._digits = digits

    def begin(self, session: Any) -> None:
        self._best = 0.0

    def after_validation(self, session: Any, logs: Mapping[str, float]) -> None:
        if logs["accuracy"] <= self._best:
            return
        self._best = logs["accuracy"]
        text = f"{self._best:.{self._digits}f}"
        (session.run_dir / "best-accuracy.txt").write_text(f"{text}\n")
        values = {"best_accuracy": self._best}
        session.print_line(event_line("top", session.global_step, session.last_step, f"accuracy {text}", values=values))
