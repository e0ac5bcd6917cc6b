"""How a fit reaches the process that runs it: a launcher takes a `FitRequest` and returns a `FitOutcome`.

There are two launchers: `InProcess` runs the training loop in this process, and `ExternalTask` takes part in a fit
whose chief is another process. Neither of them sees the `Trainer`; the request is all that they know, and the outcome
all that they return.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import keras
import numpy as np

from kdist._compat.keras import main_optimizer, step_counter
from kdist.cluster.description import TaskFingerprint
from kdist.cluster.network import isolate, sockets
from kdist.cluster.spec import ClusterShape, Membership
from kdist.config.recorded import plain_values
from kdist.config.schema import ClusterConfig, StrategyConfig
from kdist.data.base import Readers, TrainingData
from kdist.data.epoch_lengths import EpochLengths
from kdist.dispatch import connection
from kdist.errors import CheckpointError, ConfigError
from kdist.evaluation.evaluate import WorkerPool
from kdist.fit.fit_arguments import FitArguments
from kdist.hooks import CheckpointSaver, Hook
from kdist.model.model_checks import preprocessing_of
from kdist.model.source import ModelSource
from kdist.model.state import num_bytes
from kdist.parameters.placement.plan import PlacementPlan, PlacementPolicy
from kdist.run.result import Origin, Result, describe
from kdist.run.run_dir import RunDir
from kdist.strategies import registry
from kdist.strategies.base import Strategy, TrainingSpec
from kdist.strategies.multi_worker_mirrored import check_same, join
from kdist.strategies.prepared_training import prepare


@dataclass(frozen=True)
class StrategyRequest:
    """Which strategy, on which cluster.

    Attributes:
        config: its name and options.
        custom: the class to use, if it is not kdist's own.
        cluster: where the tasks are.
        shape: how many tasks the cluster has.
        membership: what this process is, if the tasks were started one by one; None otherwise.
        description: what they need alike in a fit; None compares nothing.
    """

    config: StrategyConfig
    custom: type[Strategy] | None
    cluster: ClusterConfig
    shape: ClusterShape
    membership: Membership | None
    description: TaskFingerprint | None = None

    @property
    def name(self) -> str:
        """The strategy's name, never `auto`."""
        return registry.resolve(self.config, self.shape)

    @property
    def is_chief(self) -> bool:
        """Whether this process runs the training loop."""
        return self.membership is None or self.membership.is_chief

    def reserved(self) -> AbstractContextManager[None]:
        """Reserves this process's connection for a fit or a session that needs it.

        Raises:
            ConfigError: this process is using it.
        """
        return connection.reserved() if self.shape.num_ps and self.is_chief else nullcontext()

    def take_place(self) -> None:
        """Makes this process ready for its cluster: out of reach of others, or joined with the other workers.

        Raises:
            ConfigError: it should be isolated, and is not, or it cannot listen at the interface of `cluster.bind`.
        """
        sockets.bind_to(self.cluster.bind)
        if self.membership is None and not self.shape.is_local:
            isolate.require(self.cluster.isolate)
        if self.name == "multi_worker_mirrored" and self.membership is not None and self.membership.runs_program:
            join(self.membership, self.cluster.start_timeout)

    def agree(self) -> None:
        """Compares all-reduce workers, which have joined; servers and workers do it while the cluster starts.

        Raises:
            ConfigError: they differ.
            ClusterError: the others do not compare themselves in time.
        """
        if self.description is not None and self.membership is not None and self.name == "multi_worker_mirrored":
            check_same(self.membership, self.description, self.cluster.start_timeout)

    def workers(
        self, log_dir: Path, grace_secs: float, training: Callable[[Strategy], None] | None
    ) -> WorkerPool | None:
        """The workers that can be started for an evaluation, see there; None without parameter servers."""
        if not self.shape.num_ps or self.membership is not None:
            return None
        return WorkerPool(self.make, self.shape.num_workers, log_dir, grace_secs, training)

    def make(self) -> Strategy:
        """A new strategy, not started."""
        return registry.create(self.config, self.cluster, self.shape, self.membership, self.custom, self.description)


