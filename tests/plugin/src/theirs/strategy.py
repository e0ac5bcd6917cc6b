"""A strategy: asynchronous parameter servers that pause between runs, to leave a shared machine some air."""

import time
from collections.abc import Callable
from typing import Any

from kdist.strategies.parameter_server import ParameterServer


class Paced(ParameterServer):
    """`parameter_server` with a pause after each run of steps. Args: those of `ParameterServer`.

    Args:
        pause_secs: how long it is, at least 0.
    """

    def __init__(self, *args: Any, pause_secs: float = 0.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pause_secs = pause_secs

    def run(self, num_steps: int, interrupted: Callable[[], bool], may_begin: int | None = None) -> Any:
        # Nothing is begun beforehand: the workers rest as well.
        logs = super().run(num_steps, interrupted, num_steps)
        time.sleep(self._pause_secs)
        return logs
