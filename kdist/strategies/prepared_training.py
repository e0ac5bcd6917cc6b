"""`PreparedTraining`: a training with its model built, for strategies with a `ParameterStore`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import keras
import tensorflow as tf

from kdist._compat.keras import loss_scaling, main_optimizer
from kdist.config.scheduler import secs_for_calls
from kdist.config.schema import ParameterServerOptions, ServerOptions
from kdist.data.base import element_spec, worker_dataset
from kdist.errors import ConfigError
from kdist.layers.initial_rows import made_on_servers
from kdist.model.lookup_rounds import RowSource
from kdist.model.names import is_seed, variable_names
from kdist.model.optimizer import leaves_other_rows_alone
from kdist.model.replica_step import ReplicaStep
from kdist.parameters.placement.blocks import ModelVariables
from kdist.parameters.placement.messages import Wire
from kdist.parameters.placement.plan import PlacementPlan, Variable, place, wrong_id
from kdist.parameters.store import ParameterStore
from kdist.strategies.base import PresentValues, TrainingSpec
from kdist.strategies.call_sizer import CallSizer

#: Of a tensor that travels; a message is a little larger.
_MOST_BYTES = 2**31 - 2**20


@dataclass(frozen=True)
class PreparedTraining:
    """A training spec with its model built, and the number of workers that share its steps.

    Attributes:
        traced_dataset: creates one worker's dataset; None if that is to be traced again, see `trace_dataset`.
    """

    spec: TrainingSpec
    replica_step: ReplicaStep
    num_workers: int
    traced_dataset: tf.types.experimental.ConcreteFunction | None

    def trace_dataset(self) -> tf.types.experimental.ConcreteFunction:
        """The function that creates one worker's dataset. Workers know only functions traced after they joined."""
        self.spec.data.trace_transfer(self.num_workers)
        return self.traced_dataset or _trace_dataset(self.spec, self.num_workers, len(self.replica_step.seeds))

    def check_assigned(self, strategy: str) -> None:
        """Refuses, with a `ConfigError`, a `tf.Variable` that each of several synchronous replicas would assign."""
        if names := self.replica_step.assigned_outside:
            raise ConfigError(
                f"strategy={strategy}: a step of model {self.spec.model.name} assigns {', '.join(names)}, and each "
                "replica would do so; make it with self.add_weight(..., trainable=False), which travels with the step"
            )

    def check_fixed_tables(self, strategy: str) -> None:
        """Refuses, with a `ConfigError`, dynamic tables where each replica would have other rows."""
        for index in self.replica_step.dynamic:
            raise ConfigError(
                f"strategy={strategy}: every replica has a copy of all parameters, and the rows of the "
                f"{type(self.replica_step.tables[index]).__name__} {self.replica_step.tables[index].name} come with "
                "the ids of one replica; use parameter servers (cluster=1ps2w), or strategy=single in one process"
            )

    def plan(self, num_servers: int, options: ServerOptions, num_workers: int = 1) -> PlacementPlan:
        """Places each variable, with its slots.

        Raises:
            ConfigError: a variable is larger than what TensorFlow can send, and cannot be cut.
        """
        batch_size = self.spec.batch_size or self.replica_step.batch_size
        if batch_size is not None and isinstance(options, ParameterServerOptions):
            # A step of `local_steps` batches looks up the ids of all of them.
            batch_size *= options.local_steps
        variables = self._described_variables()
        plan = place(variables, num_servers, options, num_workers, Wire.max_bytes, batch_size)
        for shard in plan.shards:
            variable = plan.variables[shard.variable]
            num_bytes = variable.value_bytes * (shard.stop - shard.start) // max(1, variable.num_rows)
            if variable.travels and num_bytes > _MOST_BYTES:
                raise ConfigError(
                    f"model {self.spec.model.name}: {plan.name(shard)} has {num_bytes} bytes, and TensorFlow sends at "
                    "most 2 GiB at once; it can be cut by rows if it has no constraint, is not assigned by the step, "
                    "and its optimizer treats each element by itself, as SGD and Adam do"
                )
        return plan

    def plan_for_one(self) -> PlacementPlan:
        """The plan of a store in this process, from where nothing travels; it is the same for every policy."""
        return place(self._described_variables(), 1, ServerOptions())

    def store(
        self,
        devices: Sequence[str],
        plan: PlacementPlan,
        wire: Wire | None = None,
        call: Callable[[Callable[[], None]], None] = lambda function: function(),
        *,
        is_replicated: bool = False,
        values_of: ParameterStore | None = None,
    ) -> ParameterStore:
        """Creates the variables on `devices`; `wire` says how their values travel, `call` waits while they are set.

        They get the values of another store, if one is given, or else the initial ones.
        """
        step = self.replica_step
        variables = ModelVariables(
            step.trainable,
            step.state,
            step.table_groups,
            step.dense_gradients,
            loss_scaling(self.spec.model),
            len(step.worker_state.variables),
            frozenset(len(step.trainable) + i for i in step.replaced_state),
        )
        store = ParameterStore(
            variables,
            step.updates,
            devices,
            plan,
            wire,
            marks_changes=self.spec.saves_deltas,
            is_replicated=is_replicated,
        )
        call(store.fill if values_of is None else partial(store.take_over, values_of))
        return store

    def present_values(self, store: ParameterStore) -> PresentValues:
        """Current values, for functions that workers run."""
        step = self.replica_step

        def pull() -> tuple[list[Any], RowSource | None]:
            pulled = store.pull(trains=False)
            return [*pulled.trainable, *pulled.state], pulled.rows

        return PresentValues([*step.trainable, *step.state], step.tables, step.table_groups, pull)

    def sizer(self, num_workers: int | None = None) -> CallSizer:
        """Chooses the size of calls; `num_workers` share the steps, all of them if None."""
        spec = self.spec
        prepare_secs = secs_for_calls(spec.grace_secs)
        sizer = CallSizer(spec.steps_per_call, num_workers or self.num_workers, spec.last_step, prepare_secs)
        sizer.begin_at(spec.first_step)
        return sizer

    def _described_variables(self) -> list[Variable]:
        step = self.replica_step
        names = variable_names(self.spec.model, [*step.trainable, *step.state])
        parameter_names = names[: len(step.trainable)]
        slots: dict[str, keras.Variable] = {}
        for group in step.updates.groups:
            slots |= group.state(step.trainable, parameter_names)
        described = []
        for i, (name, variable) in enumerate(zip(names, [*step.trainable, *step.state])):
            beside = [slot for key, slot in slots.items() if key.rpartition("/")[0] == f"slots/{name}"]
            cuttable = i < len(step.trainable) and step.updates.is_elementwise(i)
            value_bytes, *slot_bytes = (prod(v.shape) * tf.as_dtype(v.dtype).size for v in [variable, *beside])
            described.append(
                Variable(
                    name,
                    tuple(variable.shape),
                    value_bytes + sum(slot_bytes),
                    value_bytes,
                    can_be_cut=cuttable and variable.constraint is None and i not in step.updates.assigned,
                    always_cut=cuttable and i in step.row_wise,
                    travels=i not in step.tables,
                    is_dynamic=i in step.dynamic,
                    num_pulls=step.num_pulls(i),
                    num_pushes=step.num_pushes(i),
                    ids_per_example=step.ids_per_example(i) if i in step.tables else 0,
                    dtype=tf.as_dtype(variable.dtype).name,
                    note=self._note(i),
                )
            )
        return described

    def _note(self, index: int) -> str:
        """A remark about a variable for the reader of a plan."""
        step, optimizer = self.replica_step, main_optimizer(self.spec.model)
        if index in step.whole_tables:
            return f"the whole table travels in every step, because of {step.whole_tables[index]}"
        if index in step.dynamic:
            return "rows come and go with the ids; each server has those of its ids"
        if index in step.tables:
            remark = "looked up by rows"
            if index not in step.row_wise and not leaves_other_rows_alone(optimizer):
                remark += (
                    f"; {type(optimizer).__name__} updates every row in every step, as in Keras "
                    "(kdist.layers.Embedding updates the rows of the batch only)"
                )
            return remark
        return ""


