"""`kdist train`: every error becomes one message and an exit code; TensorFlow is imported for a checked config."""

from __future__ import annotations

import os
import re
import shlex
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kdist import log
from kdist._compat import imports
from kdist.cli.arguments import as_hydra_reads, in_quotes, typed
from kdist.cli.compose import HYDRA_VERSION, check_keys, composed, explained, without_hydra
from kdist.cli.help import help_text
from kdist.cli.process import exit_code_of, native_log, print_error, start_anew
from kdist.cluster.network import isolate, sockets
from kdist.config import targets
from kdist.config.checks import check_target
from kdist.config.scheduler import grace_secs_of
from kdist.errors import ClusterError, ConfigError, KdistError, traceback_of
from kdist.fit import signals
from kdist.log import warn
from kdist.storage.files import make_new, make_private, relative
from kdist.storage.mirror import chief_folder, lock_of
from kdist.version import __version__

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from kdist._compat.hydra import CheckedLoader
    from kdist.cluster.spec import Membership
    from kdist.config.schema import Config


def run(arguments: list[str]) -> int:
    """Runs the command line `arguments`; returns the exit code."""
    if "--help" in arguments or "-h" in arguments:
        from kdist.cli.main import COMMANDS

        print(help_text(COMMANDS), end="")
        return 0
    if "--version" in arguments:
        print(f"kdist {__version__}")
        return 0
    # A config that is wrong is reported in this form, too.
    log.use("json" if "run.log_format=json" in arguments else "text")
    return exit_code_of(lambda: _run_hydra(arguments))


def _run_hydra(arguments: list[str]) -> None:
    """Runs the job, or with `-m` all trials of a sweep."""
    from kdist._compat.hydra import parse_command_line
    from kdist.cli.hydra_plugins import register

    register()
    arguments = as_hydra_reads(arguments)
    parsed = parse_command_line(arguments)
    if parsed.multirun:
        _run_sweep(parsed)
    elif parsed.cfg or parsed.info or parsed.hydra_help or parsed.shell_completion:
        _show(parsed, arguments)
    else:
        _run_once(parsed)


def _show(parsed: Namespace, arguments: list[str]) -> None:
    """Lets Hydra print a config, its help or, for a shell, completions of a command line."""
    from hydra import main as hydra_main

    from kdist.cli.main import COMMANDS

    typed = re.fullmatch(r"((?:\S*python\S* -m )?\S*kdist) +(?:([a-z]+) +)?(.*)", os.environ.get("COMP_LINE", ""))
    if typed is not None:
        program, command, rest = typed.groups()
        if command in COMMANDS and command != "train":
            # The shell offers files.
            return
        if command is None:
            print(*(f"{name}\n" for name in COMMANDS if name.startswith(rest)), sep="", end="")
        # Hydra completes the words behind the name of the program.
        os.environ["COMP_LINE"] = f"{program} {rest}"

    if parsed.cfg or parsed.info:
        composed(parsed)
    sys.argv = [sys.argv[0], *arguments]
    with _hydra_explained():
        hydra_main(version_base=HYDRA_VERSION, config_path="pkg://kdist.conf", config_name="config")(_nothing)()


def _nothing(_: DictConfig) -> None:
    """The job of a command that only prints."""


def _run_once(parsed: Namespace) -> None:
    """Runs the job; a task that is not the chief takes part in it."""
    from kdist._compat.hydra import run as run_job
    from kdist.cli.hydra_plugins import has_own_run_dir

    # Before there is a run dir: neither a wrong config nor a task that is not the chief may leave one.
    config, loader, for_job, checked, membership = _check(parsed)
    if membership is not None and not membership.is_chief:
        _take_part(for_job, checked, membership)
        return
    failures: list[Exception] = []

    def job(config: DictConfig) -> None:
        # Hydra would print a traceback of its own.
        try:
            _job(config, parsed=parsed)
        except Exception as error:  # noqa: BLE001 - raised below
            failures.append(error)

    with _hydra_explained():
        if has_own_run_dir(config):
            config.run.dir = str(make_new(Path(checked.run.dir)))
        folder = Path(str(config.hydra.run.dir))
        lock_of(chief_folder(checked.run.dir, folder, checked.run.storage_timeout)).check()
        make_private(folder)
        run_job(config, loader, job)
    if failures:
        raise failures[0]


