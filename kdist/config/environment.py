"""Values of environment variables that a config refers to, as `${oc.env:PASSWORD}`: in no message, and in no result."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress

_REFERENCE = re.compile(r"\$\{\s*oc\.env\s*:\s*([^\s,}]+)")
_SHORT = 3
#: What messages show in the place of each value.
_references: dict[str, str] = {}


def hide_values(config: str) -> None:
    """Keeps the present values of the variables that the text of a config refers to out of later messages."""
    for name in _REFERENCE.findall(config):
        for form in _forms(os.environ.get(name, "")):
            _references[form] = f"${{oc.env:{name}}}"


def as_written(message: str) -> str:
    """The message, in which values of variables are references to them again."""
    # A value may be a part of another one.
    for value in sorted(_references, key=len, reverse=True):
        # A short one may be a word or a number of the message itself.
        before = r"(?<![\w.])" if len(value) > _SHORT else r"(?<=[='\"])"
        message = re.sub(rf"{before}{re.escape(value)}(?!\w|\.\d)", _references[value], message)
    return message


def _forms(value: str) -> Iterator[str]:
    """A value as it may stand in a message: as a text, with its quotes, and as the number that it becomes."""
    if value:
        yield value
        yield repr(value)[1:-1]
        for kind in (int, float):
            with suppress(ValueError):
                yield str(kind(value))
