"""`Export`: a SavedModel at the end. After Estimator's `FinalExporter`."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

from kdist.errors import ConfigError
from kdist.hooks.base import Hook

if TYPE_CHECKING:
    from kdist.session import TrainSession

_FORMATS = ("tf_saved_model", "onnx", "openvino")
_UNFINISHED = ".unfinished-export"


class Export(Hook):
    """Exports the trained model for serving, by `keras.Model.export`; `model.keras` is written without it.

    With an optimizer that keeps moving averages, they are what is exported, as with `model.keras`.

    Args:
        folder: where, inside the run dir.
        format: as in `keras.Model.export`; `onnx` and `openvino` need packages of their own.

    Raises:
        ConfigError: an unknown format.
    """

    def __init__(self, folder: str = "saved_model", format: str = "tf_saved_model") -> None:
        if format not in _FORMATS:
            raise ConfigError(f"Export.format={format}: choose one of {', '.join(_FORMATS)}")
        self._folder = folder
        self._format = format

    def end(self, session: TrainSession) -> None:
        from kdist.parameters.local import write_to_model

        if session.interrupted:
            # What was interrupted goes on later, and exports then.
            return
        model = session.program.model
        write_to_model(model, session.strategy.read())
        if model.optimizer.use_ema:
            model.optimizer.finalize_variable_values(model.trainable_variables)
        unfinished, path = session.run_dir / _UNFINISHED, session.run_dir / self._folder
        shutil.rmtree(unfinished, ignore_errors=True)
        model.export(unfinished, format=self._format, verbose=False)
        shutil.rmtree(path, ignore_errors=True)
        os.replace(unfinished, path)
