"""`Trainer`: distributed training with the methods of a Keras model."""

from __future__ import annotations

import inspect
import math
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np

from kdist import log
from kdist._compat.keras import in_order
from kdist.cluster.resolve import membership_of, with_given
from kdist.cluster.spec import ClusterChange, Membership
from kdist.config.checks import STOP_SIGNALS, check_verbose
from kdist.config.hparams import plain
from kdist.config.scheduler import grace_secs_of
from kdist.config.schema import ClusterConfig, Config, RunConfig, TrainConfig, strategy_config
from kdist.console import live
from kdist.data.sources import split_validation
from kdist.errors import ConfigError
from kdist.evaluation.evaluate import WorkerPool, evaluate, predict
from kdist.fit.finished import finished_outcome
from kdist.fit.follow import EndedSession, follow_chief, not_the_chief
from kdist.fit.local import LocalFit, run_here
from kdist.fit.request import Fit, FitOutcome, Place
from kdist.forks import children_end_here
from kdist.hooks import Hook, check_hooks, with_defaults
from kdist.hooks.keras_callbacks import (
    PREDICT_BATCH_EVENTS,
    TEST_BATCH_EVENTS,
    CallbackOrSeveral,
    acts_on_any,
    list_of,
)
from kdist.model.source import USE_VALUES, WRITE_VALUES, ModelSource
from kdist.parameters.placement.plan import PlacementPlan
from kdist.run.resizes import Resize, ResizeRequests
from kdist.run.result import Origin, Result
from kdist.run.run_dir import RunDir, name_of_program
from kdist.session import TrainSession
from kdist.storage.folder import Folder
from kdist.strategies import registry
from kdist.strategies.base import Strategy


