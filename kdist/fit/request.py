"""`Fit`: all that runs a fit in a process, as one value: the config, the model, the data, the hooks and the place.

A Trainer of a program and the command line meet here: both have a `Config`, and neither is known to what runs the fit.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import keras
import numpy as np

from kdist._compat.keras import main_optimizer, step_counter
from kdist.cluster.description import TaskFingerprint
from kdist.cluster.network import isolate, sockets
from kdist.cluster.resolve import shape_of
from kdist.cluster.spec import ClusterShape, Membership
from kdist.config.checks import check_whole_number
from kdist.config.record import plain_values
from kdist.config.scheduler import grace_secs_of
from kdist.config.schema import Config
from kdist.data.base import Readers, TrainingData
from kdist.data.epoch_lengths import EpochCount, EpochLengths
from kdist.data.shares import DealtShares, SharedData, shares_in
from kdist.data.sources import training_data
from kdist.data.split_data import SplitSource
from kdist.dispatch import connection
from kdist.errors import CheckpointError, ConfigError
from kdist.evaluation.evaluate import ValidationArguments
from kdist.hooks import CheckpointSaver, Hook
from kdist.log import say, warn
from kdist.model.source import ModelSource, preprocessing_of
from kdist.model.state import num_bytes
from kdist.parameters.placement.plan import PlacementPlan
from kdist.run.resizes import ResizeRequests
from kdist.run.result import Origin, Result, describe
from kdist.run.run_dir import RunDir
from kdist.strategies import registry
from kdist.strategies.base import Strategy, TrainingSpec
from kdist.strategies.prepared_training import prepare
from kdist.strategies.rounds import serve

#: The arguments of `fit` that are keys of the config, by their group.
_IN_CONFIG = {
    "train": (
        *("batch_size", "steps", "epochs", "more_steps", "more_epochs", "steps_per_epoch"),
        *("validation_every_steps", "validate_with_ema"),
    ),
    "run": ("verbose",),
}


@dataclass(frozen=True)
class Place:
    """The place of this process in its cluster.

    Attributes:
        shape: the number of tasks of the cluster.
        membership: the role of this process, if the tasks were started one by one; None otherwise.
        custom: the class of the strategy, if it is not kdist's own.
    """

    shape: ClusterShape
    membership: Membership | None = None
    custom: type[Strategy] | None = None

    @classmethod
    def take(cls, config: Config, membership: Membership | None, custom: type[Strategy] | None) -> Place:
        """Makes this process ready for its cluster: out of reach of others, or served for the other workers.

        Raises:
            ConfigError: it should be isolated, and is not, or it cannot listen at the interface of `cluster.bind`.
        """
        cluster = config.cluster
        place = cls(shape_of(cluster, membership), membership, custom)
        name = registry.resolve(config.strategy, place.shape)
        sockets.bind_to(cluster.bind, all_here=membership is None)
        if 0 < place.shape.num_workers < cluster.min_workers:
            raise ConfigError(
                f"cluster.min_workers={cluster.min_workers}: cluster={place.shape} has fewer to begin with"
            )
        if membership is None and not place.shape.is_local:
            isolate.require(cluster.isolate)
        if name == "multi_worker_mirrored" and membership is not None and membership.runs_program:
            serve(membership, cluster)
        return place

    @property
    def follower(self) -> Membership | None:
        """The role of a task that follows a chief; None in the process that runs the training loop."""
        return None if self.membership is None or self.membership.is_chief else self.membership

    @property
    def is_chief(self) -> bool:
        """True if this process runs the training loop."""
        return self.follower is None

    def reserve_connection(self) -> AbstractContextManager[None]:
        """Reserves this process's connection for a fit or a session that needs it.

        Raises:
            ConfigError: this process is using it.
        """
        return connection.reserved() if self.shape.num_ps and self.is_chief else nullcontext()

    def make_strategy(self, config: Config, fingerprint: TaskFingerprint | None = None) -> Strategy:
        """A new strategy, not started; its tasks compare `fingerprint`."""
        return registry.create(config, self.shape, self.membership, self.custom, fingerprint)


@dataclass(frozen=True)
class FitData:
    """The arguments of `Trainer.fit` without a key in the config, under the names that Keras gave them.

    Raises:
        ConfigError: a value is not allowed.
    """

    x: Any
    y: Any = None
    sample_weight: Any = None
    class_weight: Mapping[float, float] | None = None
    shuffle: bool = True
    initial_epoch: int = 0
    callbacks: Sequence[keras.callbacks.Callback] = ()
    validation_data: Any = None
    validation_steps: int | None = None
    validation_batch_size: int | None = None
    validation_freq: int | Collection[int] = 1

    def __post_init__(self) -> None:
        if self.x is None:
            raise ConfigError("fit needs data: x is None")
        if isinstance(self.validation_data, SplitSource):
            raise ConfigError("validation_data: data that keeps arriving is read once, by training; give other data")
        check_whole_number("validation_batch_size", self.validation_batch_size)
        check_whole_number("validation_steps", self.validation_steps)
        check_whole_number("initial_epoch", self.initial_epoch, at_least=0)


@dataclass(frozen=True)
class Fit:
    """One fit: everything that a process needs to run it.

    Attributes:
        config: of the run, with the arguments of this fit.
        source: the model, or the function that builds it.
        data: the data, callbacks and other arguments without a key in the config.
        hooks: the hooks of the trainer, defaults included.
        place: the place of this process in the cluster.
        files: the run dir.
        resume: `auto`, `never` or `must`; None continues from the model as it is.
        hparams: of the run, for TensorBoard.
        num_fits: of the same trainer before, whose values the model has.
        goes_on: the count of a fit that trains more on the data from its beginning; None of any other.
        began: the time, of `time.monotonic`, at which the command of this fit began, which has printed the first lines;
            None of a program.
        requests: changes of its cluster that are asked for.
    """

    config: Config
    source: ModelSource
    data: FitData
    hooks: Sequence[Hook]
    place: Place
    files: RunDir
    resume: str | None
    hparams: Mapping[str, Any]
    origin: Origin
    num_fits: int = 0
    goes_on: EpochCount | None = None
    began: float | None = None
    requests: ResizeRequests = field(default_factory=ResizeRequests)

    @classmethod
    def of(cls, config: Config, arguments: Mapping[str, Any], place: Place, **others: Any) -> Fit:
        """The fit with these arguments of `Trainer.fit`; the config has the others that have a key.

        Raises:
            ConfigError: a value is not allowed.
        """
        given = dict(arguments)
        known = {item.name for item in fields(FitData)}.union(*_IN_CONFIG.values())
        if unknown := [name for name in given if name not in known]:
            raise TypeError(f"{unknown[0]}: fit and session have no such argument")
        groups = {group: {n: given.pop(n) for n in names if n in given} for group, names in _IN_CONFIG.items()}
        return cls(config.with_values(**groups), data=FitData(**given), place=place, **others)

    def within_limits(self) -> Fit:
        """The same fit, limited by `keras.config.set_max_epochs` and `keras.config.set_max_steps_per_epoch`."""
        limits = {"epochs": keras.config.max_epochs(), "steps_per_epoch": keras.config.max_steps_per_epoch()}
        given = {name: getattr(self.config.train, name) for name in limits}
        lower = {n: limit for n, limit in limits.items() if limit and (given[n] is None or given[n] > limit)}
        for name, limit in lower.items():
            warn(f"{name}={given[name]}: limited to {limit} by keras.config.set_max_{name}")
        return replace(self, config=self.config.with_values(train=lower))

    def going_on(self) -> Fit:
        """The same fit, with `more_epochs` or `more_steps` as the epoch or global step at which it ends.

        They count from the newest checkpoint, and begin the data anew. If that is of the same fit, which was stopped
        before its end, the rest of it is left.
        """
        more_epochs, more_steps = self.config.train.more_epochs or 0, self.config.train.more_steps or 0
        if not more_epochs and not more_steps:
            return self
        step, count = self._earlier or (self.model_step, EpochCount(self.model_step, epoch=self.data.initial_epoch))
        is_same = (count.more_epochs, count.more_steps) == (more_epochs, more_steps)
        if not is_same or not (count.num_epochs < count.epochs or step < count.steps):
            done = count.num_epochs
            count = EpochCount(count.origin, step, done, done, more_epochs=more_epochs, more_steps=more_steps)
            count = replace(count, epochs=more_epochs and done + more_epochs, steps=more_steps and step + more_steps)
        ends = {"epochs": count.epochs or None, "steps": count.steps or None}
        return replace(self, config=self.config.with_values(train=ends), goes_on=count)

    @cached_property
    def record(self) -> Mapping[str, Any]:
        """The config as `result.json` has it; without the command line, with the arguments that have no key."""
        if self.origin.config is not None:
            return self.origin.config
        own = ("initial_epoch", "shuffle", "class_weight", "validation_steps", "validation_batch_size")
        return plain_values(
            {
                "cluster": asdict(self.config.cluster),
                # Arguments of a class of the user's may be objects that cannot be copied.
                "strategy": {**vars(self.config.strategy), "name": self.strategy_name},
                "train": asdict(self.config.train),
                "fit": {name: getattr(self.data, name) for name in (*own, "validation_freq")},
                "run": {**asdict(self.config.run), "dir": str(self.files)},
                "hparams": dict(self.hparams),
            }
        )

    @property
    def strategy_name(self) -> str:
        """The name of the strategy, never `auto`."""
        return registry.resolve(self.config.strategy, self.place.shape)

    def resized(self, shape: ClusterShape) -> Fit:
        """The same fit on a cluster of another shape."""
        return replace(
            self, place=replace(self.place, shape=replace(shape, has_evaluator=self.place.shape.has_evaluator))
        )

    def make_strategy(self) -> Strategy:
        """A new strategy, not started."""
        return self.place.make_strategy(self.config, self.fingerprint)

    @cached_property
    def fingerprint(self) -> TaskFingerprint | None:
        """The properties that separately started tasks must have in common; None compares nothing."""
        membership = self.place.membership
        return None if membership is None else TaskFingerprint.of(membership, self.record)

    @property
    def grace_secs(self) -> float:
        """Seconds to save and exit after a stop signal."""
        return grace_secs_of(self.config.run.grace_secs, os.environ)

    @property
    def steps_per_call(self) -> int | None:
        """Steps of a call; None for `auto`: the `steps_per_execution` of the model, if it is more than 1."""
        given = self.config.train.steps_per_call
        return None if given == "auto" else int(given)

    @property
    def is_quiet(self) -> bool:
        """True if nothing is printed."""
        return bool(self.config.run.verbose == 0)

    @property
    def print_line(self) -> Callable[[str], None]:
        """Prints a line, unless `is_quiet`; with `run.verbose=3`, all of it."""
        return (lambda _: None) if self.is_quiet else partial(say, in_full=self.config.run.verbose == 3)

    @property
    def validation(self) -> ValidationArguments:
        """The arguments about validation."""
        data, train = self.data, self.config.train
        size = data.validation_batch_size or train.batch_size
        return ValidationArguments(data.validation_data, size, data.validation_steps, train.validate_with_ema)

    def result(self, error: BaseException | None = None, **found: Any) -> Result:
        """The result of the fit: the values known before it runs, and those `found`, by the names of `Result`."""
        config = self.record
        if self.origin.config is None:
            config = {**config, "fit": {**config["fit"], **self.source.description}}
        known = {"strategy": self.strategy_name, "cluster": str(self.place.shape), "seed": self.config.run.seed}
        origin = vars(replace(self.origin, config=config))
        return Result(error=None if error is None else describe(error), **{**known, **origin, **found})

    @property
    def keeps_model_on_servers(self) -> bool:
        """True if the trained values are too large to come back to this process; the model is built."""
        return self.place.shape.num_ps > 0 and num_bytes(self.source.model) > self.config.run.export_max_bytes

    def bring_back(self, strategy: Strategy) -> None:
        """Starts a strategy with the values that such a fit has left in its newest checkpoint.

        Raises:
            CheckpointError: there is none any more.
        """
        strategy.start(self.training_spec(self.training_data))
        checkpoints = self.files.checkpoints()
        if checkpoints.restore(strategy.values) is None:
            raise CheckpointError(f"there is no checkpoint in {checkpoints.place}, where the trained values were")
        # Training continues from the parameters themselves, but evaluates these, as Keras does at the end of `fit`.
        strategy.values.use_averages()

    def plan(self) -> PlacementPlan:
        """Finds the server that would hold each variable.

        Raises:
            ConfigError: the cluster has no parameter servers.
        """
        shape = self.place.shape
        if not shape.num_ps:
            raise ConfigError(f"cluster={shape} has no parameter servers to place variables on; use NpsMw")
        prepared = prepare(self.training_spec(self.training_data), shape.num_workers)
        return prepared.plan(shape.num_ps, self.config.strategy, shape.num_workers)

    def model_is_elsewhere(self) -> ConfigError:
        """The error for the use of a model whose trained values stayed on the servers of such a fit."""
        return ConfigError(
            f"model {self.source.model.name}: has {num_bytes(self.source.model)} bytes, more than export_max_bytes="
            f"{self.config.run.export_max_bytes}, so its trained values are in {self.files.checkpoints().folder} only; "
            "on_workers=True evaluates arrays where parameter servers have the values, and predicts; a fit with the "
            "same run_dir and a larger export_max_bytes brings them here"
        )

    @property
    def _seed(self) -> int:
        assert self.config.run.seed is not None
        return self.config.run.seed

    @cached_property
    def training_data(self) -> TrainingData:
        """The data that the workers read.

        Raises:
            ConfigError: the data cannot be used, or not with this strategy.
            TaskError: the user's code failed to make its first batches.
        """
        return self._data(self._readers())

    @property
    def training_data_of_checkpoint(self) -> TrainingData:
        """The same, in as many shares as when the run that is resumed was resized."""
        data = self.training_data
        all_reduce = self.strategy_name in registry.ALL_REDUCE
        can_share = self.place.shape.num_ps > 0 or all_reduce
        if data.splits is not None or not self.resumes or self.begins_anew or not can_share:
            return data
        if self.config.strategy.local_steps > 1:
            return data
        number = shares_in(self.files.checkpoints().newest_data_state())
        if number is None or data.share_end(0, number, 1) is None:
            return data
        mixes_epochs = self.strategy_name == "parameter_server"
        return SharedData(data, number, [0] * number, mixes_epochs=mixes_epochs, in_step=all_reduce)

    def data_read_here(self) -> TrainingData:
        """The same, which this process reads for the workers."""
        return self._data(replace(self._readers(), here=True))

    def _data(self, readers: Readers) -> TrainingData:
        seed = self._seed
        if self.num_fits:
            # Otherwise every fit would shuffle in the same way.
            seed = int(np.random.SeedSequence([seed, self.num_fits]).generate_state(1)[0])
        data = training_data(
            self.data.x,
            self.data.y,
            self.data.sample_weight,
            batch_size=self.config.train.batch_size,
            steps_per_epoch=self.config.train.steps_per_epoch,
            shuffle=self.data.shuffle,
            class_weight=self.data.class_weight,
            seed=seed,
            readers=readers,
            preprocess=preprocessing_of(self.source.model),
        )
        if data.splits is not None and not data.splits.have_lengths:
            self._check_takes_splits(arrive=data.splits.arrive)
        return data

    def _readers(self) -> Readers:
        name, number, train = self.strategy_name, max(1, self.place.shape.num_workers), self.config.train
        run_the_program = name == "multi_worker_mirrored"
        # All-reduce workers know more only when they have joined each other.
        replicas = number if run_the_program else self.make_strategy().batches_per_step
        # As in Keras, epochs end with the data at the latest. Those of several workers have so many steps.
        is_one_batch = self.steps_per_call in (None, 1) and self.config.strategy.local_steps == 1
        one_reads = number == replicas == 1 and is_one_batch
        ends_by_epochs = train.steps is None and train.epochs is not None
        by_passes = ends_by_epochs and (self.steps_per_epoch is None or one_reads)
        return Readers(
            number=number,
            at_once=replicas if name == "mirrored" else 1,
            replicas=replicas,
            run_the_program=run_the_program,
            serve=self.place.shape.num_ps > 0,
            by_passes=by_passes,
            steps_per_epoch=self.steps_per_epoch if by_passes else None,
            timeout=self.config.cluster.step_timeout,
        )

    def _check_takes_splits(self, *, arrive: bool) -> None:
        """Refuses options that need to know ahead if there is another batch: with data that may end nobody does."""
        name = self.strategy_name
        what = "data that keeps arriving" if arrive else "data of one process, or of unknown length,"
        if name in registry.ALL_REDUCE and arrive:
            raise ConfigError(
                f"strategy={name}: in every step every replica needs a batch, and with {what} one may have none while "
                "others have; use parameter servers (cluster=2ps2w), or strategy=single"
            )
        if self.steps_per_call not in (None, 1):
            raise ConfigError(f"train.steps_per_call={self.steps_per_call}: with {what} a call is one step; use auto")
        if self.config.strategy.local_steps > 1:
            raise ConfigError(
                f"strategy.local_steps={self.config.strategy.local_steps}: with {what} a step is one batch; use 1"
            )

    @property
    def steps_per_epoch(self) -> int | None:
        """As given, in whole executions: as in Keras, epochs consist of them as long as there is data."""
        given, per_execution = self.config.train.steps_per_epoch, self.source.model.steps_per_execution
        return None if given is None else math.ceil(given / per_execution) * per_execution

    def epoch_lengths(self, data: TrainingData, replicas: int | None = None) -> EpochLengths | None:
        """Global steps of epochs; None if they end with data of unknown length, or nobody knows where.

        Args:
            replicas: of an earlier run; all-reduce workers know their number only when they have joined each other.
        """
        lengths = None if data.passes is not None else self._epoch_lengths(data, replicas)
        step, count = self._earlier or (self.count.begin, self.count)
        if lengths is not None and self.steps_per_epoch is None and isinstance(data.splits, DealtShares):
            # Its state knows where the epoch ends, to the batch.
            data.splits.restore(self.files.checkpoints().newest_data_state())
            left = data.splits.left_of_epoch or lengths.steps_per_pass
            return lengths.placed(step, count.epoch - count.first_epoch + 1, left)
        return None if lengths is None else lengths.continuing(self.count, step)

    def lengths_on(
        self, shape: ClusterShape, spec: TrainingSpec, step: int, batches_per_step: int
    ) -> EpochLengths | None:
        """The lengths of epochs from `step` on, where as much of the data is read, on a cluster of another shape.

        Synchronous steps have as many batches as there are replicas.

        Args:
            batches_per_step: of steps before.
        """
        lengths, data = spec.epoch_lengths, spec.data
        readers = max(1, self.place.shape.num_workers)
        fresh = self.resized(shape)._epoch_lengths(data, None, readers)
        if lengths is None or fresh is None or fresh == replace(lengths, first_step=fresh.first_step):
            return lengths
        following = lengths.epoch_at(step) + 1
        next_batches_per_step = self.resized(shape).make_strategy().batches_per_step
        if self.strategy_name in registry.ALL_REDUCE and data.share_end(0, batches_per_step, 1) is not None:
            # By batches, see `DealtShares`. Data that is not in shares began at the count's beginning.
            now = lengths
            if not isinstance(data, SharedData):
                per_pass = data.batches_per_pass(batches_per_step) or 1
                now = EpochLengths(per_pass, per_pass, spec.count.begin, per_step=batches_per_step)
            return replace(now, per_step=next_batches_per_step).placed(step, following, now.left_at(step))
        left = (lengths.begin_of(following) - step) * batches_per_step
        if isinstance(data, SharedData) and not data.splits.mixes_epochs:
            # Asynchronous workers have read more than the steps that are counted, and may be in the next epoch.
            left = data.splits.left_of_epoch or data.batches_per_pass(readers) or 0
        steps_left = math.ceil(left / next_batches_per_step)
        return replace(fresh, first_step=step + steps_left - replace(fresh, first_step=0).begin_of(following))

    def _epoch_lengths(
        self, data: TrainingData, replicas: int | None, shares: int | None = None
    ) -> EpochLengths | None:
        steps_per_epoch = self.steps_per_epoch
        joins = self.strategy_name == "multi_worker_mirrored"
        batches_per_step = replicas if joins and replicas else self.make_strategy().batches_per_step
        all_reduce = self.strategy_name in registry.ALL_REDUCE
        readers = batches_per_step if all_reduce else max(1, self.place.shape.num_workers)
        ends_with_data = self.config.train.steps is None and readers == batches_per_step == 1
        if steps_per_epoch is not None and not ends_with_data:
            # A pass has other steps than in Keras, for which the number is made.
            return EpochLengths.of(steps_per_epoch, None)
        batches = data.batches_per_pass(shares or readers)
        if all_reduce and batches and isinstance(data, SharedData):
            return EpochLengths(batches, batches, per_step=batches_per_step)
        steps_per_pass = None if batches is None else math.ceil(batches / batches_per_step)
        return EpochLengths.of(steps_per_epoch, steps_per_pass)

    @property
    def model_step(self) -> int:
        """The global step of the model.

        It counts the updates of earlier fits, or of the model's file, not those of the run that is resumed.
        """
        return int(step_counter(main_optimizer(self.source.model)))

    @cached_property
    def count(self) -> EpochCount:
        """The count of epochs, from where the data and an epoch begin, or began in the run that is resumed."""
        if self.goes_on is not None:
            return self.goes_on
        begin, first_epoch = self.model_step, self.data.initial_epoch
        if self._earlier is None:
            return EpochCount(begin, begin, first_epoch, first_epoch)
        _, count = self._earlier
        # A run of another beginning has counted other epochs.
        return count if count.origin == begin else EpochCount(begin, begin)

    @cached_property
    def _earlier(self) -> tuple[int, EpochCount] | None:
        """The step of the checkpoint that is resumed, and its count of epochs."""
        return self.files.checkpoints().epoch_count() if self.resumes else None

    @property
    def begins_anew(self) -> bool:
        """True if the data begins at the checkpoint that is resumed."""
        return self._earlier is not None and self._earlier[0] == self.count.begin

    @property
    def resumes(self) -> bool:
        """True if the fit continues from a checkpoint of its run dir, which the chief alone reads."""
        if not self.place.is_chief or self.resume not in ("auto", "must"):
            return False
        return self.files.checkpoints().newest() is not None

    def training_spec(
        self,
        data: TrainingData,
        *,
        last_step: int | None = None,
        epoch_lengths: EpochLengths | None = None,
    ) -> TrainingSpec:
        """The training that a strategy runs. A check of the model needs no ends of the run and of its epochs."""
        model = self.source.model
        follows = model.steps_per_execution if model.steps_per_execution > 1 else None
        return TrainingSpec(
            model=model,
            data=data,
            batch_size=self.config.train.batch_size,
            # A call that ran out of data in the middle would lose what its steps have logged.
            steps_per_call=(self.steps_per_call or follows) if data.splits is None or data.splits.have_lengths else 1,
            seed=self._seed,
            # A task that is not the chief writes no logs, and makes no run dir for them.
            log_dir=self.files.logs if self.place.is_chief else Path(),
            last_step=last_step,
            grace_secs=self.grace_secs,
            on_servers=self.place.shape.num_ps > 0,
            stays_on_servers=lambda: self.keeps_model_on_servers,
            epoch_lengths=epoch_lengths,
            fingerprint=data.fingerprint(),
            count=self.count if epoch_lengths is None else replace(self.count, begin=epoch_lengths.first_step),
            source=self.source,
            saves_deltas=any(isinstance(hook, CheckpointSaver) and hook.full_every > 1 for hook in self.hooks),
        )


@dataclass(frozen=True)
class FitOutcome:
    """The end of a fit.

    Attributes:
        result: the content of `result.json`.
        history: of the epochs; empty in a task that is not the chief.
        resume: the beginning of the next fit of the same trainer: None continues from the model, `auto` from the newest
            checkpoint.
        error: the error that ended the fit; None if it ended well.
        left_on_servers: the fit, if its model is too large to come back to this process.
    """

    result: Result
    resume: str | None
    history: keras.callbacks.History = field(default_factory=keras.callbacks.History)
    error: BaseException | None = None
    left_on_servers: Fit | None = None
