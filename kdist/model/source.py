"""`ModelSource`: the user's model, or the function that builds it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cached_property
from typing import Any

import keras

from kdist.errors import ConfigError
from kdist.layers.initial_rows import made_on_servers
from kdist.model.model_checks import check_has_values, check_model


class ModelSource:
    """Builds the model when it is first needed, once in each process, and checks it.

    Args:
        build_model: a function that returns a compiled `keras.Model`, or such a model.
        strategy: name of the strategy that will train it.
        on_servers: whether parameter servers will have its values, and make those of large tables.

    Raises:
        ConfigError: the model cannot be trained; at once if it is a model, else when it is built.
    """

    def __init__(
        self, build_model: Callable[[], keras.Model] | keras.Model, strategy: str, *, on_servers: bool = False
    ) -> None:
        self._build_model = build_model
        self._strategy = strategy
        self._on_servers = on_servers
        if isinstance(build_model, keras.Model):
            check_has_values(build_model)
            check_model(build_model, strategy)

    @cached_property
    def model(self) -> keras.Model:
        """The model of this process."""
        if isinstance(self._build_model, keras.Model):
            return self._build_model
        with made_on_servers() if self._on_servers else nullcontext():
            model = self._build_model()
        if not isinstance(model, keras.Model):
            raise ConfigError(f"the model function returned {type(model).__name__}; it must return a keras.Model")
        check_model(model, self._strategy)
        return model

    def __getstate__(self) -> dict[str, Any]:
        # Another process builds its own.
        return {name: value for name, value in vars(self).items() if name != "model"}