def prepare(spec: TrainingSpec, num_workers: int, num_replicas: int = 1) -> PreparedTraining:
    """Builds the model for the batches of its data; needs no task.

    Args:
        num_workers: workers that share the steps.
        num_replicas: workers that make one step together.

    Raises:
        ConfigError: the model cannot be trained.
    """
    # The model is built for the shape of a batch, and may have more seeds then; the last one is that of keras.random.
    num_seeds = 1 + sum(map(is_seed, spec.model.variables))
    dataset = _trace_dataset(spec, num_workers, num_seeds)
    batch_spec, _ = element_spec(dataset)
    with made_on_servers() if spec.on_servers else nullcontext():
        epoch_at = spec.epoch_lengths.epoch_at if spec.epoch_lengths else None
        step = ReplicaStep(spec.model, batch_spec, epoch_at, num_replicas)
    is_final = len(step.seeds) == num_seeds and not spec.on_servers
    return PreparedTraining(spec, step, num_workers, dataset if is_final else None)


def _trace_dataset(spec: TrainingSpec, num_workers: int, num_seeds: int) -> tf.types.experimental.ConcreteFunction:
    return worker_dataset(
        spec.data, num_workers=num_workers, batch_size=spec.batch_size, num_seeds=num_seeds, seed=spec.seed
    )


def in_terms_of_tables(error: tf.errors.OpError, plan: PlacementPlan | None) -> tf.errors.OpError:
    """The same error; if an id is not in its table, it names both, not the rows of a server."""
    found = None if plan is None else wrong_id(error.message, plan)
    return error if found is None else tf.errors.InvalidArgumentError(None, None, found)


def no_batch() -> ValueError:
    """The error for an empty dataset: since data is repeated, only an empty one ends."""
    return ValueError("the dataset has not a single batch")
