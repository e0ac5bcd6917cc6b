"""The config classes that Python programs use; `kdist.config.schema` has all of them."""

from kdist.config.schema import ClusterConfig, DevicesConfig, StrategyConfig

__all__ = ["ClusterConfig", "DevicesConfig", "StrategyConfig"]
