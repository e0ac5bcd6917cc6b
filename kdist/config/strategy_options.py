"""Which options of `StrategyConfig` belong to which strategy."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from kdist.config.schema import (
    MirroredOptions,
    ParameterServerOptions,
    PlacementOptions,
    ServerOptions,
    StrategyConfig,
    SyncReplicasOptions,
)
from kdist.errors import ConfigError

#: The options that each strategy takes; one that is not listed takes none.
OPTIONS_OF: dict[str, type[ServerOptions] | type[MirroredOptions]] = {
    "parameter_server": ParameterServerOptions,
    "sync_replicas": SyncReplicasOptions,
    "mirrored": MirroredOptions,
}


def options_of(config: StrategyConfig, name: str) -> Any:
    """The options of strategy `name`, as its own dataclass; None if it has none."""
    kind = OPTIONS_OF.get(name)
    return None if kind is None else kind(**{item.name: getattr(config, item.name) for item in fields(kind)})


def foreign_options(config: StrategyConfig, name: str) -> dict[str, Any]:
    """The options that differ from their defaults and that strategy `name` does not take.

    Where variables are placed has no effect without servers, and is not refused there.
    """
    own = {item.name for kind in (PlacementOptions, OPTIONS_OF.get(name, PlacementOptions)) for item in fields(kind)}
    return {
        item.name: getattr(config, item.name)
        for kind in OPTIONS_OF.values()
        for item in fields(kind)
        if item.name not in own and getattr(config, item.name) != item.default
    }


def strategy_config(name: str, options: dict[str, Any], custom: type | None = None) -> StrategyConfig:
    """The config of strategy `name` with `options` by their names; `custom` is its class, if it is not kdist's own.

    Raises:
        ConfigError: there is no such option, or a value is not allowed.
    """
    known = {item.name for item in fields(StrategyConfig)} - {"name", "_target_"}
    for option in options:
        if option not in known:
            raise ConfigError(f"Trainer({option}=...): there is no such argument; strategies take {', '.join(known)}")
    target = None if custom is None else f"{custom.__module__}.{custom.__qualname__}"
    return StrategyConfig(name, **options, _target_=target)
