"""The allow-list of names for `_target_`, so that a config from elsewhere cannot run arbitrary code.

It contains Keras and the hooks, layers and recipes of kdist, by their public names. `trust` adds packages in Python,
`run.trust=[...]` on the command line. A name is checked before anything is imported, and its object must be defined in
the same package, so that `package.module.system` is not `os.system`. A refusal is a ConfigError that names the key.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kdist.errors import ConfigError

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

# The rest of kdist runs programs, reads pickles and starts processes; no config needs to call it.
_KDIST = ("kdist.hooks", "kdist.layers", "kdist.recipes")
# Hooks that lie elsewhere.
_EXTRAS = ("kdist.extras.faults", "kdist.extras.monitoring", "kdist.extras.trackers")
_KERAS = ("keras",)

# Names of Keras that are not part of a model or its data, and what they could do.
_REFUSED = {
    "keras.src": "is private to Keras",
    "keras.config": "changes what holds for the whole process, as enable_unsafe_deserialization() does",
    "keras.backend": "changes what holds for the whole process",
    "keras.ops": "calls functions that it is given",
    "keras.tree": "calls functions that it is given",
    "keras.layers.TFSMLayer": "runs the graph of a file, which may read and write other files",
    "keras.utils.get_file": "writes what it downloads to any place",
}

_trusted: set[str] = set()


def trust(*packages: str) -> None:
    """Allows configs to name the contents of `packages` by `_target_` in this process.

    Args:
        packages: names of packages or modules, with dots for nested ones; their contents are trusted, too.

    Raises:
        ConfigError: it is not such a name, or a package of Python's own library.
    """
    check_packages("kdist.trust", packages)
    _trusted.update(packages)


def check_packages(key: str, packages: Iterable[str]) -> None:
    """Refuses packages that cannot be trusted; see `trust`."""
    for package in packages:
        if not all(part.isidentifier() for part in package.split(".")):
            raise ConfigError(f"{key}: {package!r} is not the name of a package")
        if _is_of_python(package):
            raise ConfigError(f"{key}: {package} is Python's own; trust a module of yours that calls what you need")


def of_command_line(packages: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """The packages that a run trusts: `run.trust`, and those passed to `trust`.

    Raises:
        ConfigError: some of `packages` come from a file or a variable, not from the `overrides` of the command line.
    """
    named = values_of(overrides, "run.trust")
    if others := [package for package in packages if package not in named]:
        raise ConfigError(
            f"run.trust: {', '.join(others)} is not from the command line; "
            f"no file can trust a package: give run.trust=[{','.join(packages)}] there"
        )
    return sorted({*packages, *_trusted})


def keys_of(overrides: Sequence[str]) -> list[str]:
    """The keys and groups that `overrides` give a value."""
    return [parsed.key_or_group for parsed in _parse(overrides)]


def values_of(overrides: Sequence[str], key: str) -> set[str]:
    """The values, also of lists and sweeps, that `overrides` give to `key`."""
    from hydra.core.override_parser.types import ChoiceSweep, QuotedString

    def texts(value: Any) -> list[str]:
        if isinstance(value, ChoiceSweep):
            value = value.list
        if isinstance(value, list):
            return [text for item in value for text in texts(item)]
        return [value.text if isinstance(value, QuotedString) else str(value)]

    return {text for parsed in _parse(overrides) if parsed.key_or_group == key for text in texts(parsed.value())}


def _parse(overrides: Sequence[str]) -> list[Override]:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return OverridesParser.create().parse_overrides(list(overrides))


def check(key: str, node: Any, packages: Sequence[str] = ()) -> None:
    """Refuses any `_target_` in the node at `key` that is not on the list, nor in `packages`. Imports nothing."""
    for place, part in nodes_in(key, node):
        if isinstance(part, Mapping) and "_target_" in part:
            _check_name(place, str(part["_target_"]), packages)
            # An argument of Keras's loading functions; without it, a file may contain code.
            if part.get("safe_mode", True) is not True:
                raise ConfigError(f"{place}.safe_mode={part['safe_mode']}: a config cannot turn Keras's safe mode off")


def nodes_in(key: str, node: Any) -> Iterator[tuple[str, Any]]:
    """Every node in the one at `key`, with its key; a node comes before its values."""
    yield key, node
    if isinstance(node, Mapping):
        for name, value in node.items():
            yield from nodes_in(f"{key}.{name}", value)
    elif isinstance(node, (list, tuple)):
        for index, value in enumerate(node):
            yield from nodes_in(f"{key}[{index}]", value)


def check_origin(key: str, target: str, found: Any, packages: Sequence[str] = ()) -> None:
    """Refuses a function or class that the module of `target` has imported from another package."""
    while isinstance(found, functools.partial):
        found = found.func
    # Of another callable, the origin is that of its class.
    origin = str(getattr(found, "__module__", None) or type(found).__module__)
    allowed = next(group for group in _groups(packages) if _is_in(target.rpartition(".")[0], group))
    if not _is_in(origin, allowed):
        raise ConfigError(f"{key}._target_={target}: comes from {origin}; name it there" + _how_to_trust(origin))


def resolve(key: str, target: str, packages: Sequence[str]) -> Callable[..., Any]:
    """The function or class that `target` names, as `package.module.name`; it has passed `check`.

    Hydra's `instantiate` hides why an import failed, so it is not used.
    """
    module_name, _, name = target.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"{key}._target_={target}: cannot be imported: {error}") from error
    try:
        found = getattr(module, name)
    except AttributeError:
        raise ConfigError(f"{key}._target_={target}: {module_name} has no {name}") from None
    if not callable(found):
        raise ConfigError(f"{key}._target_={target}: is a {type(found).__name__}, not a function or class")
    check_origin(key, target, found, packages)
    return found


def call(key: str, node: Mapping[str, Any], packages: Sequence[str]) -> Any:
    """Calls the target of `node` with its arguments, which may be targets themselves; its errors are not changed."""
    check(key, node, packages)
    target = resolve(key, str(node["_target_"]), packages)
    arguments = arguments_of(node)
    for name, value in arguments.items():
        if isinstance(value, Mapping) and "_target_" in value:
            arguments[name] = call(f"{key}.{name}", value, packages)
    return target(**arguments)


def arguments_of(node: Mapping[str, Any]) -> dict[str, Any]:
    return {str(key): value for key, value in node.items() if key != "_target_"}


def nodes_to_call(config: Mapping[str, Any]) -> dict[str, Any]:
    """The nodes of a config, given as the fields of `Config`, that name a function to call; without nulls."""
    nodes = {f"{group}.{name}": node for group in ("hooks", "callbacks") for name, node in config[group].items()}
    nodes |= {"data": config["data"], "drill": config["drill"]}
    return {"model": config["model"], **{key: node for key, node in nodes.items() if node is not None}}


def _check_name(key: str, target: str, packages: Sequence[str]) -> None:
    parts = target.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise ConfigError(f"{key}._target_={target}: not of the form package.module.name")
    module = target.rpartition(".")[0]
    if not any(_is_in(module, group) for group in _groups(packages)):
        shipped = ", ".join((*_KERAS, *_KDIST))
        raise ConfigError(
            f"{key}._target_={target}: {parts[0]} is not trusted; a config may name {shipped}" + _how_to_trust(target)
        )
    if _is_in(module, (*_KERAS, *_KDIST, *_EXTRAS)) and any(part.startswith("_") for part in parts):
        raise ConfigError(f"{key}._target_={target}: is private")
    for name, why in _REFUSED.items():
        if _is_in(target, (name,)):
            raise ConfigError(f"{key}._target_={target}: cannot be named in a config: {name} {why}")


def _groups(packages: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Groups of packages that may import from each other."""
    return _KERAS, (*_KDIST, *_EXTRAS), (*packages, *_trusted)


def _how_to_trust(name: str) -> str:
    package = name.partition(".")[0]
    if _is_of_python(package):
        return ""
    return f'; if you trust it: run.trust=[{package}] on the command line, kdist.trust("{package}") in Python'


def _is_in(name: str, packages: Iterable[str]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def _is_of_python(package: str) -> bool:
    return package.partition(".")[0] in sys.stdlib_module_names
