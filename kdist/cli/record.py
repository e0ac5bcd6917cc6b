"""The config of a run that was trained: from its record, with what a later command line changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf, open_dict
from yaml import YAMLError

from kdist._compat.hydra import parse_command_line
from kdist.cli.compose import as_hydra_reads, check_keys, compose, explain_errors
from kdist.cli.hydra_plugins import register
from kdist.config import targets
from kdist.config.record import check_record, read_record
from kdist.config.schema import Config, OptimizerConfig
from kdist.errors import ConfigError
from kdist.run.model_file import MODEL_FILE
from kdist.version import __version__

if TYPE_CHECKING:
    from kdist.run.run_dir import RunDir

_NAME = "kdist_trained"
#: What a model and its evaluation depend on: all of these groups, or these keys of them.
_WHOLE = ("model", "data", "optimizer", "loss", "metrics")
_PARTS = {
    "train": ("batch_size",),
    "strategy": ("placement", "partition_min_bytes"),
    "run": ("export_max_bytes", "trust"),
}
#: Groups of which the command line may choose another option.
_GROUPS = ("cluster", "strategy", "model", "data", "optimizer")


def config_of(run: RunDir, overrides: Sequence[str]) -> Config:
    """The config of a run, changed by `overrides` as on the command line of a new one; everything else has its default.

    Where nothing is recorded of the model, as in a run from Python, or no checkpoint has its values, it is that of
    `model.keras`. Where nothing is recorded of the data, `data` is None.

    Raises:
        ConfigError: it is not the run dir of a run, or its record cannot be used by this version.
    """
    try:
        return _compose(run, _read(run), as_hydra_reads(overrides))
    except ConfigError as error:
        raise ConfigError(f"{run}: {error}") from None


def _compose(run: RunDir, recorded: dict[str, Any], overrides: Sequence[str]) -> Config:
    with explain_errors(ValueError):
        chosen = set(targets.keys_of(overrides))
    if "recipe" in chosen:
        raise ConfigError(
            "recipe: cannot be changed for a finished run; override single keys, as data=mnist or data.path=test.npz"
        )
    if not {"model", "model._target_"} & chosen and (recorded.get("model") is None or not run.checkpoints().steps()):
        _use_model_file(run, recorded)
    register()
    groups = [{group: "local" if group == "cluster" else None} for group in _GROUPS if group in {*chosen, "cluster"}]
    # An option replaces what is recorded of its group. What is not recorded can be given by `_target_`.
    node = {"model": {"_target_": None}, "data": {"_target_": None}, **recorded}
    node = {key: value for key, value in node.items() if key not in chosen}
    ConfigStore.instance().store(_NAME, {"defaults": ["kdist_schema", *groups, "_self_"], **node})
    parsed = parse_command_line(overrides)
    return _check(compose(parsed, _NAME)[0], overrides)


def _check(config: DictConfig, overrides: Sequence[str]) -> Config:
    with explain_errors(ValueError):
        with open_dict(config):
            del config["hydra"]
        if OmegaConf.select(config, "data._target_") is None:
            config.data = None
        check_keys(config, Config)
        checked: Any = OmegaConf.to_object(config)
        checked.check()
        checked.run.trust = targets.of_command_line(checked.run.trust, overrides)
    return checked


def _read(run: RunDir) -> dict[str, Any]:
    """The recorded config, resolved, as far as it matters now.

    Raises:
        ConfigError: there is no record of a run.
    """
    hydra, result = run.file(".hydra/config.yaml"), run.read_result()
    if hydra is None and not result and not run.checkpoints().steps():
        sweep = "; it is the folder of a sweep: give that of a trial" if run.file("multirun.yaml") else ""
        raise ConfigError(f"is not the run dir of a run{sweep}")
    try:
        config = OmegaConf.create(result.get("config") or {}) if hydra is None else read_record(hydra)
    except (OSError, ValueError, YAMLError) as error:
        raise ConfigError(f".hydra/config.yaml cannot be read: {' '.join(str(error).split())}") from None
    check_record(config)
    with explain_errors(ValueError):
        kept = {group: _resolved(config, group) for group in _WHOLE}
        kept |= {group: {key: _resolved(config, f"{group}.{key}") for key in keys} for group, keys in _PARTS.items()}
        if (size := _resolved(config, "fit.validation_batch_size")) is not None:
            kept["train"]["batch_size"] = size
        _check_version(kept["optimizer"], result)
        return {
            group: {key: value for key, value in node.items() if value is not None} if group in _PARTS else node
            for group, node in kept.items()
            if node is not None
        }


def _check_version(optimizer: Any, result: dict[str, Any]) -> None:
    """Refuses a record of another version that this one would misread."""
    by = f"was trained by kdist {result.get('versions', {}).get('kdist', 'of another version')}; this is {__version__}"
    if unknown := sorted(set(optimizer or ()) - {item.name for item in fields(OptimizerConfig)}):
        raise ConfigError(f"{by}, which knows no {', '.join(f'optimizer.{name}' for name in unknown)}")


def _resolved(config: Any, key: str) -> Any:
    value = OmegaConf.select(config, key)
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _use_model_file(run: RunDir, recorded: dict[str, Any]) -> None:
    """Lets the model be that of `model.keras`, compiled as it was, if there is one."""
    path = run.file("model.keras")
    if path is not None:
        for group in ("optimizer", "loss", "metrics"):
            recorded.pop(group, None)
        recorded["model"] = {"_target_": MODEL_FILE, "filepath": str(path)}
    elif recorded.get("model") is None:
        raise ConfigError(
            "was trained from Python, so that nothing says how its model is built, and there is no model.keras "
            "to read it from; name the function that builds it: model._target_=package.function run.trust=[package]"
        )
