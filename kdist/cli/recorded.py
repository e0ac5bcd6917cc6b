"""Configs that runs have recorded, as configs of Hydra: to work with a trained model, or to run a run again."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
from yaml import YAMLError

from kdist.cli.compose import explain_errors
from kdist.config import targets
from kdist.config.record import check_record, read_record
from kdist.config.schema import RunConfig
from kdist.errors import ConfigError
from kdist.storage.folder import Folder
from kdist.storage.mirror import Mirror
from kdist.storage.object_storage import NotThereError, is_url

FOLDER = ".hydra"
AGAIN = "--again"
_NAME = "kdist_again"


def take_again(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """The run dir behind `--again`, if it is among the arguments, and the others."""
    rest = list(arguments)
    for i, text in enumerate(rest):
        option, sign, value = text.partition("=")
        if option == AGAIN:
            given = [value] if sign else rest[i + 1 : i + 2]
            if not given or not given[0] or given[0].startswith("-"):
                raise ConfigError(f"{AGAIN}: needs the run dir of the run to run again: kdist train {AGAIN} runs/mine")
            return given[0], rest[:i] + rest[i + (1 if sign else 2) :]
    return None, rest


def record_folder(parsed: Namespace) -> str | None:
    """The run dir whose record a command line names as its config (`--config-path RUN_DIR/.hydra`), if it does."""
    if parsed.config_path is None or Path(parsed.config_path).name != FOLDER:
        return None
    if (parsed.config_name or "config").removesuffix(".yaml") != "config":
        return None
    run_dir = str(Path(parsed.config_path).parent)
    parsed.config_path = parsed.config_name = None
    return run_dir


def use_again(run_dir: str, parsed: Namespace) -> list[str]:
    """Makes the record of a run the config of a command line, whose run has a run dir of its own.

    Returns:
        The overrides of that run which still count.

    Raises:
        ConfigError: there is no such record, or it cannot be used by this version.
    """
    if parsed.config_name is not None:
        raise ConfigError(f"{AGAIN}: the config is that of the run; leave --config-name={parsed.config_name} out")
    names = [f"{FOLDER}/{name}.yaml" for name in ("config", "overrides")]
    given = Mirror(run_dir, RunConfig.storage_timeout) if is_url(run_dir) else Folder(Path(run_dir))
    try:
        with given.open_for(f"reader:{os.getpid()}") as folder:
            with suppress(NotThereError):
                folder.fetch(names)
            config, overrides = (folder.path / name for name in names)
            if not config.is_file():
                raise ConfigError("has no .hydra/config.yaml, which each run of the command line records")
            record = read_record(config)
            check_record(record)
            earlier: Any = OmegaConf.to_container(OmegaConf.load(overrides)) if overrides.is_file() else []
    except (ConfigError, OSError, ValueError, YAMLError) as error:
        raise ConfigError(f"{AGAIN} {run_dir}: {' '.join(str(error).split())}") from None
    node: Any = OmegaConf.to_container(record, resolve=False)
    node.get("run", {}).pop("dir", None)
    store_record(_NAME, node, parsed.overrides)
    parsed.config_name = _NAME
    with explain_errors(ValueError):
        changed = ("run.dir", *targets.keys_of(parsed.overrides))
        # An option of a group replaces all of the group.
        return [text for text in map(str, earlier) if not any(f"{_key(text)}.".startswith(f"{k}.") for k in changed)]


def _key(override: str) -> str:
    (key,) = targets.keys_of([override])
    return key


def store_record(name: str, record: Mapping[str, Any], overrides: Sequence[str]) -> None:
    """Makes a record a config of Hydra; where it has nothing, the defaults of every run count.

    An option that `overrides` choose replaces the record of its group.
    """
    base: Any = OmegaConf.to_container(
        OmegaConf.create((resources.files("kdist.conf") / "config.yaml").read_text(encoding="utf-8")), resolve=False
    )
    with explain_errors(ValueError):
        chosen = set(targets.keys_of(overrides))
    kept = {key: value for key, value in record.items() if key not in chosen}
    defaults = [entry for entry in base["defaults"] if not (isinstance(entry, dict) and kept.keys() & entry.keys())]
    ConfigStore.instance().store(name, {**base, "defaults": defaults, **kept})
