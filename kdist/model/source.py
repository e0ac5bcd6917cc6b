"""`ModelSource`: the user's model, or the function that builds it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any, NoReturn

import keras

from kdist._compat.keras import compile_arguments, layer_settings, layers_of
from kdist.errors import ConfigError
from kdist.layers.initial_rows import made_on_servers
from kdist.model.model_checks import check_compiled, check_has_values, check_model

#: Methods of a model that write its values to a file.
WRITE_VALUES = ("save", "save_weights", "export")
#: Those that use its values.
USE_VALUES = (*WRITE_VALUES, "evaluate", "predict", "test_on_batch", "predict_on_batch", "get_weights")


class ModelSource:
    """Builds the model when it is first needed, once in each process, and checks it.

    Args:
        build_model: a function that returns a compiled `keras.Model`, or such a model. To predict, it need not be
            compiled.
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
        self._withheld: dict[str, _Withheld] = {}
        self._as_built: _Settings | None = None
        self._is_checked = False
        if isinstance(build_model, keras.Model):
            check_has_values(build_model)
            self._check(build_model)

    @property
    def model(self) -> keras.Model:
        """The model of this process, which can be trained; raises `ConfigError` if it is not compiled."""
        check_compiled(self.built)
        self._check(self.built)
        return self.built

    @cached_property
    def built(self) -> keras.Model:
        """The model of this process, compiled or not."""
        model = self._build_model if isinstance(self._build_model, keras.Model) else self._make(self._build_model)
        self._mark(model)
        return model

    def withhold(self, methods: Sequence[str] = (), why: Callable[[], ConfigError] | None = None) -> None:
        """Lets methods of the model raise an error that `why` makes; without any, undoes it.

        The rest of the model can be looked at.
        """
        self._withheld = {} if why is None else {name: _Withheld(why) for name in methods}
        if "built" in vars(self) or isinstance(self._build_model, keras.Model):
            self._mark(self.built)

    def _make(self, build_model: Callable[[], keras.Model]) -> keras.Model:
        with made_on_servers() if self._on_servers else nullcontext():
            model = build_model()
        if not isinstance(model, keras.Model):
            raise ConfigError(f"the model function returned {type(model).__name__}; it must return a keras.Model")
        self._check(model)
        self._as_built = _Settings(model)
        return model

    def _check(self, model: keras.Model) -> None:
        if model.compiled and not self._is_checked:
            check_model(model, self._strategy)
            self._is_checked = True

    def _mark(self, model: keras.Model) -> None:
        for name in [name for name, value in vars(model).items() if isinstance(value, _Withheld)]:
            del vars(model)[name]
        vars(model).update(self._withheld)

    def __getstate__(self) -> dict[str, Any]:
        # Another process builds its own, unless this one was compiled again or has other layers frozen since.
        state = {name: value for name, value in vars(self).items() if name != "built"}
        if self._as_built is not None and self._as_built.differ_from(self.built):
            state["_build_model"] = self.built
        return {**state, "_as_built": None, "_is_checked": False}


class _Settings:
    """What a user may change of a model between two fits: what `compile` was given, and the arguments of its layers."""

    def __init__(self, model: keras.Model) -> None:
        self._compiled = compile_arguments(model)
        self._layers = [(layer, layer_settings(layer)) for layer in layers_of(model)]

    def differ_from(self, model: keras.Model) -> bool:
        """Whether they are others by now; layers that the model has made since do not count."""
        compiled = compile_arguments(model)
        is_compiled_again = any(value is not self._compiled.get(name) for name, value in compiled.items())
        return is_compiled_again or any(_differ(before, layer_settings(layer)) for layer, before in self._layers)


def _differ(before: dict[str, Any], now: dict[str, Any]) -> bool:
    """Whether a setting has another value; `build` may make something else of one, as of the axis of normalization."""
    return any(now[name] != before[name] for name in before.keys() & now.keys())


class _Withheld:
    """Stands in for a method of a model that does not have the values that it would use."""

    def __init__(self, why: Callable[[], ConfigError]) -> None:
        self._why = why

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise self._why()
