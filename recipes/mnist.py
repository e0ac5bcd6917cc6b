"""MNIST for the recipes `mnist` and `mnist_mlp`: two models and the data.

Keras is imported when it is used, so that a config that names these functions can be checked without it.
"""

from __future__ import annotations

import io
import socket
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from importlib import resources
from typing import TYPE_CHECKING, Any

import numpy as np

from kdist.errors import ConfigError
from kdist.log import say

if TYPE_CHECKING:
    import keras

_ARRAYS = ("x_train", "y_train", "x_test", "y_test")
_FORM = "an npz file with x_train, y_train, x_test and y_test, images uint8 [n, 28, 28] and labels [n], as Keras has it"
_DOWNLOAD_TIMEOUT_SECS = 10.0


def build_cnn(dropout: float = 0.4) -> keras.Model:
    """Three convolutions and a dense layer; compiled with Adam and a decaying learning rate.

    Input: float32 [batch, 28, 28] in 0..1.
    """
    import keras

    model = keras.Sequential(
        [
            keras.layers.Input((28, 28)),
            keras.layers.Reshape((28, 28, 1)),
            keras.layers.Conv2D(16, 5, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(64, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dropout(dropout),
            keras.layers.Dense(10, activation="softmax"),
        ],
        name="mnist_cnn",
    )
    learning_rate = keras.optimizers.schedules.ExponentialDecay(0.003, decay_steps=1000, decay_rate=0.15)
    model.compile(
        optimizer=keras.optimizers.Adam(learning_rate), loss="sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    return model


def build_mlp(hidden_units: int = 100) -> keras.Model:
    """784-`hidden_units`-10 with a sigmoid; compiled with SGD. Input: float32 [batch, 28, 28] in 0..1."""
    import keras

    model = keras.Sequential(
        [
            keras.layers.Input((28, 28)),
            keras.layers.Flatten(),
            keras.layers.Dense(hidden_units, activation="sigmoid"),
            keras.layers.Dense(10, activation="softmax"),
        ],
        name="mnist_mlp",
    )
    model.compile(
        optimizer=keras.optimizers.SGD(learning_rate=0.5),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    return model


def load_data(path: str | None = None) -> dict[str, Any]:
    """MNIST as the data arguments of `fit`: images float32 [n, 28, 28] in 0..1, labels uint8 [n].

    Prints one line that says which MNIST it is.

    Args:
        path: an npz file in Keras's form. If None, Keras's cached or downloaded file is used; without a network, the
            10 000 + 2 000 images that ship with kdist.

    Raises:
        ConfigError: `path` is missing or of another form.
    """
    if path is not None:
        source, arrays = path, _read_npz(path)
    else:
        source, arrays = _from_keras() or _shipped()
    x_train, y_train, x_test, y_test = arrays
    say(f"data      MNIST, {len(x_train)} + {len(x_test)} images, {source}")
    return {
        "x": x_train.astype(np.float32) / 255.0,
        "y": y_train,
        "validation_data": (x_test.astype(np.float32) / 255.0, y_test),
    }


def _read_npz(path: str) -> tuple[np.ndarray, ...]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = tuple(archive[name] for name in _ARRAYS)
    except FileNotFoundError:
        raise ConfigError(f"data.path={path}: there is no such file; expected {_FORM}") from None
    except KeyError as error:
        raise ConfigError(f"data.path={path}: holds no {error}; expected {_FORM}") from None
    except (OSError, ValueError, TypeError, AttributeError, EOFError, zipfile.BadZipFile):
        raise ConfigError(f"data.path={path}: is no npz file that can be read; expected {_FORM}") from None
    for images, labels in (arrays[:2], arrays[2:]):
        if images.shape[1:] != (28, 28) or labels.shape != images.shape[:1] or images.dtype != np.uint8:
            raise ConfigError(
                f"data.path={path}: images are {images.dtype} {images.shape}, labels {labels.shape}; expected {_FORM}"
            )
    return arrays


def _from_keras() -> tuple[str, tuple[np.ndarray, ...]] | None:
    """Keras's own copy of MNIST; None if it is neither cached nor to be had within seconds."""
    import keras

    try:
        # Keras prints where it would download from, also where there is no network.
        with _socket_timeout(_DOWNLOAD_TIMEOUT_SECS), redirect_stdout(io.StringIO()):
            (x_train, y_train), (x_test, y_test) = keras.datasets.mnist.load_data()
    except Exception:  # noqa: BLE001 - Keras raises a bare Exception when it cannot download.
        return None
    return "from Keras (keras.datasets.mnist)", (x_train, y_train, x_test, y_test)


def _shipped() -> tuple[str, tuple[np.ndarray, ...]]:
    with resources.as_file(resources.files("kdist.recipes") / "mnist_part.npz") as path:
        return "the part in kdist (no network)", _read_npz(str(path))


@contextmanager
def _socket_timeout(secs: float) -> Iterator[None]:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(secs)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
