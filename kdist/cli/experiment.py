"""One run of the command line: from a composed config to a trained model."""

from __future__ import annotations

import gc
import inspect
import os
import time
from argparse import Namespace
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from kdist import log
from kdist._compat import imports
from kdist.cli.compose import check_keys, explain_errors, shell_argument
from kdist.cli.hydra_plugins import write_record
from kdist.cli.main import LOG_FILE, native_log, start_anew
from kdist.cluster.network import isolate, sockets
from kdist.cluster.resolve import membership_of, shape_of
from kdist.cluster.spec import Membership
from kdist.config import targets
from kdist.config.build import build_model, check_targets, data_arguments, parts_of
from kdist.config.checks import check_target
from kdist.config.environment import as_written
from kdist.config.hparams import hparams_of, overrides_of_job
from kdist.config.record import record_of
from kdist.config.scheduler import grace_secs_of
from kdist.config.schema import Config
from kdist.console import lines
from kdist.errors import ClusterError, ConfigError, KdistError, TaskError, traceback_of
from kdist.fit import signals
from kdist.log import warn
from kdist.storage.files import relative
from kdist.storage.mirror import chief_folder, lock_of
from kdist.strategies import registry

if TYPE_CHECKING:
    from kdist.hooks import Hook
    from kdist.run.result import Origin
    from kdist.storage.folder import Folder
    from kdist.strategies.base import Strategy


def check_job(config: DictConfig, parsed: Namespace) -> tuple[Config, Membership | None]:
    """The config as dataclasses, with values and targets checked, and the role of this process in its cluster."""
    with explain_errors(ValueError):
        check_keys(config, Config)
        checked: Any = OmegaConf.to_object(config)
        log.use(checked.run.log_format)
        checked.check()
        check_target("data", checked.data)
        if Path(checked.run.dir).exists() and not Path(checked.run.dir).is_dir():
            raise ConfigError(f"run.dir={checked.run.dir}: is a file")
        membership = membership_of(checked.cluster, os.environ)
        shape = shape_of(checked.cluster, membership)
        registry.resolve(checked.strategy, shape)
        checked.run.trust = targets.of_command_line(checked.run.trust, parsed.overrides)
        if membership is None and (parsed.multirun or not shape.is_local):
            # Now, while there is one thread, and before the first trial of a sweep.
            isolate.enter(checked.cluster.isolate)
        sockets.bind_to(checked.cluster.bind, all_here=membership is None)
        # It may import TensorFlow, which prints messages about every machine.
        with native_log(Path(os.devnull)):
            check_targets(checked)
            custom_strategy(checked)
    return checked, membership


def custom_strategy(config: Config) -> type[Strategy] | None:
    """The class of the strategy, if the config names one."""
    target = config.strategy._target_
    if target is None:
        return None
    from kdist.strategies.base import Strategy

    found: Any = targets.resolve("strategy", target, config.run.trust)
    if not (inspect.isclass(found) and issubclass(found, Strategy)):
        raise ConfigError(
            f"strategy._target_={target}: must be a class derived from that of strategy={config.strategy.name}"
        )
    return found


class EndOfSweep(ExitStack):
    """Callbacks for the end of a sweep that runs its trials in `process`; copies in other processes never run them."""

    def __init__(self) -> None:
        super().__init__()
        self.process = os.getpid()


def run_job(
    config: DictConfig,
    trial_dir: str | None = None,
    *,
    parsed: Namespace,
    end_of_sweep: EndOfSweep | None = None,
    began: float | None = None,
) -> None:
    """One run, in the folder that Hydra has created for it; `trial_dir` is the run dir of a trial of a sweep.

    The fork server of trials in the process of their sweep ends with `end_of_sweep`. The command `began` at that time.
    """
    began = time.monotonic() if began is None else began
    checked, membership = check_job(config, parsed)
    if membership is not None and HydraConfig.get().mode == RunMode.MULTIRUN:
        raise ConfigError(f"cluster={checked.cluster.shape}: tasks that others start have one run, and no sweep (-m)")
    if membership is not None and not membership.is_chief:
        take_part(config, checked, membership)
        return
    checked.run.dir = trial_dir or checked.run.dir
    run_dir = relative(Path(HydraConfig.get().runtime.output_dir))
    log_file = run_dir / "logs" / "chief-0.log"
    if checked.run.log_device_placement:
        # TensorFlow reads it on import.
        os.environ[imports.LEVEL] = "0"
    folder = chief_folder(checked.run.dir, run_dir, checked.run.storage_timeout)
    with lock_of(folder), ExitStack() as end_of_run, native_log(log_file), log.file_log(log_file):
        write_record(run_dir, config)
        shape = shape_of(checked.cluster, membership)
        if checked.run.verbose != 0 and not checked.run.plan_only:
            # Before TensorFlow is imported, which takes seconds.
            log.say(lines.start_line(checked.run.name, registry.resolve(checked.strategy, shape), str(shape)))
            log.say(lines.run_dir_line(str(folder), folder.path))
        from kdist.cluster.local import log_path
        from kdist.cluster.processes.forkserver import share_fork_server

        end = end_of_sweep if end_of_sweep is not None and end_of_sweep.process == os.getpid() else end_of_run
        if membership is None and not shape.is_local and not checked.run.plan_only:
            # The tasks that this process will start import TensorFlow while it does so itself.
            end.enter_context(share_fork_server(log_path(log_file.parent, shape.tasks[0]), train=not shape.num_ps))
        from kdist.console import live
        from kdist.run.result import Origin

        known = record_of(config)
        known["run"]["dir"] = checked.run.dir
        origin = Origin.here_and_now(known, overrides_of_job())
        signals.exit_at_once = live.exit_at_once
        try:
            _train(checked, membership, folder, origin, began)
        except ClusterError as error:
            from kdist.run.run_dir import RunDir

            way_on, files = "there is no checkpoint yet", RunDir(folder, "")
            if (newest := files.checkpoints().newest()) is not None:
                again = shell_argument("run.dir", str(files))
                way_on = f"the same command with {again} resumes from {newest.parent.name}/{newest.name}"
            raise ClusterError(f"{error}\n  {way_on}    logs: {run_dir / 'logs'}") from error
        except Exception as error:
            if isinstance(error, KdistError) and not isinstance(error, TaskError):
                raise
            with log_file.open("a", encoding="utf-8") as file:
                file.write(as_written(traceback_of(error)))
            setattr(error, LOG_FILE, log_file)
            raise


