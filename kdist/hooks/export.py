"""`Export`: a SavedModel, at the end and meanwhile. After Estimator's `FinalExporter` and `LatestExporter`."""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Callable
from functools import partial

from kdist.config.checks import check_one_of
from kdist.console import lines
from kdist.hooks.base import Session
from kdist.hooks.timer import TimedHook
from kdist.log import warn
from kdist.storage.tensorflow_paths import literal_path


class Export(TimedHook):
    """Exports the trained model for serving by `keras.Model.export`; `model.keras` is written anyway.

    If the optimizer keeps moving averages, they are exported, as in `model.keras`. Each export replaces the previous
    one. While training continues, a failed export costs a warning.

    Args:
        folder: target, inside the run dir.
        format: as in `keras.Model.export`; `onnx` and `openvino` need other packages.
        every_steps: also export at multiples of this step; at the end only if neither is given.
        every_secs: also export after so many seconds.
        clock: returns seconds; replaced in tests.

    Raises:
        ConfigError: an unknown format, or a value is out of range.
    """

    _owner = "Export"

    def __init__(
        self,
        folder: str = "saved_model",
        format: str = "tf_saved_model",
        every_steps: int | None = None,
        every_secs: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_one_of("Export.format", format, ("tf_saved_model", "onnx", "openvino"))
        self._folder = folder
        self._format = format
        never = every_steps is None and every_secs is None
        super().__init__(every_steps, math.inf if never else every_secs, clock)

    def _act(self, session: Session) -> None:
        # A model that stays on its servers is mentioned at the end, once.
        if not session.spec.stays_on_servers():
            try:
                self._export(session)
            except OSError as error:
                warn(f"Export: {error.strerror or error}; training continues")

    def end(self, session: Session) -> None:
        if session.interrupted:
            # An interrupted run continues later, and exports then.
            return
        model = session.spec.model
        if session.spec.stays_on_servers():
            warn(
                f"Export: model {model.name} is larger than run.export_max_bytes and stays in its checkpoints; "
                "kdist export exports it, with a larger run.export_max_bytes"
            )
            return
        self._export(session)

    def idle_in(self, step: int) -> int | None:
        return self.due_in(step)

    def _export(self, session: Session) -> None:
        from kdist.model.state import finalize_ema, write_to_model

        model = session.spec.model
        session.read_into(partial(write_to_model, model))
        finalize_ema(model)
        unfinished, path = session.run_dir / ".unfinished-export", session.run_dir / self._folder
        shutil.rmtree(unfinished, ignore_errors=True)
        model.export(literal_path(unfinished), format=self._format, verbose=False)
        shutil.rmtree(path, ignore_errors=True)
        os.replace(unfinished, path)
        session.print_line(lines.save_line(session.global_step, session.last_step, path))
