"""Imports TensorFlow in less time, and without harmless messages of it and of Matplotlib, which Keras imports; and lets
Keras import what it looks for.

`TF_CPP_MIN_LOG_LEVEL` gets a default, and counts from the first message on: TensorFlow's libraries write to standard
error while they are loaded, before they look at the level. The import passes through a filter, which drops the messages
below the level. The filter is a process: should the import abort, TensorFlow's messages about it are shown.
"""

from __future__ import annotations

import functools
import gc
import importlib
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

LEVEL = "TF_CPP_MIN_LOG_LEVEL"
_XLA_FLAGS = "TF_XLA_FLAGS"
#: XLA's auto-clustering places constants that it folds on `/job:localhost`, and a cluster of a task's operations with
#: such a constant ends with "Multiple CPU devices". XLA folds them itself when it compiles.
_NO_FOLDING = "--tf_xla_disable_constant_folding"

_END_SECS = 5.0
#: Files that exist if this machine has a GPU that TensorFlow may use: of NVIDIA, also in WSL, and of AMD.
_GPUS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
_NO_GPU = r"|.* failed call to cuInit"
#: Messages begin as `I0000 00:00:17...` or, in earlier versions, as `2026-11-25 14:16:31.376231: I `.
_FILTER = r"""
import re, sys
below = "IWE"[: int(sys.argv[1])]
dropped = re.compile(
    rf"([{below}]\d{{4}} |\d{{4}}-\d\d-\d\d [\d:.]+: [{below}] "
    "|WARNING: All log messages before absl::Init|To enable the following" + sys.argv[2] + ")"
)
for line in sys.stdin.buffer:
    if not dropped.match(line.decode(errors="replace")):
        sys.stderr.buffer.write(line)
        sys.stderr.buffer.flush()
"""


def make_quiet() -> None:
    """Makes these imports quiet; TensorFlow that has been imported is left alone."""
    # Matplotlib warns of a home directory that cannot be written, although it finds another place.
    logging.getLogger("matplotlib").addFilter(lambda record: record.funcName != "_get_config_or_cache_dir")
    if "tensorflow" not in sys.modules:
        sys.meta_path.insert(0, _Finder("tensorflow", _execute_quietly))


def register_on_demand(prefix: str, module: str) -> None:
    """Lets Keras import a module when it looks for an object whose registered name begins with `prefix`.

    If Keras has been imported, the module is imported at once.
    """

    def wrap(registration: Any, execute: Callable[[Any], None]) -> None:
        execute(registration)
        original = registration.get_registered_object

        @functools.wraps(original)
        def get_registered_object(name: Any, *args: Any, **kwargs: Any) -> Any:
            if str(name).startswith(prefix):
                importlib.import_module(module)
            return original(name, *args, **kwargs)

        registration.get_registered_object = get_registered_object

    if sys.modules.get("keras"):
        importlib.import_module(module)
    else:
        # Not the module itself as soon as Keras is there: Keras may be what a part of the module imports first.
        sys.meta_path.insert(0, _Finder("keras.src.saving.object_registration", wrap))


@contextmanager
def quick_import(*, keras: bool = True) -> Iterator[None]:
    """Lets the import of TensorFlow take less time, and tasks have XLA's auto-clustering, if `TF_XLA_FLAGS` has it.

    Garbage collection is off in the meantime: there is no garbage among the million objects that are created, and
    looking for it costs a fifth of the time.

    Args:
        keras: whether TensorFlow may import Keras, unless it is already imported: another quarter of the time,
            including Matplotlib, which Keras imports. A process that only serves does not need it.
    """
    was_enabled = gc.isenabled()
    modules: dict[str, Any] = sys.modules
    hidden = not keras and "keras" not in modules
    flags = os.environ.get(_XLA_FLAGS, "")
    if flags.startswith("-") and _NO_FOLDING not in flags:
        # TensorFlow reads them when it first optimizes a graph.
        os.environ[_XLA_FLAGS] = f"{flags} {_NO_FOLDING}"
    gc.disable()
    if hidden:
        # Python treats it as a module that does not exist; TensorFlow continues without it.
        modules["keras"] = None
    try:
        yield
    finally:
        if hidden:
            del modules["keras"]
        if was_enabled:
            gc.enable()


def has_gpu() -> bool:
    return any(Path(path).exists() for path in _GPUS)


class _Finder(MetaPathFinder):
    """Finds a module where Python does, but lets `execute` execute it; goes when the module has been imported once."""

    def __init__(self, name: str, execute: Callable[[Any, Callable[[Any], None]], None]) -> None:
        self._name, self._execute = name, execute

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != self._name or (spec := PathFinder.find_spec(fullname, path, target)) is None:
            return None
        loader: Any = spec.loader
        original = loader.exec_module

        def execute(module: Any) -> None:
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            self._execute(module, original)

        loader.exec_module = execute
        return spec


def _execute_quietly(module: Any, execute: Callable[[Any], None]) -> None:
    with _level() as level, _filtered(level):
        execute(module)
        if level in ("1", "2") and not has_gpu():
            # TensorFlow looks for GPUs once, and calls it an error that there is none.
            module.config.list_physical_devices("GPU")


@contextmanager
def _level() -> Iterator[str]:
    """Sets the level in the environment, where TensorFlow reads it."""
    if LEVEL in os.environ:
        yield os.environ[LEVEL]
        return
    # Without a GPU, fatal errors only: others are about the GPU that is missing, or are raised as exceptions, too.
    os.environ[LEVEL] = "1" if has_gpu() else "3"
    try:
        yield os.environ[LEVEL]
    finally:
        os.environ.pop(LEVEL, None)


@contextmanager
def _filtered(level: str) -> Iterator[None]:
    """Drops the messages on standard error that `level` does not allow; text that is no message passes."""
    if level not in ("1", "2", "3") or not sys.executable:
        yield
        return
    try:
        console = os.dup(2)
    except OSError:  # This process has none.
        yield
        return
    # Ctrl-C is for this process.
    command = [sys.executable, "-I", "-S", "-c", _FILTER, level, "" if has_gpu() else _NO_GPU]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)
    assert process.stdin is not None
    os.dup2(process.stdin.fileno(), 2)
    process.stdin.close()
    try:
        yield
    finally:
        os.dup2(console, 2)
        os.close(console)
        # A process that was started meanwhile may keep the pipe open.
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECS)
