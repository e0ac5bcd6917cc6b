"""How training steps are spread over tasks. Knows nothing of hooks, and of the cluster only what it looks like."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kdist.cluster.spec import ClusterShape
from kdist.errors import ConfigError
from kdist.schema import ClusterConfig, StrategyConfig

if TYPE_CHECKING:
    from kdist.strategies.base import Strategy

#: Names that `strategy=` takes; `auto` picks one by the cluster.
NAMES = ("auto", "parameter_server", "sync_replicas", "mirrored", "multi_worker_mirrored", "single")

_ON_SERVERS = ("parameter_server", "sync_replicas")
# Options that mean something to one strategy only, with the value that asks for nothing.
_OPTIONS_OF = {
    "replicas_to_aggregate": ("sync_replicas", None),
    "backup_workers": ("sync_replicas", 0),
    "token_mode": ("sync_replicas", "strict"),
    "devices": ("mirrored", None),
}


def resolve(config: StrategyConfig, shape: ClusterShape) -> str:
    """The strategy that `config` means on a cluster of `shape`. Does not import TensorFlow.

    Raises:
        ConfigError: an unknown name, a cluster that the strategy cannot use, or options that cannot be met.
    """
    name = config.name
    if name not in NAMES:
        raise ConfigError(f"strategy={name}: there is no such strategy; choose one of {', '.join(NAMES)}")
    if name == "auto":
        name = _automatic(config, shape)
    if name in _ON_SERVERS and not shape.num_ps:
        raise ConfigError(f"strategy={name} needs parameter servers, cluster={shape} has none; use NpsMw")
    if name in ("single", "mirrored") and not shape.is_local:
        raise ConfigError(f"strategy={name} runs in one process and cannot use cluster={shape}; use cluster=local")
    if name == "multi_worker_mirrored":
        raise ConfigError(f"cluster={shape}: multi_worker_mirrored is not there yet; use cluster=NpsMw")
    if name == "multi_worker_mirrored" and (shape.num_ps or not shape.num_workers):
        raise ConfigError(
            f"strategy=multi_worker_mirrored needs workers and no parameter servers, not cluster={shape}; use Mw, as 4w"
        )
    for option, (owner, nothing) in _OPTIONS_OF.items():
        value = getattr(config, option)
        if value != nothing and name != owner:
            raise ConfigError(f"strategy.{option}={value}: strategy={name} takes no {option}; {owner} does")
    if name == "mirrored" and config.devices == 1:
        raise ConfigError("strategy.devices=1: mirrored needs at least 2 devices; use strategy=single for one")
    if name == "sync_replicas":
        _check_quorum(config, shape)
    return name


def create(config: StrategyConfig, cluster: ClusterConfig) -> Strategy:
    """Makes the strategy that `config` means on `cluster`.

    Raises:
        ConfigError: see `resolve`.
    """
    shape = ClusterShape.parse(cluster.shape)
    name = resolve(config, shape)
    if name == "single":
        from kdist.strategies.single import Single

        return Single()
    if name == "mirrored":
        from kdist.strategies.mirrored import Mirrored

        return Mirrored(config.devices)
    from kdist.strategies.stored import Placement

    placement = Placement(config.placement, config.partition_min_bytes)
    timeouts = {"start_timeout": cluster.start_timeout, "step_timeout": cluster.step_timeout}
    if name == "parameter_server":
        from kdist.strategies.parameter_server import ParameterServer

        return ParameterServer(shape, placement=placement, **timeouts)
    from kdist.strategies.sync_replicas import SyncReplicas

    return SyncReplicas(
        shape,
        placement=placement,
        **timeouts,
        replicas_to_aggregate=config.replicas_to_aggregate,
        backup_workers=config.backup_workers,
        token_mode=config.token_mode,
    )


def _automatic(config: StrategyConfig, shape: ClusterShape) -> str:
    if shape.num_ps:
        return "parameter_server"
    if not shape.is_local:
        return "multi_worker_mirrored"
    return "mirrored" if (config.devices or 1) > 1 else "single"


def _check_quorum(config: StrategyConfig, shape: ClusterShape) -> None:
    """Refuses a number of gradients that can never be reached."""
    backup, asked = config.backup_workers, config.replicas_to_aggregate
    if backup >= shape.num_workers:
        raise ConfigError(
            f"strategy.backup_workers={backup}: must be less than the workers there are, {shape.num_workers} on "
            f"cluster={shape}"
        )
    if asked is not None and backup and asked + backup > shape.num_workers:
        raise ConfigError(
            f"strategy.replicas_to_aggregate={asked} and strategy.backup_workers={backup}: {asked} fresh gradients can "
            f"never arrive from {shape.num_workers - backup} of the {shape.num_workers} workers of cluster={shape}; "
            "give one of the two"
        )
