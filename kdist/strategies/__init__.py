"""How training steps are spread over tasks. Knows nothing of hooks, and of the cluster only what it looks like."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kdist.cluster.spec import ClusterShape
from kdist.errors import ConfigError

if TYPE_CHECKING:
    from kdist.strategies.base import Strategy

#: Names that `strategy=` takes; `auto` picks one by the cluster.
NAMES = ("auto", "parameter_server", "single")


def resolve(name: str, shape: ClusterShape) -> str:
    """The strategy that `name` means on a cluster of `shape`. Does not import TensorFlow.

    Raises:
        ConfigError: an unknown name, or a cluster that the strategy cannot use.
    """
    if name not in NAMES:
        raise ConfigError(f"strategy={name}: there is no such strategy; choose one of {', '.join(NAMES)}")
    if shape.num_ps == 0 and shape.num_workers > 1:
        raise ConfigError(f"cluster={shape}: workers without parameter servers have no strategy yet; use cluster=NpsMw")
    if name == "auto":
        name = "parameter_server" if shape.num_ps else "single"
    if name == "parameter_server" and not shape.num_ps:
        raise ConfigError(f"strategy=parameter_server needs parameter servers, cluster={shape} has none; use NpsMw")
    if name == "single" and not shape.is_local:
        raise ConfigError(f"strategy=single runs in one process and cannot use cluster={shape}; use cluster=local")
    return name


def create(name: str, shape: ClusterShape, **options: Any) -> Strategy:
    """Makes the strategy `name`, or the one that `auto` picks.

    Args:
        options: keyword arguments of the strategy's class; `single` takes none and ignores them.

    Raises:
        ConfigError: see `resolve`.
    """
    name = resolve(name, shape)
    if name == "single":
        from kdist.strategies.single import Single

        return Single()
    from kdist.strategies.parameter_server import ParameterServer

    return ParameterServer(shape, **options)
