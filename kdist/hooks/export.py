"""`Export`: a SavedModel at the end. After Estimator's `FinalExporter`."""

from __future__ import annotations

import os
import shutil
from functools import partial

from kdist.console.warn import warn
from kdist.errors import ConfigError
from kdist.hooks.base import Hook, Session

_FORMATS = ("tf_saved_model", "onnx", "openvino")


class Export(Hook):
    """Exports the trained model for serving by `keras.Model.export`; `model.keras` is written anyway.

    If the optimizer keeps moving averages, they are exported, as in `model.keras`.

    Args:
        folder: target, inside the run dir.
        format: as in `keras.Model.export`; `onnx` and `openvino` need packages of their own.

    Raises:
        ConfigError: an unknown format.
    """

    def __init__(self, folder: str = "saved_model", format: str = "tf_saved_model") -> None:
        if format not in _FORMATS:
            raise ConfigError(f"Export.format={format}: choose one of {', '.join(_FORMATS)}")
        self._folder = folder
        self._format = format

    def end(self, session: Session) -> None:
        from kdist.model.state import finalize_ema, write_to_model

        if session.interrupted:
            # An interrupted run continues later, and exports then.
            return
        model = session.spec.model
        session.strategy.count_rows()
        if session.spec.stays_on_servers():
            warn(
                f"Export: model {model.name} is larger than run.export_max_bytes and stays in its checkpoints; a run "
                "that resumes with a larger run.export_max_bytes exports it"
            )
            return
        session.read_into(partial(write_to_model, model))
        finalize_ema(model)
        unfinished, path = session.run_dir / ".unfinished-export", session.run_dir / self._folder
        shutil.rmtree(unfinished, ignore_errors=True)
        model.export(unfinished, format=self._format, verbose=False)
        shutil.rmtree(path, ignore_errors=True)
        os.replace(unfinished, path)
