"""`SeededScope`: the scope of a pure step, in which everything that draws random numbers has a state."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from kdist._compat.keras import global_seed
from kdist.model.names import is_seed


class SeededScope(keras.StatelessScope):
    """A stateless scope that gives a state to seed generators which no layer has, as those of metrics and losses.

    Their states follow from that of the global generator, if the scope has one: otherwise a step would read, on another
    task, a variable of this process.
    """

    _num_found = 0

    def get_current_value(self, variable: keras.Variable) -> Any:
        value = super().get_current_value(variable)
        if value is None and is_seed(variable) and (seed := self.state_mapping.get(id(global_seed()))) is not None:
            self._num_found += 1
            own = tf.constant([self._num_found, 0], seed.dtype)
            value = self.state_mapping[id(variable)] = tf.cast(tf.bitwise.bitwise_xor(seed, own), variable.dtype)
        return value
