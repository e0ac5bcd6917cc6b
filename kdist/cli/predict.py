"""`kdist predict RUN_DIR`: the outputs of a run that was trained, for the rows of a file."""

from __future__ import annotations

import inspect
import os
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kdist.cli.trained import load_trained_run, parser_for, run_command
from kdist.config import targets
from kdist.errors import ConfigError

if TYPE_CHECKING:
    from kdist.config.schema import Config

_DESCRIPTION = """\
Predicts with a checkpoint of a run, and writes what comes out to a file, row by row in the order of the input.

  kdist predict runs/mine --input new.csv --output predictions.csv
  kdist predict runs/mine --input new.npz --output predictions.parquet cluster=2ps2w
  kdist predict runs/mine --input my_code.read_records --output predictions.npz
"""


def run(arguments: list[str]) -> int:
    """Runs the command; returns the exit code."""
    parser = parser_for("predict", _DESCRIPTION)
    parser.add_argument(
        "--input",
        required=True,
        metavar="INPUT",
        help="an npz, csv or parquet file with a column for each input of the model, by its name; or a function, as "
        "package.function, that returns inputs, as a tf.data.Dataset of TFRecords",
    )
    parser.add_argument("--output", required=True, metavar="FILE", help="an npz, csv or parquet file to write")
    parser.add_argument("--overwrite", action="store_true", help="replace FILE if it exists")
    return run_command(arguments, parser, _predict)


def _predict(given: Namespace) -> str:
    from kdist.data.table_files import FORMATS, read_table, write_table
    from kdist.storage.files import written_whole

    source, output = str(given.input), Path(given.output)
    is_file = os.sep in source or Path(source).suffix in FORMATS or Path(source).exists()
    if is_file and Path(source).suffix not in FORMATS:
        raise ConfigError(f"--input={source}: unknown format; give {', '.join(FORMATS)}, or package.function")
    _check_output(output, FORMATS, may_exist=given.overwrite)
    with load_trained_run(given, needs_data=False) as (run, config):
        from kdist.model.named_inputs import inputs_from, named_outputs

        if is_file:
            x = inputs_from(read_table(Path(source)), run.model, run.batch_spec, source)
        else:
            x = _call(source, config)
        outputs = named_outputs(run.predict(x, config.train.batch_size), run.model)
        try:
            with written_whole(output) as unfinished:
                named = unfinished.with_name(f"{unfinished.name}{output.suffix}")
                write_table(named, outputs)
                os.replace(named, unfinished)
        except OSError as error:
            raise ConfigError(f"--output={output}: cannot be written: {error.strerror or error}") from error
        num_rows = len(next(iter(outputs.values())))
        return f"predict | step {run.step:>6} | {num_rows} rows of {', '.join(outputs)} | {output}"


def _check_output(path: Path, formats: tuple[str, ...], *, may_exist: bool) -> None:
    if path.suffix not in formats:
        raise ConfigError(f"--output={path}: unknown format; the name has to end in {', '.join(formats)}")
    if path.exists() and (path.is_dir() or not may_exist):
        raise ConfigError(f"--output={path}: exists" + ("" if path.is_dir() else "; --overwrite replaces it"))
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError(f"--output={path}: cannot be written: there is no folder {path.parent} to write to")


def _call(source: str, config: Config) -> Any:
    """The result of a function, of data of `fit` its `x`; a function that takes a `DataContext` itself."""
    from kdist.config.build import DATA_ARGUMENTS
    from kdist.data.table_files import FORMATS

    # It is on the command line, where packages are trusted.
    package = source.partition(".")[0]
    packages = [*config.run.trust, package]
    try:
        targets.check_packages("--input", [package])
        targets.check("--input", {"_target_": source}, packages)
        function = targets.resolve("--input", source, packages)
    except ConfigError as error:
        why = str(error).removeprefix("--input").removeprefix(f"._target_={source}").removeprefix(": ")
        files = ", ".join(FORMATS)
        raise ConfigError(f"--input={source}: is neither the name of a {files} file nor of a function: {why}") from None
    takes_context = any(p.default is p.empty for p in inspect.signature(function).parameters.values())
    if takes_context:
        return function
    data = function()
    return data["x"] if isinstance(data, dict) and "x" in data and set(data) <= set(DATA_ARGUMENTS) else data