class Trainer:
    """Trains a compiled Keras model on a cluster.

    Args:
        build_model: a function that returns a compiled `keras.Model`, or such a model.
        cluster: `NpsMw` is N servers and M workers, `Mw` workers alone: in a Slurm step or TF_CONFIG of as many tasks,
            this process is one of them; otherwise it starts them for the time of a `fit`. `local` is this process. Or a
            `kdist.ClusterConfig`, with any key of the config group `cluster`.
        strategy: `parameter_server`, `sync_replicas`, `mirrored`, `multi_worker_mirrored`, `single`, or `auto` to
            choose by the cluster. Or a custom class, derived from the class of one of these.
        run_dir (str | Path | None): folder, or URL as `s3://bucket/folder`, for all files of a run; its checkpoints are
            resumed. None: `runs/<name>/<date_time>`; in a Slurm step `runs/<name>/slurm-<job id>`.
        hooks: added to the default hooks; a hook replaces the default one of its class.
        callbacks: Keras callbacks for every `fit`.
        name: shown on the first line and used in the default `run_dir`; the script's name if None.
        steps_per_call: steps that a worker runs per call of the chief; `auto` adapts them to the model.
        resume: `auto`, `never` or `must`; see `TrainSession`.
        start_from: a run dir, or a file `x.keras`, whose values a run without a checkpoint begins with, as far as they
            fit: weights, slots of the optimizer and tables of the same name and shape. The global step begins at 0.
        seed: makes shuffling and Dropout repeatable; from 0 to 2**32 - 1. None: the seed of a resumed run, else random.
        start_timeout: seconds within which every task must serve; None, here and for the next two: as in `cluster`.
        step_timeout: seconds without progress after which an unresponsive task is replaced, or the run fails.
        max_worker_restarts: the number of restarts of each lost worker of a local cluster.
        max_restarts: the number of times that training resumes from the newest checkpoint, on a new local cluster.
        export_max_bytes: a model whose parameters take more stays on its parameter servers and in checkpoints: `model`
            does not get the trained values, and there is no `model.keras`.
        grace_secs: seconds to save and exit after a stop signal or Ctrl-C; None: 20 in a Slurm job or pod, else 30.
        stop_signals: names of the signals at which the run saves and exits; a handler of your program stays.
        storage_timeout: seconds for which object storage may fail before a save counts as failed.
        log_format: `text` prints lines for people, `json` an object a line for programs; see `kdist.log`.
        use_default_hooks: adds the default hooks.
        hparams: hyperparameters of this run, under names of your choice: its row in TensorBoard's HParams tab.
        strategy_options: options of the strategy, as in the config group `strategy`: `placement` and
            `partition_min_bytes` (with servers), `replicas_to_aggregate`, `backup_workers`, `token_mode`,
            `on_lost_worker` and `worker_timeout` (`sync_replicas`), `local_steps` and `prefetch` (`parameter_server`),
            `wire_dtype` (with servers), `devices` (`mirrored`). See `kdist.config.schema.StrategyConfig`.

    Other Args:
        lock_run_dir: keeps other chiefs out of the run dir; false if the caller does.
        membership: the role of this process in a cluster whose tasks were started one by one; None: that of `cluster`.
        origin: the origin of the run for `result.json`; None: these arguments, and this process.

    Raises:
        ConfigError: a value is not allowed, or the model cannot be trained with this strategy.
    """

    def __init__(
        self,
        build_model: Callable[[], keras.Model] | keras.Model,
        cluster: str | ClusterConfig = "local",
        strategy: str | type[Strategy] = "auto",
        *,
        run_dir: str | Path | Folder | None = None,
        hooks: Sequence[Hook] = (),
        callbacks: CallbackOrSeveral = (),
        name: str | None = None,
        steps_per_call: int | str = TrainConfig.steps_per_call,
        resume: str = RunConfig.resume,
        start_from: str | Path | None = None,
        seed: int | None = None,
        start_timeout: float | None = None,
        step_timeout: float | None = None,
        max_worker_restarts: int | None = None,
        max_restarts: int = TrainConfig.max_restarts,
        export_max_bytes: float = RunConfig.export_max_bytes,
        grace_secs: float | None = RunConfig.grace_secs,
        stop_signals: Sequence[str] = STOP_SIGNALS,
        storage_timeout: float = RunConfig.storage_timeout,
        log_format: str = RunConfig.log_format,
        use_default_hooks: bool = True,
        lock_run_dir: bool = True,
        membership: Membership | None = None,
        hparams: Mapping[str, Any] | None = None,
        origin: Origin | None = None,
        **strategy_options: Any,
    ) -> None:
        custom = None if isinstance(strategy, str) else strategy
        config = Config(
            cluster=with_given(
                ClusterConfig(cluster) if isinstance(cluster, str) else cluster,
                start_timeout=start_timeout,
                step_timeout=step_timeout,
                max_worker_restarts=max_worker_restarts,
            ),
            strategy=strategy_config(
                strategy if isinstance(strategy, str) else strategy.name,
                strategy_options,
                custom=custom,
                others=inspect.signature(Trainer).parameters,
            ),
            # What `fit` is not told is as in Keras.
            train=TrainConfig(batch_size=None, steps_per_call=steps_per_call, max_restarts=max_restarts),
            run=RunConfig(
                name=name or name_of_program(),
                seed=seed,
                export_max_bytes=_whole(export_max_bytes),
                grace_secs=grace_secs,
                stop_signals=list(stop_signals),
                storage_timeout=storage_timeout,
                resume=resume,
                start_from=None if start_from is None else os.fspath(start_from),
                log_format=log_format,
            ),
        )
        self._set_up(
            config,
            build_model,
            custom=custom,
            run_dir=run_dir,
            hooks=with_defaults(hooks) if use_default_hooks else hooks,
            callbacks=callbacks,
            hparams=hparams or {},
            origin=origin,
            membership=membership,
            lock_run_dir=lock_run_dir,
        )

    @classmethod
    def of_config(cls, config: Config, build_model: Callable[[], keras.Model], **others: Any) -> Trainer:
        """The trainer of the command line, which has checked its config; `others` as in `_set_up`."""
        trainer = cls.__new__(cls)
        trainer._set_up(config, build_model, **others)
        return trainer

    def _set_up(
        self,
        config: Config,
        build_model: Callable[[], keras.Model] | keras.Model,
        *,
        custom: type[Strategy] | None,
        run_dir: str | Path | Folder | None,
        hooks: Sequence[Hook],
        callbacks: CallbackOrSeveral,
        hparams: Mapping[str, Any],
        origin: Origin | None,
        began: float | None = None,
        membership: Membership | None = None,
        lock_run_dir: bool = False,
    ) -> None:
        membership = membership or membership_of(config.cluster, os.environ)
        # Before a model runs TensorFlow's first ops.
        self._place = Place.take(config, membership, custom)
        self.name = config.run.name
        self.files = RunDir(run_dir, self.name, config.run.storage_timeout, is_joined=membership is not None)
        self.hooks = check_hooks(hooks)
        self.callbacks = list_of(callbacks)
        self.hparams = plain(hparams)
        self._origin = origin
        self._began = began
        seed = config.run.seed
        self._follows_run = seed is None
        self.seed = int(np.random.SeedSequence().generate_state(1)[0]) if seed is None else seed
        self._config = config.with_values(run={"seed": self.seed})
        self._source = ModelSource(build_model, self.strategy_name, on_servers=self._place.shape.num_ps > 0)
        # None continues from the model as it is.
        self._resume: str | None = config.run.resume
        self._lock_run_dir = lock_run_dir
        self.result = Result()
        self._left_on_servers: Fit | None = None
        self._num_fits = 0
        #: Changes of the cluster that are asked for while a fit is running.
        self._requests: ResizeRequests | None = None

    def __repr__(self) -> str:
        return f"Trainer({self.name}, {self.strategy_name} on {self._place.shape}, run dir {self.files})"

    @property
    def strategy_name(self) -> str:
        """The strategy, never `auto`."""
        return registry.resolve(self._config.strategy, self._place.shape)

    @property
    def is_chief(self) -> bool:
        """True if this process runs the training loop, writes, and has the trained values after it.

        False in the other tasks of an externally started cluster: there `fit` takes part until the chief has finished,
        and the program goes on.
        """
        return self._place.is_chief

    @property
    def run_dir(self) -> Path:
        """The folder that holds everything the run produces; if that is at a URL, the folder that is mirrored there."""
        return self.files.path

    @property
    def model(self) -> keras.Model:
        """The model: an ordinary local Keras model, which holds the trained values as soon as `fit` returns.

        After `fit` in a task that is not the chief, it can be looked at, but not saved, and where it does not have the
        trained values it neither evaluates nor predicts.
        """
        return self._source.built

    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: Any = RunConfig.verbose,
        callbacks: CallbackOrSeveral | None = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool = True,
        class_weight: Mapping[float, float] | None = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: int | Collection[int] = 1,
        *,
        steps: int | None = None,
        more_epochs: int | None = None,
        more_steps: int | None = None,
        validation_every_steps: int | None = None,
        validate_with_ema: bool = TrainConfig.validate_with_ema,
    ) -> keras.callbacks.History:
        """Trains the model, as `keras.Model.fit` does.

        The first `fit` of a trainer resumes from the newest checkpoint in `run_dir`; if that has reached `steps` or
        `epochs`, nothing is started. A later one trains `epochs` more from `model`.

        Args:
            x: arrays (also in dicts or tuples), a `tf.data.Dataset` of batches, or a function
                `(DataContext) -> tf.data.Dataset` of batches. Each worker reads a different part of it, repeated
                endlessly. Or data that this process reads for the workers: a `keras.utils.PyDataset`, a generator, a
                `torch.utils.data.DataLoader`, a SciPy sparse matrix, a dataset with Python functions.
            y, sample_weight, class_weight, shuffle: as in Keras; with a dataset or function, y and sample_weight are
                part of the elements.
            batch_size: examples per replica and step; None: 32, or a size that reads arrays in `steps_per_epoch` steps.
                The last batch of arrays has the remaining examples, as in Keras; each of several workers has one.
            epochs, initial_epoch, steps_per_epoch: as in Keras; one step is one update of the parameters. With one
                worker and without `steps`, an epoch ends with the data at the latest. A resumed run continues to the
                end of epoch `epochs`, counting from where it stopped.
            verbose: 0 prints nothing; 1 and `auto` keep a live line below the others on a terminal; 2 prints lines
                only; 3 also lists the tasks and the placement of variables.
            callbacks: Keras callbacks, in addition to those of the trainer; see `kdist.hooks.keras_callbacks` for when
                they see what.
            validation_data, validation_split, validation_steps, validation_batch_size, validation_freq: as in Keras; in
                addition, the final parameters are always validated.
            steps: the global step to stop at; overrides `epochs`. Without it and `steps_per_epoch`, an epoch of data of
                unknown length is a pass over it; one of an infinite dataset, or of a function, has no end: training
                ends by a hook, a callback or a signal.
            more_epochs, more_steps: so many more, from where `run_dir` is, on this data from its beginning; override
                `epochs` and `steps`. The same call again continues a fit that was stopped, or else trains as many more.
            validation_every_steps: also validate at multiples of this global step.
            validate_with_ema: during training, too, validate the moving averages of an optimizer with `use_ema` instead
                of the parameters. At the end the model always gets the averages, and they are validated.

        Returns:
            The `History` of this fit, by epochs; of a run that has nothing left to do, that of the run. In a task that
            is not the chief, which takes part until the chief has finished, it is empty.

        Raises:
            ConfigError: arguments, data or a model cannot be used, or another process trains in `run_dir`.
            TaskError: the model or the data failed on a task.
            ClusterError: a task was lost, or stopped responding.
            KeyboardInterrupt, SystemExit: after Ctrl-C or SIGTERM, when a checkpoint is saved and the tasks have ended.
        """
        arguments = dict(locals())
        del arguments["self"]
        return self._run(self._fit_of(**arguments))

    def fit_as_configured(self, **data: Any) -> keras.callbacks.History:
        """Trains as `fit` does, but takes every argument except `data` from the config of the command line."""
        return self._run(self._fit_of(**data))

    @contextmanager
    def session(self, x: Any, y: Any = None, **arguments: Any) -> Iterator[TrainSession]:
        """Starts a session for your own training loop; `fit` is this with a loop of two lines.

            with trainer.session(x, y, steps=2000) as session:
                while not session.should_stop():
                    session.run()

        The arguments are as in `fit`, except `validation_split`. Without `steps` and `epochs`, only hooks and the
        caller stop the session.

        Yields:
            The session, started. When it has ended, `model` holds the trained values, and `run_dir` holds `model.keras`
            and `result.json`. In a task that is not the chief, a session that has ended: the task has taken part until
            the chief had finished, as after `fit`.
        """
        with self._place.reserve_connection(), self._one_chief(self._fit_of(x, y, **arguments)) as fit:
            if (follower := self._place.follower) is not None:
                self._take(self._outcome_of(fit))
                ended: Any = EndedSession(follower.task)
                yield ended
                return
            self._source.withhold()
            local = LocalFit(fit)
            try:
                with local.session() as session:
                    yield session
            finally:
                self._take(local.outcome())

    def resize(
        self, workers: int | None = None, ps: int | None = None, move: str | None = None, why: str = "trainer.resize"
    ) -> Future[Resize]:
        """Changes the cluster of the fit that is running, from a hook or callback, or in another thread.

        Args:
            workers, ps: the number of workers, and of parameter servers, to have; None for as many as there are.
            move: a server, as `ps:0`, whose values another one takes, which joins in its place.
            why: for `result.json`, which records each change.

        Returns:
            The change, once it is made, between two steps. Its errors are a `ConfigError` if it is refused, and a
            `ResizeError` if it has failed; then training continues on the cluster as it was.

        Raises:
            ConfigError: a value cannot be read, or no fit is running.
        """
        change = ClusterChange.of(workers, ps, move)
        if self._requests is None:
            raise ConfigError(f"resize({change}): no fit is running")
        return self._requests.add(change, why)

    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: int | str = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: CallbackOrSeveral | None = None,
        return_dict: bool = False,
        *,
        on_workers: bool = False,
    ) -> Any:
        """Returns loss and metrics of the present parameters, as `keras.Model.evaluate` does.

        Args:
            x, y, batch_size, sample_weight, steps: as in Keras and in `fit`: `x` may also be a function
                `(DataContext) -> tf.data.Dataset` of batches.
            verbose: as in Keras; `auto` shows Keras's progress bar on a terminal or in a notebook only.
            callbacks: called in this process; the callbacks of the trainer are for `fit`.
            return_dict: returns a dict, by name. Otherwise the result is a list, in the order of the model's metrics,
                and a number if there is only the loss.
            on_workers: starts the cluster, which must have parameter servers, and each worker evaluates a part: for
                much data, and the only way for a model larger than `export_max_bytes`. There is no progress bar.
                With `steps`, or callbacks that act on batches, this process evaluates.
        """
        listed, shown = list_of(callbacks), _keras_verbose(verbose)
        workers = self._workers(listed, TEST_BATCH_EVENTS) if on_workers and steps is None else None
        data = (x, y, sample_weight)
        logs = None if workers is None else workers.evaluate(self.model, data, batch_size, listed)
        if logs is None:
            logs = evaluate(self.model, data, batch_size=batch_size, verbose=shown, steps=steps, callbacks=listed)
        return logs if return_dict else in_order(self.model, logs)

    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: int | str = "auto",
        steps: int | None = None,
        callbacks: CallbackOrSeveral | None = None,
        *,
        on_workers: bool = False,
    ) -> Any:
        """Returns the outputs of the present parameters, as `keras.Model.predict` does, in the order of the data.

        The arguments are as in Keras and in `evaluate`; `on_workers` is for arrays.
        """
        listed, shown = list_of(callbacks), _keras_verbose(verbose)
        workers = self._workers(listed, PREDICT_BATCH_EVENTS) if on_workers and steps is None else None
        outputs = None if workers is None else workers.predict(self.model, x, batch_size, listed)
        if outputs is None:
            outputs = predict(self.model, x, batch_size=batch_size, verbose=shown, steps=steps, callbacks=listed)
        return outputs

    def plan(self, x: Any, y: Any = None, batch_size: int | None = None) -> PlacementPlan:
        """Shows which server would hold each variable; starts nothing.

        The arguments are as in `fit`; the model is built for the shapes of the data.

        Raises:
            ConfigError: the cluster has no parameter servers.
        """
        fit = self._fit_of(x, y, batch_size=batch_size)
        plan = fit.plan()
        if self.is_chief:
            with self._one_chief(fit):
                self.files.write_plan(plan)
        return plan

    def _fit_of(self, x: Any = None, y: Any = None, *, validation_split: float = 0.0, **arguments: Any) -> Fit:
        """The fit with these arguments of `fit`."""
        if validation_split:
            parts, validation_data = split_validation(x, y, arguments.get("sample_weight"), validation_split)
            x, y, arguments["sample_weight"] = parts
            arguments["validation_data"] = validation_data
        arguments["callbacks"] = [*self.callbacks, *list_of(arguments.get("callbacks"))]
        return Fit.of(
            self._config,
            {"x": x, "y": y, **arguments},
            self._place,
            source=self._source,
            files=self.files,
            hooks=self.hooks,
            resume=self._resume,
            hparams=self.hparams,
            origin=self._origin or Origin.here_and_now(),
            num_fits=self._num_fits,
            began=self._began,
        )

    def _run(self, fit: Fit) -> keras.callbacks.History:
        with self._place.reserve_connection(), self._one_chief(fit) as seeded:
            outcome = self._outcome_of(seeded)
        self._take(outcome)
        if outcome.error is not None:
            raise outcome.error
        return outcome.history

    @contextmanager
    def _one_chief(self, fit: Fit) -> Iterator[Fit]:
        """Keeps other chiefs out of the run dir, and adopts the seed of the run that is resumed."""
        if not self._place.is_chief:
            yield fit.within_limits()
            return
        with (
            log.in_format(self._config.run.log_format),
            self.files.lock if self._lock_run_dir else nullcontext(),
            log.file_log(self.files.logs / "chief-0.log"),
            children_end_here(),
        ):
            if self._follows_run and self._resume in ("auto", "must"):
                stored = self.files.checkpoints().seed()
                self.seed = self.seed if stored is None else stored
            self._requests = fit.requests
            try:
                yield replace(fit, config=fit.config.with_values(run={"seed": self.seed})).within_limits().going_on()
            finally:
                self._requests = None

    def _outcome_of(self, fit: Fit) -> FitOutcome:
        self._source.withhold()
        if (finished := finished_outcome(fit)) is not None:
            return finished
        follower = self._place.follower
        return run_here(fit) if follower is None else follow_chief(fit, follower)

    def _take(self, outcome: FitOutcome) -> None:
        self.result, self._resume, self._left_on_servers = outcome.result, outcome.resume, outcome.left_on_servers
        self._num_fits += outcome.resume is None
        if self._left_on_servers is not None:
            self._source.withhold(USE_VALUES, self._left_on_servers.model_is_elsewhere)
        elif (follower := self._place.follower) is not None:
            # All-reduce workers have the trained values as well.
            methods = WRITE_VALUES if follower.runs_program else USE_VALUES
            self._source.withhold(methods, partial(not_the_chief, follower))

    def _workers(self, callbacks: Sequence[keras.callbacks.Callback], batch_events: Sequence[str]) -> WorkerPool | None:
        """The workers to start for an evaluation in parts; None without servers, or if callbacks act on batches."""
        place, left, config = self._place, self._left_on_servers, self._config
        if not place.shape.num_ps or place.membership is not None:
            return None
        if any(acts_on_any(callback, batch_events) for callback in callbacks):
            return None
        make, training = partial(place.make_strategy, config), None if left is None else left.bring_back
        grace_secs = grace_secs_of(config.run.grace_secs, os.environ)
        return WorkerPool(make, place.shape.num_workers, self.files.logs, grace_secs, training)


def _keras_verbose(verbose: int | str) -> int | str:
    """The `verbose` that Keras gets: its progress bar is for people."""
    check_verbose("verbose", verbose)
    return int(live.is_terminal() or live.is_notebook()) if verbose == "auto" else verbose


def _whole(number: Any) -> Any:
    """Turns `1.5e9`, and `inf` for no limit, into an int; the schema refuses other values that are not whole."""
    if isinstance(number, float) and (number == math.inf or number.is_integer()):
        return int(min(number, sys.maxsize))
    return number
