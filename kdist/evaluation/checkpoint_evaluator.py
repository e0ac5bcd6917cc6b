"""`CheckpointEvaluator`: what an evaluator does, wherever it runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kdist.evaluation.evaluate import ValidationArguments, Validator
from kdist.model.model_checks import preprocessing_of
from kdist.model.source import ModelSource
from kdist.run.checkpoint import Checkpoints
from kdist.strategies.base import TrainingSpec
from kdist.strategies.prepared_training import prepare


@dataclass(frozen=True)
class Evaluation:
    """Loss and metrics of the checkpoint of a step."""

    step: int
    logs: dict[str, float]


class CheckpointEvaluator:
    """Evaluates the newest checkpoint of a run, each checkpoint once.

    Args:
        source: the model; it gets the values of the checkpoints.
        arguments: the validation data, and how to evaluate it.
        checkpoints: those of the run; only read.
        after: the step of the last checkpoint that was evaluated before.
    """

    def __init__(
        self, source: ModelSource, arguments: ValidationArguments, checkpoints: Checkpoints, after: int = -1
    ) -> None:
        # Builds the model.
        data = arguments.training_data(preprocessing_of(source.model))
        prepare(TrainingSpec(source.model, data, arguments.batch_size, None, 0, Path()), 1)
        self._validator = Validator(source.model, arguments)
        self._checkpoints = checkpoints
        self._after = after

    def evaluate_newest(self) -> Evaluation | None:
        """Evaluates the newest checkpoint; None if it was evaluated before, or cannot be read."""
        newest = max(self._checkpoints.steps(), default=-1)
        # A run that starts over has smaller steps.
        if newest in (-1, self._after):
            return None
        values = self._checkpoints.read(newest)
        if values is None:
            # Deleted meanwhile, or damaged, which is for the chief to report; a newer one will come.
            return None
        self._after = newest
        return Evaluation(newest, self._validator.of_values(values))
