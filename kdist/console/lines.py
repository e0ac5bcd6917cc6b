"""The lines of the console: one per event, aligned columns, plain text."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kdist.log import Line
from kdist.version import __version__

if TYPE_CHECKING:
    from kdist.cluster.spec import Task
    from kdist.parameters.placement.plan import PlacementPlan
    from kdist.strategies.gradient_counts import GradientCounts

_MAX_ITEMS = 5

#: The line at the beginning of a run without a last step.
ENDLESS_LINE = "steps     no end is given: training ends by a hook, a callback, a signal or Ctrl-C"
#: The same, with data that keeps arriving.
ARRIVING_LINE = "steps     no end is given: training ends with the data, by a hook, a callback, a signal or Ctrl-C"
#: The same, with data of unknown length.
PASSES_LINE = "steps     the length of the data is not known: an epoch ends where the data does"


def start_line(name: str, strategy: str, cluster: str) -> Line:
    """`kdist 0.1.0 | mnist | parameter_server on 2ps2w`, the first line of a run."""
    values = {"version": __version__, "name": name, "strategy": strategy, "cluster": cluster}
    return Line(f"kdist {__version__} | {name} | {strategy} on {cluster}", "start", values=values)


def run_dir_line(run_dir: str, path: Path) -> Line:
    """`run dir   runs/mnist/2026-11-21_09-03-45      tensorboard --logdir runs`; in `path`, its files are here."""
    # A relative one is shown with its siblings.
    logdir = shlex.quote(path.parts[0] if path.parts and not path.is_absolute() else str(path))
    return Line(f"run dir   {run_dir}      tensorboard --logdir {logdir}", "run_dir", values={"run_dir": run_dir})


def how_to_resume(run_dir: str, arguments: Sequence[str] | None) -> Line:
    """`  resume: the same command with run.dir=runs/a`; of a program, without arguments of a command line, its own."""
    if arguments is None:
        return Line(f"  resume: the same program with run_dir={run_dir!r}", "resume")
    has_run_dir = any(argument.startswith("run.dir=") for argument in arguments)
    return Line("  resume: the same command" + ("" if has_run_dir else f" with run.dir={run_dir}"), "resume")


def event_line(
    event: str, step: int, last_step: int | None, *columns: str, values: Mapping[str, Any] | None = None
) -> Line:
    """A line of a custom hook: `speed | step    100/2000 | 412.3 examples/sec`, from `speed` and its columns.

    `run.log_format=json` reports `values`.
    """
    return _line(event, _step(step, last_step), *columns, step=step, values=values)


def train_line(
    step: int, last_step: int | None, logs: Mapping[str, Any], num_steps: int, steps_per_second: float | None
) -> Line:
    """`train | step    200/2000 | loss 0.4213 | accuracy 0.8750 | over 100 steps |  412.3 steps/s | ETA 5s`"""
    over = over_steps(num_steps)
    columns = train_columns(step, last_step, logs, steps_per_second, over)
    values = {**logs, "over_steps": num_steps, "steps_per_second": steps_per_second}
    return _line("train", *columns, step=step, values=values, spare=[over, *_spare(logs)])


def over_steps(num_steps: int) -> str:
    """The scope of an average, `over 100 steps`."""
    return f"over {num_steps} step{'s' * (num_steps != 1)}"


def train_columns(
    step: int, last_step: int | None, logs: Mapping[str, Any], steps_per_second: float | None, *over: str
) -> list[str]:
    """The step, metrics, the steps that these are `over`, rate and remaining time of training."""
    columns = [_step(step, last_step), *_metrics(logs), *over]
    if steps_per_second:
        columns.append(f"{steps_per_second:6.1f} steps/s")
        if last_step is not None:
            columns.append(f"ETA {_duration((last_step - step) / steps_per_second)}")
    return columns


def epoch_line(epoch: int, epochs: int | None, step: int, logs: Mapping[str, Any]) -> Line:
    """`epoch 2/4 | loss 0.4213 | accuracy 0.8750 | val_loss 0.3902 | val_accuracy 0.8931`, of an epoch from 1."""
    number = f"epoch {epoch}" if epochs is None else f"epoch {epoch}/{epochs}"
    values = {"epoch": epoch, "epochs": epochs, **logs}
    return Line(" | ".join([number, *_metrics(logs)]), "epoch", step, values, _spare(logs))


def validation_line(step: int, last_step: int | None, logs: Mapping[str, Any]) -> Line:
    """`valid | step    500/2000 | loss 0.1902 | accuracy 0.9431`"""
    return _line("valid", _step(step, last_step), *_metrics(logs), step=step, values=logs, spare=_spare(logs))


def evaluation_line(step: int, last_step: int | None, logs: Mapping[str, Any]) -> Line:
    """`eval  | step    500/2000 | loss 0.1902 | accuracy 0.9431`, of a checkpoint, by the evaluator."""
    return _line("eval", _step(step, last_step), *_metrics(logs), step=step, values=logs, spare=_spare(logs))


def save_line(step: int, last_step: int | None, path: Path) -> Line:
    """`save  | step    500      | checkpoints/ckpt-500`"""
    return _line("save", _wide_step(step, last_step), _short(path), step=step, values={"path": str(path)})


def resume_line(step: int, last_step: int | None, path: Path) -> Line:
    """`load  | step    500      | checkpoints/ckpt-500`"""
    return _line("load", _wide_step(step, last_step), _short(path), step=step, values={"path": str(path)})


def start_from_line(source: str, num_values: int, new: Sequence[str]) -> Line:
    """`begin | 8 values of runs/day1/checkpoints/ckpt-500; new are parameters/dense_2/kernel, ...`"""
    others = ", ".join(new[:_MAX_ITEMS]) + (f", ... ({len(new)})" if len(new) > _MAX_ITEMS else "")
    text = f"{num_values} values of {source}" + (f"; new are {others}" if new else "")
    return _line("begin", text, values={"source": source, "values": num_values, "new": list(new)})


def best_line(step: int, last_step: int | None, best: int) -> Line:
    """`best  | step   1000      | restored step 600, which validated best`"""
    what = f"restored step {best}, which validated best"
    return _line("best", _wide_step(step, last_step), what, step=step, values={"best_step": best})


def resize_line(step: int, last_step: int | None, resize: Mapping[str, Any]) -> Line:
    """`resize | step   1200/2000 | 2ps2w -> 3ps4w | 1.8 s`, as `result.json` has it; a move leaves the shape."""
    before, after = resize["from"], resize["to"]
    change = f"{before} -> {after}" if before != after else f"{after}, {resize['change']}"
    return _line("resize", _step(step, last_step), change, f"{resize['seconds']:.1f} s", step=step, values=resize)


def wait_line(step: int, last_step: int | None, place: str, idle_secs: float) -> Line:
    """`wait  | step    500/2000 | incoming/*.csv: all data read; waiting up to 3600 s for more`"""
    return event_line("wait", step, last_step, f"{place}: all data read; waiting up to {idle_secs:g} s for more")


def task_lines(tasks: Iterable[tuple[str, int, Path]]) -> list[Line]:
    """`task  | worker:0 | pid   4711 | logs/worker-0.log`, one line per task: its name, process id and log."""
    return [
        _line("task", f"{name:<8}", f"pid {pid:>6}", _short(path), values={"task": name, "pid": pid, "log": str(path)})
        for name, pid, path in tasks
    ]


def member_lines(addresses: Mapping[Task, str], chief: str) -> list[Line]:
    """`task  | worker:0 | host3:2222 | also the chief`, a line per externally started task."""
    named = {str(task): address for task, address in addresses.items()}
    width = max(map(len, named))
    also = {chief: ["also the chief"]} if chief != "chief" else {}
    return [
        _line("task", f"{task:<{width}}", address, *also.get(task, []), values={"task": task, "address": address})
        for task, address in named.items()
    ]


def plan_lines(plan: PlacementPlan) -> list[Line]:
    """Lines about the bytes that servers will hold, and that a step will move.

    plan  | 1.20 TB on 48 servers, slots included | the fullest needs about 25.4 GB of memory
    plan  | step of a worker | gets 12.4 MB, sends 13.1 MB at most | 512 examples
    plan  | 64 workers | for 1 step/s of each, the busiest server sends 17.1 MB/s and gets 18.3 MB/s
    """
    held = f"{_size(sum(plan.bytes_by_server))} on {_several(plan.num_servers, 'server')}, slots included"
    rows = ", rows of dynamic tables not counted" if any(variable.is_dynamic for variable in plan.variables) else ""
    lines = [_line("plan", held + rows, f"the fullest needs about {_size(max(plan.memory_by_server))} of memory")]
    try:
        moved = plan.step_bytes()
    except ValueError as error:
        return [*lines, _line("plan", f"step of a worker | {error}")]
    gets, sends = (sum(way) for way in zip(*moved))
    most = " at most" if any(not variable.travels for variable in plan.variables) else ""
    batch = [] if plan.batch_size is None else [f"{plan.batch_size} examples"]
    lines.append(_line("plan", "step of a worker", f"gets {_size(gets)}, sends {_size(sends)}{most}", *batch))
    sent, received = (_size(plan.num_workers * rate) for rate in max(moved, key=sum))
    busiest = f"for 1 step/s of each, the busiest server sends {sent}/s and gets {received}/s"
    return [*lines, _line("plan", _several(plan.num_workers, "worker"), busiest)]


def _several(number: int, thing: str) -> str:
    return f"{number} {thing}{'s' * (number != 1)}"


def _size(num_bytes: float) -> str:
    """`1.20 TB`, in powers of 1000, as networks and disks are."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:,.3g} PB"


