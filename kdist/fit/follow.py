"""Takes part in a fit as a task that is not its chief."""

from __future__ import annotations

from typing import Any

from kdist import log
from kdist.cluster.processes.server import serve_until_done
from kdist.cluster.spec import Membership, Task
from kdist.errors import ChiefStoppedError, ConfigError
from kdist.evaluation.evaluator import evaluate_until_done
from kdist.fit import signals
from kdist.fit.request import Fit, FitOutcome
from kdist.model.state import finalize_ema, write_to_model
from kdist.run.result import Result
from kdist.version import __version__


def follow_chief(fit: Fit, membership: Membership) -> FitOutcome:
    """Serves the chief as this task, until the chief has finished.

    An error is raised as it is: it ends a process that has nothing else to do.
    """
    try:
        _take_part(fit, membership)
    except ChiefStoppedError as stopped:
        # The command line may start anew. A program of the user's ends as that of the chief does.
        if signals.exit_at_once is not None:
            raise
        log.say(f"done  | {stopped}")
        raise SystemExit(stopped.exit_code) from None
    return FitOutcome(Result(), resume=None)


def _take_part(fit: Fit, membership: Membership) -> None:
    cluster = fit.config.cluster
    with signals.task_signals(membership.task, fit.grace_secs, fit.config.run.stop_signals) as stop:
        if membership.evaluates:
            stop.begin_to_serve()
            evaluate_until_done(
                fit.source,
                fit.validation,
                fit.files,
                membership,
                start_timeout=cluster.start_timeout,
                print_line=fit.print_line,
            )
        elif membership.runs_program:
            stop.begin_to_serve()
            _run_as_worker(fit, membership.task)
        else:
            serve_until_done(membership, cluster, stop.begin_to_serve, fingerprint=fit.fingerprint)


def _run_as_worker(fit: Fit, task: Task) -> None:
    """Trains as one of the all-reduce workers."""
    log.say(f"kdist {__version__} | {task} of {fit.place.shape} | {fit.strategy_name}")
    fit.check_alike()
    strategy: Any = fit.make_strategy()
    data = fit.training_data
    is_at_end = strategy.run_as_worker(fit.training_spec(data, epoch_lengths=fit.epoch_lengths(data)))
    if fit.config.cluster.wait_for_next_chief and not is_at_end:
        raise ChiefStoppedError(f"{task}: the chief was told to stop")
    model = fit.source.model
    write_to_model(model, strategy.values.read())
    finalize_ema(model)
    log.say(f"done  | {task} | the chief has finished")


def not_the_chief(membership: Membership) -> ConfigError:
    """The error for what only the chief does after a fit, in a task that is not the chief."""
    why = ", which alone writes"
    if not membership.runs_program:
        why = ", and its model does not have the trained values: the chief alone saves, evaluates and predicts"
    return ConfigError(f"{membership.task} is not the chief{why}; write `if trainer.is_chief:` before it")


class EndedSession:
    """The session of the chief, for a task that has taken part in it: it has ended.

    Raises:
        ConfigError: for all else that the chief alone has.
    """

    def __init__(self, task: Task) -> None:
        self._task = task

    def should_stop(self) -> bool:
        return True

    def run(self) -> None:
        """Runs nothing, as a session that has been interrupted."""

    def request_stop(self, reason: str) -> None:
        """It has stopped."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ConfigError(
            f"session.{name}: {self._task} is not the chief, which alone has it; write `if trainer.is_chief:` before it"
        )
