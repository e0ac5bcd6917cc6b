"""Opens a trained run for `kdist evaluate`, `predict` and `export`."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from kdist import log
from kdist.cli.main import exit_code_of, native_log
from kdist.errors import ClusterError, ConfigError, KdistError

if TYPE_CHECKING:
    from kdist.config.schema import Config
    from kdist.evaluation.trained_run import TrainedRun

_EPILOG = """\
RUN_DIR is a folder or a URL. KEY=VALUE changes what the run has recorded, as data.path=test.npz, or says where to work:
cluster=2ps2w has its workers do it. Code of your own has to be trusted again: run.trust=[my_code].
Exit codes: 0 done, 1 failed, 2 something given is wrong, 75 a retry may help.
"""


class _Parser(ArgumentParser):
    """Raises a ConfigError instead of printing usage."""

    def error(self, message: str) -> NoReturn:
        # Python takes what may be missing for required, where options stand between arguments.
        message = message.replace(", KEY=VALUE", "")
        raise ConfigError(f"{message}; --help shows what this command takes")


def parser_for(command: str, description: str) -> ArgumentParser:
    """The parser of a command, with what all of them take."""
    parser = _Parser(
        f"kdist {command}",
        description=description,
        epilog=_EPILOG,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="the run dir of a run")
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="changes to its config")
    parser.add_argument("--step", type=int, metavar="N", help="the checkpoint of this global step; else the newest")
    return parser


def run_command(arguments: list[str], parser: ArgumentParser, command: Callable[[Namespace], str]) -> int:
    """Runs a command and prints what it returns; returns the exit code.

    What the user's code prints goes to standard error.
    """

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
        given: the options of the command.
        needs_data: the command cannot do without the data of the config.
        data: the data that a model is built for, if it needs some, with the preprocessing of the model; None: that
            which the run was trained on.

    Raises:
        ConfigError: there is no such run dir or checkpoint, or its record cannot be used.
        KdistError: object storage failed; a retry may help.
    """
    from kdist.cluster.network import isolate
    from kdist.storage.object_storage import StorageError, is_url

    if not is_url(given.run_dir) and not Path(given.run_dir).is_dir():
        raise ConfigError(f"{given.run_dir}: there is no such run dir")
    with _logs() as logs, native_log(logs / "native.log"):
        from kdist.cli.record import config_of
        from kdist.config.build import check_targets
        from kdist.evaluation.trained_run import TrainedRun
        from kdist.run.run_dir import RunDir

        try:
            with RunDir(given.run_dir, "").open_for(f"reader:{os.getpid()}") as run:
                config = config_of(run, given.overrides)
                if needs_data and config.data is None:
                    raise ConfigError(
                        f"{given.run_dir}: was trained from Python, so that nothing says what its data is; give "
                        "data=..., or data._target_=package.function"
                    )
                check_targets(config if needs_data else replace(config, data=None))
                found = TrainedRun(config, run, given.step, logs, partial(data or _training_data, config))
                if config.cluster.shape != "local":
                    isolate.require(config.cluster.isolate)
                    if (line := isolate.network_line(config.cluster.bind)) is not None:
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
    try:
        yield folder
    except ClusterError as error:
        raise ClusterError(f"{error}\n  logs: {folder}") from error
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)


def _training_data(config: Config, preprocess: Callable[..., Any] | None) -> Any:
    from kdist.config.build import data_arguments
    from kdist.data.sources import training_data

    if config.data is None:
        raise ConfigError("building the model needs its data, and the run recorded none; give data=...")
    data = data_arguments(config)
    x, y, sample_weight = (data.get(name) for name in ("x", "y", "sample_weight"))
    return training_data(
        x,
        y,
        sample_weight,
        batch_size=config.train.batch_size,
        class_weight=data.get("class_weight"),
        seed=0,
        preprocess=preprocess,
    )
