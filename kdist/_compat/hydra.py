"""Private names of Hydra; read in 1.3.7."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_automatic_config_search_path, get_args_parser
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from hydra.core.utils import JobReturn, JobRuntime, configure_log
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from kdist._compat.replaced import replaced


class CheckedLoader(ConfigLoaderImpl):
    """Composes every config that Hydra uses, also for trials; each is checked before Hydra uses any of it.

    Args:
        parsed: the command line.
        check: raises the error of a config.
        check_searchpath: the same of `hydra.searchpath` in a file, before anything there is imported.
    """

    def __init__(
        self, parsed: Namespace, check: Callable[[DictConfig], None], check_searchpath: Callable[[Any], None]
    ) -> None:
        path = create_automatic_config_search_path(None, "kdist.cli", parsed.config_path or "pkg://kdist.conf")
        if parsed.config_dir:
            path.prepend("command-line", f"file://{Path(parsed.config_dir).absolute()}", SearchPathQuery("schema"))
        super().__init__(path)
        self._parsed = parsed
        self._check = check
        self._check_searchpath = check_searchpath

    def load(self, default_name: str, overrides: Sequence[str] = ()) -> DictConfig:
        """The config of the command line and of `overrides` after it, with Hydra's own part.

        `hydra.compose` leaves that incomplete in a sweep.
        """
        JobRuntime.instance().set("name", "kdist")
        mode = RunMode.MULTIRUN if self._parsed.multirun else RunMode.RUN
        # Hydra would write `.hydra` before it is known whether another process has the run dir.
        given = [*self._parsed.overrides, *overrides, f"hydra.mode={mode.name}", "hydra.output_subdir=null"]
        return self.load_configuration(self._parsed.config_name or default_name, given, mode)

    def load_configuration(self, *args: Any, **options: Any) -> DictConfig:
        config = super().load_configuration(*args, **options)
        self._check(config)
        return config

    def _process_config_searchpath(
        self, config_name: str | None, parsed_overrides: list[Override], repo: CachingConfigRepository
    ) -> None:
        primary = None if config_name is None else repo.load_config(config_path=config_name)
        if primary is not None:
            self._check_searchpath(OmegaConf.select(primary.config, "hydra.searchpath"))
        super()._process_config_searchpath(config_name, parsed_overrides, repo)


def parse_command_line(arguments: Sequence[str]) -> Namespace:
    """Parses Hydra's own options and the overrides, before Hydra makes a folder for the run."""
    return get_args_parser().parse_args(arguments)


def run(config: DictConfig, loader: CheckedLoader, task: Callable[[DictConfig], Any]) -> Exception | None:
    """Calls `task` as `@hydra.main` does, in a sweep for each trial; the config is not composed again.

    Returns:
        The error that ended the job; None in a sweep.
    """
    hydra = Hydra(config.hydra.job.name, loader)
    GlobalHydra.instance().initialize(hydra)
    try:
        configure_log(config.hydra.hydra_logging, config.hydra.verbose)
        name = config.hydra.job.config_name
        with replaced(hydra, compose_config=lambda **_: config):
            if config.hydra.mode == RunMode.MULTIRUN:
                hydra.multirun(name, task, [])
                return None
            # Hydra's own property prints a message before it raises the error of the job.
            outcome = property(lambda job: job._return_value, lambda job, value: setattr(job, "_return_value", value))
            with replaced(JobReturn, return_value=outcome):
                value = hydra.run(name, task, []).return_value
        return value if isinstance(value, Exception) else None
    finally:
        GlobalHydra.instance().clear()


def nodes_of_plugins(group: str) -> Iterator[tuple[str, Any]]:
    """The targets that installed plugins have registered below a config group, and their nodes in plain containers."""

    def walk(entries: Any) -> Iterator[tuple[str, Any]]:
        for entry in entries.values():
            if isinstance(entry, dict):
                yield from walk(entry)
            else:
                node = OmegaConf.to_container(entry.node, resolve=False)
                if isinstance(node, dict) and isinstance(target := node.get("_target_"), str):
                    yield target, node

    entries: Any = ConfigStore.instance().repo
    for part in group.split("/"):
        entries = entries.get(part, {})
    yield from walk(entries)
