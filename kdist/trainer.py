"""`Trainer`: distributed training with the methods of a Keras model."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import keras
import numpy as np

from kdist import strategies
from kdist.callbacks import checked
from kdist.checks import STOP_SIGNALS, check_stop_signals, checked_steps_per_call
from kdist.cluster import isolate
from kdist.cluster.membership import common_seed, membership_of, shape_of
from kdist.cluster.spec import Membership
from kdist.data import TrainingData, read_locally, split_validation
from kdist.errors import ConfigError
from kdist.evaluation import evaluate, evaluate_on_workers, predict_on_workers
from kdist.fit_arguments import FitArguments
from kdist.hooks import Hook, with_defaults
from kdist.hparams import plain
from kdist.local_fit import LocalFit
from kdist.parameters.placement import Plan
from kdist.remote_fit import fit_in_processes, take_part
from kdist.replica import check_model
from kdist.result import Result
from kdist.run_dir import RunDir, name_of_program
from kdist.run_lock import RunLock
from kdist.schema import ClusterConfig, strategy_config
from kdist.session import TrainSession
from kdist.strategies.base import Program, Strategy
from kdist.strategies.multi_worker_mirrored import join
from kdist.strategies.stored import Placement, prepare


class Trainer:
    """Trains a compiled Keras model on a cluster.

    Args:
        build_model: a function that returns a compiled `keras.Model`, or such a model.
        cluster: `NpsMw` starts N parameter servers and M workers on this machine for the time of a `fit`, `Mw`
            workers alone; `local` is this process; `tf_config` is what the environment variable TF_CONFIG says. Or a
            `kdist.schema.ClusterConfig`, for what the config group `cluster` can say.
        strategy: `parameter_server`, `sync_replicas`, `mirrored`, `multi_worker_mirrored`, `single`, or `auto` to
            pick by the cluster. Or a class of yours, derived from that of one of these; `arguments` are its own.
        run_dir: folder for checkpoints, summaries, logs, model and result; `runs/<name>/<date_time>` if None. A folder
            with checkpoints is resumed.
        hooks: beside the default hooks, or instead of the one of the same class.
        callbacks: Keras callbacks for every `fit`.
        name: shown in the first line and used for the default `run_dir`; the script's name if None.
        steps_per_call: steps that a worker runs for one call of the chief; `auto` fits them to the model.
        resume: `auto`, `never` or `must`; see `TrainSession`.
        seed: makes shuffling and Dropout repeatable, at least 0 and less than 2**32; if None that of the run that is
            resumed, and random in a new one.
        start_timeout: seconds within which every task must serve.
        step_timeout: seconds without any progress after which a task that does not answer is replaced, or the run
            given up.
        max_worker_restarts: how often each lost worker of a local cluster is started again.
        max_restarts: how often training goes back to the newest checkpoint after a failure, on a new local cluster.
        grace_secs: after a stop signal or Ctrl-C, seconds to save and end in good order.
        stop_signals: names of signals at which the run saves and ends; SIGUSR1 and the like are left to a program that
            handles them itself.
        use_default_hooks: whether the default hooks are there at all.
        membership: what this process is in a cluster whose tasks others started; None follows from `cluster`.
        hparams: what was chosen for this run, by names of your own: its row in TensorBoard's HParams tab.
        strategy_options: options of the strategy, as in the config group `strategy`: `placement` and
            `partition_min_bytes` (with servers), `replicas_to_aggregate`, `backup_workers`, `token_mode`,
            `on_lost_worker` and `worker_timeout` (`sync_replicas`),
            `local_steps` (`parameter_server`), `wire_dtype` (with servers), `devices` (`mirrored`).
            See `kdist.schema.StrategyConfig`.

    Raises:
        ConfigError: a value that is not allowed, or a model that cannot be trained so.
    """

    def __init__(
        self,
        build_model: Callable[[], keras.Model] | keras.Model,
        cluster: str | ClusterConfig = "local",
        strategy: str | type[Strategy] = "auto",
        *,
        run_dir: str | Path | None = None,
        hooks: Sequence[Hook] = (),
        callbacks: Sequence[keras.callbacks.Callback] = (),
        name: str | None = None,
        steps_per_call: int | str = "auto",
        resume: str = "auto",
        seed: int | None = None,
        start_timeout: float = 120.0,
        step_timeout: float = 300.0,
        max_worker_restarts: int = 3,
        max_restarts: int = 3,
        grace_secs: float = 30.0,
        stop_signals: Sequence[str] = STOP_SIGNALS,
        use_default_hooks: bool = True,
        membership: Membership | None = None,
        hparams: Mapping[str, Any] | None = None,
        **strategy_options: Any,
    ) -> None:
        if isinstance(cluster, str):
            cluster = ClusterConfig(cluster, start_timeout, step_timeout, max_worker_restarts)
        self.cluster_config = cluster
        self.membership = membership or membership_of(cluster, os.environ)
        self.shape = shape_of(cluster, self.membership)
        self._strategy_class = None if isinstance(strategy, str) else strategy
        name_of_strategy = strategy if isinstance(strategy, str) else strategy.name
        self._strategy_config = strategy_config(name_of_strategy, strategy_options, custom=self._strategy_class)
        self.strategy = strategies.resolve(self._strategy_config, self.shape)
        if self.membership is None and not self.shape.is_local:
            isolate.require(cluster.isolate)
        if self.strategy == "multi_worker_mirrored" and self.membership is not None and self.membership.runs_program:
            # Before a model runs TensorFlow's first ops.
            join(self.membership, cluster.start_timeout)
        self.name = name or name_of_program()
        self.files = RunDir(run_dir, self.name)
        self.hooks = with_defaults(hooks) if use_default_hooks else list(hooks)
        self.callbacks = checked(callbacks)
        self.hparams = plain(hparams or {})
        self.build_model = build_model
        self._model = self._checked(build_model) if isinstance(build_model, keras.Model) else None
        self._steps_per_call = checked_steps_per_call("steps_per_call", steps_per_call)
        self.max_restarts = max_restarts
        self.grace_secs = grace_secs
        check_stop_signals("stop_signals", stop_signals)
        self.stop_signals = tuple(stop_signals)
        # None goes on from the model as it is.
        self.resume: str | None = resume
        if seed is not None and not 0 <= seed < 2**32:
            raise ConfigError(f"seed={seed}: must be at least 0 and less than 2**32")
        self._follows_run = seed is None
        self.seed = int(np.random.SeedSequence().generate_state(1)[0]) if seed is None else seed
        if seed is None and self.membership is not None and self.membership.runs_program:
            self.seed = common_seed(self.membership)
            self._follows_run = False
        #: Whether somebody else keeps other processes out of the run dir for this trainer.
        self.run_dir_is_locked = False
        self.result = Result()

    @property
    def run_dir(self) -> Path:
        """Folder of everything that the run leaves behind."""
        return self.files.path

    @property
    def model(self) -> keras.Model:
        """The model: an ordinary local Keras model, with the trained values as soon as `fit` returns."""
        if self._model is None:
            self._model = self._checked(self.build_model())
        return self._model

    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: int | str = "auto",
        callbacks: Sequence[keras.callbacks.Callback] | None = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool = True,
        class_weight: Mapping[int, float] | None = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: int | Collection[int] = 1,
        *,
        steps: int | None = None,
        validation_every_steps: int | None = None,
        validate_with_ema: bool = False,
    ) -> keras.callbacks.History:
        """Trains the model, as `keras.Model.fit` does.

        The first `fit` of a trainer resumes from the newest checkpoint in `run_dir`; a later one goes on from `model`.

        Args:
            x: arrays (also in dicts or tuples), a `tf.data.Dataset` of batches, or a function
                `(DataContext) -> tf.data.Dataset` of batches. Workers read different parts of it, without end.
            y, sample_weight, class_weight, shuffle: as in Keras; with a dataset or function, y and sample_weight are
                part of its elements.
            batch_size: examples per replica and step; 32 if None. Every step has a full batch: the last of an epoch is
                filled up from the next.
            epochs, initial_epoch, steps_per_epoch: as in Keras; one step is one update of the parameters. A run that
                is resumed from a checkpoint goes on to the end of epoch `epochs` and counts from where it stopped.
            verbose: 0 prints nothing; 1 and `auto` keep a live line on a terminal, below the others; 2 prints lines
                only; 3 tells which tasks there are as well, and where variables live.
            callbacks: Keras's, beside those of the trainer; see `kdist.callbacks` for when they see what.
            validation_data, validation_split, validation_steps, validation_batch_size, validation_freq: as in Keras;
                besides, the final parameters are always validated.
            steps: the global step to stop at; `epochs` does not count then.
            validation_every_steps: validate at multiples of this global step as well.
            validate_with_ema: validate the moving averages of an optimizer with `use_ema`, and not the parameters, also
                during training. At the end the averages are what the model gets and what is validated anyway.

        Returns:
            The `History` of this fit, by epochs; an empty one in a task that is not the chief, which takes part in what
            the chief does and returns when that is done.

        Raises:
            ConfigError: arguments, data or a model that cannot be used, or a `run_dir` that another process trains in.
            TaskError: the model or the data failed on a task.
            ClusterError: a task was lost, or stopped answering.
            KeyboardInterrupt, SystemExit: after Ctrl-C or SIGTERM, when a checkpoint was saved and the tasks ended.
        """
        if validation_split:
            (x, y, sample_weight), validation_data = split_validation(x, y, sample_weight, validation_split)
        arguments = FitArguments(
            x=x,
            y=y,
            batch_size=batch_size,
            steps=steps,
            epochs=epochs,
            initial_epoch=initial_epoch,
            steps_per_epoch=steps_per_epoch,
            shuffle=shuffle,
            class_weight=class_weight,
            sample_weight=sample_weight,
            verbose=verbose,
            callbacks=[*self.callbacks, *(callbacks or ())],
            validation_data=validation_data,
            validation_steps=validation_steps,
            validation_batch_size=validation_batch_size,
            validation_freq=validation_freq,
            validation_every_steps=validation_every_steps,
            validate_with_ema=validate_with_ema,
        )
        if self.membership is not None and not self._is_chief:
            take_part(self, self.membership, arguments)
            self.resume = None
            return keras.callbacks.History()
        with self._one_chief():
            if (num_cpus := self._own_processes()) is not None:
                return fit_in_processes(self, num_cpus, arguments)
            return self.fit_here(arguments)

    def fit_here(self, arguments: FitArguments) -> keras.callbacks.History:
        """`fit` in this process."""
        history = keras.callbacks.History()
        with LocalFit(self, arguments, history).session() as session:
            while not session.should_stop():
                session.run()
        return history

    @contextmanager
    def session(self, x: Any, y: Any = None, **arguments: Any) -> Iterator[TrainSession]:
        """The loop in your own hands; `fit` is this with a loop of two lines.

            with trainer.session(x, y, steps=2000) as session:
                while not session.should_stop():
                    session.run()

        The arguments are those of `fit`, but for `validation_split`. With neither `steps` nor `epochs`, only hooks and
        the caller stop the session.

        Yields:
            The session, started. When it ends `model` has the trained values, and `model.keras` and `result.json` are
            in `run_dir`.
        """
        if self._own_processes() is not None:
            raise ConfigError(f"strategy={self.strategy} trains in processes of its own, not in your loop; use fit")
        arguments["callbacks"] = [*self.callbacks, *(arguments.get("callbacks") or ())]
        given = FitArguments(x, y, **arguments)
        with self._one_chief(), LocalFit(self, given, keras.callbacks.History()).session() as session:
            yield session

    @contextmanager
    def _one_chief(self) -> Iterator[None]:
        """Keeps other chiefs out of the run dir, and goes on with the seed of the run that is in it."""
        with nullcontext() if self.run_dir_is_locked else RunLock(self.run_dir):
            if self._follows_run and self.resume in ("auto", "must"):
                stored = self.files.checkpoints().seed()
                self.seed = self.seed if stored is None else stored
            yield

    def plan(self, x: Any, y: Any = None, batch_size: int | None = None) -> Plan:
        """Where each variable would live; starts nothing.

        Args: those of `fit`; the data says for which input the model is built.

        Raises:
            ConfigError: the cluster has no parameter servers.
        """
        if not self.shape.num_ps:
            raise ConfigError(f"cluster={self.shape} has no parameter servers to place variables on; use NpsMw")
        data = FitArguments(x, y, batch_size=batch_size).training_data(self.seed)
        options = self._strategy_config
        prepared = prepare(self.program(data, batch_size), self.shape.num_workers)
        plan = prepared.plan(self.shape.num_ps, Placement(options.placement, options.partition_min_bytes))
        self.files.write_plan(plan)
        return plan

    def make_strategy(self) -> Strategy:
        """A new strategy, not started."""
        return strategies.create(
            self._strategy_config, self.cluster_config, self.shape, self.membership, self._strategy_class
        )

    def arguments(self) -> dict[str, Any]:
        """Arguments that make another trainer like this one."""
        options = {key: value for key, value in vars(self._strategy_config).items() if key not in ("name", "_target_")}
        return {
            "build_model": self.build_model,
            "cluster": self.cluster_config,
            "strategy": self._strategy_class or self._strategy_config.name,
            "run_dir": self.run_dir,
            "hooks": self.hooks,
            "hparams": self.hparams,
            "name": self.name,
            "steps_per_call": self._steps_per_call or "auto",
            "resume": self.resume,
            "seed": self.seed,
            "max_restarts": 0,
            "grace_secs": self.grace_secs,
            "stop_signals": self.stop_signals,
            "use_default_hooks": False,
            **options,
        }

    def program(self, data: TrainingData, batch_size: int | None, last_step: int | None = None) -> Program:
        """What a strategy is to run."""
        return Program(
            model=self.model,
            data=data,
            batch_size=batch_size,
            steps_per_call=self._steps_per_call,
            seed=self.seed,
            # A task that is not the chief writes no logs, and makes no run dir for them.
            log_dir=self.files.logs if self._is_chief else Path(),
            last_step=last_step,
            grace_secs=self.grace_secs,
            # A run that resumes began at step 0, a later fit begins at the model's own.
            data_begins_at=int(self.model.optimizer.iterations) if self.resume is None else 0,
        )

    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: int | str = 0,
        sample_weight: Any = None,
        steps: int | None = None,
        *,
        on_workers: bool = False,
    ) -> dict[str, float]:
        """Loss and metrics of the present parameters, as `keras.Model.evaluate(..., return_dict=True)`.

        Args: those of Keras; `x` may also be a function `(DataContext) -> tf.data.Dataset` of batches.
            on_workers: start the cluster for it, with parameter servers, and have each worker evaluate a part. That
                pays where evaluating takes much longer than the seconds that a cluster needs to start. Data that cannot
                be cut (functions, generators, or with `steps`) is evaluated here.
        """
        if on_workers and steps is None:
            logs = evaluate_on_workers(self, x, y, sample_weight, batch_size)
            if logs is not None:
                return logs
        return evaluate(
            self.model, x, y, batch_size=batch_size, verbose=verbose, sample_weight=sample_weight, steps=steps
        )

    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: int | str = 0,
        steps: int | None = None,
        *,
        on_workers: bool = False,
    ) -> Any:
        """Outputs of the present parameters, as `keras.Model.predict`, in the order of the data.

        Args: those of Keras; `on_workers` as in `evaluate`, for arrays.
        """
        if on_workers and steps is None:
            outputs = predict_on_workers(self, x, batch_size)
            if outputs is not None:
                return outputs
        return self.model.predict(read_locally(x, batch_size), batch_size=batch_size, verbose=verbose, steps=steps)

    @property
    def _is_chief(self) -> bool:
        return self.membership is None or self.membership.is_chief

    def _own_processes(self) -> int | None:
        return strategies.own_processes(self._strategy_config, self.shape, self.membership)

    def _checked(self, model: Any) -> keras.Model:
        if not isinstance(model, keras.Model):
            raise ConfigError(f"the model function returned {type(model).__name__}; it must return a keras.Model")
        check_model(model, self.strategy)
        return model
