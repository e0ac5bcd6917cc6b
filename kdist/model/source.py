"""`ModelSource`: the user's model, or the function that builds it; checks of a model before anything starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import cached_property, partial
from math import prod
from typing import Any, NoReturn, TypeAlias

import keras

from kdist._compat.keras import compile_arguments, layer_settings, layers_of, optimizers_of, strategy_of
from kdist._compat.lazy_variable import made_by
from kdist.errors import ConfigError
from kdist.layers.initial_rows import made_on_servers
from kdist.model.optimizer import check_optimizer


def check_model(model: keras.Model, strategy: str) -> None:
    """Refuses, with a `ConfigError`, a compiled model that no replica step can train under a strategy, by its name."""
    if overrides_of(model, "make_train_function") or (overrides_of(model, "fit") and preprocessing_of(model) is None):
        raise ConfigError(
            f"model {model.name}: class {type(model).__name__} has a `fit` or `make_train_function` of its own, which "
            "is not called here: prepare the data before (dataset.map(...)), put what belongs to a step into "
            "`train_step`, and give a model without it, as keras.Model(model.inputs, model.outputs), compiled"
        )
    if (scope := strategy_of(model)) is not None:
        raise ConfigError(
            f"model {model.name}: made in the scope of a {type(scope).__name__}, whose variables cannot be trained; "
            "make it outside of the scope, and choose with `strategy` how it is trained"
        )
    if model.optimizer is None:
        raise ConfigError(
            f"model {model.name} is compiled without an optimizer; a model with its own `compile` gives it to "
            "super().compile(optimizer=...)"
        )
    known = (keras.layers.RNN, keras.layers.Bidirectional)
    stateful = [layer for layer in layers_of(model) if getattr(layer, "stateful", False)]
    if names := [layer.name for layer in stateful if not isinstance(layer, known)]:
        raise ConfigError(
            f"model {model.name}: {', '.join(names)}: only layers that derive from keras.layers.RNN may be stateful; "
            "others keep what they remember in self.add_weight(..., trainable=False), which all workers share"
        )
    saved = [layer for layer in layers_of(model) if isinstance(layer, keras.layers.TFSMLayer)]
    if names := [layer.name for layer in saved if layer.trainable_variables]:
        raise ConfigError(
            f"model {model.name}: {', '.join(names)}: a TFSMLayer cannot be trained here, for the function in its file "
            "reads its own variables; give it trainable=False, or build the model of Keras layers"
        )
    for optimizer in optimizers_of(model).values():
        check_optimizer(optimizer, strategy)


def overrides_of(model: keras.Model, *methods: str) -> list[str]:
    """The names of the given methods that a model overrides."""
    return [name for name in methods if getattr(type(model), name) is not getattr(keras.Model, name)]


def preprocessing_of(model: keras.Model) -> Callable[..., Any] | None:
    """The function `(x, y, sample_weight) -> batch` by which a model's own `fit` prepares batches; None without one.

    It is the `preprocess_samples` of the class that has the `fit`, as in every task of KerasHub.
    """
    owner = next(kind for kind in type(model).__mro__ if "fit" in vars(kind))
    return model.preprocess_samples if "preprocess_samples" in vars(owner) else None


#: Methods of a model that write its values to a file.
WRITE_VALUES = ("save", "save_weights", "export")
#: Methods that use its values.
USE_VALUES = (*WRITE_VALUES, "evaluate", "predict", "test_on_batch", "predict_on_batch", "get_weights")

_Settings: TypeAlias = "tuple[dict[str, Any], list[tuple[keras.layers.Layer, dict[str, Any]]]]"


class ModelSource:
    """Builds the model when it is first needed, once in each process, and checks it.

    Args:
        build_model: a function that returns a compiled `keras.Model`, or such a model. To predict, it need not be
            compiled.
        on_servers: True if parameter servers will have its values, and make those of large tables.

    Raises:
        ConfigError: the model cannot be trained; at once if it is a model, else when it is built.
    """

    def __init__(
        self, build_model: Callable[[], keras.Model] | keras.Model, strategy: str, *, on_servers: bool = False
    ) -> None:
        self._build_model = build_model
        self._strategy = strategy
        self._on_servers = on_servers
        self._withheld: dict[str, Callable[..., NoReturn]] = {}
        #: The arguments of `compile`, and of each layer, as the model was built; a user may change them between fits.
        self._as_built: _Settings | None = None
        self._is_checked = False
        if isinstance(build_model, keras.Model):
            if names := [variable.path for variable in build_model.variables if made_by(variable) is not None]:
                raise ConfigError(
                    f"model {build_model.name}: the values of {', '.join(names)} were on parameter servers only; give "
                    "the function that builds the model, and the run dir that has its checkpoints"
                )
            self._check(build_model)

    @property
    def model(self) -> keras.Model:
        """The model of this process, which can be trained; raises `ConfigError` if it is not compiled."""
        if not self.built.compiled:
            raise ConfigError(
                f"model {self.built.name} is not compiled: call model.compile(optimizer=..., loss=...) in the function "
                "that builds it, or give optimizer, loss and metrics in the config"
            )
        self._check(self.built)
        return self.built

    @cached_property
    def built(self) -> keras.Model:
        """The model of this process, compiled or not."""
        model = self._build_model if isinstance(self._build_model, keras.Model) else self._make(self._build_model)
        self._mark(model)
        return model

    @property
    def description(self) -> dict[str, Any]:
        """The maker of the model, its number of weights and its loss: those of runs to compare; empty if not built."""
        make = self._build_model
        if "built" not in vars(self) and not isinstance(make, keras.Model):
            return {}
        maker = make if hasattr(make, "__qualname__") else type(make)
        num_weights = sum(prod(variable.shape) for variable in self.built.variables)
        loss = keras.tree.map_structure(_loss_name, compile_arguments(self.built).get("loss"))
        return {"model": f"{maker.__module__}.{maker.__qualname__}, {num_weights} weights", "loss": loss}

    def withhold(self, methods: Sequence[str] = (), why: Callable[[], ConfigError] | None = None) -> None:
        """Lets methods of the model raise an error that `why` makes; without any, undoes it."""
        self._withheld = {} if why is None else {name: partial(_refuse, why) for name in methods}
        if "built" in vars(self) or isinstance(self._build_model, keras.Model):
            self._mark(self.built)

    def _make(self, build_model: Callable[[], keras.Model]) -> keras.Model:
        with made_on_servers() if self._on_servers else nullcontext():
            model = build_model()
        if not isinstance(model, keras.Model):
            raise ConfigError(f"the model function returned {type(model).__name__}; it must return a keras.Model")
        self._check(model)
        self._as_built = compile_arguments(model), [(layer, layer_settings(layer)) for layer in layers_of(model)]
        return model

    def _check(self, model: keras.Model) -> None:
        if model.compiled and not self._is_checked:
            check_model(model, self._strategy)
            self._is_checked = True

    def _mark(self, model: keras.Model) -> None:
        for name in [n for n, value in vars(model).items() if isinstance(value, partial) and value.func is _refuse]:
            del vars(model)[name]
        vars(model).update(self._withheld)

    def __getstate__(self) -> dict[str, Any]:
        # Another process builds its own, unless this one was compiled again or has other layers frozen since.
        state = {name: value for name, value in vars(self).items() if name != "built"}
        if self._as_built is not None and _have_changed(self._as_built, self.built):
            state["_build_model"] = self.built
        return {**state, "_as_built": None, "_is_checked": False}


def _have_changed(as_built: _Settings, model: keras.Model) -> bool:
    """True if settings of a model have changed; layers that it has made since do not count."""
    compiled, layers = as_built
    if any(value is not compiled.get(name) for name, value in compile_arguments(model).items()):
        return True
    settings = ((before, layer_settings(layer)) for layer, before in layers)
    # `build` may drop a setting, such as the axis of normalization.
    return any(before[name] != now[name] for before, now in settings for name in before.keys() & now.keys())


def _loss_name(loss: Any) -> str | None:
    # An unknown one is an error of its own, when training begins.
    with suppress(ValueError):
        loss = keras.losses.get(loss)
    return loss if loss is None else getattr(loss, "name", None) or getattr(loss, "__name__", str(loss))


def _refuse(why: Callable[[], ConfigError], /, *_: Any, **__: Any) -> NoReturn:
    """Stands in for a method of a model that does not have the values that it would use."""
    raise why()
