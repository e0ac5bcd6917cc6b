"""Actions around training steps: stop, save, summarize, log. The contract is in `base`.

Names and defaults follow `tf.compat.v1.train`, without the word Hook.
"""

import importlib
from collections.abc import Sequence
from typing import Any

from kdist.errors import ConfigError
from kdist.hooks.autoscale import Autoscale
from kdist.hooks.base import Hook, RunContext, RunValues, Session
from kdist.hooks.best_values import BestCheckpoint, EarlyStopping
from kdist.hooks.checkpoint_saver import CheckpointSaver, CheckpointSaverListener
from kdist.hooks.ends import NanTensor, StopAtStep
from kdist.hooks.export import Export
from kdist.hooks.functions import FeedFn, FinalOps
from kdist.hooks.global_step_waiter import GlobalStepWaiter
from kdist.hooks.histogram_saver import HistogramSaver
from kdist.hooks.profiler import Profiler
from kdist.hooks.progressive_validation import ProgressiveValidation
from kdist.hooks.reports import LoggingTensor, Progress, StepCounter, SummarySaver
from kdist.hooks.timer import SecondOrStepTimer

_EXTRAS = {
    "HealthCheck": "kdist.extras.monitoring",
    "MetricsServer": "kdist.extras.monitoring",
    "MlflowTracker": "kdist.extras.trackers",
    "Tracker": "kdist.extras.trackers",
    "WandbTracker": "kdist.extras.trackers",
}

__all__ = [
    "Autoscale",
    "BestCheckpoint",
    "CheckpointSaver",
    "CheckpointSaverListener",
    "EarlyStopping",
    "Export",
    "FeedFn",
    "FinalOps",
    "GlobalStepWaiter",
    "HistogramSaver",
    "Hook",
    "LoggingTensor",
    "NanTensor",
    "Profiler",
    "Progress",
    "ProgressiveValidation",
    "RunContext",
    "RunValues",
    "SecondOrStepTimer",
    "Session",
    "StepCounter",
    "StopAtStep",
    "SummarySaver",
    "default_hooks",
    "with_defaults",
]
__all__.extend(_EXTRAS)


def __getattr__(name: str) -> Any:
    if name in _EXTRAS:
        return getattr(importlib.import_module(_EXTRAS[name]), name)
    raise AttributeError(f"module 'kdist.hooks' has no attribute {name!r}")


def default_hooks() -> list[Hook]:
    """The hooks of a run that specifies none; the same as the config group `hooks=default`.

    They are called in this order: NaN is found before anything is saved or shown.
    """
    return [NanTensor(), StepCounter(), SummarySaver(), LoggingTensor(), CheckpointSaver(), StopAtStep()]


def check_hooks(hooks: Sequence[Any]) -> list[Hook]:
    """The hooks as a list.

    Raises:
        ConfigError: one is not a hook.
    """
    for hook in hooks:
        if isinstance(hook, type):
            raise ConfigError(f"hooks: {hook.__name__} is a class; give an instance, {hook.__name__}(...)")
        # Keras is not imported for it: `--help` reads this module.
        if hasattr(hook, "on_epoch_end"):
            raise ConfigError(f"hooks: {type(hook).__name__} is a Keras callback; give it to fit(callbacks=[...])")
        if not isinstance(hook, Hook):
            raise ConfigError(f"hooks: {hook!r} is a {type(hook).__name__}, not a kdist.hooks.Hook")
    return list(hooks)


def with_defaults(hooks: Sequence[Hook]) -> list[Hook]:
    """The default hooks, each replaced by the hooks of its class in `hooks`; then the remaining `hooks`."""
    merged: list[Hook] = []
    for default in default_hooks():
        replacements = [hook for hook in hooks if isinstance(hook, type(default))]
        merged += replacements or [default]
    return [*merged, *(hook for hook in hooks if hook not in merged)]
