"""Variables of Keras without values, and slots without needless memory; read in Keras 3.12 to 3.15."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from math import prod
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common.stateless_scope import in_stateless_scope

from kdist._compat.replaced import replaced
from kdist._compat.tensorflow import UninitializedVariable

#: True while a model is built for parameter servers, for which its values do not matter.
is_building: ContextVar[bool] = ContextVar("is_building", default=False)


class LazyVariable(keras.Variable):
    """A variable with a shape, but without memory, until it is read or written.

    If it is read before anything was written to it, it gets its initial values.

    Attributes:
        initializer_here: the initializer of its values; None once they are known to be here.
        elsewhere: the error that is raised when they are read, if they are not to be made here.
    """

    initializer_here: Callable[..., Any] | None
    elsewhere: Exception | None


class _ValueOf(UninitializedVariable):
    """The value of a lazy variable, for TensorFlow."""

    def __init__(self, variable: LazyVariable) -> None:
        super().__init__(trainable=variable.trainable, shape=variable.shape, dtype=variable.dtype)
        self._lazy = variable

    def _make(self) -> None:
        """Makes the values if they are needed: not when a model is traced to find shapes, or for other values."""
        variable = self._lazy
        is_eager = tf.executing_eagerly()
        if in_stateless_scope() or (is_building.get() and not is_eager) or (make := made_by(variable)) is None:
            return
        if variable.elsewhere is not None:
            raise copy.copy(variable.elsewhere)
        if is_eager:
            variable.assign(make(variable.shape, variable.dtype))


def _with_values(name: str) -> Callable[..., Any]:
    """The method of a variable of this name, which reads or changes its values: they are made first."""
    original = getattr(UninitializedVariable, name)

    def method(self: _ValueOf, *args: Any, **kwargs: Any) -> Any:
        self._make()
        return original(self, *args, **kwargs)

    return method


for _name in dir(UninitializedVariable):
    if _name.startswith(("assign_", "scatter_", "batch_scatter_", "_read_variable_op", "sparse_read", "gather_nd")):
        setattr(_ValueOf, _name, _with_values(_name))


@contextmanager
def lazy_above(num_bytes: int) -> Iterator[None]:
    """In this context a model is built: new variables of more than `num_bytes` with an initializer are lazy."""

    def initialize(variable: keras.Variable, initializer: Callable[..., Any]) -> None:
        size = prod(variable.shape) * tf.as_dtype(variable.dtype).size
        if type(variable) is not keras.Variable or size <= num_bytes:
            of_tensorflow(variable, initializer)
            return
        variable.__class__ = LazyVariable
        variable.initializer_here, variable.elsewhere = initializer, None
        variable._value = _ValueOf(variable)

    # Keras calls it also later, for variables that were made while a model was built symbolically.
    token, of_tensorflow = is_building.set(True), keras.Variable._initialize_with_initializer
    try:
        with replaced(keras.Variable, _initialize_with_initializer=initialize):
            yield
    finally:
        is_building.reset(token)


def made_by(variable: keras.Variable) -> Callable[..., Any] | None:
    """The initializer of a lazy variable; None from the moment its values are here, however they were written."""
    if not isinstance(variable, LazyVariable) or variable.initializer_here is None:
        return None
    # TensorFlow is asked: a checkpoint, for one, writes without Keras.
    with tf.init_scope():
        if variable._value.is_initialized():
            variable.initializer_here = None
    return variable.initializer_here


def hand_over(variable: keras.Variable, why: Exception) -> None:
    """Takes the values of a lazy variable to be elsewhere: `why` is raised if they are read."""
    if made_by(variable) is not None:
        variable.elsewhere = why


@contextmanager
def cheap_constants(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """In this context, slots with a constant initial value need no memory beside them, as Keras's product does."""
    original = optimizer.add_variable_from_reference

    def add(reference_variable: Any, name: str | None = None, initializer: Any = "zeros") -> keras.Variable:
        if type(initializer) is keras.initializers.Constant and np.ndim(initializer.value) == 0:
            value = initializer.value
            return original(reference_variable, name, lambda shape, dtype: tf.fill(shape, tf.cast(value, dtype)))
        return original(reference_variable, name, initializer)

    with replaced(optimizer, add_variable_from_reference=add):
        yield
