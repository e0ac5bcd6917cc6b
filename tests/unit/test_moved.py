"""Earlier names of modules and commands."""

import importlib
import importlib.util

import pytest

from kdist import moved

PRESENT = {earlier: importlib.import_module(present) for earlier, present in moved.MODULES.items()}


@pytest.mark.parametrize("earlier", PRESENT)
def test_a_module_has_its_earlier_name_too(earlier: str) -> None:
    assert importlib.import_module(earlier) is PRESENT[earlier]


@pytest.mark.parametrize("name", moved.COMMANDS)
def test_a_command_that_python_runs_by_its_module_has_a_file_as_its_first_argument(name: str) -> None:
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert isinstance(spec.origin, str)
