"""Checks of user input, and of Keras's backend: a `ConfigError` has the key, the value and what is allowed."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from numbers import Integral
from pathlib import Path
from typing import Any

from kdist.errors import ConfigError


def check_whole_number(key: str, value: object, at_least: int = 1, *, required: bool = False) -> None:
    """Refuses all but whole numbers of at least `at_least`; None means not given, and passes unless `required`."""
    if value is None and not required:
        return
    if not isinstance(value, Integral) or isinstance(value, bool) or int(value) < at_least:
        raise ConfigError(f"{key}={value}: must be a whole number, at least {at_least}")


def check_port(key: str, value: int | None) -> None:
    """Refuses numbers that are not a port; None means none."""
    if value is not None and not 0 < value < 2**16:
        raise ConfigError(f"{key}={value}: must be a port, from 1 to 65535")


def check_more_than_zero(key: str, value: float) -> None:
    """Refuses numbers that are not more than 0, or infinite."""
    if not 0 < value < math.inf:
        raise ConfigError(f"{key}={value:g}: must be more than 0 and finite")


def check_seed(key: str, value: int | None) -> None:
    """Refuses numbers that cannot be a seed; None means a random one."""
    if value is not None and not 0 <= value < 2**32:
        raise ConfigError(f"{key}={value}: must be at least 0 and less than 2**32")


def check_devices(key: str, value: Any) -> None:
    """Refuses anything but lists of GPU numbers for the tasks of a job."""

    def are_numbers(value: Any) -> bool:
        return isinstance(value, list) and all(type(number) is int and number >= 0 for number in value)

    if not (value is None or are_numbers(value) or (isinstance(value, list) and all(map(are_numbers, value)))):
        raise ConfigError(f"{key}={value}: must be a list of GPU numbers, as [0,1], or one such list per task")


def check_one_of(key: str, value: Any, allowed: Sequence[Any]) -> None:
    """Refuses values that are not allowed."""
    if value not in allowed:
        raise ConfigError(f"{key}={value}: choose one of {', '.join(map(str, allowed))}")


def check_verbose(key: str, value: Any) -> None:
    """Refuses values that are not a verbosity as in Keras, or 3, which is kdist's own."""
    check_one_of(key, value, ("auto", 0, 1, 2, 3))


#: Signals by which schedulers end a run: SIGTERM, and with `sbatch --signal` another one ahead of the time limit.
STOP_SIGNALS = ("SIGTERM", "SIGUSR1", "SIGUSR2")


def check_stop_signals(key: str, names: Sequence[str]) -> None:
    """Refuses names that are not signals at which a run can save."""
    allowed = (*STOP_SIGNALS, "SIGHUP", "SIGXCPU")
    for name in names:
        if name not in allowed:
            raise ConfigError(f"{key}={name}: choose from {', '.join(allowed)} (Ctrl-C always ends a run)")


def check_target(key: str, node: Any) -> None:
    """Refuses a part of a config without a `_target_`."""
    if not isinstance(node, dict) or not isinstance(node.get("_target_"), str):
        hint = f"; or name a recipe (+recipe=mnist) or a {key} that ships" if key in ("model", "data") else ""
        raise ConfigError(f"{key}: must name a function by _target_, for example {key}._target_=package.function{hint}")


def number_or_auto(key: str, value: int | str, at_least: int) -> int | None:
    """The number, or None for `auto`."""
    if value == "auto":
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ConfigError(f"{key}={value}: must be at least {at_least}, or auto")
    return value


_VARIABLE = "KERAS_BACKEND"
_TENSORFLOW = "tensorflow"


def require_tensorflow() -> None:
    """Refuses another backend of Keras than TensorFlow; a command ends with the sentence and exit code 2."""
    where, backend = _backend()
    if backend == _TENSORFLOW:
        return
    error = ConfigError(
        f"{where}={backend}: kdist trains with Keras on TensorFlow; set {_VARIABLE}={_TENSORFLOW} before Keras is "
        "imported"
    )
    # While Python looks for the module of `python -m`, the first argument is this.
    if sys.argv and (sys.argv[0] == "-m" or Path(sys.argv[0]).name == "kdist"):
        print(f"kdist: error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code)
    raise error


def _backend() -> tuple[str, str]:
    """The setting that names the backend, and the backend."""
    keras = sys.modules.get("keras")
    if keras is not None and hasattr(keras, "config"):
        return "keras.config.backend()", keras.config.backend()
    if backend := os.environ.get(_VARIABLE):
        return _VARIABLE, backend
    file = Path(os.environ.get("KERAS_HOME") or os.path.expanduser("~/.keras")) / "keras.json"
    # What Keras cannot read it ignores, or reports itself.
    with suppress(OSError, ValueError, AttributeError):
        return f"{file}: backend", json.loads(file.read_text(encoding="utf-8")).get("backend", _TENSORFLOW)
    return _VARIABLE, _TENSORFLOW
