"""Five rules that no linter knows; `make lint` runs this as a script.

1. A private name of TensorFlow, Keras, Hydra or another room appears in `kdist/_compat` only.
2. The default of a config key stands once, in `kdist/config/schema.py`. Elsewhere a default is `RunConfig.grace_secs`.
3. Text that is read or written is UTF-8, whatever the locale says: every text file is opened with an encoding.
4. A docstring begins with a verb or with a noun that names the thing, never with a question word.
5. No text of the repository holds the markers of a merge conflict.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRIVATE_MODULES = ("tensorflow.python", "keras.src", "hydra._internal")
#: Their private name is all that Python offers.
ALLOWED = {"os._exit"}
#: Words that mean something else where they are not config keys.
NOT_ONLY_KEYS = {"name", "dir", "verbose"}
_FOLDERS = ("docs", "conf", "deploy", "recipes", "benchmarks", ".github")
_NOT_THE_PRODUCT = ("recipes", "benchmarks", "tests")
QUESTION_WORDS = {"What", "Which", "How", "When", "Why", "Who", "Where"}
#: Files that may hold markers of a conflict; Python would not compile.
TEXT = ("*.md", "*.yml", "Makefile", *(f"{folder}/**/*.{end}" for folder in _FOLDERS for end in ("md", "yaml", "yml")))


def private_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of each private name of something else."""
    own = set(_defined(tree))
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            yield from ((node.lineno, module) for module in modules if module.startswith(PRIVATE_MODULES))
        elif isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            of_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            of_super = isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "super"
            is_own = of_self or of_super or node.attr in own or text in ALLOWED
            if text in PRIVATE_MODULES or (_is_private(node.attr) and not is_own):
                yield node.lineno, text
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr"):
            name = node.args[1] if len(node.args) > 1 else None
            if isinstance(name, ast.Constant) and isinstance(name.value, str) and _is_private(name.value):
                yield node.lineno, ast.unparse(node)


def second_defaults(tree: ast.Module, keys: set[str]) -> Iterator[tuple[int, str]]:
    """Line and text of each parameter or field that is named like a config key and has a default of its own."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            positional = [*node.args.posonlyargs, *node.args.args]
            given = zip(positional[len(positional) - len(node.args.defaults) :], node.args.defaults)
            named = zip(node.args.kwonlyargs, node.args.kw_defaults)
            for argument, default in [*given, *named]:
                if argument.arg in keys and _is_literal(default):
                    yield argument.lineno, f"{argument.arg}={ast.unparse(default) if default else ''}"
        elif isinstance(node, ast.ClassDef):
            for item in node.body:
                if isinstance(item, ast.AnnAssign) and ast.unparse(item.target) in keys and _is_literal(item.value):
                    yield item.lineno, ast.unparse(item)


def files_in_the_locale(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of each call that opens a text file and names no encoding."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or any(keyword.arg == "encoding" for keyword in node.keywords):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        modes = [*node.args[:2], *(k.value for k in node.keywords if k.arg == "mode")]
        is_text = not any(isinstance(mode, ast.Constant) and "b" in str(mode.value) for mode in modes)
        # Of a path: `os.open` and others have their own meaning.
        says_text = any(isinstance(mode, ast.Constant) and mode.value in ("r", "w", "a", "x") for mode in modes)
        opens = ast.unparse(node.func) == "open" or (name == "open" and (says_text or not node.args))
        if name in ("read_text", "write_text") or (opens and is_text):
            yield node.lineno, ast.unparse(node)


def questions(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring, of attributes as well, that begins with a question word."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            line = node.value.value.strip().partition("\n")[0]
            if line.partition(" ")[0] in QUESTION_WORDS:
                yield node.lineno, line


def conflicts(root: Path) -> Iterator[str]:
    """The place of each marker of a merge conflict in Markdown, configs and code."""
    for path in sorted(path for pattern in TEXT for path in root.glob(pattern)):
        for line, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if re.match(r"(<{7}|>{7}) ", text):
                yield f"{path.relative_to(root)}:{line}: marker of a merge conflict"


def config_keys() -> set[str]:
    """The last parts of all config keys that have a default."""
    from kdist.config.schema import Config

    return set(_keys_of(Config)) - NOT_ONLY_KEYS


def violations(root: Path = ROOT) -> list[str]:
    """One line for each, as `path:line: what is wrong`."""
    keys, found = config_keys(), list(conflicts(root))
    for path in (path for folder in _NOT_THE_PRODUCT for path in sorted((root / folder).rglob("*.py"))):
        tree, where = ast.parse(path.read_text(encoding="utf-8")), path.relative_to(root)
        found += [f"{where}:{line}: begins with a question word: {text}" for line, text in questions(tree)]
    for path in sorted((root / "kdist").rglob("*.py")):
        tree, where = ast.parse(path.read_text()), path.relative_to(root)
        room = where.parts[1]
        found += [f"{where}:{line}: no encoding: {text}" for line, text in files_in_the_locale(tree)]
        found += [f"{where}:{line}: begins with a question word: {text}" for line, text in questions(tree)]
        if room != "_compat":
            found += [f"{where}:{line}: private name {text}: use kdist._compat" for line, text in private_names(tree)]
        # Hooks have arguments of their own, with defaults of their own in conf/hooks.
        if room not in ("config", "hooks"):
            found += [
                f"{where}:{line}: second default {text}: use that of kdist.config.schema"
                for line, text in second_defaults(tree, keys)
            ]
    return found


def _defined(tree: ast.Module) -> Iterator[str]:
    """Private names that the classes and functions of a module define."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                yield node.attr
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and not name.endswith("_")


def _is_literal(default: ast.expr | None) -> bool:
    return isinstance(default, (ast.Constant, ast.List, ast.Tuple, ast.Dict)) and not (
        isinstance(default, ast.Constant) and default.value is None
    )


def _keys_of(schema: type) -> Iterator[str]:
    for item in fields(schema):
        value = item.default_factory() if item.default_factory is not MISSING else item.default
        if is_dataclass(value):
            yield from _keys_of(type(value))
        elif value not in (None, [], {}):
            yield item.name


if __name__ == "__main__":
    found = violations()
    print("\n".join(found) or "rules: kept")
    sys.exit(bool(found))
