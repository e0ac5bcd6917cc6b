"""How training steps are spread over tasks. Knows nothing of hooks, and of the cluster only what it looks like."""

from __future__ import annotations

import importlib
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kdist.cluster.spec import ClusterShape, Membership
from kdist.errors import ConfigError
from kdist.schema import ClusterConfig, StrategyConfig

if TYPE_CHECKING:
    from kdist.cluster.supervisor import Cluster
    from kdist.strategies.base import Strategy

#: Names that `strategy=` takes; `auto` picks one by the cluster.
NAMES = ("auto", "parameter_server", "sync_replicas", "mirrored", "multi_worker_mirrored", "single")

_ON_SERVERS = ("parameter_server", "sync_replicas")
# Options that mean something to some strategies only, with the value that asks for nothing.
_OPTIONS_OF: dict[str, tuple[tuple[str, ...], Any]] = {
    "replicas_to_aggregate": (("sync_replicas",), None),
    "backup_workers": (("sync_replicas",), 0),
    "token_mode": (("sync_replicas",), "strict"),
    "on_lost_worker": (("sync_replicas",), "lower"),
    "worker_timeout": (("sync_replicas",), 60.0),
    "devices": (("mirrored",), None),
    "local_steps": (("parameter_server",), 1),
    "wire_dtype": (_ON_SERVERS, None),
}


def resolve(config: StrategyConfig, shape: ClusterShape) -> str:
    """The strategy that `config` means on a cluster of `shape`. Does not import TensorFlow.

    Raises:
        ConfigError: an unknown name, a cluster that the strategy cannot use, or options that cannot be met.
    """
    name = config.name
    if config.arguments and config._target_ is None:
        raise ConfigError("strategy.arguments: are those of a class of yours; name it by strategy._target_")
    if name not in NAMES:
        raise ConfigError(f"strategy={name}: there is no such strategy; choose one of {', '.join(NAMES)}")
    if name == "auto":
        name = _automatic(config, shape)
    if name in _ON_SERVERS and not shape.num_ps:
        raise ConfigError(f"strategy={name} needs parameter servers, cluster={shape} has none; use NpsMw")
    if name in ("single", "mirrored") and not shape.is_local:
        raise ConfigError(f"strategy={name} runs in one process and cannot use cluster={shape}; use cluster=local")
    if name == "multi_worker_mirrored" and (shape.num_ps or not shape.num_workers):
        raise ConfigError(
            f"strategy=multi_worker_mirrored needs workers and no parameter servers, not cluster={shape}; use Mw, as 4w"
        )
    for option, (owners, nothing) in _OPTIONS_OF.items():
        value = getattr(config, option)
        if value != nothing and name not in owners:
            do = f"{' and '.join(owners)} {'does' if len(owners) == 1 else 'do'}"
            raise ConfigError(f"strategy.{option}={value}: strategy={name} takes no {option}; {do}")
    if name == "mirrored" and config.devices == 1:
        raise ConfigError("strategy.devices=1: mirrored needs at least 2 devices; use strategy=single for one")
    if name == "sync_replicas":
        _check_quorum(config, shape)
    return name


def create(
    config: StrategyConfig,
    cluster: ClusterConfig,
    shape: ClusterShape,
    membership: Membership | None = None,
    custom: type[Strategy] | None = None,
) -> Strategy:
    """Makes the strategy that `config` means on a cluster of `shape`.

    Args:
        membership: what this process is, if the tasks were started one by one.
        custom: the class to make it of, derived from that of the strategy; it also gets `config.arguments`.

    Raises:
        ConfigError: see `resolve`; or `custom` is of another kind, or takes no such arguments.
    """
    name = resolve(config, shape)
    base = _class_of(name)
    if custom is not None and not issubclass(custom, base):
        raise ConfigError(f"strategy={name}: {custom.__name__} must be a subclass of {base.__module__}.{base.__name__}")
    given: tuple[Any, ...] = ()
    options: dict[str, Any] = {}
    if name == "mirrored":
        given = (config.devices,)
    elif name == "multi_worker_mirrored":
        if membership is None:
            raise ValueError("multi_worker_mirrored runs in the workers' own processes")
        given, options = (membership,), {"step_timeout": cluster.step_timeout, "patience": cluster.patience}
    elif name in _ON_SERVERS:
        from kdist.strategies.stored import Placement

        given = (shape, partial(_cluster_on_servers, cluster, shape, membership))
        options = {
            "placement": Placement(config.placement, config.partition_min_bytes),
            "step_timeout": cluster.step_timeout,
            "max_worker_restarts": cluster.max_worker_restarts,
            **{option: getattr(config, option) for option, (owners, _) in _OPTIONS_OF.items() if name in owners},
        }
    try:
        return (custom or base)(*given, **options, **config.arguments)
    except TypeError as error:
        if custom is None:
            raise
        raise ConfigError(f"strategy.arguments: {error}") from error


def _class_of(name: str) -> type[Any]:
    """The class of a strategy; importing it imports TensorFlow."""
    module = importlib.import_module(f"kdist.strategies.{name}")
    return getattr(module, "".join(part.capitalize() for part in name.split("_")))


def _cluster_on_servers(
    config: ClusterConfig, shape: ClusterShape, membership: Membership | None, log_dir: Path
) -> Cluster:
    """The cluster that a strategy on servers starts, or waits for."""
    if membership is not None:
        from kdist.cluster.joined import JoinedCluster

        return JoinedCluster(
            membership.spec,
            log_dir,
            start_timeout=config.start_timeout,
            patience=config.patience,
            chief_port=config.chief_port,
            devices=config.devices,
        )
    from kdist.cluster.local import LocalCluster

    return LocalCluster(
        shape,
        log_dir,
        start_timeout=config.start_timeout,
        step_timeout=config.step_timeout,
        devices=config.devices,
    )


def own_processes(config: StrategyConfig, shape: ClusterShape, membership: Membership | None) -> int | None:
    """Whether a strategy has to run in processes of its own, and not in the caller's.

    TensorFlow can meet other workers, and cut the CPU into devices, only before its first op in a process.

    Returns:
        None if it need not; else how many logical CPU devices to make in each process, 0 for those there are.
    """
    name = resolve(config, shape)
    if name == "multi_worker_mirrored":
        return 0 if membership is None else None
    if name == "mirrored":
        from kdist.strategies.mirrored import logical_cpus_needed

        return logical_cpus_needed(config.devices) or None
    return None


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
