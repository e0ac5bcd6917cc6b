"""`kdist export RUN_DIR`: the model of a run that was trained, for a serving system."""

from __future__ import annotations

import errno
import importlib.util
import os
import shutil
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from kdist.cli.trained import load_trained_run, parser_for, run_command
from kdist.errors import ConfigError
from kdist.storage.object_storage import is_url

if TYPE_CHECKING:
    import keras

_DESCRIPTION = """\
Exports the model of a run, with the values of a checkpoint, to DIR/<n> with the next free number, as TensorFlow Serving
and others expect it: complete or not at all. A SavedModel needs neither kdist nor Keras to be loaded.

  kdist export runs/mine --to served/mine
  kdist export runs/mine --to models --format keras --step 500
"""
_FORMATS = ("saved_model", "keras", "onnx")


def run(arguments: list[str]) -> int:
    """Runs the command; returns the exit code."""
    parser = parser_for("export", _DESCRIPTION)
    parser.add_argument("--to", required=True, metavar="DIR", help="the folder of all versions; made if necessary")
    parser.add_argument("--format", default=_FORMATS[0], help=f"{', '.join(_FORMATS)}; onnx needs tf2onnx")
    return run_command(arguments, parser, _export)


def _export(given: Namespace) -> str:
    if given.format not in _FORMATS:
        raise ConfigError(f"--format={given.format}: unknown format; choose one of {', '.join(_FORMATS)}")
    if given.format == "onnx" and importlib.util.find_spec("tf2onnx") is None:
        raise ConfigError("--format=onnx: needs the package tf2onnx: pip install tf2onnx")
    if is_url(given.to):
        raise ConfigError(f"--to={given.to}: is a URL; export to a folder, and copy that")
    folder = Path(given.to)
    unfinished = folder / f".unfinished-{os.getpid()}"
    with load_trained_run(given, needs_data=False) as (run, _):
        model = run.load()
        try:
            unfinished.mkdir(parents=True)
            _write(model, given.format, unfinished)
            path = _move_to_next_version(unfinished, folder)
        except OSError as error:
            raise ConfigError(f"--to={folder}: cannot be written: {error.strerror or error}") from error
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        return f"export | step {run.step:>6} | {given.format} | {path}"


def _write(model: keras.Model, form: str, folder: Path) -> None:
    """Writes the model into a folder that exists; raises `OSError`."""
    from kdist.run.model_file import write_model_file
    from kdist.storage.tensorflow_paths import literal_path

    try:
        if form == "keras":
            write_model_file(model, folder / "model.keras")
        elif form == "onnx":
            model.export(literal_path(folder / "model.onnx"), format="onnx", verbose=False)
        else:
            model.export(literal_path(folder), format="tf_saved_model", verbose=False)
    except (NotImplementedError, TypeError, ValueError) as error:
        raise ConfigError(f"--format={form}: Keras cannot write model {model.name} so: {error}") from error


def _move_to_next_version(unfinished: Path, folder: Path) -> Path:
    """Gives a complete export the number after the largest one in `folder`; raises `OSError`."""
    while True:
        path = folder / str(1 + max((int(p.name) for p in folder.iterdir() if p.name.isdecimal()), default=0))
        try:
            unfinished.rename(path)
            return path
        except OSError as error:
            # Another export has just taken the number.
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
