"""`load_npz`: the arrays of an `.npz` file, left in the file."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import IO

import numpy as np

from kdist.errors import ConfigError

_SUFFIX = ".npy"
#: Of an entry, before its name; then come two bytes each for the lengths of the name and of what follows it.
_HEADER_BYTES = 30


def load_npz(path: str | Path) -> dict[str, np.ndarray]:
    """Loads a file of `numpy.savez`; its arrays stay in the file, as with `numpy.load(path, mmap_mode="r")`.

    They can be larger than memory, and workers that see the file read their examples there. Arrays of a compressed file
    (`numpy.savez_compressed`) are loaded.

    Args:
        path: the file.

    Returns:
        The arrays by name, read-only if they are in the file.

    Raises:
        ConfigError: there is no such file, it is no `.npz` file, or an array in it is of Python objects.
    """
    try:
        with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
            entries = [entry for entry in archive.infolist() if entry.filename.endswith(_SUFFIX)]
            return {
                entry.filename.removesuffix(_SUFFIX): _mapped(Path(path), file, entry)
                if entry.compress_type == zipfile.ZIP_STORED
                else _loaded(archive, entry)
                for entry in entries
            }
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{path}: is no npz file of numbers: {error}") from error


def _mapped(path: Path, file: IO[bytes], entry: zipfile.ZipInfo) -> np.ndarray:
    file.seek(entry.header_offset)
    header = file.read(_HEADER_BYTES)
    file.seek(int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little"), 1)
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, is_fortran, dtype = read(file)
    if dtype.hasobject:
        raise ValueError(f"{entry.filename} is an array of Python objects")
    if 0 in shape:
        # Nothing cannot be mapped.
        return np.empty(shape, dtype)
    return np.memmap(path, dtype, "r", file.tell(), shape, "F" if is_fortran else "C")


def _loaded(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> np.ndarray:
    with archive.open(entry) as file:
        array: np.ndarray = np.lib.format.read_array(file, allow_pickle=False)
    return array
