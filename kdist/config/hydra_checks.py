"""Limits of what Hydra itself does for a config, since it calls targets, writes logs and sets variables, too.

What Hydra uses is compared as it is written: a value that is computed (`${...}`) could be another one by then.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kdist.config import targets
from kdist.errors import ConfigError

if TYPE_CHECKING:
    from omegaconf import DictConfig

#: Keys of a launcher or sweeper that a file may set besides numbers: the values to try, which are overrides.
_FREE = ("params",)
#: The parts of a logging config, what each may have, and which classes it may be of.
_LOGGER = ("level", "handlers", "propagate")
_LOGGING = {
    "formatters": ("format", "datefmt", "style", "log_colors", "secondary_log_colors", "reset", "class", "()"),
    "handlers": ("class", "formatter", "level", "stream", "filename"),
    "loggers": _LOGGER,
}
_CLASSES = ("logging.StreamHandler", "logging.FileHandler", "logging.NullHandler", "logging.Formatter")
_FACTORIES = ("colorlog.ColoredFormatter",)
_STREAM = re.compile(r"ext://sys\.std(out|err)")
_NAME = r"[\w-][\w.-]*"
_LOG_FILE = re.compile(rf"\$\{{hydra[.:]runtime\.output_dir\}}/(\$\{{hydra[.:]job\.name\}}|{_NAME})\.log")


def check_hydra(config: DictConfig, overrides: Sequence[str]) -> None:
    """Refuses anything that Hydra would do for a file against the will of its user.

    Launchers, sweepers and callbacks are those of installed plugins, or callbacks of trusted packages; logs are files
    in the run dir; variables of the environment, which may name libraries to load, and text for launchers and sweepers,
    which some of them run, come from the command line.
    """
    from omegaconf import OmegaConf

    from kdist._compat.hydra import nodes_of_plugins

    given = targets.keys_of(overrides)
    for part in ("launcher", "sweeper"):
        key = f"hydra.{part}"
        node = OmegaConf.to_container(config.hydra[part], resolve=False)
        _check_plugin(key, node, {}, dict(nodes_of_plugins(f"hydra/{part}")), given)
    known = dict(nodes_of_plugins("hydra/callbacks"))
    trusted = sorted(targets.values_of(overrides, "run.trust"))
    callbacks: Any = OmegaConf.to_container(config.hydra.callbacks, resolve=False)
    for name, callback in callbacks.items():
        key = f"hydra.callbacks.{name}"
        _refuse_interpolation(key, callback)
        if callback not in known.values():
            targets.check(key, callback, trusted)
    for part in ("job_logging", "hydra_logging"):
        _check_logging(f"hydra.{part}", OmegaConf.to_container(config.hydra[part], resolve=False))
    if not re.fullmatch(_NAME, str(config.hydra.job.name)):
        raise ConfigError(f"hydra.job.name={config.hydra.job.name}: is not a name of letters, digits and _ - .")
    for name in config.hydra.job.env_set:
        # `env_copy` copies what is there.
        if f"hydra.job.env_set.{name}" not in given and name not in config.hydra.job.env_copy:
            raise ConfigError(f"hydra.job.env_set.{name}: is not from the command line; no file can set a variable")


def check_searchpath(searchpath: Any, overrides: Sequence[str]) -> None:
    """Refuses packages in `hydra.searchpath` of a file, which Hydra imports, unless the command line trusts them."""
    trusted = {"kdist.conf", *targets.values_of(overrides, "run.trust")}
    for place in searchpath or ():
        package = str(place).partition("pkg://")[2]
        if package and not any(package == name or package.startswith(f"{name}.") for name in trusted):
            raise ConfigError(
                f"hydra.searchpath: {place} is not from the command line, and would be imported; give "
                f"hydra.searchpath=[{place}] or run.trust=[{package.partition('.')[0]}] there"
            )


def _check_plugin(key: str, node: Any, own: Any, known: Mapping[str, Any], given: Sequence[str]) -> None:
    """Refuses differences from the node that a plugin has registered, except numbers and keys of the command line.

    Args:
        own: the node of the plugin at this place.
        known: the nodes of all plugins, by their targets.
    """
    if any(key == name or key.startswith(f"{name}.") for name in given):
        parts = [part for _, part in targets.nodes_in(key, node) if isinstance(part, Mapping) and "_target_" in part]
        if unknown := [str(part["_target_"]) for part in parts if str(part["_target_"]) not in known]:
            raise _not_installed(key, unknown[0], known)
        return
    if isinstance(node, Mapping):
        if (target := node.get("_target_")) is not None:
            if target not in known:
                raise _not_installed(key, target, known)
            own = known[target]
        for name, value in node.items():
            if name in _FREE:
                _refuse_interpolation(f"{key}.{name}", value)
            elif name != "_target_":
                _check_plugin(f"{key}.{name}", value, own.get(name) if isinstance(own, Mapping) else None, known, given)
    elif isinstance(node, (list, tuple)):
        if node != own:
            for index, value in enumerate(node):
                _check_plugin(f"{key}[{index}]", value, None, known, given)
    elif isinstance(node, str) and node != own:
        raise ConfigError(f"{key}={node}: text for a launcher or sweeper has to be on the command line: {key}={node}")


def _not_installed(key: str, target: str, known: Mapping[str, Any]) -> ConfigError:
    others = ", ".join(sorted(known))
    return ConfigError(f"{key}._target_={target}: is not of an installed plugin of Hydra; choose one of {others}")


def _refuse_interpolation(key: str, node: Any) -> None:
    for place, value in targets.nodes_in(key, node):
        if isinstance(value, str) and "${" in value:
            raise ConfigError(
                f"{place}={value}: has to be written out; Hydra could read another value than kdist has checked"
            )


def _check_logging(key: str, config: Any) -> None:
    """Refuses all but plain logging to the console or to a file in the run dir."""
    for part, value in (config or {}).items():
        place = f"{key}.{part}"
        if part == "root":
            _check_keys(place, value or {}, _LOGGER)
        elif part in _LOGGING:
            for name, entry in (value or {}).items():
                _check_keys(f"{place}.{name}", entry or {}, _LOGGING[part])
        elif part in ("version", "disable_existing_loggers", "incremental"):
            _refuse_interpolation(place, value)
        else:
            raise ConfigError(f"{place}: is not allowed; a config may have formatters, handlers, loggers and root")


def _check_keys(key: str, entry: Mapping[str, Any], allowed: Sequence[str]) -> None:
    for name, value in entry.items():
        place = f"{key}.{name}"
        if name not in allowed:
            raise ConfigError(f"{place}: is not allowed; choose one of {', '.join(allowed)}")
        if name == "filename":
            if not _LOG_FILE.fullmatch(str(value)):
                raise ConfigError(
                    f"{place}={value}: is not in the run dir: write ${{hydra.runtime.output_dir}}/NAME.log"
                )
            continue
        _refuse_interpolation(place, value)
        is_reference = isinstance(value, str) and value.startswith(("ext://", "cfg://"))
        if (
            (name == "class" and value not in _CLASSES)
            or (name == "()" and value not in _FACTORIES)
            or (is_reference and not _STREAM.fullmatch(value))
        ):
            raise ConfigError(
                f"{place}={value}: choose one of {', '.join((*_CLASSES, *_FACTORIES))}, and ext://sys.stdout or stderr"
            )
