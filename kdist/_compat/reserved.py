"""Variables of Keras without values, and the slots of optimizers; read in Keras 3.12 to 3.15."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kdist._compat.keras import optimizers_of
from kdist._compat.tensorflow import UninitializedVariable


class Reserved(keras.Variable):
    """A variable whose values are made elsewhere: it has a shape, but no memory; reading it gives no element.

    Attributes:
        made_by: the initializer of its values; None from the moment values are assigned to it here.
    """

    made_by: Callable[..., Any] | None

    def _initialize_with_initializer(self, initializer: Any) -> None:
        # Also called later, for variables that were made while a model was built symbolically.
        self._value = UninitializedVariable(trainable=self.trainable, shape=self.shape, dtype=self.dtype)

    def _direct_assign(self, value: Any) -> None:
        self.made_by = None
        super()._direct_assign(value)


def no_rows(shape: Sequence[int], dtype: Any = None) -> tf.Tensor:
    """An initializer for variables that become reserved."""
    return tf.zeros([0, *shape[1:]], dtype)


def reserve(variable: keras.Variable, made_by: Callable[..., Any]) -> None:
    """Makes a variable that was initialized by `no_rows` a reserved one."""
    variable.__class__ = Reserved
    variable.made_by = made_by
    if variable._value is not None:
        variable._initialize_with_initializer(made_by)


def made_by(variable: keras.Variable) -> Callable[..., Any] | None:
    """What is to make the values of a reserved variable; None if a variable has values."""
    return variable.made_by if isinstance(variable, Reserved) else None


@contextmanager
def reserved_slots(model: keras.Model) -> Iterator[None]:
    """In this context, slots that the optimizers of a compiled model make for reserved variables are reserved, too."""

    def add(original: Callable[..., Any], reference: Any, name: str | None, initializer: Any) -> keras.Variable:
        if made_by(reference) is None:
            return original(reference, name=name, initializer=initializer)
        slot = original(reference, name=name, initializer=no_rows)
        reserve(slot, keras.initializers.get(initializer))
        return slot

    optimizers = list(optimizers_of(model).values())
    with _adding_slots([*optimizers, *(part for o in optimizers for part in getattr(o, "optimizers", ()))], add):
        yield


@contextmanager
def cheap_constants(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """In this context, slots with a constant initial value need no memory beside them, as Keras's product does."""

    def add(original: Callable[..., Any], reference: Any, name: str | None, initializer: Any) -> keras.Variable:
        if type(initializer) is keras.initializers.Constant and np.ndim(initializer.value) == 0:
            value = initializer.value
            return original(reference, name=name, initializer=lambda s, dtype: tf.fill(s, tf.cast(value, dtype)))
        return original(reference, name=name, initializer=initializer)

    with _adding_slots([optimizer], add):
        yield


@contextmanager
def _adding_slots(
    optimizers: Sequence[keras.optimizers.Optimizer], add: Callable[..., keras.Variable]
) -> Iterator[None]:
    """In this context `add(Keras's function, variable, name, initializer)` makes the slots of optimizers."""

    def adding(optimizer: Any) -> Callable[..., keras.Variable]:
        original = optimizer.add_variable_from_reference

        def add_variable_from_reference(
            reference_variable: Any, name: str | None = None, initializer: Any = "zeros"
        ) -> keras.Variable:
            return add(original, reference_variable, name, initializer)

        return add_variable_from_reference

    for optimizer in optimizers:
        vars(optimizer)["add_variable_from_reference"] = adding(optimizer)
    try:
        yield
    finally:
        for optimizer in optimizers:
            del vars(optimizer)["add_variable_from_reference"]
