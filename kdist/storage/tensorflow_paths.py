"""Paths that TensorFlow and Keras read as they are meant, whatever characters the names of folders have.

Before it reads a checkpoint, TensorFlow looks for files that match the path, taken as a pattern: `runs/lr=[1]` then
stands for `runs/lr=1`. Keras takes a backslash for a separator. No way of writing a path avoids that, so they get a
link without such characters.
"""

from __future__ import annotations

import hashlib
import os
import re
import uuid
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from kdist.errors import ConfigError

if TYPE_CHECKING:
    import tensorflow as tf

# `*` and `?` match themselves, too.
_SPECIAL = re.compile(r"[\[\\]")


def open_checkpoint(path: Path) -> tf.train.CheckpointReader:
    """The reader of a checkpoint or delta; raises what TensorFlow raises for damaged files."""
    # Not above: the command line imports this module for `--help`.
    import tensorflow as tf

    return tf.train.load_checkpoint(str(literal_path(path)))


def literal_path(path: Path) -> Path:
    """An absolute path of the same file or folder that is no pattern; raises `ConfigError` if its link fails."""
    path = path.absolute()
    if not _SPECIAL.search(str(path.parent)):
        return path
    folder = str(path.parent)
    link = cache_folder() / "links" / hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]
    try:
        if _SPECIAL.search(str(link)):
            raise OSError("its name has such characters, too")
        if not (link.is_symlink() and os.readlink(link) == folder):
            link.parent.mkdir(parents=True, exist_ok=True)
            # Other tasks may do the same at the same time.
            unfinished = link.with_name(f".{uuid.uuid4().hex}")
            unfinished.symlink_to(folder)
            unfinished.replace(link)
    except OSError as error:
        raise ConfigError(
            f"{folder}: TensorFlow takes [ and \\ in the names of folders for a pattern, and a link in {link.parent}, "
            f"which helps, cannot be made: {error.strerror or error}; choose another run.dir, or set XDG_CACHE_HOME"
        ) from error
    return link / path.name


def cache_folder() -> Path:
    """The folder of this user for files that can be made again."""
    with suppress(RuntimeError):
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "kdist"
    raise ConfigError("there is no home directory; set XDG_CACHE_HOME to a folder for kdist's files")
