"""Private names of Hydra; read in 1.3.7."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_automatic_config_search_path, get_args_parser
from hydra.core.config_search_path import SearchPathQuery
from hydra.types import RunMode
from omegaconf import DictConfig


def parse_command_line(arguments: Sequence[str]) -> Namespace:
    """Hydra's own options and the overrides: what runs has to be known before Hydra makes a folder for it."""
    return get_args_parser().parse_args(arguments)


def load_config(parsed: Namespace, default_path: str, default_name: str) -> DictConfig:
    """The config as Hydra will compose it, with its own part, which `hydra.compose` leaves incomplete in a sweep."""
    search_path = create_automatic_config_search_path(None, "kdist.cli", parsed.config_path or default_path)
    if parsed.config_dir:
        search_path.prepend("command-line", f"file://{Path(parsed.config_dir).absolute()}", SearchPathQuery("schema"))
    loader = ConfigLoaderImpl(search_path)
    mode = RunMode.MULTIRUN if parsed.multirun else RunMode.RUN
    return loader.load_configuration(parsed.config_name or default_name, parsed.overrides, mode)
