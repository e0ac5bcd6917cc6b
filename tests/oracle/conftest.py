"""What every comparison with plain Keras needs: a TensorFlow that keeps the order of a step."""

from collections.abc import Iterator

import pytest
import tensorflow as tf


@pytest.fixture(scope="session", autouse=True)
def in_order() -> Iterator[None]:
    """Grappler's dependency optimizer drops edges that order the reads and writes of a variable.

    A compiled `train_step` that reads what it has updated then differs between runs of plain Keras: 1 of 40 fits with
    two optimizers on a busy machine, every fit with spectral norms (TensorFlow 2.21).
    """
    before = tf.config.optimizer.get_experimental_options()
    tf.config.optimizer.set_experimental_options({"dependency_optimization": False})
    yield
    tf.config.optimizer.set_experimental_options({**before, "dependency_optimization": True})
