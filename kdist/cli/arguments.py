"""The arguments of the command line, made such that Hydra reads them as they are meant."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from typing import TYPE_CHECKING

from kdist.errors import ConfigError

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

_ADDED_HOOKS = "+hooks="
# Between them are the items of a list, a dict or a sweep.
_ITEM_ENDS = re.compile(r"([,\[\]{}()]|(?<=\w):(?=\s))")


def as_hydra_reads(arguments: Iterable[str]) -> list[str]:
    """`recipe=mnist` becomes `+recipe=mnist`, `+hooks=mlflow` adds to the hooks that are there, and values with other
    letters than ASCII's get the quotes Hydra wants.

    Raises:
        ConfigError: a value cannot be read, but could be in quotes.
    """
    from kdist._compat.hydra import parse_command_line

    arguments = list(arguments)
    parsed = parse_command_line(arguments)
    # In a config of the user's own, the recipe may be one of the defaults.
    adds_recipe = not (parsed.config_name or parsed.config_path)
    changed = {text: _with_plus(_quoted(text)) if adds_recipe else _quoted(text) for text in parsed.overrides}
    return _with_hooks([changed.get(text, text) for text in arguments])


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


def _with_plus(override: str) -> str:
    return f"+{override}" if override.startswith("recipe=") else override


def _quoted(override: str) -> str:
    """An override in which Hydra can read the value."""
    key, sign, value = override.partition("=")
    if not sign or _is_readable(override):
        return override
    has_items = "," in value or value.startswith(("[", "{", "("))
    items = _ITEM_ENDS.split(value) if has_items else [value]
    quoted = f"{key}={''.join(item if item.isascii() else in_quotes(item) for item in items)}"
    if _is_readable(quoted):
        return quoted
    if _is_readable(f"{key}={in_quotes(value)}"):
        raise ConfigError(
            f"{override}: cannot be read; if the value is one text, it needs quotes within those of the shell: "
            f"{_for_a_shell(key, value)}"
        )
    # Hydra says what is wrong.
    return override


def in_quotes(value: str) -> str:
    """A value in quotes, as Hydra reads them: a backslash means something before a quote only."""
    stripped = value.strip()
    escaped = re.sub(r"(\\*)('|$)", lambda found: 2 * found[1] + found[2].replace("'", "\\'"), stripped)
    return value.replace(stripped, f"'{escaped}'")


def typed(key: str, value: str) -> str:
    """What to type in a shell to give `key` one text as its value."""
    override = f"{key}={value}"
    return shlex.quote(override) if _text_in(override) == value else _for_a_shell(key, value)


def _for_a_shell(key: str, value: str) -> str:
    # In the double quotes of a shell, and before those of Hydra, they mean something else.
    if re.search(r'["\\$`!]', value):
        return shlex.quote(f"{key}={in_quotes(value)}")
    return f'"{key}=\\"{value}\\""' if "'" in value else f"'{key}=\"{value}\"'"


def _is_readable(override: str) -> bool:
    return _read(override) is not None


def _text_in(override: str) -> str | None:
    """The value as text, as far as it is one text."""
    from hydra.core.override_parser.types import QuotedString

    if (read := _read(override)) is None:
        return None
    value = read.value()
    return value.text if isinstance(value, QuotedString) else value if isinstance(value, str) else None


def _read(override: str) -> Override | None:
    """An override as Hydra reads it; None if it cannot."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return OverridesParser.create().parse_override(override)
    except HydraException:
        return None
