"""TensorFlow is imported without looking for garbage, and for tasks without Keras."""

import gc
import subprocess
import sys

import pytest

from kdist._compat.quick_import import quick_import


def test_nobody_looks_for_garbage_meanwhile() -> None:
    with quick_import():
        assert not gc.isenabled()
        with quick_import():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_what_goes_wrong_goes_on_and_leaves_everything_as_it_was() -> None:
    with pytest.raises(ImportError, match="no such"), quick_import():
        raise ImportError("no such module")
    assert gc.isenabled()


@pytest.mark.long
@pytest.mark.parametrize(("keras", "found"), [(True, "True"), (False, "False")])
def test_keras_is_imported_only_if_it_is_wanted_and_stays_importable(keras: bool, found: str) -> None:
    program = f"""
import sys
from kdist._compat.quick_import import quick_import
with quick_import(keras={keras}):
    import tensorflow as tf
print("keras" in sys.modules, tf.distribute.Server.__name__)
import keras
print(keras.backend.backend())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.splitlines()[-2:] == [f"{found} Server", "tensorflow"]


def test_keras_that_is_there_already_stays() -> None:
    import keras

    with quick_import(keras=False):
        assert sys.modules["keras"] is keras
    assert sys.modules["keras"] is keras
