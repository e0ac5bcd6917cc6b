"""Makes the arguments of a trainer from a checked config: the model, the data, hooks and callbacks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kdist.config import targets
from kdist.config.schema import Config, OptimizerConfig
from kdist.errors import ConfigError

if TYPE_CHECKING:
    import keras

#: The values that the function of `data` may return, by the names of `fit`.
DATA_ARGUMENTS = ("x", "y", "sample_weight", "class_weight", "validation_data", "validation_split")


def check_targets(config: Config) -> None:
    """Imports the targets of the config, if they are trusted, and checks their arguments; calls nothing."""
    called = targets.nodes_to_call(vars(config))
    others = {"optimizer.learning_rate": config.optimizer.learning_rate, "loss": config.loss, "metrics": config.metrics}
    if config.strategy._target_ is not None:
        others["strategy"] = vars(config.strategy)
    for key, node in (called | others).items():
        targets.check(key, node, config.run.trust)
    for key, node in called.items():
        target = targets.resolve(key, node["_target_"], config.run.trust)
        try:
            inspect.signature(target).bind(**targets.arguments_of(node))
        except TypeError as error:
            raise ConfigError(f"{key}: {node['_target_']}: {error}") from None
        except ValueError:
            continue  # A built-in without a signature; its call will show.


def parts_of(config: Config, *groups: str) -> list[Any]:
    """The results of the nodes of `groups` (hooks, callbacks or drill)."""
    nodes = targets.nodes_to_call(vars(config))
    return [targets.call(key, nodes[key], config.run.trust) for key in nodes if key.partition(".")[0] in groups]


def build_model(config: Config) -> keras.Model:
    """The model of the config, compiled as by its function, with the changes of the config."""
    import keras

    from kdist._compat.keras import compile_arguments

    packages = config.run.trust
    model = targets.call("model", config.model, packages)
    if not isinstance(model, keras.Model):
        raise ConfigError(f"model: {config.model['_target_']} returned {type(model).__name__}, not a keras.Model")
    arguments = compile_arguments(model)
    before = dict(arguments)
    optimizer = _optimizer(config.optimizer, arguments.get("optimizer"), packages)
    if optimizer is not None:
        arguments["optimizer"] = optimizer
    if config.loss is not None:
        arguments["loss"] = _keras_object("loss", config.loss, keras.losses.get, packages)
    if config.metrics is not None:
        arguments["metrics"] = [
            metric if isinstance(metric, str) else _keras_object(f"metrics[{i}]", metric, keras.metrics.get, packages)
            for i, metric in enumerate(config.metrics)
        ]
    if arguments != before:
        # A model that is not compiled needs both of them.
        if not model.compiled and ("optimizer" not in arguments or "loss" not in arguments):
            raise ConfigError(
                f"model {model.name} is not compiled: give both optimizer.name and loss in the config, or compile it "
                f"in {config.model['_target_']}"
            )
        try:
            model.compile(**arguments)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"optimizer, loss, metrics: {error}") from error
    return model


def _optimizer(config: OptimizerConfig, present: Any, packages: Sequence[str]) -> keras.optimizers.Optimizer | None:
    """The optimizer of the config: a new one, or the present one with other arguments; None for neither."""
    import keras

    from kdist._compat.keras import copy_decay_exclusions

    given = {key: value for key, value in vars(config).items() if value is not None}
    if not given:
        return None
    if isinstance(config.learning_rate, Mapping):
        given["learning_rate"] = targets.call("optimizer.learning_rate", config.learning_rate, packages)
    name = given.pop("name", None)
    if name is None and present is None:
        keys = ", ".join(f"optimizer.{key}" for key in given)
        raise ConfigError(f"{keys}: the model is not compiled; give optimizer.name as well")
    try:
        base = keras.optimizers.get(present if name is None else name)
    except ValueError:
        known = ", ".join(sorted(n.lower() for n, c in vars(keras.optimizers).items() if inspect.isclass(c)))
        raise ConfigError(f"optimizer.name={name}: Keras has no such optimizer; it has {known}") from None
    allowed = inspect.signature(type(base).__init__).parameters
    for key in given:
        if key not in allowed:
            takes = [k for k in vars(config) if k != "name" and k in allowed]
            raise ConfigError(f"optimizer.{key}: {type(base).__name__} takes no {key}; it takes {', '.join(takes)}")
    try:
        optimizer = type(base).from_config({**(base.get_config() if name is None else {}), **given})
    except (ValueError, TypeError) as error:
        raise ConfigError(f"optimizer: {type(base).__name__}: {error}") from error
    copy_decay_exclusions(base, optimizer)
    return optimizer


def data_arguments(config: Config) -> dict[str, Any]:
    """The data arguments of `fit`, from the result of the data function, also in the form of `keras.datasets`."""
    data = targets.call("data", config.data, config.run.trust)
    if isinstance(data, tuple) and len(data) == 2 and all(isinstance(part, tuple) and len(part) == 2 for part in data):
        (x, y), validation_data = data
        return {"x": x, "y": y, "validation_data": validation_data}
    if not isinstance(data, dict) or "x" not in data or set(data) - set(DATA_ARGUMENTS):
        what = f"a dict with {', '.join(map(str, data))}" if isinstance(data, dict) else type(data).__name__
        raise ConfigError(
            f"data: {config.data['_target_']} returned {what}; it must return a dict with x and any of "
            f"{', '.join(DATA_ARGUMENTS[1:])}, or ((x, y), (x_validation, y_validation))"
        )
    return data


def _keras_object(key: str, value: Any, get: Callable[[Any], Any], packages: Sequence[str]) -> Any:
    if isinstance(value, Mapping):
        return targets.call(key, value, packages)
    try:
        return get(value)
    except ValueError as error:
        raise ConfigError(f"{key}={value}: {str(error).splitlines()[0]}") from None
