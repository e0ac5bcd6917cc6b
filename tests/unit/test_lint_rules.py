"""`make lint` finds what breaks the order of the rooms, and the rules of the code."""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import REPO

sys.path.append(str(REPO / "tests" / "lint"))
import rules


@pytest.mark.parametrize(
    "code",
    [
        "from tensorflow.python.eager import context",
        "import keras.src.backend",
        "import keras\nkeras.src.utils.is_default(f)",
        "def f(model):\n    return model._loss_tracker",
        "def f(layer):\n    return getattr(layer, '_embeddings')",
        "def f(self, other):\n    self.x = other._x",
    ],
)
def test_a_private_name_of_something_else_is_found(code: str) -> None:
    assert list(rules.private_names(ast.parse(code)))


@pytest.mark.parametrize(
    "code",
    [
        "import os\nos._exit(1)",
        "class A:\n    def __init__(self):\n        self._x = 1\n    def same(self, other):\n        return other._x",
        "class A(B):\n    def f(self):\n        return super()._g() + self._h",
        "target = config._target_",
    ],
)
def test_private_names_of_ones_own_are_fine(code: str) -> None:
    assert not list(rules.private_names(ast.parse(code)))


@pytest.mark.parametrize(
    ("code", "is_found"),
    [
        ("def f(storage_timeout=60.0): ...", True),
        ("def f(*, resume: str = 'auto'): ...", True),
        ("class A:\n    step_timeout: float = 300.0", True),
        ("def f(grace_secs=RunConfig.grace_secs, resume=None, other=1): ...", False),
    ],
)
def test_a_second_default_of_a_config_key_is_found(code: str, is_found: bool) -> None:
    assert bool(list(rules.second_defaults(ast.parse(code), rules.config_keys()))) is is_found


@pytest.mark.parametrize(
    ("code", "is_found"),
    [
        ("path.read_text()", True),
        ("open(path)", True),
        ("path.open('w')", True),
        ("path.open()", True),
        ("path.read_text(encoding='utf-8')", False),
        ("open(path, 'rb')", False),
        ("os.open(path, os.O_RDWR)", False),
    ],
)
def test_a_text_file_in_the_encoding_of_the_locale_is_found(code: str, is_found: bool) -> None:
    assert bool(list(rules.files_in_the_locale(ast.parse(code)))) is is_found


def test_the_code_keeps_the_rules() -> None:
    assert rules.violations() == []


@pytest.mark.parametrize(
    ("file", "line", "contract"),
    [
        ("config/checks.py", "from kdist.trainer import Trainer", "A room imports only rooms below it"),
        ("data/sources.py", "from kdist.console.lines import print_line", "A room imports only rooms below it"),
        ("cli/help.py", "from kdist.extras import faults", "Nothing in the core imports the extras"),
        (
            "cluster/spec.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from kdist.cluster.local import LocalCluster",
            "No import circle",
        ),
    ],
)
def test_an_import_that_breaks_the_order_of_the_rooms_is_found(
    tmp_path: Path, file: str, line: str, contract: str
) -> None:
    shutil.copytree(REPO / "kdist", tmp_path / "kdist", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPO / "pyproject.toml", tmp_path)
    with (tmp_path / "kdist" / file).open("a") as changed:
        changed.write(f"\n{line}\n")
    # The copy is what Python finds, also where kdist is installed.
    code = "import sys; sys.path.insert(0, '.'); from importlinter.cli import lint_imports_command as run; run()"
    command = [sys.executable, "-c", code, "--no-cache"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    broken = [line for line in done.stdout.splitlines() if " BROKEN" in line]
    assert any(line.startswith(contract) for line in broken), done.stdout


def test_a_wheel_has_every_package() -> None:
    folders = {"kdist": "kdist", "kdist.conf": "conf", "kdist.recipes": "recipes"}
    found = {
        ".".join([name, *init.parent.relative_to(REPO / folder).parts])
        for name, folder in folders.items()
        for init in (REPO / folder).rglob("__init__.py")
    }
    configs = {
        f"kdist.conf.{path.name}" for path in (REPO / "conf").iterdir() if path.is_dir() and any(path.glob("*.yaml"))
    }
    text = (REPO / "pyproject.toml").read_text()
    listed = re.findall(r'"([\w.]+)"', text[text.index("\npackages = [") : text.index("[tool.setuptools.package-dir]")])
    assert sorted(listed) == sorted(found | configs)


@pytest.mark.parametrize(
    ("code", "is_found"),
    [
        ('"""What it does."""', True),
        ('class A:\n    x: int\n    """Which one."""', True),
        ('def f():\n    """The time when it began."""', False),
        ('def f():\n    """Whatever is given."""', False),
    ],
)
def test_a_docstring_that_begins_with_a_question_word_is_found(code: str, is_found: bool) -> None:
    assert bool(list(rules.questions(ast.parse(code)))) is is_found


def test_markers_of_a_merge_conflict_are_found(tmp_path: Path) -> None:
    page = tmp_path / "docs" / "howto" / "page.md"
    page.parent.mkdir(parents=True)
    page.write_text("one\n<<<<<<< HEAD\ntwo\n=======\nthree\n>>>>>>> 0123abc\n")

    assert list(rules.conflicts(tmp_path)) == [
        f"docs/howto/page.md:{line}: marker of a merge conflict" for line in (2, 6)
    ]
