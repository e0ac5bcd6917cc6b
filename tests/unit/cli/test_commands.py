"""Subcommands, and the earlier names of commands and modules."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from kdist import moved
from kdist.cli.main import COMMANDS, run


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_its_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([command, "--help"]) == 0
    assert "kdist " in capsys.readouterr().out


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(f"  kdist {name} {command.usage}" in printed for name, command in COMMANDS.items())


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("evalute", "did you mean evaluate?"),
        ("mnist", "choose one of train, evaluate, predict, export, resize, runs, launch"),
    ],
)
def test_a_wrong_command_is_refused_with_a_suggestion(
    typed: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([typed, "runs/mine"]) == 2
    assert f"kdist: error: {typed}: there is no such command; {hint}" in capsys.readouterr().err


def test_train_may_be_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    printed = []
    for arguments in (["train"], []):
        assert run([*arguments, "+recipe=mnist", "train.steps=0"]) == 2
        printed.append(capsys.readouterr().err)
    assert printed[0] == printed[1] != ""


@pytest.mark.parametrize("name", moved.COMMANDS)
def test_earlier_names_of_commands_work(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", name, "--help"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.startswith(f"usage: kdist {name.removeprefix('kdist.')} ")


@pytest.mark.parametrize("name", moved.MODULES)
def test_earlier_names_of_modules_are_the_present_ones(name: str) -> None:
    module = importlib.import_module(moved.MODULES[name])
    assert importlib.import_module(name) is module
    assert module.__name__ == moved.MODULES[name]
    assert module.__spec__ is not None
    assert module.__spec__.name == moved.MODULES[name]
