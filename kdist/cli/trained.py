"""Opens a trained run for `kdist evaluate`, `predict` and `export`: its config from its record, with later changes."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from omegaconf import OmegaConf
from yaml import YAMLError

from kdist import log
from kdist._compat.hydra import parse_command_line
from kdist.cli.compose import as_hydra_reads, check_keys, compose, explain_errors, without_hydra
from kdist.cli.hydra_plugins import register
from kdist.cli.main import exit_code_of, native_log
from kdist.cli.recorded import FOLDER, store_record
from kdist.cluster.network import isolate, sockets
from kdist.config import targets
from kdist.config.build import check_targets, data_arguments
from kdist.config.record import check_record, read_record
from kdist.config.schema import Config, OptimizerConfig
from kdist.errors import ClusterError, ConfigError, KdistError
from kdist.run.model_file import MODEL_FILE
from kdist.storage.object_storage import StorageError, is_url
from kdist.version import __version__

if TYPE_CHECKING:
    from kdist.evaluation.trained_run import TrainedRun
    from kdist.run.checkpoint import Checkpoints
    from kdist.run.run_dir import RunDir

_EPILOG = """\
RUN_DIR is a folder or a URL. KEY=VALUE changes what the run has recorded, as data.path=test.npz, or says where to work:
cluster=2ps2w has its workers do it. Code of your own has to be trusted again: run.trust=[my_code].
Exit codes: 0 done, 1 failed, 2 something given is wrong, 75 a retry may help.
"""
_NAME = "kdist_trained"
#: The keys on which a model and its evaluation depend: whole groups, or some keys of a group.
_WHOLE = ("model", "data", "optimizer", "loss", "metrics")
_PARTS = {
    "train": ("batch_size",),
    "strategy": ("placement", "partition_min_bytes"),
    "run": ("export_max_bytes", "trust"),
}


class Parser(ArgumentParser):
    """Raises a ConfigError instead of printing usage."""

    def error(self, message: str) -> NoReturn:
        # Python takes what may be missing for required, where options stand between arguments.
        message = message.replace(", KEY=VALUE", "")
        raise ConfigError(f"{message}; --help shows what this command takes")


def parser_for(command: str, description: str) -> ArgumentParser:
    """The parser of a command, with the arguments that all commands take."""
    parser = Parser(
        f"kdist {command}",
        description=description,
        epilog=_EPILOG,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="the run dir of a run")
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="changes to its config")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, metavar="N", help="the checkpoint of this global step; else the newest")
    which.add_argument("--best", action="store_true", help="that of the best validation, which BestCheckpoint keeps")
    return parser


def run_command(arguments: list[str], parser: ArgumentParser, command: Callable[[Namespace], str]) -> int:
    """Prints the result of a command, and what the user's code prints to standard error; returns the exit code."""

    def run() -> None:
        given = parser.parse_intermixed_args(arguments)
        if wrong := [text for text in given.overrides if "=" not in text and not text.startswith("~")]:
            raise ConfigError(f"{wrong[0]}: is neither an option nor of the form KEY=VALUE")
        with redirect_stdout(sys.stderr):
            line = command(given)
        print(line, flush=True)

    return exit_code_of(run)


@contextmanager
def load_trained_run(
    given: Namespace, *, needs_data: bool, data: Callable[[Config, Callable[..., Any] | None], Any] | None = None
) -> Iterator[tuple[TrainedRun, Config]]:
    """Yields the run that a command names, and its config.

    Args:
        needs_data: true if the command cannot do without the data of the config.
        data: makes the data for which a model is built, with the preprocessing of the model; None: that of the run.
    """
    if not is_url(given.run_dir) and not Path(given.run_dir).is_dir():
        raise ConfigError(f"{given.run_dir}: there is no such run dir")
    with _logs() as logs, native_log(logs / "native.log"):
        from kdist.evaluation.trained_run import TrainedRun
        from kdist.run.run_dir import RunDir

        try:
            with RunDir(given.run_dir, "").open_for(f"reader:{os.getpid()}") as run:
                config, checkpoints = _open(run, given)
                if needs_data and config.data is None:
                    raise ConfigError(
                        f"{given.run_dir}: was trained from Python, so that nothing says what its data is; give "
                        "data=..., or data._target_=package.function"
                    )
                check_targets(config if needs_data else replace(config, data=None))
                found = TrainedRun(config, run, checkpoints, given.step, logs, partial(data or _training_data, config))
                if checkpoints.folder != run.checkpoints().folder:
                    log.say(f"reads step {found.step} of {checkpoints.place}")
                if config.cluster.shape != "local":
                    isolate.require(config.cluster.isolate)
                    sockets.bind_to(config.cluster.bind, all_here=True)
                    if (line := isolate.network_line()) is not None:
                        log.say(line)
                yield found, config
        except StorageError as error:
            failure = KdistError(str(error))
            failure.exit_code = 75
            raise failure from None


