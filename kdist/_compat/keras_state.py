"""The settings of Keras and TensorFlow that a program has changed, for threads and processes that run its functions.

Read in Keras 3.12 to 3.15. `keras.config` has no way to read them all, and keeps most of them for each thread.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")

#: Settings that Keras keeps for the process, each with a function to read and one to set it.
_OF_PROCESS = ("floatx", "epsilon", "image_data_format", "max_epochs", "max_steps_per_epoch")
#: Settings of each thread, by Keras's own names.
_OF_THREAD = ("dtype_policy", "flash_attention", "interactive_logging", "traceback_filtering", "safe_mode_saving")
_SEEDS = "global_seed_generator"
_SCOPE = "custom_objects_scope_dict"


def settings_here() -> tuple[Mapping[str, Any], ...]:
    """The settings that this process has made: of Keras for itself and for this thread, and of TensorFlow."""
    import keras

    of_process = {name: getattr(keras.config, name)() for name in _OF_PROCESS}
    return of_process, {name: value for name, value in _present().items() if name in _OF_THREAD}, _of_tensorflow()


def set_here(of_process: Mapping[str, Any], of_thread: Mapping[str, Any], of_tensorflow: Mapping[str, Any]) -> None:
    """Sets what `settings_here` has returned in this process, and in this thread."""
    import keras

    for name, value in of_process.items():
        getattr(keras.config, f"set_{name}")(value)
    _present().update(of_thread)
    _set_tensorflow(of_tensorflow)


def registered_objects() -> dict[str, Any]:
    """The objects that are registered with Keras, or of a scope that is entered, by name."""
    import keras

    return {**keras.saving.get_custom_objects(), **(_present().get(_SCOPE) or {})}


def register(objects: Mapping[str, Any]) -> None:
    """Registers objects with Keras under the names of `registered_objects`."""
    from keras.src.saving.object_registration import GLOBAL_CUSTOM_NAMES, GLOBAL_CUSTOM_OBJECTS

    for name, item in objects.items():
        GLOBAL_CUSTOM_OBJECTS[name] = item
        GLOBAL_CUSTOM_NAMES[item] = name


def as_in_this_thread(function: Callable[[], T]) -> Callable[[], T]:
    """The function, which sees Keras's settings and its generator of seeds as this thread does, in any other.

    Nothing that Keras keeps for that other thread outlasts the call.
    """
    if "keras" not in sys.modules:
        return function
    wanted = {name: value for name, value in _present().items() if name in (*_OF_THREAD, _SEEDS, _SCOPE)}

    def with_settings() -> T:
        _present().update(wanted)
        try:
            return function()
        finally:
            _present().clear()

    return with_settings


def _present() -> dict[str, Any]:
    """Keras's state of this thread itself, not a copy."""
    from keras.src.backend.common import global_state

    # `clear_session` replaces it.
    return vars(global_state.GLOBAL_STATE_TRACKER)


def _of_tensorflow() -> dict[str, Any]:
    import tensorflow as tf
    from tensorflow.python.framework import config

    return {
        "jit": tf.config.optimizer.get_jit(),
        "options": tf.config.optimizer.get_experimental_options(),
        "tensor_float_32": tf.config.experimental.tensor_float_32_execution_enabled(),
        "deterministic": config.is_op_determinism_enabled(),
    }


def _set_tensorflow(wanted: Mapping[str, Any]) -> None:
    """Sets what `wanted` changes: compilation by XLA, Grappler's options, TensorFloat-32 and determinism."""
    import tensorflow as tf

    present = _of_tensorflow()
    if wanted["jit"] != present["jit"]:
        tf.config.optimizer.set_jit(wanted["jit"] or False)
    if wanted["options"] != present["options"]:
        tf.config.optimizer.set_experimental_options(wanted["options"])
    if wanted["tensor_float_32"] != present["tensor_float_32"]:
        tf.config.experimental.enable_tensor_float_32_execution(wanted["tensor_float_32"])
    if wanted["deterministic"]:
        tf.config.experimental.enable_op_determinism()
