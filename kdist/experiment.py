"""From a checked config to a trained model: what `python -m kdist` does once Hydra has composed the config."""

from __future__ import annotations

import gc
import importlib
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kdist import trusted
from kdist.config_sources import overrides_of_job
from kdist.errors import ConfigError
from kdist.hparams import CHOSEN, hparams_of
from kdist.quick_import import quick_import
from kdist.schema import Config, OptimizerConfig

if TYPE_CHECKING:
    import keras

    from kdist.strategies.base import Strategy
    from kdist.trainer import Trainer


def run_experiment(config: Config, run_dir: Path | None, *, is_chief: bool = True) -> None:
    """Trains as `config` says, or takes part in the training if this process is not the chief.

    Args:
        config: checked by `check_targets`.
        run_dir: where everything goes, locked by the caller if it is the chief; None in a process that needs none.
        is_chief: whether this process writes the result of the run.
    """
    with quick_import():
        import keras
        import tensorflow as tf

        from kdist.result import Result, describe
        from kdist.run_dir import RunDir

    # All that is there before the first job stays. Before the next ones it would keep what is left of those before.
    if not gc.get_freeze_count():
        gc.freeze()
    tf.debugging.set_log_device_placement(config.run.log_device_placement)
    tf.config.set_soft_device_placement(config.run.soft_device_placement)
    # Names of layers count from the start in every run of a sweep.
    keras.utils.clear_session()
    if config.run.seed is not None:
        keras.utils.set_random_seed(config.run.seed)
    started = time.time()
    trainer = None
    try:
        trainer = _trainer(config, run_dir)
        trainer.run_dir_is_locked = True
        # Built now: what is wrong with it is found before anything starts.
        _ = trainer.model
        data = _data_arguments(config)
        if config.run.plan_only:
            print(trainer.plan(data["x"], data.get("y"), config.train.batch_size).table(), end="", flush=True)
            return
        trainer.fit(
            **data,
            batch_size=config.train.batch_size,
            steps=config.train.steps,
            epochs=config.train.epochs or 1,
            steps_per_epoch=config.train.steps_per_epoch,
            validation_every_steps=config.train.validation_every_steps,
            validate_with_ema=config.train.validate_with_ema,
            verbose=config.run.verbose,
        )
    except BaseException as error:
        # What fails before training leaves its result, too.
        is_said = not is_chief or (trainer is not None and trainer.result.error is not None)
        if run_dir is not None and not is_said and not RunDir(run_dir, config.run.name).has_result_since(started):
            result = Result(strategy=config.strategy.name, cluster=config.cluster.shape, error=describe(error))
            RunDir(run_dir, config.run.name).write_result(result)
        raise


def _trainer(config: Config, run_dir: Path | None) -> Trainer:
    from kdist.trainer import Trainer

    return Trainer(
        partial(build_model, config),
        cluster=config.cluster,
        strategy=_strategy(config),
        run_dir=run_dir,
        hooks=[_call(key, hook, config.run.trust) for key, hook in _hook_nodes(config).items()],
        callbacks=[_call(key, node, config.run.trust) for key, node in _callback_nodes(config).items()],
        name=config.run.name,
        steps_per_call=config.train.steps_per_call,
        resume=config.run.resume,
        seed=config.run.seed,
        max_restarts=config.train.max_restarts,
        grace_secs=config.run.grace_secs,
        stop_signals=config.run.stop_signals,
        use_default_hooks=False,
        hparams=_hparams(config),
        **{key: value for key, value in vars(config.strategy).items() if key not in ("name", "_target_")},
    )


def _strategy(config: Config) -> str | type[Strategy]:
    """The name of the strategy, or the class that the config names."""
    from kdist.strategies.base import Strategy

    target = config.strategy._target_
    if target is None:
        return config.strategy.name
    found: Any = _resolve("strategy", target, config.run.trust)
    if not (inspect.isclass(found) and issubclass(found, Strategy)):
        raise ConfigError(
            f"strategy._target_={target}: must be a class derived from that of strategy={config.strategy.name}"
        )
    return found


def _hparams(config: Config) -> dict[str, Any]:
    return hparams_of(asdict(config), overrides_of_job(), [*CHOSEN, *config.run.hparams])


def check_targets(config: Config) -> None:
    """Imports what the config names by `_target_`, if it is trusted, and checks the arguments; calls nothing.

    Raises:
        ConfigError: names the key, the target and what is wrong.
    """
    nodes = {"model": config.model, "data": config.data}
    nodes |= _hook_nodes(config) | _callback_nodes(config)
    if config.strategy._target_ is not None:
        trusted.check("strategy", vars(config.strategy), config.run.trust)
        _strategy(config)
    others = {"optimizer.learning_rate": config.optimizer.learning_rate, "loss": config.loss, "metrics": config.metrics}
    for key, node in (nodes | others).items():
        trusted.check(key, node, config.run.trust)
    for key, node in nodes.items():
        target = _resolve(key, node["_target_"], config.run.trust)
        try:
            inspect.signature(target).bind(**_arguments(node))
        except TypeError as error:
            raise ConfigError(f"{key}: {node['_target_']}: {error}") from None
        except ValueError:
            continue  # A built-in without a signature; its call will tell.


