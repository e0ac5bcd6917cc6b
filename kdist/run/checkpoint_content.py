"""What is in the files of a checkpoint, how it differs from a model, and what may be wrong with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import tensorflow as tf

from kdist.errors import reason
from kdist.model.names import BESIDE
from kdist.storage.tensorflow_paths import open_checkpoint

#: Errors that TensorFlow raises for damaged files, depending on the byte that is wrong.
DAMAGE_ERRORS = (tf.errors.OpError, ValueError, IndexError, UnicodeDecodeError, RuntimeError)


def values_of(path: Path) -> dict[str, np.ndarray]:
    """All values of a model in a checkpoint, and what else a delta has."""
    reader = open_checkpoint(path)
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map() if name not in BESIDE}


def check_all(path: Path) -> None:
    """Reads everything in a checkpoint, one tensor after the other; raises one of `DAMAGE_ERRORS` if it is damaged."""
    reader = open_checkpoint(path)
    for name in reader.get_variable_to_shape_map():
        reader.get_tensor(name)


def shapes_in(path: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of all values of a model in a checkpoint, by name."""
    shapes = open_checkpoint(path).get_variable_to_shape_map()
    return {name: tuple(shape) for name, shape in shapes.items() if name not in BESIDE}


def differences(saved: Mapping[str, tuple[int, ...]], shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Lines that say how the values of a checkpoint differ from those of the model; empty if they do not."""
    differences = {
        "missing": sorted(shapes.keys() - saved.keys()),
        "unexpected": sorted(saved.keys() - shapes.keys()),
        "of another shape": [
            f"{name} {saved[name]} (the model has {shapes[name]})"
            for name in sorted(shapes.keys() & saved.keys())
            if not _fits(saved[name], shapes[name])
        ],
    }
    return "".join(f"  {what}: {', '.join(names)}\n" for what, names in differences.items() if names)


def _fits(saved: Sequence[int], shape: Sequence[int | None]) -> bool:
    """Whether a saved value has a shape, in which None stands for any number."""
    return len(saved) == len(shape) and all(wanted in (None, size) for size, wanted in zip(saved, shape))


def in_a_line(error: tf.errors.OpError | OSError) -> str:
    """Why something could not be written."""
    text = error.strerror if isinstance(error, OSError) else reason(error)
    return " ".join(str(text).split())


def data_part(path: Path) -> str:
    """The suffix of a file with data: `.data-00000-of-00002`."""
    return path.name[path.name.index(".data-") :]
