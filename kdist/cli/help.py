"""The text of `--help`, from the schemas and the config folders, and suggestions for misspelled keys."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from importlib import resources
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from kdist.config.schema import Config
from kdist.config.suggestions import did_you_mean
from kdist.errors import ConfigError
from kdist.version import __version__

if TYPE_CHECKING:
    from kdist.cli.main import Command

_CONF = resources.files("kdist.conf")
#: Whose arguments are those of a class of the user's.
_OPEN = ("model.", "data.", "hooks.")
_HELP = """\
kdist {version}: distributed training of Keras 3 models on TensorFlow

groups (GROUP=OPTION)
{groups}

  python -m kdist +recipe=mnist cluster=2ps2w                  2 parameter servers and 2 workers, here, now
  python -m kdist +recipe=mnist                                the same in one process
  python -m kdist +recipe=mnist cluster=4w                     4 workers without servers
  python -m kdist +recipe=mnist cluster=2ps2w strategy=sync_replicas
                                                               synchronous updates
  python -m kdist +recipe=mnist optimizer.learning_rate=0.01   any key can be changed
  python -m kdist -m +recipe=mnist cluster=1ps1w,2ps2w         one run after another (multirun)
  python -m kdist --again runs/mine train.steps=500            as a run that has ended, with changes, anew
  python -m kdist +recipe=mnist --cfg job                      shows the config and runs nothing

commands (kdist COMMAND --help says more; also as python -m kdist COMMAND)
{commands}

keys (KEY=VALUE; null is "not given")
{keys}

hooks (hooks.NAME.KEY=VALUE; hooks.NAME=null removes one)
{hooks}

exit codes: 0 done, 1 the run failed, 2 the config is wrong, 75 the cluster failed (a retry may help),
            130 Ctrl-C and 143 a stop signal, both after a saved checkpoint if training had begun
Hydra's own options: python -m kdist --hydra-help
"""


def help_text(commands: Mapping[str, Command]) -> str:
    """The text of `--help`: the groups with their options and every key with its meaning."""
    groups = {
        "cluster": [*_options("cluster"), "NpsMw and Mw (any N and M)"],
        **{group: _options(group) for group in ("strategy", "model", "data", "optimizer", "hooks")},
        "+recipe": _options("recipe"),
        "+drill": _options("drill"),
    }
    rows = describe_keys()
    width = max(len(key) for key, _, _ in rows)
    return _HELP.format(
        version=__version__,
        commands="\n".join(f"  {f'kdist {n} {c.usage}':<45} {c.summary}" for n, c in commands.items()),
        groups="\n".join(f"  {group:<10} {' | '.join(options)}" for group, options in groups.items()),
        keys="\n".join(f"  {key:<{width}}  {meaning} [{default}]" for key, default, meaning in rows),
        hooks="\n".join(_describe_hooks()),
    )


def describe_keys() -> list[tuple[str, str, str]]:
    """Every key that has a default, with the default as a user types it and its meaning."""
    return [row for row in _walk(Config) if row[1] and ("." in row[0] or row[0] in ("loss", "metrics"))]


def unknown_key(key: str, beside: Iterable[str] = ()) -> ConfigError:
    """The error for a key that does not exist, with a similar one, of those `beside` it first, or a way to find one."""
    known = [*beside, *(known for known, _, _ in _walk(Config))]
    known += [f"hooks.{name}.{argument}" for name, hook in _default_hooks().items() for argument in hook]
    hint = did_you_mean(key, known) or ("" if key.startswith(_OPEN) else "--help lists the keys")
    if key.startswith(_OPEN):
        hint = f"{hint} A new argument is added with a plus: +{key}=...".strip()
    return ConfigError(f"{key}: there is no such key; {hint}")


def _default_hooks() -> dict[str, dict[str, Any]]:
    from omegaconf import OmegaConf

    hooks: Any = OmegaConf.to_container(
        OmegaConf.create((_CONF / "hooks" / "default.yaml").read_text(encoding="utf-8"))
    )
    return hooks


def _describe_hooks() -> Iterable[str]:
    from kdist import hooks

    for name, node in _default_hooks().items():
        summary = str(getattr(hooks, node["_target_"].rpartition(".")[2]).__doc__).splitlines()[0]
        keys = [f"{key}={'null' if value is None else str(value).lower()}" for key, value in node.items()]
        yield f"  hooks.{name:<12}  {summary}"
        yield f"  {'':<18}  {' '.join(keys[1:])}"


def _walk(schema: type, prefix: str = "") -> Iterable[tuple[str, str, str]]:
    """Every key of a schema with its default and its meaning."""
    meanings, defaults = _field_docstrings(schema), schema()
    for item in fields(schema):
        value = getattr(defaults, item.name)
        # As a user types it.
        listed = f"[{','.join(map(str, value))}]" if isinstance(value, list) else str(value)
        default = "null" if value is None else listed
        yield f"{prefix}{item.name}", "" if is_dataclass(value) else default, meanings[item.name]
        if is_dataclass(value):
            yield from _walk(type(value), f"{prefix}{item.name}.")


def _field_docstrings(schema: type) -> dict[str, str]:
    """The string after each field of a dataclass and its bases, which Python itself does not keep."""
    meanings = {}
    for owner in filter(is_dataclass, schema.__mro__):
        definition: Any = ast.parse(inspect.getsource(owner)).body[0]
        for item, text in pairwise(definition.body):
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and isinstance(text, ast.Expr):
                meanings[item.target.id] = " ".join(ast.literal_eval(text.value).split())
    return meanings


def _options(group: str) -> list[str]:
    return sorted(path.name.removesuffix(".yaml") for path in (_CONF / group).iterdir() if path.name.endswith(".yaml"))
