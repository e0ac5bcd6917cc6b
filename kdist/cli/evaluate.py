"""`kdist evaluate RUN_DIR`: loss and metrics of a run that was trained."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kdist.cli.trained import load_trained_run, parser_for, run_command
from kdist.errors import ConfigError

if TYPE_CHECKING:
    from kdist.config.schema import Config
    from kdist.data.base import TrainingData
    from kdist.evaluation.evaluate import ValidationArguments

_DESCRIPTION = """\
Evaluates a checkpoint of a run on its validation data, or on other data, and prints one line.

  kdist evaluate runs/mine                              as in result.json
  kdist evaluate runs/mine data.path=test.npz --json    other data; for machines
  kdist evaluate runs/mine cluster=2ps2w --step 500     by two workers, an earlier checkpoint
"""


def run(arguments: list[str]) -> int:
    """Runs the command; returns the exit code."""
    parser = parser_for("evaluate", _DESCRIPTION)
    parser.add_argument("--json", action="store_true", help="print {run_dir, step, metrics} as JSON")
    return run_command(arguments, parser, _evaluate)


def _evaluate(given: Namespace) -> str:
    found: list[ValidationArguments] = []

    def data(config: Config) -> ValidationArguments:
        if not found:
            has_other = any(text.lstrip("+").startswith(("data=", "data.")) for text in given.overrides)
            found.append(_validation(config, or_training=has_other))
        return found[0]

    def to_build(config: Config, preprocess: Callable[..., Any] | None) -> TrainingData:
        return data(config).training_data(preprocess)

    with load_trained_run(given, needs_data=True, data=to_build) as (run, config):
        logs = run.evaluate(data(config))
        step = run.step
    if given.json:
        return json.dumps({"run_dir": given.run_dir, "step": step, "metrics": logs})
    from kdist.console import lines

    return lines.evaluation_line(step, None, logs)


def _validation(config: Config, *, or_training: bool) -> ValidationArguments:
    """The validation data of the config; with `or_training`, its training data if there is none."""
    import tensorflow as tf

    from kdist.config.build import data_arguments
    from kdist.data.sources import has_labels, split_validation
    from kdist.evaluation.evaluate import ValidationArguments

    data = data_arguments(config)
    x, y, sample_weight = (data.get(name) for name in ("x", "y", "sample_weight"))
    validation = data.get("validation_data")
    if data.get("validation_split"):
        _, validation = split_validation(x, y, sample_weight, data["validation_split"])
    if validation is None and or_training:
        validation = x if has_labels(x) else (x, y, sample_weight)
    if validation is None:
        raise ConfigError(f"data: {config.data['_target_']} returns no validation_data; give other data, by data=...")
    if isinstance(validation, tf.data.Dataset) and int(validation.cardinality()) == tf.data.INFINITE_CARDINALITY:
        raise ConfigError(f"data: {config.data['_target_']} returns data without end, which cannot be evaluated")
    return ValidationArguments(validation, config.train.batch_size)