def _train(
    config: Config,
    membership: Membership | None,
    run_dir: Folder | str | None,
    origin: Origin,
    began: float | None = None,
) -> None:
    """Trains as a checked config says, or takes part in the training if this process is not the chief.

    A chief has locked its `run_dir`; it is None in a process that needs none.
    """
    with imports.quick_import():
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
    is_chief = membership is None or membership.is_chief
    if run_dir is not None and is_chief:
        # Before anything replaces the record of a newer version.
        RunDir(run_dir, config.run.name).read_result()
    earlier = None if run_dir is None else RunDir(run_dir, config.run.name).result_written_at()
    trainer = None
    try:
        trainer = Trainer.of_config(
            config if config.train.epochs is not None else config.with_values(train={"epochs": 1}),
            partial(build_model, config),
            custom=custom_strategy(config),
            run_dir=run_dir,
            hooks=[*parts_of(config, "hooks", "drill"), *_http_hooks(config)],
            callbacks=parts_of(config, "callbacks"),
            hparams=hparams_of(asdict(config), overrides_of_job(), ["train.batch_size", *config.run.hparams]),
            origin=origin,
            began=began,
            membership=membership,
        )
        # Built now, so that its errors are found before anything starts.
        _ = trainer.model
        data = data_arguments(config)
        if config.run.plan_only:
            plan = trainer.plan(data["x"], data.get("y"), config.train.batch_size)
            log.say(log.Line(plan.table().rstrip("\n"), "plan"))
            for line in lines.plan_lines(plan):
                log.say(line)
            return
        trainer.fit_as_configured(**data)
    except BaseException as error:
        # A failure before training leaves a result, too.
        is_said = not is_chief or (trainer is not None and trainer.result.error is not None)
        if run_dir is not None and not is_said:
            files = RunDir(run_dir, config.run.name)
            if files.result_written_at() == earlier:
                shape = shape_of(config.cluster, membership)
                files.write_result(
                    Result(
                        strategy=registry.resolve(config.strategy, shape),
                        cluster=str(shape),
                        error=describe(error),
                        seed=config.run.seed,
                        **vars(origin),
                    )
                )
        raise


def _http_hooks(config: Config) -> list[Hook]:
    """The hooks that answer over HTTP while the run lasts."""
    from kdist import hooks

    run = config.run
    found: list[Hook] = [] if run.metrics_port is None else [hooks.MetricsServer(run.metrics_port, run.metrics_host)]
    return found if run.health_port is None else [*found, hooks.HealthCheck(run.health_port)]


def take_part(as_composed: DictConfig, config: Config, membership: Membership) -> None:
    """Runs as a task that is not the chief, until the chief has finished; `config` is the checked one."""
    signals.exit_at_once = os._exit
    grace_secs = grace_secs_of(config.run.grace_secs, os.environ)
    with signals.task_signals(membership.task, grace_secs, config.run.stop_signals) as stop:
        try:
            with ExitStack() as health:
                if (port := config.run.health_port) is not None:
                    from kdist.cluster.network.http_server import health_of_task, health_server

                    of_task = health_of_task(membership, port, lambda: stop.is_serving)
                    health.enter_context(health_server(port, of_task))
                _serve(record_of(as_composed), config, membership, stop)
        except ClusterError as error:
            stays = config.cluster.wait_for_next_chief and not membership.evaluates
            if not (stays and stop.is_serving) or stop.received is not None:
                raise
            warn(f"{error}; it waits for the next chief (cluster.wait_for_next_chief)")
            start_anew()


def _serve(known: Mapping[str, Any], config: Config, membership: Membership, stop: signals.TaskSignals) -> None:
    logs_devices = config.run.log_device_placement
    with nullcontext() if logs_devices and not membership.runs_program else native_log(Path(os.devnull)):
        if membership.runs_program or membership.evaluates:
            from kdist.run.result import Origin

            # An evaluator reads there what the chief saves.
            run_dir = config.run.dir if membership.evaluates else None
            _train(config, membership, run_dir, Origin.here_and_now(known))
        else:
            from kdist.cluster.description import TaskFingerprint
            from kdist.cluster.processes.server import serve_until_done

            serve_until_done(
                membership,
                config.cluster,
                stop.begin_to_serve,
                fingerprint=TaskFingerprint.of(membership, known),
                log_device_placement=logs_devices,
            )
