"""`CheckpointEvaluator`: what an evaluator does, wherever it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import keras

from kdist.checkpoint import Checkpoints
from kdist.fit_arguments import FitArguments
from kdist.strategies.base import Program
from kdist.strategies.stored import prepare
from kdist.validation import Validator


@dataclass(frozen=True)
class Evaluation:
    """Loss and metrics of the checkpoint of a step."""

    step: int
    logs: dict[str, float]


class CheckpointEvaluator:
    """Evaluates the newest checkpoint of a folder whenever it is another one.

    Args:
        build_model: what the trainer was given: a function, or a model.
        arguments: of the fit; its validation data is what is evaluated.
        folder: of the checkpoints; it is only read.
        after: the step whose checkpoint was evaluated before.
    """

    def __init__(
        self,
        build_model: Callable[[], keras.Model] | keras.Model,
        arguments: FitArguments,
        folder: Path,
        after: int = -1,
    ) -> None:
        model = build_model if isinstance(build_model, keras.Model) else build_model()
        # Builds the model.
        prepare(Program(model, arguments.training_data(0), arguments.batch_size, None, 0, Path()), 1)
        self._validator = Validator(model, arguments)
        self._checkpoints = Checkpoints(folder)
        self._after = after

    def evaluate_newest(self) -> Evaluation | None:
        """What the newest checkpoint comes to; None if it was evaluated before, or cannot be read."""
        try:
            newest = max(self._checkpoints.steps(), default=-1)
        except OSError:
            # The chief has just set the folder of an earlier run aside.
            return None
        # A run that begins anew has smaller steps.
        if newest in (-1, self._after):
            return None
        values = self._checkpoints.read(newest)
        if values is None:
            # It was deleted, or it is damaged, which is for the chief to say; a newer one will come.
            return None
        self._after = newest
        return Evaluation(newest, self._validator.of_values(values))
