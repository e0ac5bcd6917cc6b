"""Composes a config by Hydra from the arguments of a command line; errors name the key and what is allowed."""

from __future__ import annotations

import copy
import re
import shlex
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import partial
from typing import TYPE_CHECKING, get_type_hints

from kdist.cli.help import unknown_key
from kdist.config.environment import hide_values
from kdist.config.hydra_checks import check_hydra, check_searchpath
from kdist.config.schema import Config
from kdist.errors import ConfigError

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override
    from omegaconf import DictConfig

    from kdist._compat.hydra import CheckedLoader

#: The version whose behaviour Hydra keeps.
HYDRA_VERSION = "1.3"
_ADDED_HOOKS = "+hooks="
# Between them are the items of a list, a dict or a sweep.
_ITEM_ENDS = re.compile(r"([,\[\]{}()]|(?<=\w):(?=\s))")


def as_hydra_reads(arguments: Iterable[str]) -> list[str]:
    """The arguments in the form that Hydra reads as they are meant.

    `recipe=mnist` becomes `+recipe=mnist`, `+hooks=mlflow` adds to the hooks that are there, and values with other
    letters than ASCII's get the quotes Hydra wants.

    Raises:
        ConfigError: a value cannot be read, but could be in quotes.
    """
    from kdist._compat.hydra import parse_command_line

    arguments = list(arguments)
    parsed = parse_command_line(arguments)
    changed = {text: _quote(text) for text in parsed.overrides}
    # In a config of the user's own, the recipe may be one of the defaults.
    if not (parsed.config_name or parsed.config_path):
        changed = {text: f"+{new}" if new.startswith("recipe=") else new for text, new in changed.items()}
    return _with_hooks([changed.get(text, text) for text in arguments])


def compose(parsed: Namespace, name: str = "config", overrides: Sequence[str] = ()) -> tuple[DictConfig, CheckedLoader]:
    """The config of a command line, whose Hydra's part is checked, and the loader that composes it again for trials.

    Args:
        name: of the primary config, if the command line names none.
        overrides: after those of the command line.
    """
    from hydra.core.hydra_config import HydraConfig
    from hydra.core.utils import setup_globals
    from hydra.version import setbase
    from omegaconf import OmegaConf

    from kdist._compat.hydra import CheckedLoader
    from kdist.cluster.spec import ClusterShape

    setup_globals()
    setbase(HYDRA_VERSION)
    hide_values(" ".join([*parsed.overrides, *overrides]))
    for override in parsed.overrides:
        group, _, value = override.partition("=")
        if group == "cluster" and value.isdecimal():
            # Hydra parses it as a number where it needs a name, and its message does not help.
            ClusterShape.parse(value)
    with explain_errors(ValueError):
        loader = CheckedLoader(
            parsed,
            partial(check_hydra, overrides=parsed.overrides),
            partial(check_searchpath, overrides=parsed.overrides),
        )
        config = loader.load(name, overrides)
        if OmegaConf.get_type(config) is not Config:
            where = "the config" if parsed.config_name is None else f"--config-name={parsed.config_name}"
            raise ConfigError(f"{where} is not one of kdist's: the first of its defaults has to be kdist_schema")
        HydraConfig.instance().set_config(config)
    hide_values(str(OmegaConf.to_container(config, resolve=False)))
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
def explain_errors(*others: type[Exception]) -> Iterator[None]:
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
            parent = key.rpartition(".")[0]
            raise unknown_key(key, [f"{parent}.{name}" for name in getattr(cause, "parent_node", None) or ()]) from None
        first_line = str(cause).strip().splitlines()[0]
        raise ConfigError(f"{key}: {first_line}" if key and key not in first_line else first_line) from None


def _with_hooks(arguments: list[str]) -> list[str]:
    """`+hooks=mlflow` as Hydra has it, which takes a plus for a group that has an option as a mistake."""
    added = [text.removeprefix(_ADDED_HOOKS).strip("[]") for text in arguments if text.startswith(_ADDED_HOOKS)]
    if not added:
        return arguments
    first = next(i for i, text in enumerate(arguments) if text.startswith(_ADDED_HOOKS))
    rest = [text for text in arguments if not text.startswith(_ADDED_HOOKS)]
    for i, text in enumerate(rest):
        if text.startswith("hooks="):
            chosen = text.removeprefix("hooks=").strip("[]")
            return [*rest[:i], f"hooks=[{','.join([chosen, *added])}]", *rest[i + 1 :]]
    # Behind the recipe, which may choose other hooks.
    behind = max([first, *(i + 1 for i, text in enumerate(rest) if text.startswith("+recipe="))])
    return [*rest[:behind], f"+hooks@hooks=[{','.join(added)}]", *rest[behind:]]


def _quote(override: str) -> str:
    """An override in which Hydra can read the value."""
    key, sign, value = override.partition("=")
    if not sign or _read(override):
        return override
    has_items = "," in value or value.startswith(("[", "{", "("))
    items = _ITEM_ENDS.split(value) if has_items else [value]
    quoted = f"{key}={''.join(item if item.isascii() else in_quotes(item) for item in items)}"
    if _read(quoted):
        return quoted
    if _read(as_text := f"{key}={in_quotes(value)}"):
        raise ConfigError(
            f"{override}: cannot be read; if the value is one text, it needs quotes within those of the shell: "
            f"{shlex.quote(as_text)}"
        )
    # Hydra says what is wrong.
    return override


def in_quotes(value: str) -> str:
    """A value in quotes, as Hydra reads them: a backslash means something before a quote only."""
    stripped = value.strip()
    escaped = re.sub(r'(\\*)("|$)', lambda found: 2 * found[1] + found[2].replace('"', '\\"'), stripped)
    return value.replace(stripped, f'"{escaped}"')


def shell_argument(key: str, value: str) -> str:
    """The argument that gives `key` one text as its value, quoted for a shell."""
    read = _read(override := f"{key}={value}")
    # A text that Hydra takes for a number, a list or a sweep needs quotes.
    return shlex.quote(override if read and read.value() == value else f"{key}={in_quotes(value)}")


def _read(override: str) -> Override | None:
    """An override as Hydra reads it; None if it cannot."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return OverridesParser.create().parse_override(override)
    except HydraException:
        return None
