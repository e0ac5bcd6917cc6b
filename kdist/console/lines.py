"""The lines of the console: one per event, aligned columns, plain text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kdist.strategies.gradient_counts import GradientCounts

_MAX_ITEMS = 5


#: Printed at the beginning of a run without a last step.
ENDLESS_LINE = "steps     no end is given: training ends by a hook, a callback, a signal or Ctrl-C"
#: The same, with data that keeps arriving.
ARRIVING_LINE = "steps     no end is given: training ends with the data, by a hook, a callback, a signal or Ctrl-C"

#: The same, with data of unknown length.
PASSES_LINE = "steps     the length of the data is not known: an epoch ends where the data does"


def print_line(line: str) -> None:
    print(line, flush=True)


def print_nothing(line: str) -> None:
    """Replaces `print_line` if nothing should be printed."""


def event_line(event: str, step: int, last_step: int | None, *columns: str) -> str:
    """A line of a custom hook: `speed | step    100/2000 | 412.3 examples/sec`, from `speed` and its columns."""
    return _line(event, _step(step, last_step), *columns)


def train_line(
    step: int, last_step: int | None, logs: Mapping[str, Any], num_steps: int, steps_per_second: float | None
) -> str:
    """`train | step    200/2000 | loss 0.4213 | accuracy 0.8750 | over 100 steps |  412.3 steps/s | ETA 5s`"""
    return _line("train", *train_columns(step, last_step, logs, steps_per_second, over_steps(num_steps)))


def over_steps(num_steps: int) -> str:
    """What an average is over: `over 100 steps`."""
    return f"over {num_steps} step{'s' * (num_steps != 1)}"


def train_columns(
    step: int, last_step: int | None, logs: Mapping[str, Any], steps_per_second: float | None, *over: str
) -> list[str]:
    """The step, metrics, what they are `over`, rate and remaining time of training."""
    columns = [_step(step, last_step), *_metrics(logs), *over]
    if steps_per_second:
        columns.append(f"{steps_per_second:6.1f} steps/s")
        if last_step is not None:
            columns.append(f"ETA {_duration((last_step - step) / steps_per_second)}")
    return columns


def epoch_line(epoch: int, epochs: int | None, logs: Mapping[str, Any]) -> str:
    """`epoch 2/4 | loss 0.4213 | accuracy 0.8750 | val_loss 0.3902 | val_accuracy 0.8931`, of an epoch from 1."""
    of = "" if epochs is None else f"/{epochs}"
    return " | ".join([f"epoch {epoch}{of}", *_metrics(logs)])


def validation_line(step: int, last_step: int | None, logs: Mapping[str, Any]) -> str:
    """`valid | step    500/2000 | loss 0.1902 | accuracy 0.9431`"""
    return event_line("valid", step, last_step, *_metrics(logs))


def evaluation_line(step: int, last_step: int | None, logs: Mapping[str, Any]) -> str:
    """`eval  | step    500/2000 | loss 0.1902 | accuracy 0.9431`, of a checkpoint, by the evaluator."""
    return event_line("eval", step, last_step, *_metrics(logs))


def save_line(step: int, last_step: int | None, path: Path) -> str:
    """`save  | step    500      | checkpoints/ckpt-500`"""
    return _line("save", _step(step).ljust(len(_step(step, last_step))), _short(path))


def best_line(step: int, last_step: int | None, best: int) -> str:
    """`best  | step   1000      | has the values of step 600, the best validation`"""
    return _line(
        "best", _step(step).ljust(len(_step(step, last_step))), f"has the values of step {best}, the best validation"
    )


def wait_line(step: int, last_step: int | None, place: str, idle_secs: float) -> str:
    """`wait  | step    500/2000 | incoming/*.csv: all is read; waiting up to 3600 s for more`"""
    return _line("wait", _step(step, last_step), f"{place}: all is read; waiting up to {idle_secs:g} s for more")


def task_lines(tasks: Iterable[tuple[str, int, Path]]) -> list[str]:
    """`task  | worker:0 | pid   4711 | logs/worker-0.log`, one line per task: its name, process id and log."""
    return [_line("task", f"{name:<8}", f"pid {pid:>6}", _short(log)) for name, pid, log in tasks]


def stays_line(num_bytes: int, limit: int) -> str:
    """`model | 4.8 GiB, more than run.export_max_bytes (2.0 GiB): its values are in the checkpoints only`"""
    size, allowed = (f"{n / (1 << 30):.1f} GiB" for n in (num_bytes, limit))
    return _line("model", f"{size}, more than run.export_max_bytes ({allowed}): its values are in the checkpoints only")


def resume_line(step: int, last_step: int | None, path: Path) -> str:
    """`load  | step    500      | checkpoints/ckpt-500`"""
    return _line("load", _step(step).ljust(len(_step(step, last_step))), _short(path))


def reached_line(step: int, run: str) -> str:
    """`done  | step   2000      | nothing is left to do: runs/mine has got there`"""
    return _line("done", _step(step), f"nothing is left to do: {run} has reached its last step")


def again_line(error: BaseException, newest: Path, number: int, of: int, *, cluster_is_there: bool = False) -> str:
    """The message when training resumes from the newest checkpoint after `error`."""
    reason = str(error).splitlines()[0]
    what = "resuming from" if cluster_is_there else "restarting the cluster from"
    return f"{reason}; {what} {_short(newest)} ({number} of {of})"


def last_lines(
    by_worker: Mapping[str, GradientCounts],
    restarts: Mapping[str, int],
    extra_steps: int,
    overflowed_steps: int | None,
    done: str,
) -> list[str]:
    """The end of a run: each worker's gradients, what was lost, what had no effect, and `done_line`.

    `sync  | worker:0 | accepted    300 | dropped     12 | stale     12`
    `lost  | worker restarts 1 | cluster restarts 0 | extra steps 12`, unless nothing was lost
    `scale | overflowed steps 3 (dropped)`, unless there was none
    """
    shown = [
        _line("sync", f"{worker:<8}", *(f"{what} {count:>6}" for what, count in asdict(counts).items()))
        for worker, counts in by_worker.items()
    ]
    if extra_steps or any(restarts.values()):
        lost = (f"worker restarts {restarts['worker']}", f"cluster restarts {restarts['cluster']}")
        shown.append(_line("lost", *lost, f"extra steps {extra_steps}"))
    if overflowed_steps:
        shown.append(_line("scale", f"overflowed steps {overflowed_steps} (dropped)"))
    return [*shown, done]


def done_line(
    step: int, last_step: int | None, logs: Mapping[str, Any], over: str, why_ended: str, seconds: float
) -> str:
    """`done  | step   2000/2000 | loss 0.0871 | accuracy 0.9741 | of validation | steps=2000 done | 6.1s`"""
    return event_line("done", step, last_step, *_metrics(logs), *([over] if logs else []), why_ended, f"{seconds:.1f}s")


def _duration(seconds: float) -> str:
    """`5s`, `2m05s`, `1h04m`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    minutes, secs = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}m{secs:02}s"
    return f"{minutes // 60}h{minutes % 60:02}m"


def _line(event: str, *columns: str) -> str:
    return " | ".join([f"{event:<5}", *columns])


def _short(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


def _step(step: int, last_step: int | None = None) -> str:
    return f"step {step:>6}" + (f"/{last_step}" if last_step is not None else "")


def _metrics(logs: Mapping[str, Any]) -> list[str]:
    return [f"{name} {_value(value)}" for name, value in logs.items()]


def _value(value: Any) -> str:
    """`0.4213`; `[0.4213 0.0012 ...]` for a metric whose result has dimensions."""
    if isinstance(value, list):
        shown = [_value(item) for item in value[:_MAX_ITEMS]]
        return f"[{' '.join([*shown, *['...'] * (len(value) > _MAX_ITEMS)])}]"
    return f"{value:.4f}" if abs(value) < 1e6 else f"{value:.3e}"
