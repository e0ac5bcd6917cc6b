"""Hyperparameters of a run for TensorBoard's HParams tab: one row a run, what was chosen beside what it came to."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from kdist.result import Result

#: Keys of a config that every run shows, beside those that it overrides.
CHOSEN = ("strategy.name", "cluster.shape", "optimizer.learning_rate", "train.batch_size")
_NOT_OF_TRAINING = ("run.", "hydra.", "sweep.", "drill")


def hparams_of(config: Mapping[str, Any], overrides: Sequence[str], chosen: Sequence[str] = CHOSEN) -> dict[str, Any]:
    """The hyperparameters of a run: keys that it overrides, swept ones among them, and those that are always shown.

    Args:
        config: the whole config, resolved.
        overrides: `key=value`, of the command line.
        chosen: more keys.

    Returns:
        Numbers, booleans and texts by their keys. A group that was chosen, `cluster=2ps2w`, is a text; what is None is
        left out.
    """
    found: dict[str, Any] = {}
    for override in overrides:
        key, _, value = override.partition("=")
        key = key.lstrip("+")
        if key.startswith(("~", *_NOT_OF_TRAINING)):
            continue
        present = _value_of(config, key)
        # A config group's own name is in no config.
        found[key] = value if present is None or isinstance(present, Mapping) else present
    found |= {key: _value_of(config, key) for key in chosen if key not in found}
    return plain(found)


def plain(values: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    """What the HParams tab can show: lists and the like become texts, None is left out."""
    return {
        key: value if isinstance(value, (bool, int, float, str)) else str(value)
        for key, value in values.items()
        if value is not None and value != "null"
    }


def final_metrics(result: Result) -> dict[str, float]:
    """What a run came to, by the tags of the HParams tab."""
    found = {
        f"final/{split}_{name}": value
        for split, logs in sorted(result.metrics.items(), reverse=True)
        for name, value in logs.items()
    }
    found["final/examples_per_sec"] = result.examples_per_second or math.nan
    return {tag: value for tag, value in found.items() if math.isfinite(value)}


def _value_of(config: Mapping[str, Any], key: str) -> Any:
    node: Any = config
    for part in key.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node
