"""`ProgressiveValidation`: each batch is a validation batch before it is trained on.

After Blum, Kalai and Langford, "Beating the hold-out" (1999), as in "Ad click prediction: a view from the trenches"
(McMahan et al., 2013).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kdist.config.checks import check_whole_number
from kdist.errors import ConfigError
from kdist.hooks.base import Hook, RunContext, RunValues, Session
from kdist.run.statistics import MetricWindow

if TYPE_CHECKING:
    from kdist.model.logs import Logs

#: Begins the names of its values.
PREFIX = "progressive_"


class ProgressiveValidation(Hook):
    """Reports loss and metrics over the last `window` examples, as the model predicted them before it trained on them.

    The forward passes of training compute them: there is no other pass, and nothing else travels.
    As long as no example comes twice, they are as honest as a validation, and always of the newest data. Two things
    differ from a validation: the model is as it is in training, with Dropout active and BatchNormalization using the
    batch; and it has changed within the window. An asynchronous worker scores a batch with the parameters that it has
    pulled for it.

    The values are reported with the values of training, as `progressive_loss`, `progressive_auc` and so on: on the
    console, in TensorBoard, in `History`, in the logs of Keras callbacks and in `result.json`. Each time when all
    examples of the window are new, hooks get them in `after_progressive_validation`, so that `EarlyStopping` and
    `BestCheckpoint` can watch one. A run that resumes begins a new window.

    Args:
        window: examples, over all workers. Up to a twentieth of them, and the examples of a step, are left out at
            times.
        metrics: names of metrics that the model is compiled with, and `loss`; None for all.

    Raises:
        ConfigError: a value is out of range; from the first run of steps: the model reports no such metric.
    """

    def __init__(self, window: int = 100_000, metrics: Sequence[str] | None = None) -> None:
        check_whole_number("ProgressiveValidation.window", window, required=True)
        if isinstance(metrics, str) or not all(isinstance(metric, str) for metric in metrics or ()):
            raise ConfigError(
                f"ProgressiveValidation.metrics={metrics}: must be a list of names of metrics that the model is "
                "compiled with"
            )
        self._size = window
        self._metrics = None if metrics is None else list(metrics)
        self._begin_window()

    def _begin_window(self) -> None:
        self._window = MetricWindow(self._size)
        self._num_new = 0
        self._logs: Logs | None = None

    def after_create_session(self, session: Session) -> None:
        self._begin_window()

    def after_run(self, context: RunContext, values: RunValues) -> None:
        self._window.add(values.steps.num_examples, values.steps.metrics)
        self._logs = None
        self._num_new += values.num_examples
        session = context.session
        if self._num_new >= self._size and not session.should_stop():
            self._num_new = 0
            for hook in session.hooks:
                hook.after_progressive_validation(session, self.extra_logs())

    def extra_logs(self) -> Mapping[str, Any]:
        """The present values, by name; empty before the first run of steps."""
        if self._logs is None:
            totals = self._window.totals
            found = {} if totals is None else totals.logs
            wanted = list(found) if self._metrics is None or not found else self._metrics
            if unknown := [name for name in wanted if name not in found]:
                raise ConfigError(f"ProgressiveValidation.metrics={unknown[0]}: the model reports {', '.join(found)}")
            self._logs = {PREFIX + name: found[name] for name in wanted}
        return self._logs
