"""The values of a training that Keras callbacks get."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import keras
import models
import numpy as np
import pytest
from keras import callbacks

from kdist.hooks.keras_callbacks import Callbacks
from kdist.model.state import read_from_model


class Anything(callbacks.Callback):
    """May look at the model."""


def names_read_for(listed: list[callbacks.Callback], model: keras.Model) -> set[str] | None:
    """The names of what a session is asked for; None if it is not asked."""
    values, asked = read_from_model(model), []

    def read(names: Any = None) -> dict[str, np.ndarray]:
        asked.append(set(values if names is None else names))
        return {name: value for name, value in values.items() if name in asked[-1]}

    shapes = {name: value.shape for name, value in values.items()}
    session: Any = SimpleNamespace(
        read=read,
        strategy=SimpleNamespace(values=SimpleNamespace(shapes=shapes)),
        spec=SimpleNamespace(stays_on_servers=lambda: False),
    )
    Callbacks(listed, model).pull(session)
    return asked[0] if asked else None


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        ([callbacks.EarlyStopping(), callbacks.CSVLogger("log.csv")], None),
        ([callbacks.EarlyStopping(), callbacks.ReduceLROnPlateau()], "scalars"),
        ([callbacks.LearningRateScheduler(lambda epoch, rate: rate)], "scalars"),
        ([callbacks.EarlyStopping(restore_best_weights=True)], "all"),
        ([callbacks.ReduceLROnPlateau(), Anything()], "all"),
    ],
)
def test_only_callbacks_that_may_look_at_the_model_bring_it(
    listed: list[callbacks.Callback], expected: str | None
) -> None:
    model = models.mlp()
    values = read_from_model(model)
    scalars = {name for name, value in values.items() if value.shape == ()}
    assert "optimizer/learning_rate" in scalars
    assert names_read_for(listed, model) == {"all": set(values), "scalars": scalars, None: None}[expected]
