"""`Trainer.fit` for strategies that cannot run in the caller's process: packed here, unpacked and run there."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from kdist import console
from kdist.callbacks import set_states, states_of, without_model
from kdist.cluster.serve import serve_until_done
from kdist.cluster.spec import Membership
from kdist.errors import ClusterError
from kdist.joined_evaluator import evaluate_until_done
from kdist.parameters.local import write_to_model
from kdist.program import ProgramTasks
from kdist.result import Result, describe
from kdist.signals import task_signals
from kdist.strategies.stored import prepare
from kdist.version import __version__
from kdist.warn import warn

if TYPE_CHECKING:
    from kdist.fit_arguments import FitArguments
    from kdist.run_dir import RunDir
    from kdist.trainer import Trainer


def fit_in_processes(trainer: Trainer, num_cpus: int, arguments: FitArguments) -> keras.callbacks.History:
    """Runs `trainer.fit_here(arguments)` in processes of its own; the trainer then has what came of it.

    Args:
        num_cpus: logical CPU devices to make in each.
    """
    data = arguments.training_data(trainer.seed)
    model = trainer.model
    # Builds the model, and finds what is wrong with it and the data before anything starts.
    prepare(trainer.program(data, arguments.batch_size), 1)
    tasks = ProgramTasks(
        num_workers=max(1, trainer.shape.num_workers),
        log_dir=trainer.run_dir / "logs",
        start_timeout=trainer.cluster_config.start_timeout,
        step_timeout=trainer.cluster_config.step_timeout,
        num_cpus=num_cpus,
        devices=trainer.cluster_config.devices,
        stop_signals=trainer.stop_signals,
        print_line=console.print_line,
    )
    callbacks = without_model(arguments.callbacks)
    given = replace(arguments, x=data, y=None, sample_weight=None, class_weight=None, callbacks=callbacks)
    run_dir = trainer.files
    started, restarts, resume = time.time(), 0, trainer.resume
    while True:
        try:
            outcome = tasks.run(
                {"trainer": {**trainer.arguments(), "resume": resume}, "fit": given, "values": _values_of(model)}
            )
            break
        except ClusterError as error:
            newest = _to_go_on_from(run_dir, resume, started)
            if newest is None or restarts == trainer.max_restarts:
                # Who is lost writes no result.
                if not run_dir.has_result_since(started):
                    trainer.result = Result(
                        strategy=trainer.strategy, cluster=str(trainer.shape), error=describe(error)
                    )
                    run_dir.write_result(trainer.result)
                raise
            restarts, resume = restarts + 1, "auto"
            warn(console.again_line(error, newest, restarts, trainer.max_restarts))
    trainer.resume = None
    _set_values(model, outcome["values"])
    trainer.result = replace(outcome["result"], restarts={"worker": 0, "cluster": restarts})
    if restarts:
        run_dir.write_result(trainer.result)
    history = keras.callbacks.History()
    set_states([history, *arguments.callbacks], [outcome["history"], *outcome["callbacks"]], model)
    return history


def _to_go_on_from(run_dir: RunDir, resume: str | None, started: float) -> Path | None:
    """The newest checkpoint, if it is of this run or of one that this run resumes."""
    newest = run_dir.checkpoints().newest()
    if newest is None or resume in ("auto", "must") or Path(f"{newest}.index").stat().st_mtime >= started:
        return newest
    return None


def run_program(program: Mapping[str, Any], membership: Membership | None) -> dict[str, Any] | None:
    """What `fit_in_processes` packed, run in one of the processes.

    Args:
        membership: which worker this is; None if it is alone.

    Returns:
        What the chief brings back; None for the others.
    """
    from kdist.trainer import Trainer

    trainer = Trainer(**program["trainer"], membership=membership)
    arguments = program["fit"]
    model = trainer.model
    prepare(trainer.program(arguments.x, arguments.batch_size), 1)
    _set_values(model, program["values"])
    if membership is not None and not membership.is_chief:
        take_part(trainer, membership, arguments)
        return None
    history = trainer.fit_here(arguments)
    return {
        "history": states_of([history])[0],
        "callbacks": states_of(arguments.callbacks),
        "values": _values_of(model),
        "result": trainer.result,
    }


def take_part(trainer: Trainer, membership: Membership, arguments: FitArguments) -> None:
    """Does in a task that is not the chief what the chief wants of it, until the chief is done."""
    with task_signals(membership.task, trainer.grace_secs, trainer.stop_signals) as stop:
        if membership.evaluates:
            stop.begin_to_serve()
            evaluate_until_done(trainer, membership, arguments)
        elif not membership.runs_program:
            serve_until_done(membership, trainer.cluster_config, stop)
        else:
            stop.begin_to_serve()
            _follow(trainer, membership, arguments)


def _follow(trainer: Trainer, membership: Membership, arguments: FitArguments) -> None:
    """Trains as one of the all-reduce workers."""
    console.print_line(f"kdist {__version__} | {membership.task} of {trainer.shape} | {trainer.strategy}")
    strategy: Any = trainer.make_strategy()
    strategy.follow(trainer.program(arguments.training_data(trainer.seed), arguments.batch_size))
    write_to_model(trainer.model, strategy.read())
    if trainer.model.optimizer.use_ema:
        trainer.model.optimizer.finalize_variable_values(trainer.model.trainable_variables)
    console.print_line(f"done  | {membership.task} | the chief is done")


def _values_of(model: keras.Model) -> list[np.ndarray]:
    """Everything that a model and its optimizer hold, in their order, which is the same for each model built alike."""
    return [variable.numpy() for variable in [*model.variables, *model.optimizer.variables]]


def _set_values(model: keras.Model, values: Sequence[np.ndarray]) -> None:
    for variable, value in zip([*model.variables, *model.optimizer.variables], values):
        variable.assign(value)
