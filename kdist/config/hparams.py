"""Hyperparameters of a run for TensorBoard's HParams tab: one row a run, what was chosen beside what it came to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

#: Keys of a config that every run shows, beside those that it overrides.
CHOSEN = ("cluster", "strategy", "optimizer.learning_rate", "train.batch_size")
#: Keys that say nothing of what is trained.
_NOT_OF_TRAINING = ("run.", "hydra.", "sweep.", "hooks", "callbacks", "drill")
#: Where the name of a group's choice is.
_NAMES = {"cluster": "cluster.shape", "strategy": "strategy.name"}


def hparams_of(config: Mapping[str, Any], overrides: Sequence[str], chosen: Sequence[str] = CHOSEN) -> dict[str, Any]:
    """The hyperparameters of a run: keys that it overrides, swept ones among them, and those that are always shown.

    Args:
        config: the whole config, resolved.
        overrides: `key=value`, of the command line.
        chosen: more keys.

    Returns:
        Numbers, booleans and texts by their keys. What a group has (`cluster=2ps2w`) is a text; what is None is left
        out.
    """
    found: dict[str, Any] = {}
    for override in overrides:
        key, _, value = override.partition("=")
        key = key.lstrip("+")
        if not key.startswith(("~", *_NOT_OF_TRAINING)):
            # As it was given: what it stands for, ${oc.env:PASSWORD}, may be a secret.
            found[key] = _read(value)
    found |= {key: _value_of(config, _NAMES.get(key, key)) for key in chosen if key not in found}
    return plain(found)


def plain(values: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    """What the HParams tab can show: lists and the like become texts, None is left out."""
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


def _value_of(config: Mapping[str, Any], key: str) -> Any:
    node: Any = config
    for part in key.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node
