"""`python -m kdist`: every error becomes one message and an exit code; TensorFlow is imported for a checked config."""

from __future__ import annotations

import os
import re
import shlex
import sys
import traceback
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import is_dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, get_type_hints

from kdist._compat import quiet_import
from kdist.cli.help import help_text, unknown_key
from kdist.cluster import isolate
from kdist.config import targets
from kdist.console.native_stderr import keep_python_stderr, native_log
from kdist.errors import ClusterError, ConfigError, KdistError
from kdist.launch import signals
from kdist.run.files import relative
from kdist.run.mirror import Mirror
from kdist.run.object_storage import folder_of, is_url
from kdist.run.run_lock import RunLock
from kdist.version import __version__

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from kdist.cluster.spec import Membership
    from kdist.config.schema import Config

# The version whose behaviour Hydra keeps.
_HYDRA_VERSION = "1.3"


def main() -> NoReturn:
    """Runs the command line and ends the process with its exit code."""
    # As `python -m` does: a config may name a module in the current folder.
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())
    keep_python_stderr()
    signals.stop_before_training()
    warnings.formatwarning = lambda message, *_, **__: f"{message}\n"
    code = run(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # At a normal exit TensorFlow may wait forever for a task that has exited. Everything is written and closed by now.
    os._exit(code)


def run(arguments: list[str]) -> int:
    """Runs the command line `arguments`; returns the exit code."""
    if "--help" in arguments or "-h" in arguments:
        print(help_text(), end="")
        return 0
    if "--version" in arguments:
        print(f"kdist {__version__}")
        return 0
    try:
        _run_hydra(arguments)
        return 0
    except BaseException as caught:  # noqa: BLE001 - whatever it is, it becomes a message and an exit code
        error = signals.asked_to_exit() or caught
    if isinstance(error, KeyboardInterrupt):
        print("kdist: interrupted", file=sys.stderr)
        return signals.INTERRUPTED
    if isinstance(error, SystemExit):
        if error.code == signals.STOPPED:
            print("kdist: terminated", file=sys.stderr)
        return error.code if isinstance(error.code, int) else 1
    _print_error(error)
    return error.exit_code if isinstance(error, KdistError) else 1


def _run_hydra(arguments: list[str]) -> None:
    """Runs the job, or with `-m` all trials of a sweep."""
    from kdist._compat.hydra import parse_command_line
    from kdist.cli.hydra_plugins import register

    register()
    parsed = parse_command_line(arguments)
    only_run = not (parsed.multirun or parsed.cfg or parsed.info or parsed.hydra_help or parsed.shell_completion)
    if only_run and not (parsed.config_dir or parsed.config_path or parsed.config_name):
        # Before Hydra creates the run dir: neither a wrong config nor a task that is not the chief may leave one.
        checked, membership = _check(parsed)
        if membership is not None and not membership.is_chief:
            _take_part(checked, membership)
            return
        _lock_of(checked, folder_of(checked.run.dir)).check()
    elif parsed.multirun:
        _run_sweep(_composed(parsed), parsed, arguments)
        return
    elif only_run:
        _composed(parsed)
    failures: list[Exception] = []

    def job(config: DictConfig) -> None:
        # Hydra would print a traceback of its own.
        try:
            _job(config, parsed=parsed)
        except Exception as error:  # noqa: BLE001 - raised below
            failures.append(error)

    _call_hydra(job, arguments)
    if failures:
        raise failures[0]


def _run_sweep(config: DictConfig, parsed: Namespace, arguments: list[str]) -> None:
    """Runs the trials of a sweep that are not done; prints the results of all of them at the end."""
    from omegaconf import OmegaConf

    from kdist.cli.sweep import Sweep, TrialRunner
    from kdist.cli.sweep_folder import sweep_folder
    from kdist.cli.sweep_plot import picture_of
    from kdist.config.schema import RunConfig

    # Resolved here, and not only where trials run: `now` is another second there.
    with _explained(ValueError):
        place = str(config.hydra.sweep.dir)
    # A config that is not derived from kdist's has no such keys; each of its trials reports that.
    metric, mode, timeout = (OmegaConf.select(config, k) for k in ("sweep.metric", "sweep.mode", "run.storage_timeout"))
    folder = sweep_folder(place, timeout or RunConfig.storage_timeout)
    quoted = str(folder.local).replace("\\", "\\\\").replace("'", "\\'")
    # After the user's overrides: the last one of a key counts.
    end = len(arguments) - (arguments[::-1].index(parsed.overrides[-1]) if parsed.overrides else 0)
    try:
        with _EndOfSweep() as end_of_sweep:
            _call_hydra(
                TrialRunner(folder, partial(_job, parsed=parsed, end_of_sweep=end_of_sweep), _print_error),
                [*arguments[:end], f"hydra.sweep.dir='{quoted}'", *arguments[end:]],
            )
    finally:
        sweep = Sweep(folder, metric, mode)
        if sweep.trials:
            logdir = shlex.quote(str(folder.local))
            print(f"\nsweep | {len(sweep.trials)} trials | {folder}      tensorboard --logdir {logdir}")
            print("\n".join(sweep.table()), flush=True)
            if any(trial.status != "done" for trial in sweep.trials):
                print(f"rerun with hydra.sweep.dir={folder} to finish the remaining trials", flush=True)
            sweep.write()
            if (picture := picture_of(sweep)) is not None:
                folder.write("sweep.png", picture)
            folder.take_over()
    if sweep.failed:
        numbers = ", ".join(str(trial.number) for trial in sweep.failed)
        error = KdistError(f"{len(sweep.failed)} of {len(sweep.trials)} trials failed: {numbers}")
        error.exit_code = sweep.failed[0].exit_code
        raise error


def _call_hydra(job: Callable[[DictConfig], Any], arguments: list[str]) -> None:
    """Lets Hydra compose the config, create the folders and call `job`."""
    from hydra import main as hydra_main

    # Hydra would print its errors itself and exit with 1.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    sys.argv = [sys.argv[0], *arguments]
    try:
        with _explained():
            hydra_main(version_base=_HYDRA_VERSION, config_path="pkg://kdist.conf", config_name="config")(job)()
    except OSError as error:
        raise ConfigError(f"run.dir: cannot be made: {error}") from None


def _take_part(config: Config, membership: Membership) -> None:
    """Runs as a task that is not the chief, until the chief has finished."""
    signals.exit_at_once = os._exit
    logs_devices = config.run.log_device_placement
    with (
        signals.task_signals(membership.task, config.run.grace_secs, config.run.stop_signals) as stop,
        nullcontext() if logs_devices and not membership.runs_program else native_log(Path(os.devnull)),
    ):
        if membership.runs_program or membership.evaluates:
            from kdist.cli.experiment import run_experiment

            # An evaluator reads there what the chief saves.
            run_experiment(config, config.run.dir if membership.evaluates else None, is_chief=False)
        else:
            from kdist.cluster.server import serve_until_done

            serve_until_done(membership, config.cluster, stop.begin_to_serve, log_device_placement=logs_devices)


def _check(parsed: Namespace) -> tuple[Config, Membership | None]:
    """Composes the config and checks everything that can be checked without running it; see `_checked`."""
    from omegaconf import open_dict

    from kdist.cluster.spec import ClusterShape

    for override in parsed.overrides:
        group, _, value = override.partition("=")
        if group == "cluster" and value.isdecimal():
            # Hydra parses it as a number where it needs a name, and its message does not help.
            ClusterShape.parse(value)
    config = _composed(parsed)
    with open_dict(config):
        del config["hydra"]
    return _checked(config, parsed)


def _composed(parsed: Namespace) -> DictConfig:
    """The config as Hydra will compose it, with Hydra's own part checked before Hydra uses it."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.core.utils import setup_globals
    from hydra.version import setbase

    from kdist._compat.hydra import load_config

    setup_globals()
    setbase(_HYDRA_VERSION)
    with _explained(ValueError):
        config = load_config(parsed, "pkg://kdist.conf", "config")
        HydraConfig.instance().set_config(config)
        targets.check_hydra(config, parsed.overrides)
    return config


def _checked(config: DictConfig, parsed: Namespace) -> tuple[Config, Membership | None]:
    """The config as dataclasses, with values and targets checked, and what it makes this process."""
    from omegaconf import OmegaConf

    from kdist.cli.experiment import strategy_of
    from kdist.cluster.resolve import membership_of, shape_of
    from kdist.config.build import check_targets
    from kdist.config.schema import Config
    from kdist.strategies import registry

    with _explained(ValueError):
        _check_keys(config, Config)
        checked: Any = OmegaConf.to_object(config)
        if Path(checked.run.dir).exists() and not Path(checked.run.dir).is_dir():
            raise ConfigError(f"run.dir={checked.run.dir}: is a file")
        membership = membership_of(checked.cluster, os.environ)
        shape = shape_of(checked.cluster, membership)
        registry.resolve(checked.strategy, shape)
        checked.run.trust = targets.of_command_line(checked.run.trust, parsed.overrides)
        if membership is None and (parsed.multirun or not shape.is_local):
            # Now, while there is one thread, and before the first trial of a sweep.
            isolate.enter(checked.cluster.isolate)
        # It may import TensorFlow, which prints messages about every machine.
        with native_log(Path(os.devnull)):
            check_targets(checked)
            strategy_of(checked)
    return checked, membership


def _check_keys(config: DictConfig, schema: type, prefix: str = "") -> None:
    """Refuses keys that `+` added where no new key is allowed."""
    types = get_type_hints(schema)
    for name in map(str, config):
        key = f"{prefix}{name}"
        if name not in types:
            raise unknown_key(key)
        if is_dataclass(types[name]) and config[name] is not None:
            _check_keys(config[name], types[name], f"{key}.")


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

    checked, membership = _checked(config, parsed)
    if membership is not None and HydraConfig.get().mode == RunMode.MULTIRUN:
        raise ConfigError(f"cluster={checked.cluster.shape}: tasks that others start have one run, and no sweep (-m)")
    if membership is not None and not membership.is_chief:
        _take_part(checked, membership)
        return
    checked.run.dir = trial_dir or checked.run.dir
    run_dir = relative(Path(HydraConfig.get().runtime.output_dir))
    log = run_dir / "logs" / "chief-0.log"
    if checked.run.log_device_placement:
        # TensorFlow reads it on import.
        os.environ[quiet_import.LEVEL] = "0"
    with _lock_of(checked, run_dir) as lock, ExitStack() as end_of_run, native_log(log):
        from kdist.cluster.local import log_path, prepared
        from kdist.cluster.resolve import shape_of

        end = end_of_sweep if end_of_sweep is not None and end_of_sweep.process == os.getpid() else end_of_run
        shape = shape_of(checked.cluster, membership)
        if membership is None and shape.num_ps and not checked.run.plan_only:
            # The tasks that this process will start import TensorFlow while it does so itself.
            end.enter_context(prepared(log_path(log.parent, shape.tasks[0])))
        from kdist.cli.experiment import run_experiment
        from kdist.cli.hydra_plugins import overrides_of_job
        from kdist.config.recorded import recorded
        from kdist.console import live
        from kdist.run.origin import Origin

        known = recorded(config)
        known["run"]["dir"] = checked.run.dir
        origin = Origin.here_and_now(known, overrides_of_job())
        signals.exit_at_once = live.exit_at_once
        place = lock if isinstance(lock, Mirror) else run_dir
        try:
            run_experiment(checked, place, origin)
        except ClusterError as error:
            from kdist.run.run_dir import RunDir

            way_on, files = "there is no checkpoint yet", RunDir(place, "")
            if (newest := files.checkpoints().newest()) is not None:
                way_on = f"the same command with run.dir={files} resumes from {newest.parent.name}/{newest.name}"
            raise ClusterError(f"{error}\n  {way_on}    logs: {run_dir / 'logs'}") from error
        except KdistError:
            raise
        except Exception:
            with log.open("a") as file:
                traceback.print_exc(file=file)
            raise


def _lock_of(config: Config, folder: Path) -> Mirror | RunLock:
    """What keeps other chiefs out of the run dir, which has `folder` on this machine; on object storage, its mirror."""
    if is_url(config.run.dir):
        return Mirror(config.run.dir, config.run.storage_timeout, folder.absolute())
    return RunLock(folder)


@contextmanager
def _explained(*others: type[Exception]) -> Iterator[None]:
    """Turns errors of Hydra and OmegaConf, and `others`, into a ConfigError with the key and the allowed values."""
    from hydra.errors import HydraException, MissingConfigException
    from omegaconf.errors import OmegaConfBaseException

    explained: tuple[type[Exception], ...] = (HydraException, OmegaConfBaseException, *others)
    try:
        yield
    except explained as error:
        if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options is not None:
            group, _, option = str(error.missing_cfg_file).rpartition("/")
            options = ", ".join(sorted(name for name in error.options if not name.startswith("_")))
            raise ConfigError(f"{group}={option}: there is no such {group}; choose one of {options}") from None
        cause = error if error.__cause__ is None else error.__cause__
        quoted = re.match(r"[^']*Could not[^']*'([^']*)'", str(error))
        key = getattr(cause, "full_key", None) or (quoted[1] if quoted else None)
        if key and ("not in struct" in str(cause) or ("Could not override" in str(error) and "not in" in str(cause))):
            raise unknown_key(key) from None
        first_line = str(cause).strip().splitlines()[0]
        raise ConfigError(f"{key}: {first_line}" if key and key not in first_line else first_line) from None


def _print_error(error: BaseException) -> None:
    """Prints one message; for an error in the user's own code, also the lines of that code that led to it."""
    if isinstance(error, KdistError):
        print(f"kdist: error: {error}", file=sys.stderr)
        return
    message = "".join(traceback.format_exception_only(type(error), error)).strip()
    print(f"kdist: error: chief: {message}", file=sys.stderr)
    ours = (str(Path(__file__).parents[1]), f"{os.sep}site-packages{os.sep}", "<frozen", f"{os.sep}lib{os.sep}python")
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if not any(o in frame.filename for o in ours)
    ]
    print(*traceback.format_list(frames), sep="", end="", file=sys.stderr)
