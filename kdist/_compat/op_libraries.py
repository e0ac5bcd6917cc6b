"""Libraries of ops that TensorFlow has loaded beside its own; `tf.load_op_library` marks them by a private name.

A graph with an op of such a library, such as TensorFlow Text, runs in processes that have loaded it, too. They
import the modules that did so in this process.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Iterable
from types import ModuleType
from typing import Any

_MARK = "_IS_TENSORFLOW_PLUGIN"


def loaded_by() -> list[str]:
    """The modules of this process that have loaded libraries of ops, by name, without the program itself."""
    modules = [(name, module) for name, module in dict(sys.modules).items() if _can_be_imported(name)]
    return sorted(name for name, module in modules if any(_MARK in _attributes(each) for each in _modules_in(module)))


def load(modules: Iterable[str]) -> None:
    """Imports modules that load libraries of ops; prints failures, whose ops are missing."""
    for name in modules:
        try:
            for module in _modules_in(importlib.import_module(name)):
                # Some load their library when it is first used.
                getattr(module, _MARK, None)
        except Exception:  # noqa: BLE001 - whatever a module of others raises
            print(f"{name}: its ops cannot be loaded", file=sys.stderr)
            traceback.print_exc()


def _can_be_imported(name: str) -> bool:
    return name not in ("__main__", "__mp_main__") and not name.startswith("tensorflow.")


def _modules_in(module: object) -> list[ModuleType]:
    return [value for value in list(_attributes(module).values()) if isinstance(value, ModuleType)]


def _attributes(module: object) -> dict[str, Any]:
    """The attributes of a module, without loading a lazy one; empty for objects that only look like one, as in cffi."""
    try:
        return object.__getattribute__(module, "__dict__") if isinstance(module, ModuleType) else {}
    except AttributeError:
        return {}
