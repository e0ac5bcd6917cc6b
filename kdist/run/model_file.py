"""Writes `model.keras`, the file of a model that plain Keras can read."""

from __future__ import annotations

import json
import os
import re
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kdist.storage.files import has_locks, written_whole
from kdist.storage.tensorflow_paths import literal_path

if TYPE_CHECKING:
    import keras

#: What reads such a file, as a config names it.
MODEL_FILE = "keras.saving.load_model"
_ERRNO = re.compile(r"errno = (\d+)")


def write_model_file(model: keras.Model, path: Path) -> None:
    """Writes a model, complete or not at all, one variable after the other: Keras would hold the whole file in memory.

    Raises:
        OSError: the file cannot be written.
        NotImplementedError, TypeError, ValueError: Keras cannot save this model.
    """
    # Not above: the command line imports this room, and needs no Keras for `--help`.
    from keras.saving import save_model

    from kdist._compat.keras import hdf5_without_locks

    folder = path.with_name(f".unfinished-{path.stem}")
    shutil.rmtree(folder, ignore_errors=True)
    try:
        try:
            with lambdas_need_source(), nullcontext() if has_locks(path.parent) else hdf5_without_locks():
                save_model(model, literal_path(folder), zipped=False)
        except RuntimeError as error:
            # What HDF5 raises if it cannot write what is left when it closes a file.
            if (number := _ERRNO.search(str(error))) is None:
                raise
            raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
        _name_layers_as_keras_does(folder / "config.json")
        with written_whole(path) as unfinished, zipfile.ZipFile(unfinished, "w") as archive:
            for file in sorted(folder.rglob("*")):
                if file.is_file():
                    archive.write(file, file.relative_to(folder))
                    # So that the disk need not have room for both.
                    file.unlink()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def lambdas_need_source() -> Iterator[None]:
    """Raises ValueError if Keras cannot save a lambda: it shows its source, and one of an interactive session has none.

    Enclose what saves a model, or its config.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None and "source code" in str(error):
            raise ValueError(f"a lambda: {error}") from error
        raise


def _name_layers_as_keras_does(config: Path) -> None:
    """Replaces `kdist.layers.Embedding`s in a saved model by Keras's own, which read the same config and weights.

    Those with a combiner stay: Keras's layer does not pool.
    """

    def renamed(node: Any) -> Any:
        if isinstance(node, list):
            return [renamed(item) for item in node]
        if not isinstance(node, dict):
            return node
        node = {key: renamed(item) for key, item in node.items()}
        if node.get("registered_name") == "kdist>Embedding" and node["config"].get("combiner") is None:
            config = {key: value for key, value in node["config"].items() if key != "combiner"}
            node |= {"module": "keras.layers", "registered_name": None, "config": config}
        return node

    config.write_text(json.dumps(renamed(json.loads(config.read_text(encoding="utf-8")))), encoding="utf-8")
