"""Private names of Hydra; read in 1.3.7."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra._internal.callbacks import Callbacks
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_automatic_config_search_path, get_args_parser
from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.core.utils import JobRuntime, configure_log, run_job
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf


class CheckedLoader(ConfigLoaderImpl):
    """Composes every config that Hydra uses, also for trials; each is checked before Hydra uses any of it.

    Args:
        check: raises the error of a config.
        check_searchpath: the same of `hydra.searchpath` in a file, before anything there is imported.
    """

    def __init__(
        self,
        search_path: ConfigSearchPath,
        check: Callable[[DictConfig], None],
        check_searchpath: Callable[[Any], None],
    ) -> None:
        super().__init__(search_path)
        self._check = check
        self._check_searchpath = check_searchpath

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


def loader_for(
    parsed: Namespace,
    default_path: str,
    check: Callable[[DictConfig], None],
    check_searchpath: Callable[[Any], None],
) -> CheckedLoader:
    """The loader of a command line; see `CheckedLoader`."""
    search_path = create_automatic_config_search_path(None, "kdist.cli", parsed.config_path or default_path)
    if parsed.config_dir:
        search_path.prepend("command-line", f"file://{Path(parsed.config_dir).absolute()}", SearchPathQuery("schema"))
    return CheckedLoader(search_path, check, check_searchpath)


def load_config(
    loader: CheckedLoader, parsed: Namespace, default_name: str, overrides: Sequence[str] = ()
) -> DictConfig:
    """The config of a command line, with Hydra's own part, which `hydra.compose` leaves incomplete in a sweep.

    Args:
        overrides: after those of the command line.
    """
    JobRuntime.instance().set("name", "kdist")
    mode = RunMode.MULTIRUN if parsed.multirun else RunMode.RUN
    # Hydra would write `.hydra` before it is known whether another process has the run dir.
    given = [*parsed.overrides, *overrides, f"hydra.mode={mode.name}", "hydra.output_subdir=null"]
    return loader.load_configuration(parsed.config_name or default_name, given, mode)


def run(config: DictConfig, loader: CheckedLoader, task: Callable[[DictConfig], Any]) -> Exception | None:
    """Calls `task` as `@hydra.main` does, with a config that is not composed again; returns the error that ended it."""
    with _hydra(config, loader) as context:
        context.callbacks.on_run_start(config=config, config_name=config.hydra.job.config_name)
        done = run_job(
            hydra_context=context,
            task_function=task,
            config=config,
            job_dir_key="hydra.run.dir",
            job_subdir_key=None,
        )
        context.callbacks.on_run_end(config=config, config_name=config.hydra.job.config_name, job_return=done)
        # The property would raise it with a message of Hydra's own.
        return done._return_value if isinstance(done._return_value, Exception) else None


def sweep(config: DictConfig, loader: CheckedLoader, task: Callable[[DictConfig], Any]) -> None:
    """Lets the sweeper of a config call `task` for each trial, with the launcher of the config."""
    with _hydra(config, loader) as context:
        context.callbacks.on_multirun_start(config=config, config_name=config.hydra.job.config_name)
        sweeper = Plugins.instance().instantiate_sweeper(config=config, hydra_context=context, task_function=task)
        overrides: Any = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
        sweeper.sweep(arguments=overrides)
        context.callbacks.on_multirun_end(config=config, config_name=config.hydra.job.config_name)


@contextmanager
def _hydra(config: DictConfig, loader: CheckedLoader) -> Iterator[HydraContext]:
    """Initializes Hydra for this config, and its own logging."""
    GlobalHydra.instance().initialize(Hydra(config.hydra.job.name, loader))
    try:
        configure_log(config.hydra.hydra_logging, config.hydra.verbose)
        yield HydraContext(config_loader=loader, callbacks=Callbacks(config))
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