def _hook_nodes(config: Config) -> dict[str, Any]:
    """The hooks of a config by their keys; a drill is one, too."""
    nodes = {f"hooks.{name}": hook for name, hook in config.hooks.items()} | {"drill": config.drill}
    return {key: node for key, node in nodes.items() if node is not None}


def _callback_nodes(config: Config) -> dict[str, Any]:
    """The Keras callbacks of a config by their keys."""
    return {f"callbacks.{name}": node for name, node in config.callbacks.items() if node is not None}


def build_model(config: Config) -> keras.Model:
    """The model of the config, compiled: as its function left it where the config says nothing else.

    Raises:
        ConfigError: an unknown optimizer, loss, metric or argument.
    """
    import keras

    packages = config.run.trust
    model = _call("model", config.model, packages)
    if not isinstance(model, keras.Model):
        raise ConfigError(f"model: {config.model['_target_']} returned {type(model).__name__}, not a keras.Model")
    compiled = getattr(model, "_compile_config", None)
    arguments: dict[str, Any] = dict(compiled.config) if model.compiled and compiled is not None else {}
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
        # A model that had nothing is compiled only if it gets the two things that it needs.
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
    """The optimizer that the config asks for: a new one, or the present one with other arguments; None for neither."""
    import keras

    given = {key: value for key, value in vars(config).items() if value is not None}
    if not given:
        return None
    if isinstance(config.learning_rate, Mapping):
        given["learning_rate"] = _call("optimizer.learning_rate", config.learning_rate, packages)
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
    # What `exclude_from_weight_decay` sets is part of an optimizer, and not of its config.
    kept = {key: value for key, value in vars(base).items() if key.startswith("_exclude_from_weight_decay")}
    vars(optimizer).update({**kept, "_exclude_from_weight_decay_cache": {}})
    return optimizer


def _data_arguments(config: Config) -> dict[str, Any]:
    """The data arguments of `fit`: what the data function returned, also in the form of `keras.datasets`."""
    allowed = ("x", "y", "sample_weight", "class_weight", "validation_data", "validation_split")
    data = _call("data", config.data, config.run.trust)
    if isinstance(data, tuple) and len(data) == 2 and all(isinstance(part, tuple) and len(part) == 2 for part in data):
        (x, y), validation_data = data
        return {"x": x, "y": y, "validation_data": validation_data}
    if not isinstance(data, dict) or "x" not in data or set(data) - set(allowed):
        what = f"a dict with {', '.join(map(str, data))}" if isinstance(data, dict) else type(data).__name__
        raise ConfigError(
            f"data: {config.data['_target_']} returned {what}; it must return a dict with x and any of "
            f"{', '.join(allowed[1:])}, or ((x, y), (x_validation, y_validation))"
        )
    return data


def _keras_object(key: str, value: Any, get: Callable[[Any], Any], packages: Sequence[str]) -> Any:
    if isinstance(value, Mapping):
        return _call(key, value, packages)
    try:
        return get(value)
    except ValueError as error:
        raise ConfigError(f"{key}={value}: {str(error).splitlines()[0]}") from None


def _call(key: str, node: Mapping[str, Any], packages: Sequence[str]) -> Any:
    """Calls what `node` names with its arguments, which may name targets themselves.

    Errors of the called function are the user's own and pass through.
    """
    trusted.check(key, node, packages)
    target = _resolve(key, str(node["_target_"]), packages)
    arguments = _arguments(node)
    for name, value in arguments.items():
        if isinstance(value, Mapping) and "_target_" in value:
            arguments[name] = _call(f"{key}.{name}", value, packages)
    return target(**arguments)


def _arguments(node: Mapping[str, Any]) -> dict[str, Any]:
    return {str(key): value for key, value in node.items() if key != "_target_"}


def _resolve(key: str, target: str, packages: Sequence[str]) -> Callable[..., Any]:
    """The function or class that `target` names, as `package.module.name`; it has passed `trusted.check`.

    Hydra's `instantiate` hides why an import failed, so it is done here.

    Args:
        packages: trusted by this run.
    """
    module_name, _, name = target.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"{key}._target_={target}: cannot be imported: {error}") from error
    try:
        found = getattr(module, name)
    except AttributeError:
        raise ConfigError(f"{key}._target_={target}: {module_name} has no {name}") from None
    if not callable(found):
        raise ConfigError(f"{key}._target_={target}: is a {type(found).__name__}, not a function or class")
    trusted.check_origin(key, target, found, packages)
    return found
