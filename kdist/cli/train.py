"""`kdist train`: one run of a config, or with `-m` a run for each of several. TensorFlow waits for a checked config."""

from __future__ import annotations

import os
import re
import shlex
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kdist import log
from kdist.cli.compose import (
    HYDRA_VERSION,
    as_hydra_reads,
    compose,
    explain_errors,
    in_quotes,
    shell_argument,
    without_hydra,
)
from kdist.cli.help import help_text
from kdist.cli.main import BEGAN, COMMANDS, print_error
from kdist.errors import ConfigError, KdistError
from kdist.storage.files import make_new, make_private
from kdist.storage.mirror import chief_folder, lock_of
from kdist.version import __version__

if TYPE_CHECKING:
    from kdist.sweeps.sweep import Sweep


def run(arguments: list[str]) -> int:
    """Runs the command line `arguments`; returns the exit code."""
    if "--help" in arguments or "-h" in arguments:
        print(help_text(COMMANDS), end="")
        return 0
    if "--version" in arguments:
        print(f"kdist {__version__}")
        return 0
    # A config that is wrong is reported in this form, too.
    log.use("json" if "run.log_format=json" in arguments else "text")
    from kdist._compat.hydra import parse_command_line
    from kdist.cli.hydra_plugins import register
    from kdist.cli.recorded import record_folder, take_again, use_again

    register()
    run_dir, arguments = take_again(arguments)
    arguments = as_hydra_reads(arguments)
    parsed = parse_command_line(arguments)
    if run_dir is None:
        run_dir = record_folder(parsed)
    # The overrides of the run that is run again.
    parsed.earlier = [] if run_dir is None else use_again(run_dir, parsed)
    if parsed.multirun:
        _run_sweep(parsed)
    elif parsed.cfg or parsed.info or parsed.hydra_help or parsed.shell_completion:
        _show(parsed, arguments)
    else:
        _run_once(parsed)
    return 0


def _run_once(parsed: Namespace) -> None:
    """Runs the job; a task that is not the chief takes part in it."""
    from omegaconf import OmegaConf, read_write

    from kdist._compat.hydra import run
    from kdist.cli.experiment import check_job, run_job, take_part
    from kdist.cli.hydra_plugins import has_own_run_dir, use_run_dir

    # Before there is a run dir: neither a wrong config nor a task that is not the chief may leave one.
    config, loader = compose(parsed)
    with explain_errors(ValueError):
        use_run_dir(config)
    # As they were written, with references to variables.
    given: Any = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
    with read_write(config.hydra):
        config.hydra.overrides.task = [*parsed.earlier, *given]
    for_job = without_hydra(config)
    checked, membership = check_job(for_job, parsed)
    if membership is not None and not membership.is_chief:
        take_part(for_job, checked, membership)
        return
    with _explain_hydra_errors():
        if has_own_run_dir(config):
            config.run.dir = str(make_new(Path(checked.run.dir)))
        folder = Path(str(config.hydra.run.dir))
        lock_of(chief_folder(checked.run.dir, folder, checked.run.storage_timeout)).check()
        make_private(folder)
        error = run(config, loader, partial(run_job, parsed=parsed, began=BEGAN))
    if error is not None:
        raise error


def _run_sweep(parsed: Namespace) -> None:
    """Runs the trials of a sweep that are not done; prints the results of all of them at the end."""
    from kdist._compat.hydra import run
    from kdist.cli.experiment import EndOfSweep, run_job
    from kdist.cli.hydra_plugins import has_own_run_dir
    from kdist.storage.object_storage import folder_at
    from kdist.sweeps.sweep import Sweep, TrialRunner

    config, _ = compose(parsed)
    # Resolved here, and not only where trials run: `now` is another second there.
    with explain_errors(ValueError):
        place = str(config.hydra.sweep.dir)
    with _explain_hydra_errors():
        if has_own_run_dir(config) and place == config.run.dir:
            place = str(make_new(Path(place)))
    folder = folder_at(place, config.run.storage_timeout, "hydra.sweep.dir")
    config, loader = compose(parsed, overrides=[f"hydra.sweep.dir={in_quotes(str(folder.path))}"])
    try:
        with EndOfSweep() as end_of_sweep, _explain_hydra_errors():
            make_private(folder.path)
            run_trial = partial(run_job, parsed=parsed, end_of_sweep=end_of_sweep)
            run(config, loader, TrialRunner(folder, run_trial, print_error))
    finally:
        sweep = Sweep(folder, config.sweep.metric, config.sweep.mode)
        if sweep.trials:
            _report(sweep)
    if sweep.failed:
        failed = ", ".join(map(str, sweep.failed))
        error = KdistError(f"{len(sweep.failed)} of {len(sweep.trials)} trials failed: {failed}")
        error.exit_code = sweep.failed[0].exit_code
        raise error


def _report(sweep: Sweep) -> None:
    """Prints the results of a sweep, and writes them into its folder."""
    from kdist.sweeps.groups import terminal_width
    from kdist.sweeps.plot import picture_of
    from kdist.sweeps.sweep import bring_files

    folder = sweep.folder
    logdir = shlex.quote(str(folder.path))
    line = f"\nsweep | {len(sweep.trials)} trials | {folder}      tensorboard --logdir {logdir}"
    lines = [line, *sweep.table(terminal_width())]
    log.say(log.Line("\n".join(lines), "sweep", values={"trials": len(sweep.trials)}), in_full=True)
    if any(trial.status != "done" for trial in sweep.trials):
        log.say(f"rerun with {shell_argument('hydra.sweep.dir', str(folder))} to finish the remaining trials")
    sweep.write()
    if (picture := picture_of(sweep)) is not None:
        folder.write("sweep.png", picture)
    bring_files(folder)


def _show(parsed: Namespace, arguments: list[str]) -> None:
    """Lets Hydra print a config, its help or, for a shell, completions of a command line."""
    from hydra import main as hydra_main

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
        compose(parsed)
    sys.argv = [sys.argv[0], *arguments]
    with _explain_hydra_errors():
        only_print = hydra_main(
            version_base=HYDRA_VERSION, config_path="pkg://kdist.conf", config_name=parsed.config_name or "config"
        )
        only_print(lambda _: None)()


@contextmanager
def _explain_hydra_errors() -> Iterator[None]:
    """Turns errors of Hydra, and of folders that cannot be made, into a ConfigError."""
    # Hydra would print its errors itself and exit with 1.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        with explain_errors():
            yield
    except OSError as error:
        raise ConfigError(f"run.dir: cannot be made: {error}") from None
