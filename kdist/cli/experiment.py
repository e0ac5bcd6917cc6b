"""One run of the command line: from a checked config to a trained model."""

from __future__ import annotations

import gc
import inspect
import os
import time
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from kdist import log
from kdist._compat.imports import quick_import
from kdist.cluster.resolve import membership_of, shape_of
from kdist.config import targets
from kdist.config.build import build_model, data_arguments, parts_of
from kdist.config.hparams import CHOSEN, hparams_of, overrides_of_job
from kdist.config.schema import Config
from kdist.errors import ConfigError
from kdist.strategies import registry

if TYPE_CHECKING:
    from kdist.hooks import Hook
    from kdist.run.result import Origin
    from kdist.storage.folder import Folder
    from kdist.strategies.base import Strategy


def run_experiment(
    config: Config, run_dir: Folder | str | None, origin: Origin | None = None, *, is_chief: bool = True
) -> None:
    """Trains as configured, or takes part in the training if this process is not the chief.

    Args:
        config: checked by `check_targets`.
        run_dir: the run dir, locked by the caller if it is the chief; None in a process that needs none.
        origin: what its result says of where the run comes from.
        is_chief: whether this process writes the result of the run.
    """
    with quick_import():
        import keras
        import tensorflow as tf

        from kdist.run.result import Result, describe
        from kdist.run.run_dir import RunDir
        from kdist.trainer import Trainer

    # Objects from before the first trial stay. Later it would also keep garbage of earlier trials.
    if not gc.get_freeze_count():
        gc.freeze()
    tf.debugging.set_log_device_placement(config.run.log_device_placement)
    tf.config.set_soft_device_placement(config.run.soft_device_placement)
    # Layer names are numbered from the start in every trial of a sweep.
    keras.utils.clear_session()
    if config.run.seed is not None:
        keras.utils.set_random_seed(config.run.seed)
    if run_dir is not None and is_chief:
        # Before anything replaces the record of a newer version.
        RunDir(run_dir, config.run.name).read_result()
    started = time.time()
    trainer = None
    try:
        strategy, train = strategy_of(config), config.train
        if train.epochs is None:
            train = replace(train, epochs=1)
        trainer = Trainer.of_config(
            replace(config, train=train),
            partial(build_model, config),
            custom=None if isinstance(strategy, str) else strategy,
            run_dir=run_dir,
            hooks=[*parts_of(config, "hooks", "drill"), *_servers(config)],
            callbacks=parts_of(config, "callbacks"),
            hparams=hparams_of(asdict(config), overrides_of_job(), [*CHOSEN, *config.run.hparams]),
            origin=origin,
        )
        # Built now, so that its errors are found before anything starts.
        _ = trainer.model
        data = data_arguments(config)
        if config.run.plan_only:
            table = trainer.plan(data["x"], data.get("y"), config.train.batch_size).table()
            log.say(log.Line(table.rstrip("\n"), "plan"))
            return
        trainer.fit_as_configured(**data)
    except BaseException as error:
        # A failure before training leaves a result, too.
        is_said = not is_chief or (trainer is not None and trainer.result.error is not None)
        if run_dir is not None and not is_said:
            files = RunDir(run_dir, config.run.name)
            if (written := files.result_written_at()) is None or written < started:
                shape = shape_of(config.cluster, membership_of(config.cluster, os.environ))
                files.write_result(
                    Result(
                        strategy=registry.resolve(config.strategy, shape),
                        cluster=str(shape),
                        error=describe(error),
                        seed=config.run.seed,
                        **({} if origin is None else vars(origin)),
                    )
                )
        raise


def _servers(config: Config) -> list[Hook]:
    """The hooks that answer over HTTP while the run lasts."""
    from kdist import hooks

    run = config.run
    found: list[Hook] = [] if run.metrics_port is None else [hooks.MetricsServer(run.metrics_port, run.metrics_host)]
    return found if run.health_port is None else [*found, hooks.HealthCheck(run.health_port)]


def strategy_of(config: Config) -> str | type[Strategy]:
    """The name of the strategy, or the class that the config names."""
    target = config.strategy._target_
    if target is None:
        return config.strategy.name
    from kdist.strategies.base import Strategy

    found: Any = targets.resolve("strategy", target, config.run.trust)
    if not (inspect.isclass(found) and issubclass(found, Strategy)):
        raise ConfigError(
            f"strategy._target_={target}: must be a class derived from that of strategy={config.strategy.name}"
        )
    return found
