"""Exit codes and last lines of commands."""

import importlib

import pytest

from kdist.cli.main import exit_code_of


def test_an_error_outside_of_the_users_code_says_where_it_was_raised(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of(lambda: importlib.import_module("no_such_module")) == 1
    said = capsys.readouterr().err
    assert said.startswith("kdist: error: chief: ModuleNotFoundError: No module named 'no_such_module'\n")
    assert 'File "' in said