def stays_line(num_bytes: int, limit: int) -> Line:
    """`model | 4.8 GiB, more than run.export_max_bytes (2.0 GiB): its values are in the checkpoints only`"""
    size, allowed = (f"{n / (1 << 30):.1f} GiB" for n in (num_bytes, limit))
    return _line("model", f"{size}, more than run.export_max_bytes ({allowed}): its values are in the checkpoints only")


def reached_line(step: int, run: str) -> Line:
    """`done  | step   2000      | runs/mine is already finished; nothing to do`"""
    return _line("done", _step(step), f"{run} is already finished; nothing to do", step=step)


def no_epoch_line(step: int, epochs: int, first_epoch: int) -> Line:
    """`done  | step   2000      | nothing to train: epochs=2, initial_epoch=2`"""
    return _line("done", _step(step), f"nothing to train: epochs={epochs}, initial_epoch={first_epoch}", step=step)


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
    done: Line,
) -> list[Line]:
    """The end of a run: each worker's gradients, losses, steps without effect, and `done_line`.

    `sync  | worker:0 | accepted    300 | dropped     12 | stale     12`
    `lost  | worker restarts 1 | cluster restarts 0 | extra steps 12`, unless nothing was lost
    `scale | overflowed steps 3 (dropped)`, unless there was none
    """
    shown = []
    for worker, counts in by_worker.items():
        values = asdict(counts)
        columns = [f"{what} {count:>6}" for what, count in values.items()]
        shown.append(_line("sync", f"{worker:<8}", *columns, values={"worker": worker, **values}))
    if extra_steps or any(restarts.values()):
        lost = (f"worker restarts {restarts['worker']}", f"cluster restarts {restarts['cluster']}")
        values = {**restarts, "extra_steps": extra_steps}
        shown.append(_line("lost", *lost, f"extra steps {extra_steps}", values=values))
    if overflowed_steps:
        values = {"overflowed_steps": overflowed_steps}
        shown.append(_line("scale", f"overflowed steps {overflowed_steps} (dropped)", values=values))
    return [*shown, done]


