"""`TrainedRun`: evaluates and predicts with the model of a run, long after it has trained."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from kdist._compat.keras import main_optimizer, metrics_are_built
from kdist.cluster.resolve import membership_of, shape_of
from kdist.config.build import build_model
from kdist.config.scheduler import grace_secs_of
from kdist.config.schema import Config
from kdist.data.base import TrainingData
from kdist.errors import CheckpointError, ConfigError
from kdist.evaluation.evaluate import ValidationArguments, WorkerPool, evaluate, predict
from kdist.log import warn
from kdist.model.logs import Logs
from kdist.model.names import AVERAGE
from kdist.model.source import ModelSource, preprocessing_of
from kdist.model.state import (
    finalize_ema,
    names_here,
    num_bytes,
    parameter_names,
    rows_cannot_be_sent,
    variables_of,
    write_to_model,
)
from kdist.run.checkpoint import Checkpoints, differences
from kdist.run.model_file import MODEL_FILE
from kdist.storage.lock import RunLock
from kdist.strategies import registry
from kdist.strategies.base import Strategy, TrainingSpec
from kdist.strategies.prepared_training import prepare

if TYPE_CHECKING:
    from kdist.run.run_dir import RunDir


class TrainedRun:
    """A trained run with the values of one of its checkpoints, or their moving averages if it keeps some.

    Args:
        config: with the model, and the cluster that evaluates it; checked.
        checkpoints: the folder with its checkpoint; without any, the values are those of `model.keras`, which is then
            the model of the config.
        step: of the checkpoint; None for the newest undamaged one.
        log_dir: folder for the logs of tasks.
        data: preprocessing of the model -> the data that it is built for; called if the model is not built, or workers
            pull values.

    Attributes:
        step: the global step of the values.

    Raises:
        ConfigError: the cluster cannot be used.
        KdistError: the run has not saved anything yet; later it may have.
    """

    def __init__(
        self,
        config: Config,
        run: RunDir,
        checkpoints: Checkpoints,
        step: int | None,
        log_dir: Path,
        data: Callable[[Callable[..., Any] | None], TrainingData],
    ) -> None:
        self._config, self._run, self._log_dir, self._data = config, run, log_dir, data
        self._checkpoints = checkpoints
        if membership_of(config.cluster, os.environ) is not None:
            raise ConfigError(
                f"cluster={config.cluster.shape}: this command starts its tasks; give a shape, as cluster=2ps2w, "
                "and cluster.started_by=kdist if this process was started as a task of another cluster"
            )
        self._shape = shape_of(config.cluster, None)
        self._grace_secs = grace_secs_of(config.run.grace_secs, os.environ)
        if not self._shape.num_ps and not self._shape.is_local:
            raise ConfigError(f"cluster={self._shape}: workers need parameter servers to evaluate, as in cluster=2ps2w")
        self._is_newest = step is None
        self.step = self._step(step)
        self._is_loaded = False
        #: The spec of the batches that the model was built for, if it was built for data.
        self.batch_spec: Any = None

    @cached_property
    def model(self) -> keras.Model:
        """The model, built; `load` gives it its values."""
        config = self._config
        try:
            model = ModelSource(partial(build_model, config), "single", on_servers=True).model
        except (TypeError, ValueError, OSError) as error:
            if not self._is_of_file:
                raise
            raise ConfigError(
                f"{self._run}: model.keras cannot be loaded: {str(error).strip().splitlines()[0]}\n  name the function "
                "that builds the model: model._target_=package.function run.trust=[package]"
            ) from error
        if model.built and getattr(model, "inputs", None):
            main_optimizer(model).build(variables_of(model)[0])
        elif not model.built or config.data is not None:
            self._prepare(model)
        return model

    def load(self) -> keras.Model:
        """The model with its values.

        Raises:
            ConfigError: it is larger than `run.export_max_bytes`, or the checkpoint is of another model.
            CheckpointError: the checkpoint is damaged, or was deleted meanwhile.
        """
        model = self.model
        if self._is_loaded:
            return model
        self._check_size(num_bytes(model))
        if self._checkpoints.steps():
            values = self._values()
            self._check_size(sum(v.nbytes for name, v in values.items() if name.startswith(("parameters/", "state/"))))
            self._check_fits(values)
            write_to_model(model, values)
            finalize_ema(model)
        self._is_loaded = True
        return model

    def evaluate(self, arguments: ValidationArguments) -> Logs:
        """Loss and metrics, computed by the workers if the cluster has some and they can."""
        if not metrics_are_built(self.model):
            self._prepare(self.model)
        data, batch_size = arguments.parts, arguments.batch_size
        if (pool := self._pool()) is not None:
            if (logs := pool.evaluate(self.model, data, batch_size)) is not None:
                return logs
            warn("the workers cannot evaluate this model or data; this process does")
        return evaluate(self.load(), data, batch_size=batch_size)

    def predict(self, x: Any, batch_size: int | None) -> Any:
        """Predicts as `keras.Model.predict`, on the workers if the cluster has some and they can."""
        if (pool := self._pool()) is not None:
            if (outputs := pool.predict(self.model, x, batch_size)) is not None:
                return outputs
            warn("the workers cannot predict with this model or data; this process does")
        return predict(self.load(), x, batch_size=batch_size)

    @property
    def _is_of_file(self) -> bool:
        """True if the model is that of `model.keras`."""
        return self._config.model["_target_"] == MODEL_FILE

    def _step(self, wanted: int | None) -> int:
        if wanted is not None:
            return wanted
        if steps := self._checkpoints.steps():
            return steps[-1]
        if not self._is_of_file:
            error = ConfigError(f"{self._run}: has no checkpoint with the values of the model")
            if RunLock(self._run.folder).living() is not None:
                error = ConfigError(f"{error}; the run has just begun: try again later")
                error.exit_code = 75
            raise error
        return int(self._run.read_result().get("global_step", 0))

    def _values(self) -> dict[str, np.ndarray]:
        """The values of the checkpoint of `step`, or of the one before if that is damaged and any will do."""
        checkpoints = self._checkpoints
        for step in reversed(checkpoints.steps()) if self._is_newest else [self.step]:
            values = checkpoints.read(step)
            if values is not None:
                self.step = step
                return values
            warn(f"{checkpoints.place}: step {step} is damaged, or was deleted meanwhile")
        raise CheckpointError(f"{self._run}: no checkpoint can be read")

    def _check_fits(self, values: dict[str, np.ndarray]) -> None:
        model, place = self.model, f"{self._checkpoints.place}, step {self.step}"
        shapes = {name: tuple(variable.shape) for name, variable in parameter_names(model).items()}
        if found := differences({name: values[name].shape for name in shapes if name in values}, shapes):
            raise ConfigError(
                f"{place} is of another model:\n{found}  change the code of the model back, or its arguments"
            )
        missing = [name for name in names_here(model) if name.endswith(f"/{AVERAGE}") and name not in values]
        if main_optimizer(model).use_ema and missing:
            raise ConfigError(f"optimizer.use_ema=true: {place} has no moving averages")

    def _check_size(self, size: int) -> None:
        limit = self._config.run.export_max_bytes
        if size > limit:
            raise ConfigError(
                f"model {self.model.name}: has {size} bytes, more than run.export_max_bytes={limit}; the workers of "
                "cluster=2ps2w evaluate and predict without a copy in this process; if that has the memory for one, "
                f"give run.export_max_bytes={size}"
            )

    def _pool(self) -> WorkerPool | None:
        """The workers; None if the cluster has none."""
        if not self._shape.num_ps:
            return None
        pulls = rows_cannot_be_sent(self.model) or num_bytes(self.model) > self._config.run.export_max_bytes
        if not pulls:
            self.load()
        make, training = partial(registry.create, self._config, self._shape), self._bring_back if pulls else None
        return WorkerPool(make, self._shape.num_workers, self._log_dir, self._grace_secs, training)

    def _bring_back(self, strategy: Strategy) -> None:
        """Starts a strategy with the values on its servers."""
        strategy.start(self._spec(self.model))
        path = self._checkpoints.restore(strategy.values, self.step)
        restored = -1 if path is None else int(path.name.rpartition("-")[2])
        if restored != self.step and not self._is_newest:
            raise CheckpointError(f"{self._checkpoints.place}: step {self.step} is damaged, or was deleted meanwhile")
        self.step = restored
        strategy.values.use_averages()

    def _prepare(self, model: keras.Model) -> None:
        self.batch_spec = prepare(self._spec(model), 1).replica_step.batch_spec

    def _spec(self, model: keras.Model) -> TrainingSpec:
        config = self._config
        return TrainingSpec(
            model,
            self._data(preprocessing_of(model)),
            config.train.batch_size,
            None,
            0,
            self._log_dir,
            grace_secs=self._grace_secs,
            on_servers=True,
            stays_on_servers=lambda: num_bytes(model) > config.run.export_max_bytes,
        )
