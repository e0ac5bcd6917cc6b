"""Chooses and makes the strategy of a config: the way in which training steps are spread over tasks."""

from __future__ import annotations

import importlib
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kdist.cluster.spec import ClusterShape, Membership
from kdist.config.schema import (
    OPTIONS_OF,
    ClusterConfig,
    Config,
    StrategyConfig,
    SyncReplicasOptions,
    foreign_options,
    options_of,
)
from kdist.errors import ConfigError

if TYPE_CHECKING:
    from kdist.cluster.description import TaskFingerprint
    from kdist.cluster.spec import Cluster
    from kdist.strategies.base import Strategy

#: Names that `strategy=` accepts; `auto` chooses by the cluster.
NAMES = ("auto", "parameter_server", "sync_replicas", "mirrored", "multi_worker_mirrored", "single")

_ON_SERVERS = ("parameter_server", "sync_replicas")
#: Those in which every replica takes part in every step.
ALL_REDUCE = ("mirrored", "multi_worker_mirrored")


def resolve(config: StrategyConfig, shape: ClusterShape) -> str:
    """The name of the strategy for `config` on a cluster of `shape`. Does not import TensorFlow.

    Raises:
        ConfigError: an unknown name, a cluster that the strategy cannot use, or options that cannot be satisfied.
    """
    name = config.name
    if config.arguments and config._target_ is None:
        raise ConfigError("strategy.arguments: are those of a class of yours; name it by strategy._target_")
    if name not in NAMES:
        raise ConfigError(f"strategy={name}: there is no such strategy; choose one of {', '.join(NAMES)}")
    if name == "auto" and shape.is_local:
        name = "mirrored" if (config.devices or 1) > 1 else "single"
    elif name == "auto":
        name = "parameter_server" if shape.num_ps else "multi_worker_mirrored"
    if name in _ON_SERVERS and not shape.num_ps:
        raise ConfigError(f"strategy={name} needs parameter servers, cluster={shape} has none; use NpsMw")
    if name in ("single", "mirrored") and not shape.is_local:
        raise ConfigError(f"strategy={name} runs in one process and cannot use cluster={shape}; use cluster=local")
    if name == "multi_worker_mirrored" and (shape.num_ps or not shape.num_workers):
        raise ConfigError(
            f"strategy=multi_worker_mirrored needs workers and no parameter servers, not cluster={shape}; use Mw, as 4w"
        )
    for option, value in foreign_options(config, name).items():
        owners = " and ".join(other for other, kind in OPTIONS_OF.items() if hasattr(kind, option))
        raise ConfigError(f"strategy.{option}={value}: not an option of strategy={name}, but of {owners}")
    if name == "mirrored" and config.devices == 1:
        raise ConfigError("strategy.devices=1: mirrored needs at least 2 devices; use strategy=single for one")
    if name == "sync_replicas":
        check_quorum(config, shape)
    return name


def create(
    config: Config,
    shape: ClusterShape,
    membership: Membership | None = None,
    custom: type[Strategy] | None = None,
    fingerprint: TaskFingerprint | None = None,
    *,
    is_in_place: bool = False,
) -> Strategy:
    """Makes the strategy of `config` on a cluster of `shape`.

    Args:
        membership: the role of this process, if the tasks were started one by one.
        custom: the class to use, derived from that of the strategy; it also gets `config.strategy.arguments`.
        fingerprint: the properties that the tasks need alike, if others start them; None compares nothing.
        is_in_place: whether this process is one that `Remote` has started.

    Raises:
        ConfigError: see `resolve`; or `custom` is not such a class, or does not take these arguments.
    """
    cluster, given = config.cluster, config.strategy
    name = resolve(given, shape)
    if not is_in_place and (num_cpus := own_processes(given, shape, membership)) is not None:
        from kdist.strategies.remote import Remote

        make = partial(create, config, shape, custom=custom, is_in_place=True)
        return Remote(name, make, shape, cluster, num_devices=given.devices or 1, num_cpus=num_cpus)
    # Imports TensorFlow.
    module = importlib.import_module(f"kdist.strategies.{name}")
    base: type[Any] = getattr(module, "".join(part.capitalize() for part in name.split("_")))
    if custom is not None and not issubclass(custom, base):
        raise ConfigError(f"strategy={name}: {custom.__name__} must be a subclass of {base.__module__}.{base.__name__}")
    positional: tuple[Any, ...] = ()
    arguments: dict[str, Any] = {}
    if (options := options_of(given, name)) is not None:
        arguments["options"] = options
    if name == "multi_worker_mirrored":
        positional = (membership,)
        arguments |= {"num_workers": shape.num_workers, "config": cluster, "fingerprint": fingerprint}
    elif name in _ON_SERVERS:
        positional = (shape, partial(_cluster_on_servers, cluster, shape, membership, fingerprint))
        arguments |= {"step_timeout": cluster.step_timeout, "max_worker_restarts": cluster.max_worker_restarts}
    try:
        return (custom or base)(*positional, **arguments, **given.arguments)
    except TypeError as error:
        if custom is None:
            raise
        raise ConfigError(f"strategy.arguments: {error}") from error


def _cluster_on_servers(
    config: ClusterConfig,
    shape: ClusterShape,
    membership: Membership | None,
    description: TaskFingerprint | None,
    log_dir: Path,
) -> Cluster:
    """The cluster that a strategy with parameter servers starts, or waits for."""
    if membership is not None:
        from kdist.cluster.external import ExternalCluster

        return ExternalCluster(membership.spec, log_dir, config, description)
    from kdist.cluster.local import LocalCluster

    return LocalCluster(shape, log_dir, config)


def own_processes(config: StrategyConfig, shape: ClusterShape, membership: Membership | None) -> int | None:
    """Finds out if a strategy has to run in processes of its own instead of the caller's.

    TensorFlow can join other workers, and split the CPU into devices, only before its first op in a process.

    Returns:
        None if it need not; otherwise how many logical CPU devices to create in each process, 0 for the existing ones.
    """
    name = resolve(config, shape)
    if name == "multi_worker_mirrored":
        return 0 if membership is None else None
    if name == "mirrored":
        from kdist.strategies.mirrored import logical_cpus_needed

        return logical_cpus_needed(config.devices) or None
    return None


def check_quorum(config: SyncReplicasOptions, shape: ClusterShape) -> None:
    """Refuses a number of gradients that can never arrive."""
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