def done_line(
    step: int, last_step: int | None, logs: Mapping[str, Any], over: str, why_ended: str, seconds: float
) -> Line:
    """`done  | step   2000/2000 | loss 0.0871 | accuracy 0.9741 | of validation | steps=2000 done | 6.1s`"""
    columns = [_step(step, last_step), *_metrics(logs), *([over] if logs else []), why_ended, f"{seconds:.1f}s"]
    values = {**logs, "seconds": seconds, "why": why_ended}
    # The step tells that a run is at its end.
    known = [why_ended] if why_ended.endswith(" done") else []
    return _line("done", *columns, step=step, values=values, spare=[over, *known, *_spare(logs)])


def _duration(seconds: float) -> str:
    minutes, secs = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{secs:02}s" if minutes else f"{secs}s"


def _line(
    event: str,
    *columns: str,
    step: int | None = None,
    values: Mapping[str, Any] | None = None,
    spare: Sequence[str] = (),
) -> Line:
    return Line(" | ".join([f"{event:<5}", *columns]), event, step, values, spare)


def _spare(logs: Mapping[str, Any]) -> list[str]:
    """The metrics that a narrow terminal does not show: the last ones first, but never the loss."""
    return _metrics(logs)[:0:-1]


def _short(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


def _step(step: int, last_step: int | None = None) -> str:
    return f"step {step:>6}" + (f"/{last_step}" if last_step is not None else "")


def _wide_step(step: int, last_step: int | None) -> str:
    """The step without the last one, as wide as with it."""
    return _step(step).ljust(len(_step(step, last_step)))


def _metrics(logs: Mapping[str, Any]) -> list[str]:
    return [f"{name} {_value(value)}" for name, value in logs.items()]


def _value(value: Any) -> str:
    """`0.4213`; `[0.4213 0.0012 ...]` for a metric whose result has dimensions."""
    if hasattr(value, "__len__"):
        shown = [_value(item) for item in value[:_MAX_ITEMS]]
        return f"[{' '.join([*shown, *['...'] * (len(value) > _MAX_ITEMS)])}]"
    if 0 < abs(value) < 0.1:
        # Four digits that count.
        return f"{value:#.4g}"
    return f"{value:.4f}" if abs(value) < 1e6 else f"{value:.3e}"