@dataclass(frozen=True)
class FitRequest:
    """One fit: everything that a process needs to run it.

    Attributes:
        source: the model.
        strategy: how, and on which cluster.
        arguments: those of `Trainer.fit`.
        files: the run dir.
        hooks: those of the trainer, defaults included.
        name: of the run.
        steps_per_call: steps of a call; None for `auto`: the `steps_per_execution` of the model, if it is more than 1.
        resume: `auto`, `never` or `must`; None continues from the model as it is.
        seed: where shuffling and random states start.
        max_restarts: how often training goes back to the newest checkpoint after a failure.
        export_max_bytes: a model on servers that is larger does not come back to this process.
        grace_secs: seconds to save and exit after a stop signal.
        stop_signals: names of the signals at which the run saves and exits.
        hparams: of the run, for TensorBoard.
        origin: where the run comes from.
        num_fits: of the same trainer before, whose values the model has.
    """

    source: ModelSource
    strategy: StrategyRequest
    arguments: FitArguments
    files: RunDir
    hooks: Sequence[Hook]
    name: str
    steps_per_call: int | None
    resume: str | None
    seed: int
    max_restarts: int
    export_max_bytes: int
    grace_secs: float
    stop_signals: Sequence[str]
    hparams: Mapping[str, Any]
    origin: Origin
    num_fits: int = 0

    def result(self, error: BaseException | None = None, **found: Any) -> Result:
        """The result of the fit: what is known before it runs, and what was `found`, by the names of `Result`."""
        return Result(
            strategy=self.strategy.name,
            cluster=str(self.strategy.shape),
            error=None if error is None else describe(error),
            seed=self.seed,
            **vars(self.with_config().origin),
            **found,
        )

    def with_config(self) -> FitRequest:
        """The request, whose origin knows the config; without the command line, that is what the request says."""
        if self.origin.config is not None:
            return self
        return replace(self, origin=replace(self.origin, config=self._config()))

    def described(self) -> FitRequest:
        """The request, whose strategy knows what the tasks need alike, if others have started them."""
        if (membership := self.strategy.membership) is None:
            return self
        description = TaskFingerprint.of(membership.spec, self.with_config().origin.config or {})
        return replace(self, strategy=replace(self.strategy, description=description))

    def _config(self) -> dict[str, Any]:
        """The arguments of a trainer without the command line and of its fit, under the keys of the config."""
        arguments, strategy = self.arguments, self.strategy
        train = ("steps", "epochs", "batch_size", "steps_per_epoch", "validation_every_steps", "validate_with_ema")
        # They have no key in the config.
        fit = (
            "initial_epoch",
            "shuffle",
            "class_weight",
            "validation_steps",
            "validation_batch_size",
            "validation_freq",
        )
        run = ("name", "seed", "resume", "grace_secs", "export_max_bytes", "stop_signals")
        return plain_values(
            {
                "cluster": asdict(strategy.cluster),
                "strategy": {**vars(strategy.config), "name": strategy.name},
                "train": {
                    **{name: getattr(arguments, name) for name in train},
                    "steps_per_call": self.steps_per_call or "auto",
                    "max_restarts": self.max_restarts,
                },
                "fit": {name: getattr(arguments, name) for name in fit},
                "run": {**{name: getattr(self, name) for name in run}, "dir": str(self.files)},
                "hparams": dict(self.hparams),
            }
        )

    @property
    def keeps_model_on_servers(self) -> bool:
        """Whether the trained values are too large to come back to this process; the model is built."""
        return self.strategy.shape.num_ps > 0 and num_bytes(self.source.model) > self.export_max_bytes

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
        """Which server would hold each variable.

        Raises:
            ConfigError: the cluster has no parameter servers.
        """
        shape = self.strategy.shape
        if not shape.num_ps:
            raise ConfigError(f"cluster={shape} has no parameter servers to place variables on; use NpsMw")
        prepared = prepare(self.training_spec(self.training_data), shape.num_workers)
        return prepared.plan(shape.num_ps, PlacementPolicy.of(self.strategy.config, shape.num_workers))

    def model_is_elsewhere(self) -> ConfigError:
        """Why a model whose trained values stayed on the servers of such a fit cannot be used."""
        return ConfigError(
            f"model {self.source.model.name}: has {num_bytes(self.source.model)} bytes, more than export_max_bytes="
            f"{self.export_max_bytes}, so its trained values are in {self.files.checkpoints().folder} only; "
            "on_workers=True evaluates arrays where parameter servers have the values, and predicts; a fit with the "
            "same run_dir and a larger export_max_bytes brings them here"
        )

    @cached_property
    def training_data(self) -> TrainingData:
        """What the workers read.

        Raises:
            ConfigError: the data cannot be used, or not with this strategy.
            TaskError: the user's code failed to make its first batches.
        """
        return self._data(self._readers())

    def data_read_here(self) -> TrainingData:
        """The same, which this process reads for the workers."""
        return self._data(replace(self._readers(), here=True))

    def _data(self, readers: Readers) -> TrainingData:
        seed = self.seed
        if self.num_fits:
            # Otherwise every fit would shuffle in the same way.
            seed = int(np.random.SeedSequence([seed, self.num_fits]).generate_state(1)[0])
        data = self.arguments.training_data(seed, readers, preprocessing_of(self.source.model))
        if data.splits is not None:
            self._check_takes_splits(arrive=data.splits.arrive)
        return data

    def _readers(self) -> Readers:
        strategy, number = self.strategy, max(1, self.strategy.shape.num_workers)
        run_the_program = strategy.name == "multi_worker_mirrored"
        # All-reduce workers know more only when they have joined each other.
        replicas = number if run_the_program else strategy.make().batches_per_step
        # As in Keras, epochs end with the data at the latest. Those of several workers have so many steps.
        one_reads = number == replicas == 1 and self.steps_per_call in (None, 1) and strategy.config.local_steps == 1
        by_passes = self.arguments.ends_by_epochs and (self.steps_per_epoch is None or one_reads)
        return Readers(
            number=number,
            at_once=replicas if strategy.name == "mirrored" else 1,
            replicas=replicas,
            run_the_program=run_the_program,
            serve=strategy.shape.num_ps > 0,
            by_passes=by_passes,
            steps_per_epoch=self.steps_per_epoch if by_passes else None,
            timeout=strategy.cluster.step_timeout,
        )

    def _check_takes_splits(self, *, arrive: bool) -> None:
        """Refuses what needs to know ahead whether there is a batch: with data that may end nobody does."""
        name = self.strategy.name
        what = "data that keeps arriving" if arrive else "data of one process, or of unknown length,"
        if name in registry.ALL_REDUCE and arrive:
            raise ConfigError(
                f"strategy={name}: in every step every replica needs a batch, and with {what} one may have none while "
                "others have; use parameter servers (cluster=2ps2w), or strategy=single"
            )
        if self.steps_per_call not in (None, 1):
            raise ConfigError(f"train.steps_per_call={self.steps_per_call}: with {what} a call is one step; use auto")
        if self.strategy.config.local_steps > 1:
            raise ConfigError(
                f"strategy.local_steps={self.strategy.config.local_steps}: with {what} a step is one batch; use 1"
            )

    @property
    def steps_per_epoch(self) -> int | None:
        """As given, in whole executions: as in Keras, epochs consist of them as long as there is data."""
        given, per_execution = self.arguments.steps_per_epoch, self.source.model.steps_per_execution
        return None if given is None else math.ceil(given / per_execution) * per_execution

    def epoch_lengths(self, data: TrainingData, replicas: int | None = None) -> EpochLengths | None:
        """Global steps of epochs; None if they end with data of unknown length, or nobody knows where.

        Args:
            replicas: of an earlier run; all-reduce workers know their number only when they have joined each other.
        """
        if data.passes is not None:
            return None
        steps_per_epoch = self.steps_per_epoch
        joins = self.strategy.name == "multi_worker_mirrored"
        batches_per_step = replicas if joins and replicas else self.strategy.make().batches_per_step
        all_reduce = self.strategy.name in registry.ALL_REDUCE
        readers = batches_per_step if all_reduce else max(1, self.strategy.shape.num_workers)
        ends_with_data = self.arguments.steps is None and readers == batches_per_step == 1
        if steps_per_epoch is not None and not ends_with_data:
            # The steps of a pass are not those of Keras, which the number is made for.
            return EpochLengths.of(steps_per_epoch, None, self._data_begins_at)
        batches = data.batches_per_pass(readers)
        steps_per_pass = None if batches is None else math.ceil(batches / batches_per_step)
        return EpochLengths.of(steps_per_epoch, steps_per_pass, self._data_begins_at)

    @property
    def _data_begins_at(self) -> int:
        """The global step at which the data, and the first epoch, begin.

        The model has the updates of earlier fits, or of its file, not those of the run that it resumes.
        """
        return int(step_counter(main_optimizer(self.source.model)))

    def first_epoch(self, first_step: int) -> int:
        """The number of the epoch that begins at `first_step`, that of the model, or began there in the resumed run."""
        if self.resume in ("auto", "must") and (checkpoints := self.files.checkpoints()).newest() is not None:
            return checkpoints.first_epoch(first_step)
        return self.arguments.initial_epoch

    def training_spec(
        self,
        data: TrainingData,
        *,
        last_step: int | None = None,
        epoch_lengths: EpochLengths | None = None,
        first_epoch: int = 0,
    ) -> TrainingSpec:
        """What a strategy is to run. What only checks the model need not know where the run and its epochs end."""
        model = self.source.model
        follows = model.steps_per_execution if model.steps_per_execution > 1 else None
        return TrainingSpec(
            model=model,
            data=data,
            batch_size=self.arguments.batch_size,
            # A call that ran out of data in the middle would lose what its steps have logged.
            steps_per_call=(self.steps_per_call or follows) if data.splits is None else 1,
            seed=self.seed,
            # A task that is not the chief writes no logs, and makes no run dir for them.
            log_dir=self.files.logs if self.strategy.is_chief else Path(),
            last_step=last_step,
            grace_secs=self.grace_secs,
            on_servers=self.strategy.shape.num_ps > 0,
            stays_on_servers=lambda: self.keeps_model_on_servers,
            epoch_lengths=epoch_lengths,
            data_begins_at=self._data_begins_at,
            first_epoch=first_epoch,
            source=self.source,
            saves_deltas=any(isinstance(hook, CheckpointSaver) and hook.full_every > 1 for hook in self.hooks),
        )


@dataclass(frozen=True)
class FitOutcome:
    """How a fit ended.

    Attributes:
        result: what `result.json` says.
        history: of the epochs; empty in a task that is not the chief.
        resume: how the next fit of the same trainer begins: None continues from the model, `auto` from the newest
            checkpoint.
        error: what ended the fit; None if it ended well.
        left_on_servers: the fit, if its model is too large to come back to this process.
    """

    result: Result
    resume: str | None
    history: keras.callbacks.History = field(default_factory=keras.callbacks.History)
    error: BaseException | None = None
    left_on_servers: FitRequest | None = None


class Launcher(abc.ABC):
    """Brings a fit to its process, or processes."""

    @abc.abstractmethod
    def launch(self, request: FitRequest) -> FitOutcome:
        """Runs the fit to its end; what ended it too early is in the outcome."""
