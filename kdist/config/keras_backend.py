"""Keras on another backend than TensorFlow is refused when kdist is imported, in one sentence.

The backend is chosen before Keras is imported, by `KERAS_BACKEND` or Keras's own config file.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from pathlib import Path

from kdist.errors import ConfigError

_VARIABLE = "KERAS_BACKEND"
_TENSORFLOW = "tensorflow"


def require_tensorflow() -> None:
    """Checks which backend Keras uses, or will use; a command ends with the sentence and exit code 2.

    Raises:
        ConfigError: it is not TensorFlow.
    """
    where, backend = _chosen()
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


def _chosen() -> tuple[str, str]:
    """What says which backend, and the backend."""
    keras = sys.modules.get("keras")
    if keras is not None and hasattr(keras, "config"):
        return "keras.config.backend()", keras.config.backend()
    if backend := os.environ.get(_VARIABLE):
        return _VARIABLE, backend
    file = Path(os.environ.get("KERAS_HOME") or os.path.expanduser("~/.keras")) / "keras.json"
    # What Keras cannot read it ignores, or reports itself.
    with suppress(OSError, ValueError, AttributeError):
        return f"{file}: backend", json.loads(file.read_text()).get("backend", _TENSORFLOW)
    return _VARIABLE, _TENSORFLOW
