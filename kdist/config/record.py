"""The config of a run as its `result.json` records it: plain values, and nothing that comes from the environment."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf import Container, DictConfig, ListConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError
from omegaconf.resolvers import oc

from kdist.errors import ConfigError

_ENVIRONMENT = "oc.env"
#: Limits of a record that somebody else may have written: of its file and of its values, and of the depth of both.
_MAX_BYTES = 1 << 20
_MAX_DEPTH = 50
_INTERPOLATION = re.compile(r"\$\{[^}]*")
_INNERMOST = re.compile(r"\$\{([^\s${}:,.][^\s${}:,]*)\}")
#: References whose keys are computed.
_COMPUTED = re.compile(r"\$\{([^:}]*|oc\.(select|dict)[^},]*)\$\{")
#: All that may be the key of a value between `${` and `}`.
_REFERENCE = re.compile(r"[^\s${}:,'\"()]+")


def read_record(path: Path) -> DictConfig:
    """The config in a YAML file of a run dir, as it was written.

    Raises:
        ConfigError: no run writes this: no config, or one that could use up this machine.
        OSError, yaml.YAMLError: it cannot be read.
    """
    if path.stat().st_size > _MAX_BYTES:
        raise ConfigError(f"{path.name} has more than {_MAX_BYTES} bytes")
    text, depth = path.read_text(encoding="utf-8"), 0
    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        if isinstance(event, yaml.AliasEvent):
            raise ConfigError(f"{path.name} has an alias (*{event.anchor}), which no run writes")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAX_DEPTH:
            raise ConfigError(f"{path.name} is nested more than {_MAX_DEPTH} levels deep")
    config = OmegaConf.create(text)
    if not isinstance(config, DictConfig):
        raise ConfigError(f"{path.name} is not the config of a run")
    return config


def check_record(config: DictConfig) -> None:
    """Refuses a config whose values, when it is resolved, are too many: each may stand for several others."""
    written: Any = OmegaConf.to_container(config, resolve=False)
    sizes: dict[tuple[Any, ...], int] = {}

    def size_of(place: tuple[Any, ...], node: Any, depth: int) -> int:
        if place in sizes:
            return sizes[place]
        name = ".".join(map(str, place)) or "it"
        if depth > _MAX_DEPTH:
            raise ConfigError(f"{name}: refers to others more than {_MAX_DEPTH} times in a row")
        sizes[place] = 0
        if isinstance(node, (dict, list)):
            items = node.items() if isinstance(node, dict) else enumerate(node)
            size = 1 + sum(size_of((*place, key), value, depth + 1) for key, value in items)
        else:
            text = str(node)
            size = len(text)
            known = _INNERMOST.sub(lambda found: _word_at(written, found[1]) or found[0], text)
            if _COMPUTED.search(known):
                raise ConfigError(f"{name}={text[:100]}: refers to a key that is computed; write it out")
            for reference in _REFERENCE.findall(" ".join(_INTERPOLATION.findall(f"{text} {known}"))):
                # Of several dots, each but the first is one level up.
                dots = len(reference) - len(reference.lstrip("."))
                base = place[: len(place) - dots] if dots else ()
                target = (*base, *_keys_of(reference))
                if (found := _at(written, target)) is not None:
                    size += size_of(target, found, depth + 1)
        if size > _MAX_BYTES:
            raise ConfigError(f"{name} stands for more than {_MAX_BYTES} values")
        sizes[place] = size
        return size

    size_of((), written, 0)


def _keys_of(reference: str) -> list[str]:
    return [key for key in re.split(r"[.\[\]]", reference) if key]


def _word_at(written: Any, reference: str) -> str | None:
    """The text to which a reference leads, if it is short and refers to nothing itself."""
    word = _at(written, tuple(_keys_of(reference)))
    return word if isinstance(word, str) and len(word) < 100 and "$" not in word else None


def _at(node: Any, place: tuple[Any, ...]) -> Any:
    """The node at a place in plain containers; None if nothing is there."""
    try:
        for key in place:
            # As for OmegaConf, `+1` and `1_0` are numbers, too.
            node = node[int(key) if isinstance(node, list) else key]
        return node
    except (LookupError, TypeError, ValueError):
        return None


def plain_values(value: Any) -> Any:
    """The value, in which only plain values, and lists and dicts of them, are left."""
    if isinstance(value, Mapping):
        return {str(key): plain_values(item) for key, item in value.items() if _is_plain(item)}
    return [plain_values(item) for item in value if _is_plain(item)] if isinstance(value, (list, tuple)) else value


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str, list, tuple, Mapping))


def record_of(config: DictConfig) -> dict[str, Any]:
    """The config in plain dicts and lists; `${oc.env:PASSWORD}`, which may be a secret, stays as it was written."""
    OmegaConf.register_new_resolver(_ENVIRONMENT, _refuse, replace=True)
    try:
        found: dict[str, Any] = _resolve(config, OmegaConf.to_container(config, resolve=False))
        return found
    finally:
        OmegaConf.register_new_resolver(_ENVIRONMENT, oc.env, replace=True)


class _OfEnvironmentError(InterpolationResolutionError):
    """A value comes from the environment."""


def _refuse(*_: Any) -> None:
    raise _OfEnvironmentError


def _resolve(node: Any, written: Any) -> Any:
    if isinstance(node, DictConfig):
        return {str(key): _item(node, key, written[key]) for key in node}
    if isinstance(node, ListConfig):
        return [_item(node, index, written[index]) for index in range(len(node))]
    return node


def _item(parent: Container, key: Any, written: Any) -> Any:
    """The value of an item: `written` if it comes from the environment."""
    if OmegaConf.is_missing(parent, key):
        return written
    try:
        value = parent[key]
    except _OfEnvironmentError:
        return written
    if isinstance(value, Container) and not isinstance(written, (dict, list)):
        # It stands elsewhere in the config.
        written = OmegaConf.to_container(value, resolve=False)
    return _resolve(value, written)
