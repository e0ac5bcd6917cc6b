"""The config of a run as its `result.json` records it: plain values, and nothing that comes from the environment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from omegaconf import Container, DictConfig, ListConfig, OmegaConf
from omegaconf.resolvers import oc

_ENVIRONMENT = "oc.env"


def plain_values(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that are plain values, or lists and dicts of them; others are left out."""
    found: dict[str, Any] = _plain(arguments)
    return found


def recorded(config: DictConfig) -> dict[str, Any]:
    """The config in plain dicts and lists, with `${oc.env:PASSWORD}`, which may be a secret, as it was written."""
    with _environment_noted() as uses:
        found: dict[str, Any] = _resolved(config, OmegaConf.to_container(config, resolve=False), uses)
        return found


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items() if _is_plain(item)}
    return [_plain(item) for item in value if _is_plain(item)] if isinstance(value, (list, tuple)) else value


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str, list, tuple, Mapping))


def _resolved(node: Any, written: Any, uses: list[str]) -> Any:
    """The value of a node: `written` if its resolution uses the environment, which adds to `uses`."""
    if isinstance(node, DictConfig):
        return {str(key): _item(node, key, written[key], uses) for key in node}
    if isinstance(node, ListConfig):
        return [_item(node, index, written[index], uses) for index in range(len(node))]
    return node


def _item(parent: Container, key: Any, written: Any, uses: list[str]) -> Any:
    if OmegaConf.is_missing(parent, key):
        return written
    uses.clear()
    value = parent[key]
    if uses:
        return written
    if isinstance(value, Container) and not isinstance(written, (dict, list)):
        # It stands elsewhere in the config.
        written = OmegaConf.to_container(value, resolve=False)
    return _resolved(value, written, uses)


@contextmanager
def _environment_noted() -> Iterator[list[str]]:
    """Yields a list that gets the names of the variables that are read."""
    uses: list[str] = []

    def noted(name: str, *default: Any) -> Any:
        uses.append(name)
        return oc.env(name, *default)

    OmegaConf.register_new_resolver(_ENVIRONMENT, noted, replace=True)
    try:
        yield uses
    finally:
        OmegaConf.register_new_resolver(_ENVIRONMENT, oc.env, replace=True)
