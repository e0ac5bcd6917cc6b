"""Hyperparameters of a run for TensorBoard's HParams tab: one row per run, with the chosen values and the results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

#: Config keys that every run shows, besides those that it overrides.
CHOSEN = ("cluster", "strategy", "optimizer.learning_rate", "train.batch_size")
#: Keys that do not affect what is trained, and deleted ones.
_NOT_SHOWN = ("~", "run.", "hydra.", "sweep.", "hooks", "callbacks", "drill")
#: The keys that hold the choice of a group.
_NAMES = {"cluster": "cluster.shape", "strategy": "strategy.name"}


def hparams_of(config: Mapping[str, Any], overrides: Sequence[str], chosen: Sequence[str]) -> dict[str, Any]:
    """The hyperparameters of a run: the keys that it overrides, including swept ones, and the `chosen` ones.

    Args:
        config: the whole config, resolved.
        overrides: `key=value`, of the command line.

    Returns:
        Numbers, booleans and texts by key. The choice of a group (`cluster=2ps2w`) is a text; None is omitted.
    """
    parts = (override.lstrip("+").partition("=") for override in overrides)
    # Not resolved: the value of ${oc.env:PASSWORD} may be a secret.
    found: dict[str, Any] = {key: _read(value) for key, _, value in parts if not key.startswith(_NOT_SHOWN)}
    for key in chosen:
        value: Any = config
        for part in _NAMES.get(key, key).split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        found.setdefault(key, value)
    return plain(found)


def plain(values: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    """Values in a form that the HParams tab can show: lists and the like become texts, None is omitted."""
    return {
        key: value if isinstance(value, (bool, int, float, str)) else str(value)
        for key, value in values.items()
        if value is not None and value != "null"
    }


def _read(text: str) -> bool | int | float | str:
    """A number or a boolean, if the text is one."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text
