"""A line for the recipe `linear`: one weight and one bias, found again from points with noise.

Keras is imported when it is used, so that a config that names these functions can be checked without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kdist.console import lines
from kdist.hooks import Hook, RunContext, RunValues, SecondOrStepTimer, Session
from kdist.log import say

if TYPE_CHECKING:
    import keras


def build_model(learning_rate: float = 0.02) -> keras.Model:
    """y = w x + b; compiled with SGD on the squared error. Input: float32 [batch, 1]."""
    import keras

    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)], name="linear")
    model.compile(optimizer=keras.optimizers.SGD(learning_rate), loss="mse")
    return model


def load_data(
    weight: float = 2.0, bias: float = 10.0, noise: float = 0.5, num_points: int = 10_000, seed: int = 0
) -> dict[str, Any]:
    """Points around the line y = `weight` x + `bias` as the data arguments of `fit`: x and y float32 [n, 1].

    Prints one line that says which line it is.

    Args:
        weight, bias: of the line.
        noise: standard deviation of y around the line; its square is the floor of the loss.
        num_points: to train with; a tenth as many more are there to validate with.
        seed: the same seed gives the same points.
    """
    num_validation = num_points // 10
    random = np.random.default_rng(seed)
    x = random.uniform(-1.0, 1.0, (num_points + num_validation, 1))
    y = weight * x + bias + random.normal(0.0, noise, x.shape)
    x, y = x.astype(np.float32), y.astype(np.float32)
    say(
        f"data      {num_points} + {num_validation} points of y = {weight:g}x + {bias:g}, noise {noise:.2f} "
        f"(the floor of the loss is {noise**2:.2f})",
    )
    return {
        "x": x[:num_points],
        "y": y[:num_points],
        "validation_data": (x[num_points:], y[num_points:]),
    }


class PrintParameters(Hook):
    """Prints weight and bias every so often, and at the end.

    Args:
        every_steps: steps between two lines; at least 1.
    """

    def __init__(self, every_steps: int = 100) -> None:
        self._timer = SecondOrStepTimer(every_steps=every_steps, owner="hooks.print_parameters")
        self._printed_step: int | None = None

    def after_create_session(self, session: Session) -> None:
        self._timer.start(session.global_step)
        self._printed_step = None

    def after_run(self, context: RunContext, values: RunValues) -> None:
        if self._timer.due(values.global_step):
            self._print(context.session)
            self._timer.restart(values.global_step)

    def end(self, session: Session) -> None:
        if self._printed_step != session.global_step:
            self._print(session)

    def due_in(self, step: int) -> int | None:
        return self._timer.due_in(step)

    def idle_in(self, step: int) -> int | None:
        # The values of that very step.
        return self.due_in(step)

    def _print(self, session: Session) -> None:
        parameters = session.read()
        weight = parameters["parameters/dense/kernel"].item()
        bias = parameters["parameters/dense/bias"].item()
        columns = (f"w {weight:.4f}", f"b {bias:.4f}")
        session.print_line(lines.event_line("line", session.global_step, session.last_step, *columns))
        self._printed_step = session.global_step