@contextmanager
def _logs() -> Iterator[Path]:
    """Yields a folder for the logs of tasks, which stays if the cluster failed."""
    folder = Path(tempfile.mkdtemp(prefix="kdist-"))
    with ExitStack() as end:
        end.callback(shutil.rmtree, folder, ignore_errors=True)
        try:
            yield folder
        except ClusterError as error:
            end.pop_all()
            raise ClusterError(f"{error}\n  logs: {folder}") from error


def _training_data(config: Config, preprocess: Callable[..., Any] | None) -> Any:
    from kdist.data.sources import training_data

    if config.data is None:
        raise ConfigError("building the model needs its data, and the run recorded none; give data=...")
    data = {name: value for name, value in data_arguments(config).items() if not name.startswith("validation_")}
    return training_data(**data, batch_size=config.train.batch_size, seed=0, preprocess=preprocess)


def _open(run: RunDir, given: Namespace) -> tuple[Config, Checkpoints]:
    """The config of a run, changed as on the command line of a new one, and the folder with the checkpoint that counts.

    What is neither recorded nor given has its default. Without a record of the model, as in a run from Python, or
    without a checkpoint, the model is `model.keras`. Without a record of the data, `data` is None.

    Raises:
        ConfigError: it is not the run dir of a run, its record cannot be used by this version, or there is no such
            checkpoint.
    """
    try:
        recorded = _read(run)
        checkpoints = run.find_checkpoints(given.step, best=given.best)
        return _compose(run, recorded, as_hydra_reads(given.overrides), bool(checkpoints.steps())), checkpoints
    except ConfigError as error:
        raise ConfigError(f"{run}: {error}") from None


def _compose(run: RunDir, recorded: dict[str, Any], overrides: Sequence[str], has_checkpoints: bool) -> Config:
    with explain_errors(ValueError):
        chosen = set(targets.keys_of(overrides))
    if "recipe" in chosen:
        raise ConfigError(
            "recipe: cannot be changed for a finished run; override single keys, as data=mnist or data.path=test.npz"
        )
    if not {"model", "model._target_"} & chosen and (recorded.get("model") is None or not has_checkpoints):
        _use_model_file(run, recorded)
    register()
    # Without a record, `_target_` can name a function.
    store_record(_NAME, {"model": {"_target_": None}, "data": {"_target_": None}, "hooks": {}, **recorded}, overrides)
    with explain_errors(ValueError):
        config = without_hydra(compose(parse_command_line(overrides), _NAME)[0])
        if OmegaConf.select(config, "data._target_") is None:
            config.data = None
        check_keys(config, Config)
        checked: Any = OmegaConf.to_object(config)
        checked.check()
        checked.run.trust = targets.of_command_line(checked.run.trust, overrides)
    return checked


def _read(run: RunDir) -> dict[str, Any]:
    """The recorded config, resolved, as far as it matters now."""
    hydra, result = run.file(f"{FOLDER}/config.yaml"), run.read_result()
    if hydra is None and not result and not run.checkpoints().steps():
        sweep = "; it is the folder of a sweep: give that of a trial" if run.file("multirun.yaml") else ""
        raise ConfigError(f"is not the run dir of a run{sweep}")
    try:
        config = OmegaConf.create(result.get("config") or {}) if hydra is None else read_record(hydra)
    except (OSError, ValueError, YAMLError) as error:
        raise ConfigError(f"{FOLDER}/config.yaml cannot be read: {' '.join(str(error).split())}") from None
    check_record(config)
    with explain_errors(ValueError):
        kept = {group: node for group in _WHOLE if (node := _resolve(config, group)) is not None}
        for group, keys in _PARTS.items():
            kept[group] = {key: value for key in keys if (value := _resolve(config, f"{group}.{key}")) is not None}
        if (size := _resolve(config, "fit.validation_batch_size")) is not None:
            kept["train"]["batch_size"] = size
        # This version would misread a record of another one.
        if unknown := sorted(set(kept.get("optimizer", ())) - {item.name for item in fields(OptimizerConfig)}):
            by = result.get("versions", {}).get("kdist", "of another version")
            names = ", ".join(f"optimizer.{name}" for name in unknown)
            raise ConfigError(f"was trained by kdist {by}; this is {__version__}, which knows no {names}")
        return kept


def _resolve(config: Any, key: str) -> Any:
    value = OmegaConf.select(config, key)
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _use_model_file(run: RunDir, recorded: dict[str, Any]) -> None:
    """Takes the model of `model.keras`, compiled as it was, if there is one."""
    path = run.file("model.keras")
    if path is not None:
        for group in ("optimizer", "loss", "metrics"):
            recorded.pop(group, None)
        recorded["model"] = {"_target_": MODEL_FILE, "filepath": str(path)}
    elif recorded.get("model") is None:
        raise ConfigError(
            "was trained from Python, so that nothing says how its model is built, and there is no model.keras "
            "to read it from; name the function that builds it: model._target_=package.function run.trust=[package]"
        )
