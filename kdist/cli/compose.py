"""Composing a config by Hydra, with errors that name the key and what is allowed."""

from __future__ import annotations

import copy
import re
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import partial
from typing import TYPE_CHECKING, get_type_hints

from kdist.cli.help import unknown_key
from kdist.config.hydra_checks import check_hydra, check_searchpath
from kdist.errors import ConfigError

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from kdist._compat.hydra import CheckedLoader

#: The version whose behaviour Hydra keeps.
HYDRA_VERSION = "1.3"


def composed(
    parsed: Namespace, name: str = "config", overrides: Sequence[str] = ()
) -> tuple[DictConfig, CheckedLoader]:
    """The config of a command line, whose Hydra's part is checked, and what composes it again for trials.

    Args:
        parsed: the command line.
        name: of the primary config, if the command line names none.
        overrides: after those of the command line.

    Raises:
        ConfigError: see `explained`.
    """
    from hydra.core.hydra_config import HydraConfig
    from hydra.core.utils import setup_globals
    from hydra.version import setbase

    from kdist._compat.hydra import load_config, loader_for
    from kdist.cluster.spec import ClusterShape

    setup_globals()
    setbase(HYDRA_VERSION)
    for override in parsed.overrides:
        group, _, value = override.partition("=")
        if group == "cluster" and value.isdecimal():
            # Hydra parses it as a number where it needs a name, and its message does not help.
            ClusterShape.parse(value)
    with explained(ValueError):
        loader = loader_for(
            parsed,
            "pkg://kdist.conf",
            partial(check_hydra, overrides=parsed.overrides),
            partial(check_searchpath, overrides=parsed.overrides),
        )
        config = load_config(loader, parsed, name, overrides)
        HydraConfig.instance().set_config(config)
    return config, loader


def without_hydra(config: DictConfig) -> DictConfig:
    """A copy of a config without Hydra's own part, as a job gets it."""
    from omegaconf import open_dict

    copied = copy.deepcopy(config)
    with open_dict(copied):
        del copied["hydra"]
    return copied


def check_keys(config: DictConfig, schema: type, prefix: str = "") -> None:
    """Refuses keys that `+` added where no new key is allowed."""
    types = get_type_hints(schema)
    for name in map(str, config):
        key = f"{prefix}{name}"
        if name not in types:
            raise unknown_key(key)
        if is_dataclass(types[name]) and config[name] is not None:
            check_keys(config[name], types[name], f"{key}.")


@contextmanager
def explained(*others: type[Exception]) -> Iterator[None]:
    """Turns errors of Hydra and OmegaConf, and `others`, into a ConfigError with the key and the allowed values."""
    from hydra.errors import HydraException, MissingConfigException
    from omegaconf.errors import OmegaConfBaseException

    known: tuple[type[Exception], ...] = (HydraException, OmegaConfBaseException, *others)
    try:
        yield
    except known as error:
        if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options is not None:
            group, _, option = str(error.missing_cfg_file).rpartition("/")
            options = ", ".join(sorted(name for name in error.options if not name.startswith("_")))
            raise ConfigError(f"{group}={option}: there is no such {group}; choose one of {options}") from None
        cause = error if error.__cause__ is None else error.__cause__
        quoted = re.match(r"[^']*Could not[^']*'([^']*)'", str(error))
        key = getattr(cause, "full_key", None) or (quoted[1] if quoted else None)
        if key and ("not in struct" in str(cause) or ("Could not override" in str(error) and "not in" in str(cause))):
            raise unknown_key(key) from None
        first_line = str(cause).strip().splitlines()[0]
        raise ConfigError(f"{key}: {first_line}" if key and key not in first_line else first_line) from None
