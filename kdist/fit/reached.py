"""A fit with nothing to train, as its run dir has reached its end already or it has no epoch: it starts no cluster."""

from __future__ import annotations

from typing import Any

import keras

from kdist._compat.keras import main_optimizer, step_counter
from kdist.console import lines
from kdist.errors import ConfigError
from kdist.fit.request import FitOutcome, FitRequest
from kdist.hooks import StopAtStep
from kdist.hooks.epochs import fill
from kdist.hooks.keras_callbacks import RATE_ONLY
from kdist.log import warn
from kdist.model.state import finalize_ema, names_here, parameter_names, write_to_model
from kdist.run.metrics_file import epochs_of, read_rows
from kdist.run.result import Result
from kdist.strategies.prepared_training import prepare


def finished_outcome(request: FitRequest) -> FitOutcome | None:
    """The outcome of a fit with nothing to train; None of any other."""
    return _ended_before(request) or (_without_epochs(request) if request.arguments.has_no_epoch else None)


def _without_epochs(request: FitRequest) -> FitOutcome:
    """The outcome of a fit that has no epoch: the model is built, and callbacks see begin and end, as in Keras."""
    arguments, model = request.arguments, request.source.model
    prepare(request.training_spec(request.training_data), 1)
    step = int(step_counter(main_optimizer(model)))
    history = keras.callbacks.History()
    if not request.strategy.is_chief:
        return FitOutcome(Result(), request.resume, history)
    if not arguments.is_quiet:
        lines.print_line(lines.no_epoch_line(step, arguments.epochs or 0, arguments.initial_epoch))
    callbacks = keras.callbacks.CallbackList([history, *arguments.callbacks], model=model, epochs=arguments.epochs)
    callbacks.on_train_begin()
    callbacks.on_train_end()
    return FitOutcome(request.result(status="done", global_step=step), request.resume, history)


def _ended_before(request: FitRequest) -> FitOutcome | None:
    """The outcome of a fit whose run has reached its end already, and whose model then has the trained values.

    The earlier run must have ended well: otherwise its model and its result are still to be written.
    """
    arguments, files = request.arguments, request.files
    if request.strategy.membership is not None or request.resume == "never":
        # Tasks that others started wait for the chief to come.
        return None
    result = files.read_result()
    if result.get("status") != "done":
        return None
    first_step = int(step_counter(main_optimizer(request.source.model)))
    if request.resume is None:
        # It continues from the model, which the fit before has trained.
        first_step, step = 0, first_step
        if arguments.steps is None or not 0 < arguments.steps <= step:
            return None
    else:
        step = max(files.checkpoints().steps(), default=0)
        if not step or not _is_last(request, result, first_step, step) or not _gives_values(request, step):
            return None
    if not arguments.is_quiet:
        lines.print_line(lines.reached_line(step, str(files)))
    left = request if request.resume is not None and request.keeps_model_on_servers else None
    return FitOutcome(
        Result.of(result),
        None if left is None else "auto",
        _history(request, first_step, step),
        left_on_servers=left,
    )


def _is_last(request: FitRequest, result: dict[str, Any], first_step: int, step: int) -> bool:
    """Whether a run that began at one step, and is resumed at another one, would end there."""
    arguments = request.arguments
    ends = [hook.last_step for hook in request.hooks if isinstance(hook, StopAtStep) and not hook.follows_fit]
    if any(end is not None and step >= end for end in ends):
        return True
    if arguments.steps is not None or arguments.epochs is None:
        return arguments.steps is not None and step >= arguments.steps
    data, num_epochs = request.training_data, arguments.epochs - request.first_epoch(first_step)
    if data.passes is not None and data.splits is not None:
        state = request.files.checkpoints().data_state(step)
        data.splits.restore(state)
        return state is not None and data.passes.epoch_at(data.passes.num_read) >= num_epochs
    lengths = request.epoch_lengths(data, replicas=result.get("workers"))
    return lengths is not None and step >= lengths.begin_of(num_epochs)


def _gives_values(request: FitRequest, step: int) -> bool:
    """Gives the model the values of a checkpoint; False if that is damaged, or of another model."""
    model = request.source.model
    # Builds the model.
    prepare(request.training_spec(request.training_data), 1)
    if request.keeps_model_on_servers:
        return True
    values = request.files.checkpoints().read(step)
    expected = {*parameter_names(model), *(name for name in names_here(model) if name.startswith("slots/"))}
    if values is None or not expected <= values.keys():
        return False
    try:
        write_to_model(model, values)
    except ValueError:
        # One has another shape.
        return False
    finalize_ema(model)
    return True


def _history(request: FitRequest, first_step: int, step: int) -> keras.callbacks.History:
    """The epochs of the run, as the fit that it resumes would have returned them."""
    history = keras.callbacks.History()
    history.set_model(request.source.model)
    callbacks = request.arguments.callbacks
    try:
        rows = read_rows(request.files.path)
    except ConfigError as error:
        warn(f"{error}; the history is empty")
        rows = []
    data = request.training_data
    has_epochs = request.arguments.steps_per_epoch is not None or data.batches_per_pass(1) is not None
    epochs = epochs_of(
        rows,
        after=first_step,
        until=step,
        are_complete=has_epochs or data.passes is not None,
        with_learning_rate=any(isinstance(callback, RATE_ONLY) for callback in callbacks),
    )
    fill(history, epochs)
    return history
