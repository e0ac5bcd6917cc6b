"""Hyperparameters of a run for TensorBoard's HParams tab: one row per run, with the chosen values and the results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

SEED = "run.seed"


def hparams_of(config: Mapping[str, Any], overrides: Sequence[str], chosen: Sequence[str]) -> dict[str, Any]:
    """The hyperparameters of a run: the keys that the command line overrides, and `chosen` ones of the resolved config.

    The choice of a group (`optimizer=adam`) is a text; None is omitted.
    """
    # Not resolved: the value of ${oc.env:PASSWORD} may be a secret.
    found: dict[str, Any] = {key: value_of(text) for key, text in by_key(overrides).items() if is_of_training(key)}
    for key in chosen:
        value: Any = config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        found.setdefault(key, value)
    return plain(found)


def of_run(strategy: str, cluster: str, learning_rate: float, hparams: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters of a run that begins, with what `auto` stands for, and the learning rate at step 0."""
    return {**hparams, "cluster": cluster, "strategy": strategy, "optimizer.learning_rate": learning_rate}


def by_key(overrides: Sequence[str]) -> dict[str, str]:
    """The overrides of the command line, as texts by key; the last one of a key counts. Deletions are left out."""
    parts = (override.lstrip("+").partition("=") for override in overrides if not override.startswith("~"))
    return {key: text for key, _, text in parts}


def is_of_training(key: str) -> bool:
    """True if a key may affect the trained values; `run.dir`, for example, does not."""
    return key == SEED or not key.startswith(("run.", "hydra.", "sweep."))


def plain(values: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    """Values in a form that the HParams tab can show: lists and the like become texts, None is omitted."""
    return {
        key: value if isinstance(value, (bool, int, float, str)) else str(value)
        for key, value in values.items()
        if value is not None
    }


def flat(config: Mapping[str, Any], prefix: str = "", *, with_empty: bool = False) -> dict[str, Any]:
    """The values of nested mappings, by keys with dots; an empty mapping is a value if `with_empty`."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        is_value = not isinstance(value, Mapping) or (with_empty and not value)
        found |= {f"{prefix}{name}": value} if is_value else flat(value, f"{prefix}{name}.", with_empty=with_empty)
    return found


def value_of(text: str) -> bool | int | float | str:
    """A number or a boolean, if the text is one."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def overrides_of_job() -> list[str]:
    """The overrides of the job that Hydra runs, if any, as they were given: ${oc.env:PASSWORD} is not resolved."""
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    if not HydraConfig.initialized():
        return []
    overrides: Any = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
    return list(overrides)


def sweep_of_job() -> Path | None:
    """The folder of the sweep whose trial is the job that Hydra runs; None if it is none."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    if not HydraConfig.initialized() or HydraConfig.get().mode != RunMode.MULTIRUN:
        return None
    return Path(HydraConfig.get().sweep.dir)
