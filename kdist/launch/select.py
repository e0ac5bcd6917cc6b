"""Which launcher a fit needs."""

from __future__ import annotations

from kdist.launch.base import Launcher, StrategyRequest
from kdist.launch.external_task import ExternalTask
from kdist.launch.in_process import InProcess


def launcher_for(strategy: StrategyRequest) -> Launcher:
    """The launcher for fits with this strategy, in this process."""
    if strategy.membership is not None and not strategy.membership.is_chief:
        return ExternalTask(strategy.membership)
    return InProcess()
