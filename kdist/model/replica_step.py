"""The replica step: one step of any compiled Keras model as a pure function, the same for every strategy.

A strategy gives it values, and takes the gradients. Keras's own `StatelessScope`, `compute_loss` and `compute_metrics`
do the work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kdist._compat.keras import (
    Reduction,
    compile_arguments,
    has_own_compute_loss,
    layers_of,
    loss_scaling,
    loss_tracker,
    losses_of_outputs,
    main_optimizer,
    outside_of_scopes,
    record_reductions,
    table_of,
)
from kdist._compat.tensorflow import assigned_variables, exchanges_between_replicas, send_to_joining_tasks
from kdist.errors import ConfigError
from kdist.layers.pooling import PooledLookup
from kdist.log import warn
from kdist.model.embedding_lookup import (
    RowLookups,
    check_dynamic_layers,
    embedding_layers,
    group_tables,
    layers_looked_up,
    why_needed_whole,
)
from kdist.model.forward import SeededScope, batch_size_of, forward, update_metrics
from kdist.model.logs import flat
from kdist.model.lookup_rounds import LookupRounds, RowSource
from kdist.model.loss_weights import LossTerms, Term, is_of_none, kinds_of, loss_terms, of_any_size, term_of
from kdist.model.metrics import LossCount, ReturnedValues, check_metrics, metric_variables
from kdist.model.names import is_seed
from kdist.model.optimizer import is_elementwise, overflow_of, unscale
from kdist.model.source import overrides_of
from kdist.model.state import WorkerState, remember_groups
from kdist.model.step_findings import StepFindings, StepOutputs, check_assigned, check_exchanges
from kdist.model.traced_step import TracedScope, TracedStep
from kdist.model.train_step import OwnTrainStep, cut_own_step, optimizer_reads
from kdist.model.updates import ReplicaOutput, RunningStep, StepUpdates


class ReplicaStep:
    """The pure step function of `model`.

    Args:
        model: compiled, of any kind; built if necessary.
        batch_spec: nested type specs of a batch: x alone, or a tuple `(x,)`, `(x, y)` or `(x, y, sample_weight)`.
        epoch_at: as for `WorkerState`.
        num_replicas: the replicas that make one step together; see `kdist.model.loss_weights`.

    Attributes:
        updates: the calls of optimizers, and their phases.
        worker_state: the states of stateful layers.
        optimizer_reads: the variables that the step reads of its optimizers.
        outside: the `tf.Variable`s that the step uses beside those of Keras; they stay where they are, in this process.
        assigned_outside: the names of those that it assigns.
        tables: embedding layers whose tables are looked up by rows, by the index of the table in `trainable`.
        table_groups: these tables in groups that are looked up and updated as one.
        whole_tables: the other embedding tables, each with the reason why it is needed as a whole.
        replaced_state: the state that a step does not just add to, by index.

    Raises:
        ConfigError: the model cannot be trained; `kdist.model.source` checks what can be checked before it is built.
    """

    def __init__(
        self,
        model: keras.Model,
        batch_spec: Any,
        epoch_at: Callable[[tf.Tensor], tf.Tensor] | None = None,
        num_replicas: int = 1,
    ) -> None:
        self.model = model
        self.batch_spec = batch_spec
        self._num_replicas = num_replicas
        #: The model's own `train_step`, if it has one.
        self.own = OwnTrainStep(model) if overrides_of(model, "train_step") else None
        self._jit_compile = True if compile_arguments(model).get("jit_compile") is True else None
        #: Known before a trace: why tables of embedding layers are needed as a whole, by the `id` of the layer; the
        #: terms of the loss.
        self._why_whole: dict[int, str] = {}
        self._terms = LossTerms() if num_replicas == 1 else None
        with exchanges_between_replicas() as exchanges:
            self._trace()
            while not self._is_traced_right(exchanges):
                self._trace()
        scope, graph = self._traced.scope, self._traced.graph
        if self.own is None:
            check_metrics(model, batch_spec)
        self.worker_state = WorkerState(self._found.worker_state, epoch_at)
        self.metrics = metric_variables(model, self.returned.means.values())
        if not self.trainable:
            warn(f"model {model.name}: nothing to train: it has no trainable variable")
        self.updates = self._find_updates()
        self.optimizer_reads = optimizer_reads(self.updates.groups, loss_scaling(model), scope.variables)
        self.loss_counts: list[LossCount] = [] if num_replicas == 1 else self._find_loss_counts()
        self._with_gradient = self._find_dense_gradients()
        optimizer = main_optimizer(model)
        # Averages that overwrite a variable overwrite all of it.
        by_rows = is_elementwise(optimizer) and not optimizer.ema_overwrite_frequency
        row_wise = frozenset(i for i, layer in self.tables.items() if by_rows and isinstance(layer, PooledLookup))
        self.table_groups = group_tables(self.tables, row_wise, self.updates, self._with_gradient)
        check_dynamic_layers(model, [self.tables[i] for i in self.row_wise], self.whole_tables)
        of_keras = {id(variable.value) for variable in (*model.variables, *scope.variables.values())}
        self.outside = [variable for variable in graph.variables if id(variable) not in of_keras]
        written = {id(variable) for variable in assigned_variables(graph)}
        self.assigned_outside = sorted(v.name for v in self.outside if id(v) in written)
        remember_groups(model, self.updates.groups)

    @property
    def row_wise(self) -> frozenset[int]:
        """The tables whose optimizer updates only rows that were looked up, by index."""
        return frozenset(index for group in self.table_groups if group.is_row_wise for index in group.tables)

    @property
    def dynamic(self) -> frozenset[int]:
        """The tables without a length, by index."""
        return frozenset(index for group in self.table_groups if group.dynamic for index in group.tables)

    def num_pulls(self, variable: int) -> int:
        """The number of times that a step reads a variable, by its index in `trainable`, then in `state`."""
        return 1 + sum(variable in again for again in self.updates.pulled_again)

    def num_pushes(self, variable: int) -> int:
        """The number of changes that a step makes to a variable, by its index as in `num_pulls`."""
        outputs: StepOutputs = self._traced.outputs
        if variable >= len(self.trainable):
            return int(outputs.state[variable - len(self.trainable)] is not None)
        phases = {update.phase for update in self.updates.updates if variable in update.variables}
        updates = len(phases) if variable in self._with_gradient else 0
        return updates + sum(variable in assigned for assigned in outputs.assigned)

    def ids_per_example(self, table: int) -> int | None:
        """The number of ids of an example that are looked up in a table; None if examples differ."""
        layer, lookups = self.tables[table], self._found.lookups.rounds
        found = [lookup.ids_per_example for of_round in lookups for lookup in of_round if lookup.layer is layer]
        return None if None in found else sum(number or 0 for number in found)

    @property
    def is_self_contained(self) -> bool:
        """True if a step needs nothing of other tasks, or of earlier steps, but its arguments."""
        fetches = self.tables or self.optimizer_reads or self.worker_state.variables
        return not fetches and self.updates.num_phases == 1

    def send_to_joining_tasks(self) -> AbstractContextManager[None]:
        """In this context, the tasks of a cluster that this process joins get to know the step."""
        return send_to_joining_tasks(self._traced.function)

    def run(
        self,
        trainable: Sequence[tf.Tensor | None],
        state: Sequence[tf.Tensor],
        metrics: Sequence[tf.Tensor],
        seeds: tf.Tensor,
        batch: Any,
        reads: Sequence[tf.Tensor] = (),
        moment: tuple[tf.Tensor, tf.Tensor] | None = None,
        rows: RowSource | None = None,
    ) -> RunningStep:
        """Runs a step on a batch; it begins when its first output is asked for.

        Args:
            trainable: values of `self.trainable`; None for `self.tables`.
            state, metrics: values of `self.state`, and of `self.metrics` before this batch.
            seeds: uint32 `[len(self.seeds), 2]`, a fresh state for every seed generator (Dropout, augmentation).
            batch: as `batch_spec`.
            reads: values of `self.optimizer_reads`.
            moment: the arguments of `WorkerState.read`; None if there is no such state.
            rows: of `self.table_groups`; None if there are none.
        """
        if moment is not None:
            state = [*state, *self.worker_state.read(*moment)]
        num_examples = batch_size_of(batch)
        variables = [*self.state, *self.worker_state.variables, *self.metrics]
        values: dict[int, Any] = {id(v): value for v, value in zip(self.trainable, trainable) if value is not None}
        values |= {id(v): value for v, value in zip(variables, [*state, *metrics])}
        values |= {id(seed): seeds[i] for i, seed in enumerate(self.seeds) if id(seed) in self._traced.scope.variables}
        values |= {id(read.variable): value for read, value in zip(self.optimizer_reads, reads)}
        if self.updates.num_phases > 1:
            running = self._cut().run(self._traced.arguments(batch, values))
            fresh: Mapping[int, tf.Tensor] = {}
            for phase, again in enumerate(self.updates.pulled_again):
                arriving = [fresh[i] for i in sorted(again)] if phase else None
                gradients, assigned, new_state, new_metrics, logs = running.send(arriving)
                shared, weight = self._keep(new_state), self._weight(num_examples)
                is_last = phase + 1 == self.updates.num_phases
                counted = self._count(metrics, new_metrics, logs, num_examples) if is_last else []
                fresh = yield ReplicaOutput(gradients, assigned, shared, counted, num_examples, phase, weight)
            return
        if rows is None:
            outputs: StepOutputs = self._traced(batch, values)
            of_tables = dict[int, Any]()
        else:
            outputs, gradients_of = self._lookups.run(self._traced.arguments(batch, values), rows)
            of_tables = gradients_of(outputs.of_rows)
        gradients = [of_tables.get(i, g) for i, g in enumerate(self.updates.merge(outputs.gradients, 0))]
        assigned = self.updates.merge_assigned(outputs.assigned, 0)
        weight = self._weight(num_examples, outputs.divisor)
        counted = self._count(metrics, outputs.metrics, outputs.values, num_examples)
        shared = self._keep(outputs.state)
        yield ReplicaOutput(gradients, assigned, shared, counted, num_examples, 0, weight, outputs.overflow)

    @cached_property
    def _lookups(self) -> LookupRounds:
        inputs = self._traced.open_inputs(without={id(self.trainable[i]) for i in self.tables})
        traced, lookups = self._traced, self._found.lookups
        return LookupRounds(traced.graph, inputs, traced.outputs, lookups, self.tables, self.table_groups)

    def _count(
        self,
        before: Sequence[tf.Tensor],
        after: Sequence[tf.Tensor | None],
        values: Sequence[tf.Tensor],
        num_examples: tf.Tensor | int,
    ) -> list[tf.Tensor]:
        """The values of `metrics` after a step.

        Args:
            after: of the variables of the model's metrics; None where they did not change.
            values: the returned values that no metric has counted.
        """
        unchanged = [None] * (len(before) - len(after))
        counted = [old if new is None else new for old, new in zip(before, [*after, *unchanged])]
        if not self.returned.means:
            return counted
        with SeededScope(zip(self.metrics, counted)) as scope:
            for (name, mean), value in zip(self.returned.means.items(), values):
                mean.update_state(value, sample_weight=1 if name in self.returned.sums else num_examples)
        return [scope.get_current_value(variable) for variable in self.metrics]

    def _keep(self, new_state: Sequence[tf.Tensor | None]) -> list[tf.Tensor | None]:
        """Sets the states that stay on the worker; returns the new state that is shared."""
        number = len(self.state)
        if any(value is not None for value in new_state[number:]):
            self.worker_state.write(new_state[number:])
        return list(new_state[:number])

    @property
    def batch_size(self) -> int | None:
        """The number of examples of every batch; None if batches differ."""
        specs = (spec for spec in tf.nest.flatten(self.batch_spec) if not is_of_none(spec))
        size: int | None = next(specs).shape[0]
        return size

    def _weight(self, num_examples: tf.Tensor | int, divisor: tf.Tensor | None = None) -> tf.Tensor | None:
        """The weight of a replica's gradient; None if replicas have equal weights, or their gradients add up."""
        if self._num_replicas == 1 or self.updates.loss is Term.SUM:
            return None
        if self.updates.loss is Term.OWN_MEAN:
            return divisor
        return None if isinstance(num_examples, int) else tf.cast(num_examples, tf.float32)

    def _find_loss_counts(self) -> list[LossCount]:
        """The losses that a replica counts otherwise than Keras; see `_weight_of_count`."""
        terms, means = self._terms or LossTerms(), self.returned.means
        counted = [LossCount(means[name], is_sum=True) for name in sorted(self.returned.sums & set(means))]
        if self.own is not None:
            # The tracker of the loss is one of `metrics` unless the model overrides them.
            own = {id(metric): metric for metric in (*self.model.metrics, loss_tracker(self.model))}.values()
            sums = [m for m in own if isinstance(m, keras.metrics.Mean) and m.name in self.returned.sums - set(means)]
            return [*counted, *(LossCount(metric, is_sum=True, own_counts=self._num_replicas) for metric in sums)]
        # Keras takes the mean of a loss that is not reduced.
        if self.updates.loss is not Term.MEAN and Term.VALUES not in terms.compiled:
            counted.append(LossCount(loss_tracker(self.model), self.updates.loss is Term.SUM))
        if not terms.is_whole:
            # Keras weights them by examples only if their number is known.
            for term, metric in zip(terms.compiled, losses_of_outputs(self.model)):
                if term is not Term.VALUES:
                    counted.append(LossCount(metric, term is Term.SUM, int(self.batch_size is not None)))
        return counted

    def _trace(self) -> None:
        layers = [] if self.own is not None else layers_looked_up(self.model)
        self._layers = [layer for layer in layers if id(layer) not in self._why_whole]
        step = partial(self._run, layers=self._layers)
        self._traced = TracedStep(step, self.batch_spec, self.model, self._jit_compile)
        self._found: StepFindings = self._traced.found
        self.trainable, self.state, self.seeds = self._found.trainable, self._found.state, self._found.seeds
        self.replaced_state, self.returned = self._found.replaced, self._found.returned

    def _is_traced_right(self, exchanges: Sequence[str]) -> bool:
        """False if the findings of a trace require another one; raises `ConfigError` if the step cannot be trained."""
        scaling, is_built = loss_scaling(self.model), True
        check_assigned(self.model, self._traced.scope.written)
        if self._num_replicas > 1:
            check_exchanges(self.model, exchanges, self._traced.scope.written)
        if self.own is not None:
            is_built = scaling is None or scaling.built
            self.own.build_optimizers(self._traced.scope.variables.values())
        # The scale of the loss is a variable only when the optimizer is built.
        return is_built and self._are_tables_right() and self._are_terms_right()

    def _are_tables_right(self) -> bool:
        """Sets `tables` and `whole_tables`; False if other tables are looked up by rows than can be.

        A table is looked up by rows if its layer uses it for nothing else, and nothing else reads it.
        """
        layers = embedding_layers(self.model, self.trainable)
        if self.own is not None:
            self.tables, self.whole_tables = {}, dict.fromkeys(layers, "the model's own train_step")
            return True
        looked_up = {id(layer) for layer in self._layers}
        inputs, hidden = self._traced.scope.inputs, self._found.lookups.hidden
        for layer in layers.values():
            key, table = id(layer), inputs.get((id(table_of(layer)), 0))
            if key in looked_up and (key in hidden or (table is not None and table.consumers())):
                self._why_whole[key] = hidden.get(key, "another use of it in the model")
        self.tables = {index: layer for index, layer in layers.items() if id(layer) in looked_up}
        self.whole_tables = {
            index: self._why_whole.get(id(layer)) or why_needed_whole(layer) or ""
            for index, layer in layers.items()
            if index not in self.tables
        }
        # The step has made a layer that has no reason.
        return all(self.whole_tables.values()) and not looked_up & self._why_whole.keys()

    def _are_terms_right(self) -> bool:
        """Sets the terms of the losses of synchronous replicas; False if the trace has assumed others."""
        if self._terms is not None:
            return True
        found = self._found
        if self.own is not None:
            kinds = self._try_terms()
            terms = tuple(kinds[: len(self.own.updated)])
            sums = {n for n, kind in zip(found.returned.names or (), kinds[len(terms) :]) if kind is Term.SUM}
            self.returned = replace(found.returned, sums=frozenset(sums))
            if found.num_divisors:
                # Of several divisors or updates, only the step knows which belong together.
                terms = (Term.OWN_MEAN if found.num_divisors == len(self.own.updated) == 1 else Term.UNKNOWN,)
            self._terms = self._of_replica(LossTerms(terms, is_whole=True))
            return True
        self._terms = self._of_replica(found.terms.known(self._try_terms() if Term.UNKNOWN in found.terms.all else ()))
        factors = *self._terms.compiled_factors, *self._terms.added_factors
        return self._terms == found.assumed and all(factor == 1 for factor in factors)

    def _try_terms(self) -> list[Term]:
        """Tries the terms of the loss; of a model's own step, its updates and returned values."""
        spec = of_any_size(self.batch_spec)
        is_so = spec == self.batch_spec and not self._layers
        traced: list[TracedStep] = [self._traced] if is_so else []

        def values(batch: Any, draw: int) -> Sequence[Any]:
            if not traced:
                traced.append(TracedStep(partial(self._run, layers=[]), spec, self.model))
            rng = np.random.default_rng(draw)
            seeds = [v for v in traced[0].scope.variables.values() if is_seed(v)]
            drawn = {id(seed): tf.constant(rng.integers(0, 2**31, seed.shape), seed.dtype) for seed in seeds}
            return traced[0](batch, drawn).tried

        return kinds_of(values, self.batch_spec, self.model, self._parts_to_try())

    def _parts_to_try(self) -> Sequence[int]:
        """The indices of values of a try that must follow from those of parts of a batch.

        With statistics of the batch, as in normalization, none do; of numbers of low precision it cannot be told.
        """
        found, written = self._found, self._traced.scope.written
        if any(layer.compute_dtype not in (None, "float32", "float64") for layer in layers_of(self.model)):
            return ()
        if any(id(v) in written and not is_seed(v) for v in self.model.non_trainable_variables):
            return ()
        if self.own is not None:
            return () if found.num_divisors else range(len(self.own.updated))
        return [i for i, term in enumerate(found.terms.all) if term is Term.UNKNOWN]

    def _of_replica(self, terms: LossTerms) -> LossTerms:
        return terms.of_replica(self._num_replicas, has_same_size=self.batch_size is not None)

    def _find_updates(self) -> StepUpdates:
        loss = (self._terms or LossTerms()).together
        if loss is None:
            raise ConfigError(
                f"model {self.model.name}: its loss is neither a mean nor a sum over the examples, or of several "
                "losses each is reduced, masked or weighted in its own way; synchronous replicas cannot compute what "
                "one process computes with all their examples: use losses with the same reduction, for a mean beside a "
                "sum also batches of one size (drop_remainder=True), or strategy=parameter_server"
            )
        if self.own is not None:
            updates, self._cut = cut_own_step(self.own, self._traced, loss, self._jit_compile)
            return updates
        updates = StepUpdates.of_all(main_optimizer(self.model), self.trainable, loss)
        return replace(updates, assigned=frozenset(i for found in self._traced.outputs.assigned for i in found))

    def _find_dense_gradients(self) -> frozenset[int]:
        """Sets `dense_gradients`; returns the variables that get any gradient, by index."""
        outputs: StepOutputs = self._traced.outputs
        index_of = {id(layer): index for index, layer in self.tables.items()}
        given = [(i, g) for of_update in outputs.gradients for i, g in enumerate(of_update) if g is not None]
        sparse = {i for i, gradient in given if not isinstance(gradient, tf.Tensor)}
        for of_round, gradients in zip(self._found.lookups.rounds, outputs.of_rows):
            sparse |= {index_of[id(lookup.layer)] for lookup, g in zip(of_round, gradients) if g is not None}
        every = frozenset(i for i, _ in given) | sparse
        self.dense_gradients = every - sparse
        return every

    def _record_losses(self, num_examples: tf.Tensor | int) -> AbstractContextManager[list[Reduction]]:
        """In this context, losses are those of a replica, and counted so that those of all replicas add up."""
        if self._num_replicas == 1:
            return nullcontext([])
        terms = self._terms or LossTerms(is_whole=has_own_compute_loss(self.model))

        def count(reduction: Reduction, weight: Any) -> Any:
            term = terms.compiled[reduction.index] if terms.compiled else term_of(reduction)
            return weight if term is Term.VALUES else _weight_of_count(term, num_examples, reduction.divisor)

        own_count = None if terms.is_whole else count
        return record_reductions(self.model, terms.compiled_factors, terms.added_factors, own_count)

    def _run_own(self, own: OwnTrainStep, batch: Any, scope: TracedScope) -> tuple[StepOutputs, StepFindings]:
        model, scaling = self.model, loss_scaling(self.model)
        with scope, record_reductions(model) as reductions:
            logs = {name: tf.convert_to_tensor(value) for name, value in own.trace(batch, scope).items()}
            # The tracker of the loss is a metric, too, and stays at 0 if the step leaves it alone.
            every = (*model.metrics, loss_tracker(model))
            metrics = [metric for metric in every if any(id(v) in scope.written for v in metric.variables)]
            counted = {name for metric in metrics for name in flat({metric.name: metric.result()})}
        scale = None if scaling is None or not scaling.built else scope.value_of(scaling.dynamic_scale)
        gradients = own.gradients(scale)
        tried: list[Any] = []
        if self._num_replicas > 1:
            given = [[tf.convert_to_tensor(g) for g in of_update if g is not None] for of_update in gradients]
            tried = [*(tf.concat([tf.reshape(g, [-1]) for g in of_update], 0) for of_update in given), *logs.values()]
        means = [name for name in logs if name not in counted]
        returned = ReturnedValues({n: keras.metrics.Mean(name=n) for n in means}, list(logs), "loss" in counted)
        found, divisors = StepFindings.of(model, scope, RowLookups([]), returned, own.trainable), _divisors(reductions)
        values = [logs[name] for name in means]
        state, counts = found.changed(model, scope)
        assigned, overflow = own.assigned(scope), overflow_of(gradients[0], scale)
        divisor = next(iter(divisors), None)
        outputs = StepOutputs(gradients, assigned, state, counts, values, divisor, overflow, [], tried)
        return outputs, replace(found, num_divisors=len(divisors))

    def _run(
        self, batch: Any, scope: TracedScope, *, layers: Sequence[keras.layers.Layer]
    ) -> tuple[StepOutputs, StepFindings]:
        """The step to trace, with lookups by rows of the tables of some layers if it is Keras's own."""
        if self.own is not None:
            return self._run_own(self.own, batch, scope)
        model, scaling = self.model, loss_scaling(self.model)
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
        num_examples = batch_size_of(batch)
        with tf.GradientTape() as tape, scope:
            lookups = RowLookups(layers, tape)
            with lookups.active(), self._record_losses(num_examples) as reductions:
                y_pred, loss = forward(model, x, y, sample_weight, training=True)
            if loss is None:
                raise ConfigError(f"model {model.name}: no loss; compile it with one, or call add_loss in a layer")
            if not model.optimizer.built:
                with outside_of_scopes():
                    model.optimizer.build(model.trainable_variables)
            scaled_loss = model.optimizer.scale_loss(loss)
        trainable = model.trainable_variables
        read = {id(v): scope.inputs[id(v), 0] for v in trainable if (id(v), 0) in scope.inputs}
        dense, of_rows = tape.gradient(scaled_loss, (list(read.values()), lookups.rows))
        of_variables = dict(zip(read, dense))
        gradients = [of_variables.get(id(v)) for v in trainable]
        if trainable and all(gradient is None for gradient in [*gradients, *tf.nest.flatten(of_rows)]):
            raise ConfigError(f"model {model.name}: the loss depends on no trainable variable")
        divisor, tried, term = next(iter(_divisors(reductions)), None), list[Any](), Term.MEAN
        terms = assumed = LossTerms()
        with scope:
            if self._num_replicas > 1:
                # The rows of tables come of the batch, too.
                terms = loss_terms(model, (batch, lookups.rows), reductions)
                assumed = self._terms or self._of_replica(terms.known())
                term = Term.MEAN if loss.shape.rank else assumed.together or Term.MEAN
                if Term.UNKNOWN in terms.all:
                    tried = [loss] if terms.is_whole else [*(one.value for one in reductions), *model.losses]
            counted = _weight_of_count(term, num_examples, divisor)
            logs = update_metrics(model, x, y, y_pred, sample_weight, loss, counted)
            others = sorted(set(logs) - set(flat(model.get_metrics_result())) - {"loss"})
            values = [tf.convert_to_tensor(logs[name]) for name in others]
        scale = None if scaling is None else scope.value_of(scaling.dynamic_scale)
        overflow = overflow_of([*gradients, *tf.nest.flatten(of_rows)], scale)
        optimizer = main_optimizer(model)
        gradients = unscale(optimizer, gradients, scale)
        of_rows = [unscale(optimizer, of_round, scale) for of_round in of_rows]
        # A model may leave a metric out in training. The loss is always reported.
        names = dict.fromkeys(["loss", *logs])
        returned = ReturnedValues({name: keras.metrics.Mean(name=name) for name in others}, list(names))
        found = StepFindings.of(model, scope, lookups, returned, trainable)
        state, counts = found.changed(model, scope)
        index_of = {id(v): i for i, v in enumerate(trainable)}
        assigned = {index_of[key]: by for key, by in scope.take_assigned(trainable).items()}
        outputs = StepOutputs([gradients], [assigned], state, counts, values, divisor, overflow, of_rows, tried)
        return outputs, replace(found, terms=terms, assumed=assumed)


def _divisors(reductions: Sequence[Reduction]) -> list[tf.Tensor]:
    """The divisors of compiled losses that depend on more than the shape of the batch."""
    return [reduction.divisor for reduction in reductions if reduction.divisor is not None]


def _weight_of_count(term: Term, num_examples: tf.Tensor | int, divisor: tf.Tensor | None) -> Any:
    if term is Term.SUM:
        return 1
    return divisor if term is Term.OWN_MEAN else num_examples
