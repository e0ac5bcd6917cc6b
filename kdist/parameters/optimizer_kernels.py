"""Keras's optimizers with their dense updates as one operation each, by TensorFlow's own kernels.

Keras writes an update as a dozen operations, each of which goes over all the elements and makes a tensor of them. The
kernels compute the same formulas in one go and in place, and hold the locks of all the variables that they change, so
that updates of several workers come one after the other. Sparse gradients are left to Keras.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from kdist._compat.keras import NadamBySteps


class _SGD(keras.optimizers.SGD):
    """Plain, with momentum, and Nesterov's."""

    def update_step(self, gradient: tf.Tensor, variable: tf.Variable, learning_rate: tf.Tensor) -> None:
        if isinstance(gradient, tf.IndexedSlices):
            super().update_step(gradient, variable, learning_rate)
            return
        learning_rate = tf.cast(learning_rate, variable.dtype)
        gradient = tf.cast(gradient, variable.dtype)
        if self.momentum == 0:
            tf.raw_ops.ResourceApplyGradientDescent(
                var=variable.handle, alpha=learning_rate, delta=gradient, use_locking=True
            )
            return
        tf.raw_ops.ResourceApplyKerasMomentum(
            var=variable.handle,
            accum=self.momentums[self._get_variable_index(variable)].value.handle,
            lr=learning_rate,
            grad=gradient,
            momentum=tf.cast(self.momentum, variable.dtype),
            use_locking=True,
            use_nesterov=self.nesterov,
        )


class _Adam(keras.optimizers.Adam):
    """With and without AMSGrad."""

    def update_step(self, gradient: tf.Tensor, variable: tf.Variable, learning_rate: tf.Tensor) -> None:
        if isinstance(gradient, tf.IndexedSlices):
            super().update_step(gradient, variable, learning_rate)
            return
        index = self._get_variable_index(variable)
        local_step = tf.cast(self.iterations + 1, variable.dtype)
        beta_1, beta_2 = tf.cast(self.beta_1, variable.dtype), tf.cast(self.beta_2, variable.dtype)
        arguments: dict[str, Any] = {
            "var": variable.handle,
            "m": self._momentums[index].value.handle,
            "v": self._velocities[index].value.handle,
            "beta1_power": tf.pow(beta_1, local_step),
            "beta2_power": tf.pow(beta_2, local_step),
            "lr": tf.cast(learning_rate, variable.dtype),
            "beta1": beta_1,
            "beta2": beta_2,
            "epsilon": tf.cast(self.epsilon, variable.dtype),
            "grad": tf.cast(gradient, variable.dtype),
            "use_locking": True,
        }
        if self.amsgrad:
            tf.raw_ops.ResourceApplyAdamWithAmsgrad(vhat=self._velocity_hats[index].value.handle, **arguments)
        else:
            tf.raw_ops.ResourceApplyAdam(**arguments)


class _AdamW(_Adam, keras.optimizers.AdamW):
    """Keras decays the weights before the update."""


def add_to_rows(variable: tf.Variable, rows: tf.Tensor, values: tf.Tensor) -> tf.Operation:
    """Adds to rows, int64 `[n]`, each of them once; traced.

    The operation holds the variable's own lock. `ResourceScatterAdd` shares that lock with others, and loses what two
    of them add to a row at the same time.
    """
    return tf.raw_ops.ResourceScatterNdAdd(
        ref=variable.handle, indices=rows[:, tf.newaxis], updates=values, use_locking=True
    )


#: Classes of the same maths with updates by kernels. Not for subclasses: those of users may compute something else.
BY_KERNEL: dict[type[keras.optimizers.Optimizer], type[keras.optimizers.Optimizer]] = {
    keras.optimizers.SGD: _SGD,
    keras.optimizers.Adam: _Adam,
    keras.optimizers.AdamW: _AdamW,
    keras.optimizers.Nadam: NadamBySteps,
}


def only_adds(kind: type[keras.optimizers.Optimizer]) -> bool:
    """Whether dense updates of a class change variables and slots by kernels, or by additions alone.

    What reads a slot and assigns to it what it has computed loses what another worker has written in between.
    """
    return any(each in (*BY_KERNEL.values(), keras.optimizers.Adagrad) for each in kind.__mro__[:2])