def _run_sweep(parsed: Namespace) -> None:
    """Runs the trials of a sweep that are not done; prints the results of all of them at the end."""
    from omegaconf import OmegaConf

    from kdist._compat.hydra import sweep as run_trials
    from kdist.cli.hydra_plugins import has_own_run_dir
    from kdist.config.schema import RunConfig
    from kdist.storage.object_storage import folder_at
    from kdist.sweeps.plot import picture_of
    from kdist.sweeps.sweep import Sweep, TrialRunner, bring_files

    config, _ = composed(parsed)
    # Resolved here, and not only where trials run: `now` is another second there.
    with explained(ValueError):
        place = str(config.hydra.sweep.dir)
    with _hydra_explained():
        if has_own_run_dir(config) and place == config.run.dir:
            place = str(make_new(Path(place)))
    # A config that is not derived from kdist's has no such keys; each of its trials reports that.
    metric, mode, timeout = (OmegaConf.select(config, k) for k in ("sweep.metric", "sweep.mode", "run.storage_timeout"))
    folder = folder_at(place, timeout or RunConfig.storage_timeout, "hydra.sweep.dir")
    config, loader = composed(parsed, overrides=[f"hydra.sweep.dir={in_quotes(str(folder.path))}"])
    try:
        with _EndOfSweep() as end_of_sweep, _hydra_explained():
            make_private(folder.path)
            run_trial = partial(_job, parsed=parsed, end_of_sweep=end_of_sweep)
            run_trials(config, loader, TrialRunner(folder, run_trial, print_error))
    finally:
        sweep = Sweep(folder, metric, mode)
        if sweep.trials:
            logdir = shlex.quote(str(folder.path))
            line = f"\nsweep | {len(sweep.trials)} trials | {folder}      tensorboard --logdir {logdir}"
            log.say(log.Line("\n".join([line, *sweep.table()]), "sweep", values={"trials": len(sweep.trials)}))
            if any(trial.status != "done" for trial in sweep.trials):
                again = typed("hydra.sweep.dir", str(folder))
                log.say(f"rerun with {again} to finish the remaining trials")
            sweep.write()
            if (picture := picture_of(sweep)) is not None:
                folder.write("sweep.png", picture)
            bring_files(folder)
    if sweep.failed:
        failed = ", ".join(map(str, sweep.failed))
        error = KdistError(f"{len(sweep.failed)} of {len(sweep.trials)} trials failed: {failed}")
        error.exit_code = sweep.failed[0].exit_code
        raise error


@contextmanager
def _hydra_explained() -> Iterator[None]:
    """Turns errors of Hydra, and of folders that cannot be made, into a ConfigError."""
    # Hydra would print its errors itself and exit with 1.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        with explained():
            yield
    except OSError as error:
        raise ConfigError(f"run.dir: cannot be made: {error}") from None


def _take_part(as_composed: DictConfig, config: Config, membership: Membership) -> None:
    """Runs as a task that is not the chief, until the chief has finished; `config` is the checked one."""
    from kdist.config.recorded import recorded

    signals.exit_at_once = os._exit
    grace_secs = grace_secs_of(config.run.grace_secs, os.environ)
    with signals.task_signals(membership.task, grace_secs, config.run.stop_signals) as stop:
        try:
            with _health_server(config, membership, lambda: stop.is_serving):
                _serve(recorded(as_composed), config, membership, stop)
        except ClusterError as error:
            stays = config.cluster.wait_for_next_chief and not membership.evaluates
            if not (stays and stop.is_serving) or stop.received is not None:
                raise
            warn(f"{error}; it waits for the next chief (cluster.wait_for_next_chief)")
            start_anew()


def _serve(known: Mapping[str, Any], config: Config, membership: Membership, stop: signals.TaskSignals) -> None:
    """See `_take_part`."""
    logs_devices = config.run.log_device_placement
    with nullcontext() if logs_devices and not membership.runs_program else native_log(Path(os.devnull)):
        if membership.runs_program or membership.evaluates:
            from kdist.cli.experiment import run_experiment
            from kdist.run.result import Origin

            # An evaluator reads there what the chief saves.
            run_dir = config.run.dir if membership.evaluates else None
            run_experiment(config, run_dir, Origin.here_and_now(known), is_chief=False)
        else:
            from kdist.cluster.description import TaskFingerprint
            from kdist.cluster.processes.server import serve_until_done

            serve_until_done(
                membership,
                config.cluster,
                stop.begin_to_serve,
                fingerprint=TaskFingerprint.of(membership.spec, known),
                log_device_placement=logs_devices,
            )


def _health_server(config: Config, membership: Membership, is_ready: Callable[[], bool]) -> AbstractContextManager[Any]:
    """While entered, this task answers at `run.health_port`, if there is one."""
    from kdist.cluster.network.http_server import health_of_task, health_server

    port = config.run.health_port
    if port is None:
        return nullcontext()
    return health_server(port, health_of_task(membership, port, is_ready))


def _check(parsed: Namespace) -> tuple[DictConfig, CheckedLoader, DictConfig, Config, Membership | None]:
    """Composes the config and checks everything that can be checked without running it; see `composed`, `_checked`."""
    config, loader = composed(parsed)
    for_job = without_hydra(config)
    return config, loader, for_job, *_checked(for_job, parsed)


