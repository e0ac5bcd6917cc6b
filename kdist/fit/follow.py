"""Takes part in a fit as a task that is not its chief."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from kdist import log
from kdist.cluster.processes.server import end_task, serve_until_done
from kdist.cluster.spec import Membership, Task
from kdist.errors import ChiefStoppedError, ConfigError
from kdist.evaluation.evaluator import evaluate_until_done
from kdist.fit import signals
from kdist.fit.request import Fit, FitOutcome
from kdist.model.state import finalize_ema, write_to_model
from kdist.run.result import Result
from kdist.strategies.base import TrainingSpec
from kdist.strategies.rounds import Round, WorkersRounds
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
            _run_as_worker(fit, membership, stop.begin_to_serve)
        else:
            serve_until_done(membership, cluster, stop.begin_to_serve, fingerprint=fit.fingerprint)


def _run_as_worker(fit: Fit, membership: Membership, before_serving: Callable[[Callable[[], None]], None]) -> None:
    """Trains as one of the all-reduce workers."""
    task, cluster = membership.task, fit.config.cluster
    rounds = WorkersRounds(membership, cluster, fit.fingerprint, before_serving)
    log.say(f"kdist {__version__} | {task} of {fit.place.shape} | {fit.strategy_name} | chief {rounds.chief}")
    strategy: Any = fit.make_strategy()
    try:
        has_trained = strategy.run_as_worker(rounds, partial(_spec_in, fit))
    finally:
        rounds.stop()
    if has_trained:
        write_to_model(fit.source.model, strategy.values.read())
        finalize_ema(fit.source.model)
    end_task(rounds.chief, task, cluster, is_at_end=rounds.is_at_end)


def _spec_in(fit: Fit, begun: Round) -> TrainingSpec:
    """The training of a worker, for the number of workers and with the seed of the chief's fit."""
    as_chief = replace(fit.resized(begun.shape), config=fit.config.with_values(run={"seed": begun.seed}))
    return as_chief.training_spec(as_chief.training_data)


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
