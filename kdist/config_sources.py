"""What Hydra needs to know of kdist: its schemas, and that `cluster=2ps2w` is a config without a file."""

from __future__ import annotations

from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from kdist.cluster.spec import ClusterShape
from kdist.schema import Config

_SCHEME = "kdist"


class ClusterShapes(ConfigSource):
    """A config source that holds `cluster/<N>ps<M>w` for every N and M."""

    @staticmethod
    def scheme() -> str:
        return _SCHEME

    def load_config(self, config_path: str) -> ConfigResult:
        shape = ClusterShape.parse(_name_of(config_path))
        config = OmegaConf.create({"shape": str(shape)})
        return ConfigResult(
            config=config, path=f"{_SCHEME}://{config_path}", provider=self.provider, header={"package": None}
        )

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return config_path == "cluster"

    def is_config(self, config_path: str) -> bool:
        # Names that are no shape are claimed as well: `ClusterShape.parse` says what is wrong with them, and Hydra
        # asks here last, after every file.
        return config_path.startswith("cluster/")

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        return ["NpsMw"] if config_path == "cluster" and results_filter is not ObjectType.GROUP else []


class ClusterShapesSearchPath(SearchPathPlugin):
    """Puts `ClusterShapes` behind the config folders."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append(provider="kdist-cluster", path=f"{_SCHEME}://")


def register() -> None:
    """Makes Hydra know kdist's schemas and cluster shapes. May be called again."""
    plugins: Any = Plugins.instance()
    plugins.register(ClusterShapes)
    plugins.register(ClusterShapesSearchPath)
    ConfigStore.instance().store(name="kdist_schema", node=Config)
    if not OmegaConf.has_resolver("kdist.run_name"):
        OmegaConf.register_new_resolver("kdist.run_name", _run_name)


def _run_name() -> str:
    from hydra.core.hydra_config import HydraConfig

    choices: dict[str, Any] = HydraConfig.get().runtime.choices if HydraConfig.initialized() else {}
    return str(choices.get("recipe") or "train")


def _name_of(config_path: str) -> str:
    return config_path.removeprefix("cluster/").removesuffix(".yaml")
