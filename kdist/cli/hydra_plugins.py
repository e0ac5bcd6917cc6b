"""kdist's plugins for Hydra: the schemas, `cluster=2ps2w` as a config without a file; and the record of a job."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf, read_write

from kdist.cluster.slurm import num_tasks
from kdist.cluster.spec import ClusterShape
from kdist.config.scheduler import folder_of_step
from kdist.config.schema import Config, RunConfig
from kdist.errors import ConfigError
from kdist.storage.files import make_private, write_whole
from kdist.storage.object_storage import is_url, working_folder

_SCHEME = "kdist"
_WORKING_FOLDER = "kdist.working_folder"
_GROUPS = "pkg://kdist.conf"


class ClusterShapes(ConfigSource):
    """A config source that holds `cluster/<N>ps<M>w` for every N and M."""

    @staticmethod
    def scheme() -> str:
        return _SCHEME

    def load_config(self, config_path: str) -> ConfigResult:
        shape = ClusterShape.parse(config_path.removeprefix("cluster/").removesuffix(".yaml"))
        config = OmegaConf.create({"shape": str(shape)})
        return ConfigResult(self.provider, f"{_SCHEME}://{config_path}", config, header={"package": None})

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return config_path == "cluster"

    def is_config(self, config_path: str) -> bool:
        # Claims names that are not a shape, too: `ClusterShape.parse` explains what is wrong with them, and Hydra asks
        # this source last, after every file.
        return config_path.startswith("cluster/")

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        return ["NpsMw"] if config_path == "cluster" and results_filter is not ObjectType.GROUP else []


class GroupsSearchPath(SearchPathPlugin):
    """Puts kdist's groups behind the config folders of an app, and `ClusterShapes` behind them."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if all(element.path != _GROUPS for element in search_path.get_path()):
            search_path.append(provider="kdist", path=_GROUPS)
        search_path.append(provider="kdist-cluster", path=f"{_SCHEME}://")


def register() -> None:
    """Registers kdist's schemas and cluster shapes with Hydra. May be called repeatedly."""
    plugins: Any = Plugins.instance()
    plugins.register(ClusterShapes)
    plugins.register(GroupsSearchPath)
    ConfigStore.instance().store(name="kdist_schema", node=Config)
    if not OmegaConf.has_resolver("kdist.run_name"):
        OmegaConf.register_new_resolver("kdist.run_name", _run_name)
        OmegaConf.register_new_resolver("kdist.run_folder", lambda now, *, _root_: _folder_of_job(_root_) or now)
        OmegaConf.register_new_resolver(
            _WORKING_FOLDER, lambda run_dir: str(working_folder(run_dir) if is_url(run_dir) else Path(run_dir))
        )


def write_record(run_dir: Path, config: DictConfig) -> None:
    """Writes `.hydra` into a run dir, which this process has locked: Hydra would do so before."""
    folder = run_dir / ".hydra"
    make_private(folder)
    hydra = OmegaConf.create({"hydra": HydraConfig.get()})
    recorded = copy.deepcopy(config)
    if _written(config, "name") == RunConfig.name:
        # It comes from the recipe, and a run of this record has none.
        recorded.run.name = config.run.name
    parts = {"config": recorded, "hydra": hydra, "overrides": HydraConfig.get().overrides.task}
    for name, part in parts.items():
        write_whole(folder / f"{name}.yaml", OmegaConf.to_yaml(part))


def has_own_run_dir(config: DictConfig) -> bool:
    """True if the run dir is the default, named by the present second, and not by a Slurm job."""
    return _written(config, "dir") == RunConfig.dir and _folder_of_job(config) is None


def use_run_dir(config: DictConfig) -> None:
    """Lets `run.dir` alone decide where a run writes; what is only given to Hydra, as `hydra.run.dir`, becomes it.

    Raises:
        ConfigError: both are given, and differ.
    """
    place, own = Path(str(config.hydra.run.dir)).absolute(), str(config.run.dir)
    # People turn the folder that Hydra makes off by `hydra.run.dir=.`; here, it makes none of its own.
    if place not in (Path.cwd(), (working_folder(own) if is_url(own) else Path(own)).absolute()):
        if _written(config, "dir") != RunConfig.dir:
            raise ConfigError(
                f"hydra.run.dir={config.hydra.run.dir}: contradicts run.dir={own}, which says where a run writes; "
                "leave hydra.run.dir out"
            )
        config.run.dir = str(config.hydra.run.dir)
    with read_write(config.hydra):
        config.hydra.run.dir = f"${{{_WORKING_FOLDER}:${{run.dir}}}}"


def _written(config: DictConfig, key: str) -> Any:
    """A value of `run` as it was written."""
    written: Any = OmegaConf.to_container(config.run, resolve=False)
    return written[key]


def _folder_of_job(config: DictConfig) -> str | None:
    cluster = config.cluster
    is_joined = cluster.shape != "local" and cluster.started_by != "kdist" and num_tasks(os.environ) != 1
    return folder_of_step(os.environ, is_joined=is_joined)


def _run_name(*, _root_: DictConfig) -> str:
    # Before a job runs, and for the folder of a sweep, only its config exists; the job's own has no such part.
    hydra = _root_.get("hydra") or (HydraConfig.get() if HydraConfig.initialized() else None)
    recipe = hydra.runtime.choices.get("recipe") if hydra is not None else None
    return str(recipe or "train")
