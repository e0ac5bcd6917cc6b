"""A fit with nothing to train, as its run dir has reached its end already or it has no epoch: it starts no cluster."""

from __future__ import annotations

from typing import Any

import keras

from kdist.console import lines
from kdist.errors import ConfigError
from kdist.fit.request import Fit, FitOutcome
from kdist.hooks import StopAtStep
from kdist.hooks.epochs import fill
from kdist.hooks.keras_callbacks import RATE_ONLY
from kdist.log import say, warn
from kdist.model.state import finalize_ema, names_here, parameter_names, write_to_model
from kdist.run.metrics_file import epochs_of, read_rows
from kdist.run.result import Result
from kdist.strategies.prepared_training import prepare


def finished_outcome(fit: Fit) -> FitOutcome | None:
    """The outcome of a fit with nothing to train; None of any other."""
    return _ended_before(fit) or _without_epochs(fit)


def _without_epochs(fit: Fit) -> FitOutcome | None:
    """The outcome of a fit whose last epoch is before its first one, as in a program whose stages may be empty.

    The model is built, and callbacks see begin and end, as in Keras.
    """
    train = fit.config.train
    if train.steps is not None or train.epochs is None or train.epochs > fit.data.initial_epoch:
        return None
    model = fit.source.model
    prepare(fit.training_spec(fit.training_data), 1)
    step = fit.model_step
    history = keras.callbacks.History()
    if not fit.place.is_chief:
        return FitOutcome(Result(), fit.resume, history)
    if not fit.is_quiet:
        say(lines.no_epoch_line(step, train.epochs, fit.data.initial_epoch))
    callbacks = keras.callbacks.CallbackList([history, *fit.data.callbacks], model=model, epochs=train.epochs)
    callbacks.on_train_begin()
    callbacks.on_train_end()
    result = fit.result(status="done", global_step=step)
    if not fit.files.read_result():
        fit.files.write_result(result)
    return FitOutcome(result, fit.resume, history)


def _ended_before(fit: Fit) -> FitOutcome | None:
    """The outcome of a fit whose run has reached its end already, and whose model then has the trained values.

    The earlier run must have ended well: otherwise its model and its result are still to be written.
    """
    train, files = fit.config.train, fit.files
    if fit.place.membership is not None or fit.resume == "never":
        # Separately started tasks wait for the chief to come.
        return None
    result = files.read_result()
    if result.get("status") != "done":
        return None
    if fit.resume is None:
        # It continues from the model, which the fit before has trained.
        first_step, step = 0, fit.model_step
        if train.steps is None or not 0 < train.steps <= step:
            return None
    else:
        first_step, step = fit.count.origin, max(files.checkpoints().steps(), default=0)
        if not step or fit.begins_anew or not _is_last(fit, result, step):
            return None
        _check_is_same_data(fit, step)
        if not _gives_values(fit, step):
            return None
    if not fit.is_quiet:
        say(lines.reached_line(step, str(files)))
    left = fit if fit.resume is not None and fit.keeps_model_on_servers else None
    resume = None if left is None else "auto"
    return FitOutcome(Result.of(result), resume, _history(fit, first_step, step), left_on_servers=left)


def _check_is_same_data(fit: Fit, step: int) -> None:
    """Refuses to leave data alone that the run has not trained on."""
    before, now = fit.files.checkpoints().fingerprint(), fit.training_data.fingerprint()
    if None not in (before, now) and before != now:
        raise ConfigError(
            f"run.dir={fit.files}: has reached its end, step {step}, on other data ({before}; this is {now})\n"
            "  to train on this data, too: train.more_epochs=1 (fit(..., more_epochs=1)), or more_steps\n"
            f"  to train another model that begins with its values: another run.dir, run.start_from={fit.files}"
        )


def _is_last(fit: Fit, result: dict[str, Any], step: int) -> bool:
    """True if the run would end at `step`, where it is resumed."""
    train = fit.config.train
    ends = [hook.last_step for hook in fit.hooks if isinstance(hook, StopAtStep) and not hook.follows_fit]
    if any(end is not None and step >= end for end in ends):
        return True
    if train.steps is not None or train.epochs is None:
        return train.steps is not None and step >= train.steps
    data, num_epochs = fit.training_data, train.epochs - fit.count.first_epoch
    if data.passes is not None and data.splits is not None:
        state = fit.files.checkpoints().data_state(step)
        data.splits.restore(state)
        return state is not None and data.passes.epoch_at(data.passes.num_read) >= num_epochs
    lengths = fit.epoch_lengths(data, replicas=result.get("workers"))
    return lengths is not None and step >= lengths.begin_of(num_epochs)


def _gives_values(fit: Fit, step: int) -> bool:
    """Gives the model the values of a checkpoint; False if that is damaged, or of another model."""
    model = fit.source.model
    # Builds the model.
    prepare(fit.training_spec(fit.training_data), 1)
    if fit.keeps_model_on_servers:
        return True
    values = fit.files.checkpoints().read(step)
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


def _history(fit: Fit, first_step: int, step: int) -> keras.callbacks.History:
    """The epochs of the run, as the fit that it resumes would have returned them."""
    history = keras.callbacks.History()
    history.set_model(fit.source.model)
    callbacks = fit.data.callbacks
    try:
        rows = read_rows(fit.files.path)
    except ConfigError as error:
        warn(f"{error}; the history is empty")
        rows = []
    data = fit.training_data
    has_epochs = fit.config.train.steps_per_epoch is not None or data.batches_per_pass(1) is not None
    epochs = epochs_of(
        rows,
        after=first_step,
        until=step,
        are_complete=has_epochs or data.passes is not None,
        with_learning_rate=any(isinstance(callback, RATE_ONLY) for callback in callbacks),
    )
    fill(history, epochs)
    return history
