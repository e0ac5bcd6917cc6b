"""Libraries of ops that this process has loaded, and loading the same ones elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from kdist._compat import op_libraries

# As `tf.load_op_library` makes its module, and as TensorFlow I/O puts it off.
_OWNER = """
import types

class Lazy(types.ModuleType):
    def __getattr__(self, name):
        if name != "_IS_TENSORFLOW_PLUGIN":
            raise AttributeError(name)
        self._IS_TENSORFLOW_PLUGIN = True
        return True

ops = Lazy("ops")
"""


@pytest.fixture
def owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "owner_of_ops.py").write_text(_OWNER)
    monkeypatch.syspath_prepend(tmp_path)
    yield "owner_of_ops"
    sys.modules.pop("owner_of_ops", None)


def test_modules_that_have_loaded_libraries_are_found_without_loading_others(owner: str) -> None:
    __import__(owner)
    assert owner not in op_libraries.loaded_by()
    op_libraries.load([owner])
    assert owner in op_libraries.loaded_by()
    assert not any(name.startswith("tensorflow.") for name in op_libraries.loaded_by())


def test_what_only_the_program_has_loaded_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    library = ModuleType("library")
    library._IS_TENSORFLOW_PLUGIN = True  # type: ignore[attr-defined]
    monkeypatch.setattr(sys.modules["__main__"], "ops", library, raising=False)
    assert "__main__" not in op_libraries.loaded_by()


def test_a_module_that_is_missing_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    op_libraries.load(["no_such_module_of_ops"])
    assert "no_such_module_of_ops: its ops cannot be loaded" in capsys.readouterr().err


def test_what_only_looks_like_a_module_has_no_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        """A library of cffi, as OpenSSL's, says that it is a module, and has no `__dict__`."""

        __slots__ = ()
        __class__ = ModuleType  # type: ignore[assignment]

    module = ModuleType("with_a_library")
    module.lib = Library()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "with_a_library", module)
    assert "with_a_library" not in op_libraries.loaded_by()
