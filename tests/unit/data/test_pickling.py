"""Objects that travel to processes that train: functions with their source, models with any function, the settings."""

from __future__ import annotations

import inspect
import linecache
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import needs_keras_3_13

from kdist._compat.keras_state import register, registered_objects, set_here, settings_here
from kdist.data.pickling import dumps, loads, pack_program, unpack_program
from kdist.threads import in_thread

SOURCE = """
def absolute(values):
    if values > 0:
        return values
    return -values
"""


def defined_in(source: str, filename: str, name: str) -> Any:
    """The object of that name that a script defines; no other process can import it."""
    program: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, filename, "exec"), program)
    return program[name]


def test_autograph_finds_the_source_of_a_function_of_a_script(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SOURCE)
    travelled = loads(dumps(defined_in(SOURCE, str(tmp_path / "script.py"), "absolute")))
    assert inspect.getsource(travelled) == SOURCE.lstrip("\n")
    assert int(next(iter(tf.data.Dataset.from_tensors(-3).map(travelled)))) == 3


def test_a_cell_of_a_notebook_travels_with_its_source() -> None:
    name, lines = "<cell 7>", SOURCE.splitlines(keepends=True)
    linecache.cache[name] = len(SOURCE), None, lines, name
    packed = dumps(defined_in(SOURCE, name, "absolute"))
    del linecache.cache[name]
    assert inspect.getsource(loads(packed)) == SOURCE.lstrip("\n")


def weighted(weight: float) -> Callable[[Any, Any], Any]:
    def error(y_true: Any, y_pred: Any) -> Any:
        return weight * keras.ops.mean(keras.ops.square(y_true - y_pred), -1)

    return error


def test_functions_of_a_model_arrive_wherever_they_stand() -> None:
    doubled = defined_in("FACTOR = 2.0\nf = lambda x: x * FACTOR", "<script>", "f")
    model = keras.Sequential(
        [
            keras.layers.Input((3,)),
            keras.layers.Dense(2, activation=doubled, kernel_initializer=lambda shape, dtype: keras.ops.ones(shape)),
            keras.layers.Lambda(doubled),
            keras.layers.Lambda(lambda x: doubled(x) + 0.0),
        ]
    )
    # Two of one name, with what they close over, and a metric around a lambda.
    metrics = [
        keras.metrics.MeanMetricWrapper(weighted(1.0), name="one"),
        keras.metrics.MeanMetricWrapper(lambda y, p: doubled(weighted(1.0)(y, p)), name="two"),
        lambda y, p: 3 * weighted(1.0)(y, p),
    ]
    model.compile("sgd", weighted(4.0), metrics=metrics)
    x, y = np.ones((4, 3), "float32"), np.zeros((4, 2), "float32")
    travelled = loads(dumps(model))
    np.testing.assert_array_equal(travelled.predict(x, verbose=0), np.full((4, 2), 24.0))
    expected = model.evaluate(x, y, verbose=0, return_dict=True)
    assert travelled.evaluate(x, y, verbose=0, return_dict=True) == expected
    assert expected == {"loss": 2304.0, "one": 576.0, "two": 1152.0, "lambda": 1728.0}
    assert doubled.__name__ == "<lambda>"


@pytest.fixture
def settings_come_back() -> Iterator[None]:
    settings, objects = settings_here(), registered_objects()
    yield
    set_here(*settings)
    register(objects)
    keras.config.set_dtype_policy("float32")
    keras.config.enable_traceback_filtering()
    keras.saving.get_custom_objects().pop("mine>Twice", None)


@pytest.mark.usefixtures("settings_come_back")
def test_settings_of_keras_travel_with_a_program() -> None:
    def present() -> dict[str, Any]:
        own = keras.config
        return {
            "policy": own.dtype_policy().name,
            "floatx": own.floatx(),
            "epsilon": own.epsilon(),
            "images": own.image_data_format(),
            "tracebacks": own.is_traceback_filtering_enabled(),
            "tf32": tf.config.experimental.tensor_float_32_execution_enabled(),
        }

    before = present()
    keras.config.set_dtype_policy("mixed_bfloat16")
    keras.config.set_floatx("float64")
    keras.config.set_epsilon(1e-3)
    keras.config.set_image_data_format("channels_first")
    keras.config.disable_traceback_filtering()
    tf.config.experimental.enable_tensor_float_32_execution(False)
    registered = defined_in("class Twice:\n    def get_config(self):\n        return {}", "<script>", "Twice")
    keras.saving.register_keras_serializable("mine")(registered)
    changed, packed = present(), pack_program("the program")
    assert not set(changed.items()) & set(before.items())

    keras.config.set_dtype_policy("float32")
    keras.config.set_floatx("float32")
    keras.config.set_epsilon(1e-7)
    keras.config.set_image_data_format("channels_last")
    keras.config.enable_traceback_filtering()
    tf.config.experimental.enable_tensor_float_32_execution(True)
    del keras.saving.get_custom_objects()["mine>Twice"]
    assert present() == before

    assert unpack_program(packed) == "the program"
    assert present() == changed
    assert keras.saving.get_registered_object("mine>Twice").__name__ == "Twice"


@needs_keras_3_13
@pytest.mark.usefixtures("settings_come_back")
def test_a_thread_that_is_waited_for_has_the_settings_and_seeds_of_this_one() -> None:
    keras.config.set_dtype_policy("mixed_bfloat16")
    keras.utils.set_random_seed(3)
    first = keras.random.uniform([2])
    keras.utils.set_random_seed(3)
    policy, drawn = in_thread(lambda: (keras.config.dtype_policy().name, keras.random.uniform([2]))).result(20)
    assert policy == "mixed_bfloat16"
    np.testing.assert_array_equal(drawn, first)
