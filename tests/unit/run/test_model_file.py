"""`model.keras` on a file system without locks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import keras
import pytest

from kdist.run.model_file import write_model_file


def test_a_model_is_written_where_files_cannot_be_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kdist.run.model_file.has_locks", lambda folder: False)
    locking: list[Any] = []
    original = h5py.File.__init__

    def noted(self: h5py.File, *args: Any, **kwargs: Any) -> None:
        locking.append(kwargs.get("locking"))
        original(self, *args, **kwargs)

    monkeypatch.setattr(h5py.File, "__init__", noted)
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    write_model_file(model, tmp_path / "model.keras")
    assert set(locking) == {False}
    monkeypatch.undo()
    keras.saving.load_model(tmp_path / "model.keras")