def _checked(config: DictConfig, parsed: Namespace) -> tuple[Config, Membership | None]:
    """The config as dataclasses, with values and targets checked, and what it makes this process."""
    from omegaconf import OmegaConf

    from kdist.cli.experiment import strategy_of
    from kdist.cluster.resolve import membership_of, shape_of
    from kdist.config.build import check_targets
    from kdist.config.schema import Config
    from kdist.strategies import registry

    with explained(ValueError):
        check_keys(config, Config)
        checked: Any = OmegaConf.to_object(config)
        if not isinstance(checked, Config):
            raise ConfigError("the config is not one of kdist's: the first of its defaults has to be kdist_schema")
        log.use(checked.run.log_format)
        checked.check()
        check_target("data", checked.data)
        if Path(checked.run.dir).exists() and not Path(checked.run.dir).is_dir():
            raise ConfigError(f"run.dir={checked.run.dir}: is a file")
        membership = membership_of(checked.cluster, os.environ)
        shape = shape_of(checked.cluster, membership)
        registry.resolve(checked.strategy, shape)
        checked.run.trust = targets.of_command_line(checked.run.trust, parsed.overrides)
        if membership is None and (parsed.multirun or not shape.is_local):
            # Now, while there is one thread, and before the first trial of a sweep.
            isolate.enter(checked.cluster.isolate)
        sockets.bind_to(checked.cluster.bind)
        # It may import TensorFlow, which prints messages about every machine.
        with native_log(Path(os.devnull)):
            check_targets(checked)
            strategy_of(checked)
    return checked, membership


class _EndOfSweep(ExitStack):
    """Callbacks for the end of a sweep that runs its trials in `process`; copies in other processes never run them."""

    def __init__(self) -> None:
        super().__init__()
        self.process = os.getpid()


def _job(
    config: DictConfig, trial_dir: str | None = None, *, parsed: Namespace, end_of_sweep: _EndOfSweep | None = None
) -> None:
    """One run, in the folder that Hydra has created for it.

    Args:
        trial_dir: the run dir, if this is a trial of a sweep.
        end_of_sweep: when its fork server ends, if this is a trial in the process of the sweep.
    """
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    from kdist.cli.hydra_plugins import write_record

    checked, membership = _checked(config, parsed)
    if membership is not None and HydraConfig.get().mode == RunMode.MULTIRUN:
        raise ConfigError(f"cluster={checked.cluster.shape}: tasks that others start have one run, and no sweep (-m)")
    if membership is not None and not membership.is_chief:
        _take_part(config, checked, membership)
        return
    checked.run.dir = trial_dir or checked.run.dir
    run_dir = relative(Path(HydraConfig.get().runtime.output_dir))
    log_file = run_dir / "logs" / "chief-0.log"
    if checked.run.log_device_placement:
        # TensorFlow reads it on import.
        os.environ[imports.LEVEL] = "0"
    folder = chief_folder(checked.run.dir, run_dir, checked.run.storage_timeout)
    with lock_of(folder), ExitStack() as end_of_run, native_log(log_file):
        write_record(run_dir, config)
        from kdist.cluster.local import log_path
        from kdist.cluster.processes.task_processes import share_fork_server
        from kdist.cluster.resolve import shape_of

        end = end_of_sweep if end_of_sweep is not None and end_of_sweep.process == os.getpid() else end_of_run
        shape = shape_of(checked.cluster, membership)
        if membership is None and not shape.is_local and not checked.run.plan_only:
            # The tasks that this process will start import TensorFlow while it does so itself.
            end.enter_context(share_fork_server(log_path(log_file.parent, shape.tasks[0]), train=not shape.num_ps))
        from kdist.cli.experiment import run_experiment
        from kdist.config.hparams import overrides_of_job
        from kdist.config.recorded import recorded
        from kdist.console import live
        from kdist.run.result import Origin

        known = recorded(config)
        known["run"]["dir"] = checked.run.dir
        origin = Origin.here_and_now(known, overrides_of_job())
        signals.exit_at_once = live.exit_at_once
        try:
            run_experiment(checked, folder, origin)
        except ClusterError as error:
            from kdist.run.run_dir import RunDir

            way_on, files = "there is no checkpoint yet", RunDir(folder, "")
            if (newest := files.checkpoints().newest()) is not None:
                again = typed("run.dir", str(files))
                way_on = f"the same command with {again} resumes from {newest.parent.name}/{newest.name}"
            raise ClusterError(f"{error}\n  {way_on}    logs: {run_dir / 'logs'}") from error
        except KdistError:
            raise
        except Exception as error:
            with log_file.open("a") as file:
                file.write(traceback_of(error))
            raise
