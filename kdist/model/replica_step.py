"""The replica step: one step of any compiled Keras model as a pure function, the same for every strategy.

Where the values come from and where the gradients go is the strategy's business. Keras's own `StatelessScope`,
`compute_loss` and `compute_metrics` do the work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import keras
import tensorflow as tf

from kdist._compat.keras import (
    Reduction,
    compile_arguments,
    global_seed,
    layers_of,
    loss_scaling,
    loss_tracker,
    losses_of_outputs,
    main_optimizer,
    optimizers_of,
    recorded_assignments,
    recorded_reads,
    recorded_reductions,
)
from kdist._compat.tensorflow import assigned_variables, exchanges_between_replicas
from kdist.console.warn import warn
from kdist.errors import ConfigError
from kdist.layers.pooled_lookup import PooledLookup
from kdist.model.embedding_lookup import RowLookups, check_dynamic_layers, embedding_layers, why_needed_whole
from kdist.model.forward import batch_size_of, forward, update_metrics
from kdist.model.increments import is_increment
from kdist.model.logs import flat
from kdist.model.lookup_rounds import LookupRounds, RowSource
from kdist.model.loss_weights import LossTerms, LossWeights, Term, is_of_none, loss_terms, tried_terms
from kdist.model.metric_merging import check_metrics
from kdist.model.metrics import LossCount, ReturnedValues, metric_variables
from kdist.model.names import is_seed
from kdist.model.optimizer import can_update_rows, overflow_of, unscaled
from kdist.model.phases import Phases, TracedPhases
from kdist.model.seeded_scope import SeededScope
from kdist.model.state import choose_variables, layer_states, remember_groups, stateful_layers
from kdist.model.table_groups import TableGroup, group_tables, single_groups
from kdist.model.train_step import Clock, ClockKind, OwnTrainStep, overrides_train_step
from kdist.model.updates import ReplicaOutput, RunningStep, StepUpdates
from kdist.model.worker_state import WorkerState


class ReplicaStep:
    """The pure step function of `model`.

    Args:
        model: a compiled model: Sequential, Functional or subclassed. It is built if necessary.
        batch_spec: nested type specs of a batch: x alone, or a tuple `(x,)`, `(x, y)` or `(x, y, sample_weight)`.
        epoch_at: that of `WorkerState`.
        num_replicas: how many make one step together; see `kdist.model.loss_weights`.

    Attributes:
        updates: what it updates, and in how many phases.
        worker_state: the states of stateful layers.
        clock: what the step reads of its optimizers.
        outside: the `tf.Variable`s that the step uses beside those of Keras; they stay where they are, in this process.
        assigned_outside: the names of those that it assigns.
        tables: embedding layers whose tables are looked up by rows, by the index of the table in `trainable`.
        table_groups: those tables in groups that are looked up and updated as one.
        whole_tables: the other embedding tables, each with the reason why it is needed as a whole.

    Raises:
        ConfigError: the model cannot be trained; `kdist.model.model_checks` finds what can be found before it is built.
    """

    def __init__(
        self,
        model: keras.Model,
        batch_spec: Any,
        epoch_at: Callable[[tf.Tensor], tf.Tensor] | None = None,
        num_replicas: int = 1,
    ) -> None:
        self.model = model
        self._num_replicas = num_replicas
        #: The model's own `train_step`, if it has one.
        self.own: OwnTrainStep | None = None
        with (
            recorded_assignments() as assigned,
            recorded_reads() as read,
            exchanges_between_replicas() as exchanges,
        ):
            if overrides_train_step(model):
                self.own = OwnTrainStep(model, batch_spec, num_replicas)
            else:
                self.returned, self._terms, graph = _build(model, batch_spec, num_replicas)
                check_metrics(model, batch_spec)
                self.outside = _of_tensorflow(graph.variables, [*assigned.values(), *read.values()])
                written = assigned_variables(graph)
                if {id(v) for v in written} & {id(v.value) for v in model.trainable_variables}:
                    # SpectralNormalization, for one. Keras's step goes the way of one of the model's own then.
                    self.own = OwnTrainStep(model, batch_spec, num_replicas)
        if self.own is not None:
            self.returned, self._terms = self.own.returned, self.own.terms
        _check_assigned(model, assigned)
        if num_replicas > 1:
            _check_exchanges(model, exchanges, assigned)
        beside = _read_beside(model, read)
        self.trainable, others = choose_variables(model, None if self.own is None else self.own.trainable, beside)
        self.state = [v for v in others if not is_seed(v)]
        #: State to which a step does not just add, by index; complete when the step was traced.
        self._replaced = {i for i, v in enumerate(self.state) if not tf.as_dtype(v.dtype).is_floating}
        # The last one is the state that keras.random uses without a seed.
        self.seeds = [*(v for v in others if is_seed(v)), global_seed()]
        states = [variable for layer in stateful_layers(model) for variable in layer_states(layer)]
        self.worker_state = WorkerState(states, epoch_at)
        self.metrics = metric_variables(model, self.returned)
        if not self.trainable:
            warn(f"model {model.name}: nothing to train: it has no trainable variable")
        self.batch_spec = batch_spec
        self.updates = StepUpdates.of_all(main_optimizer(model), self.trainable, self._weights())
        self.loss_counts: list[LossCount] = [] if num_replicas == 1 else self._losses_counted()
        self._has_dense: frozenset[int] = frozenset()
        self.tables: dict[int, keras.layers.Layer] = {}
        self.table_groups: list[TableGroup] = []
        self.whole_tables: dict[int, str] = {}
        self.clock: list[Clock] = []
        if self.own is None and (scaling := loss_scaling(model)) is not None:
            self.clock = [Clock(scaling.dynamic_scale, 0, ClockKind.LOSS_SCALE)]
        self._find_tables()
        check_dynamic_layers(model, [self.tables[i] for i in self.row_wise], self.whole_tables)
        self._jit_compile = True if compile_arguments(model).get("jit_compile") is True else None
        # Traced once, no matter how many steps a call unrolls.
        self._dense_step = tf.function(self._run_dense, autograph=False, jit_compile=self._jit_compile)
        self._phases: Phases | None = None
        self._rounds: LookupRounds | None = None
        if self.own is not None:
            graph = self._trace_own()
            self.outside = _of_tensorflow(graph.variables, [*assigned.values(), *read.values()])
            written = assigned_variables(graph)
        self.assigned_outside = sorted(v.name for v in self.outside if any(v is one for one in written))
        remember_groups(model, self.updates.groups)

    @property
    def _own(self) -> OwnTrainStep:
        assert self.own is not None
        return self.own

    @property
    def _all_state(self) -> list[keras.Variable]:
        return [*self.state, *self.worker_state.variables]

    @property
    def row_wise(self) -> frozenset[int]:
        """The tables of which the optimizer updates only the rows that were looked up, by index."""
        return frozenset(index for group in self.table_groups if group.is_row_wise for index in group.tables)

    @property
    def dynamic(self) -> frozenset[int]:
        """The tables without a length, by index."""
        return frozenset(index for group in self.table_groups if group.dynamic for index in group.tables)

    @property
    def is_self_contained(self) -> bool:
        """Whether a step needs nothing of other tasks, or of earlier steps, but what it is given at its beginning."""
        fetches = self.tables or self.clock or self.worker_state.variables
        return not fetches and self.updates.num_phases == 1

    def replaced_state(self) -> frozenset[int]:
        """The state that a step replaces instead of adding to it, by index: whole numbers, and all other functions."""
        self.dense_gradients()
        return frozenset(self._replaced)

    def dense_gradients(self) -> frozenset[int]:
        """The trainable variables that get a dense gradient in every step, by index."""
        if self.tables or self.own is not None:
            return self._has_dense
        traced = self._dense_step.get_concrete_function(*self._specs)
        others = (type(None), tf.IndexedSlices, tf.IndexedSlicesSpec)
        return frozenset(i for i, g in enumerate(traced.structured_outputs[0]) if not isinstance(g, others))

    def run(
        self,
        trainable: Sequence[tf.Tensor | None],
        state: Sequence[tf.Tensor],
        metrics: Sequence[tf.Tensor],
        seeds: tf.Tensor,
        batch: Any,
        clock: Sequence[tf.Tensor] = (),
        moment: tuple[tf.Tensor, tf.Tensor] | None = None,
        rows: RowSource | None = None,
    ) -> RunningStep:
        """One step on one batch, begun when its first output is asked for.

        Args:
            trainable: values of `self.trainable`; None for `self.tables`.
            state, metrics: values of `self.state`, and of `self.metrics` before this batch.
            seeds: uint32 `[len(self.seeds), 2]`, a fresh state for every seed generator (Dropout, augmentation).
            batch: as `batch_spec`.
            clock: values of `self.clock`.
            moment: what `WorkerState.read` takes; None if there is no such state.
            rows: those of `self.table_groups`; None if there are none.
        """
        if moment is not None:
            state = [*state, *self.worker_state.read(*moment)]
        num_examples = batch_size_of(batch)
        arguments = list(trainable), list(state), list(metrics), seeds, batch, list(clock)
        if rows is not None:
            if self._rounds is None:
                self._rounds = LookupRounds(self._run_with_rows, self._specs, self.table_groups)
            gradients, new_state, new_metrics, divisor, overflow = self._rounds.run(arguments, rows)
            weight = self._weight(num_examples, divisor)
            shared, unassigned = self._keep(new_state), [None] * len(gradients)
            yield ReplicaOutput(gradients, unassigned, shared, new_metrics, num_examples, 0, weight, overflow)
        elif self.updates.num_phases == 1:
            gradients, assigned, new_state, new_metrics, divisor, overflow = self._dense_step(*arguments)
            weight = self._weight(num_examples, divisor)
            shared = self._keep(new_state)
            yield ReplicaOutput(gradients, assigned, shared, new_metrics, num_examples, 0, weight, overflow)
        else:
            if self._phases is None:
                self._phases = self._trace_phases().phases(self._jit_compile)
            running = self._phases.run(arguments)
            outputs = next(running)
            for phase in range(self.updates.num_phases):
                gradients, assigned, new_state, new_metrics = outputs
                shared = self._keep(new_state)
                weight = self._weight(num_examples)
                fresh = yield ReplicaOutput(gradients, assigned, shared, new_metrics, num_examples, phase, weight)
                if phase + 1 < self.updates.num_phases:
                    outputs = running.send([fresh[i] for i in sorted(self.updates.pulled_again[phase + 1])])

    def _keep(self, new_state: Sequence[tf.Tensor | None]) -> list[tf.Tensor | None]:
        """Sets the states that stay on the worker; returns the new state that is shared."""
        number = len(self.state)
        if any(value is not None for value in new_state[number:]):
            self.worker_state.write(new_state[number:])
        return list(new_state[:number])

    @property
    def _has_one_size(self) -> bool:
        """Whether all batches have the same number of examples."""
        specs = (spec for spec in tf.nest.flatten(self.batch_spec) if not is_of_none(spec))
        return next(specs).shape[0] is not None

    def _weights(self) -> LossWeights:
        """The weights of replicas' gradients; sets the factors of their losses."""
        if self._num_replicas > 1:
            self._terms = self._terms.of_replica(self._num_replicas, has_same_size=self._has_one_size)
        weights = self._terms.weights
        if weights is None:
            raise ConfigError(
                f"model {self.model.name}: its loss is neither a mean nor a sum over the examples, or of several "
                "losses each is reduced, masked or weighted in its own way; synchronous replicas cannot compute what "
                "one process computes with all their examples: use losses with the same reduction, for a mean beside a "
                "sum also batches of one size (drop_remainder=True), or strategy=parameter_server"
            )
        return weights

    def _weight(self, num_examples: tf.Tensor | int, divisor: tf.Tensor | None = None) -> tf.Tensor | None:
        """That of a replica's gradient; None if replicas have equal weights, or their gradients add up."""
        if self._num_replicas == 1 or self.updates.weights is LossWeights.SUM:
            return None
        if self.updates.weights is LossWeights.DIVISORS:
            return divisor
        return None if isinstance(num_examples, int) else tf.cast(num_examples, tf.float32)

    def _losses_counted(self) -> list[LossCount]:
        """The losses that a replica does not count as Keras does, see `_count`."""
        terms, weights = self._terms, self.updates.weights
        means = self.returned.means
        counted = [LossCount(means[name], is_sum=True) for name in sorted(self.returned.sums & set(means))]
        if self.own is not None:
            own = [metric for metric in (*self.model.metrics, loss_tracker(self.model)) if metric.name not in means]
            sums = [m for m in own if isinstance(m, keras.metrics.Mean) and m.name in self.returned.sums]
            return [*counted, *(LossCount(metric, is_sum=True, own_counts=self._num_replicas) for metric in sums)]
        # Keras takes the mean of a loss that is not reduced.
        if weights is not LossWeights.EXAMPLES and Term.VALUES not in terms.compiled:
            counted.append(LossCount(loss_tracker(self.model), weights is LossWeights.SUM))
        if not terms.is_whole:
            # Keras weights them by examples only if their number is known.
            for term, metric in zip(terms.compiled, losses_of_outputs(self.model)):
                if term is not Term.VALUES:
                    counted.append(LossCount(metric, term is Term.SUM, int(self._has_one_size)))
        return counted

    def _recorded(self, num_examples: tf.Tensor | int) -> AbstractContextManager[list[Reduction]]:
        """In this context, losses are those of a replica, and counted so that those of all replicas add up."""
        terms = self._terms
        if self._num_replicas == 1 or self.own is not None:
            return nullcontext([])

        def count(reduction: Reduction, weight: Any) -> Any:
            term = terms.compiled[reduction.index]
            return weight if term is Term.VALUES else _count(term, num_examples, reduction.divisor)

        return recorded_reductions(
            self.model, terms.compiled_factors, terms.added_factors, None if terms.is_whole else count
        )

    @property
    def _specs(self) -> list[Any]:
        """The arguments of a step."""
        return [
            [None if i in self.tables else _spec(v) for i, v in enumerate(self.trainable)],
            [_spec(v) for v in self._all_state],
            [_spec(v) for v in self.metrics],
            tf.TensorSpec([len(self.seeds), 2], tf.uint32),
            self.batch_spec,
            [_spec(c.variable) for c in self.clock],
        ]

    def _run_dense(
        self, trainable: Any, state: Any, metrics: Any, seeds: tf.Tensor, batch: Any, clock: Any
    ) -> tuple[Any, ...]:
        if self.own is None:
            output, _ = self._run(trainable, state, metrics, seeds, batch, clock)
            found = output.gradients, output.assigned, output.state, output.metrics
            return *found, output.weight, output.overflow
        with recorded_reductions(self.model) as reductions:
            gradients, assigned, *rest, overflow = self._run_own(trainable, state, metrics, seeds, batch, clock)
        merged = self.updates.merge(gradients, 0), self.updates.merge_assigned(assigned, 0)
        return *merged, *rest, _divisor(reductions), overflow

    def _run_own(
        self, trainable: Any, state: Any, metrics: Any, seeds: tf.Tensor, batch: Any, clock: Any, later: Any = ()
    ) -> tuple[Any, ...]:
        """As `_run_dense`, by the model's own `train_step`; `later` is that of `OwnTrainStep.scope`.

        Returns:
            For each update of the step the gradients of all variables; for each and for the end of the step what has
            been assigned; new state; new metrics; overflow.
        """
        own = self._own
        others = self._others(state, metrics, seeds, clock)
        with own.scope(list(zip(self.trainable, trainable)), others, later) as scope:
            gradients, assigned = own(batch, batch_size_of(batch))
        scale, overflows = self._loss_scale(clock), overflow_of(gradients[0], self._loss_scale(clock))
        gradients = [unscaled(own.groups[g].optimizer, of_update, scale) for g, of_update in zip(own.order, gradients)]
        return gradients, assigned, *self._new_values(scope, state), overflows

    def _trace_own(self) -> tf.Graph:
        """Sets what a trace of the model's own `train_step` tells; returns its graph."""
        # In a function of its own: a worker knows only those that are traced after it has joined.
        traced = self._trace_phases()
        self.clock = self._own.find_clock(traced.function)
        self.updates = traced.updates
        self._has_dense = traced.dense_gradients
        return traced.function.graph

    def _trace_phases(self) -> TracedPhases:
        """Traces the model's own `train_step` with open values after each update, and sees which of them it needs."""
        own, traced = self._own, TracedPhases(self._own, self.updates.weights)
        later = [[_spec(self.trainable[i]) for i in indices] for indices in own.updated]

        def step(*arguments: Any) -> None:
            *outputs, _ = self._run_own(*arguments)
            traced.trace(arguments, tuple(outputs))

        function = tf.function(step, autograph=False)
        traced.function = function.get_concrete_function(*self._specs, later)
        return traced

    def _run_with_rows(self, *arguments: Any) -> tuple[tuple[Any, ...], RowLookups]:
        """What `LookupRounds` traces."""
        output, lookups = self._run(*arguments, tables=self.tables, groups=self.table_groups)
        return (output.gradients, output.state, output.metrics, output.weight, output.overflow), lookups

    def _run(
        self,
        trainable: Sequence[tf.Tensor | None],
        state: Sequence[tf.Tensor],
        metrics: Sequence[tf.Tensor],
        seeds: tf.Tensor,
        batch: Any,
        clock: Sequence[tf.Tensor],
        *,
        tables: Mapping[int, keras.layers.Layer] = MappingProxyType({}),
        groups: Sequence[TableGroup] = (),
        whole_tables: Mapping[int, tf.Tensor] | None = None,
    ) -> tuple[ReplicaOutput, RowLookups]:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
        model = self.model
        whole = [i for i in range(len(trainable)) if i not in tables]
        mapping = [*((self.trainable[i], trainable[i]) for i in whole), *self._others(state, metrics, seeds, clock)]
        with tf.GradientTape() as tape, SeededScope(mapping, collect_losses=True) as scope:
            # Only its layer reads a table: `_find_tables` checks that, by passing the whole tables.
            tables_seen = whole_tables or {i: tf.zeros([0, layer.output_dim]) for i, layer in tables.items()}
            scope.state_mapping |= {id(self.trainable[i]): table for i, table in tables_seen.items()}
            tape.watch([trainable[i] for i in whole])
            lookups = RowLookups(tables, groups, tape)
            num_examples = batch_size_of(batch)
            with lookups.active(), self._recorded(num_examples) as reductions:
                y_pred, loss = forward(model, x, y, sample_weight, training=True)
            if loss is None:
                raise ConfigError(f"model {model.name}: no loss; compile it with one, or call add_loss in a layer")
            scaled_loss = model.optimizer.scale_loss(loss)
        dense, of_rows = tape.gradient(scaled_loss, ([trainable[i] for i in whole], lookups.rows))
        found: dict[int, Any] = dict(zip(whole, dense)) | lookups.gradients(of_rows)
        gradients = [found.get(i) for i in range(len(trainable))]
        divisor = _divisor(reductions)
        with scope:
            term = _TERMS[self.updates.weights] if self._num_replicas > 1 and not loss.shape.rank else Term.MEAN
            counted = _count(term, num_examples, divisor)
            logs = update_metrics(model, x, y, y_pred, sample_weight, loss, counted)
            self.returned.count(logs, num_examples)
        output = self._output(gradients, scope, state, num_examples, self._loss_scale(clock))
        return replace(output, weight=divisor), lookups

    def _others(self, state: Any, metrics: Any, seeds: Any, clock: Any) -> list[tuple[keras.Variable, Any]]:
        """All variables but the trainable ones, with their values."""
        seeds_cast = ((seed, tf.cast(seeds[i], seed.dtype)) for i, seed in enumerate(self.seeds))
        read = ((c.variable, value) for c, value in zip(self.clock, clock))
        return [*zip(self._all_state, state), *zip(self.metrics, metrics), *seeds_cast, *read]

    def _loss_scale(self, clock: Sequence[tf.Tensor]) -> tf.Tensor | None:
        """The dynamic scale of the loss, if it has one."""
        return next((value for c, value in zip(self.clock, clock) if c.kind is ClockKind.LOSS_SCALE), None)

    def _output(
        self,
        gradients: list[Any],
        scope: keras.StatelessScope,
        state: Sequence[tf.Tensor],
        num_examples: tf.Tensor | int,
        scale: tf.Tensor | None,
    ) -> ReplicaOutput:
        """What came out of a step that ran in `scope`."""
        if self.trainable and all(gradient is None for gradient in gradients):
            raise ConfigError(f"model {self.model.name}: the loss depends on no trainable variable")
        overflows = overflow_of(gradients, scale)
        gradients = unscaled(main_optimizer(self.model), gradients, scale)
        new_state, new_metrics = self._new_values(scope, state)
        unassigned = [None] * len(gradients)
        return ReplicaOutput(gradients, unassigned, new_state, new_metrics, num_examples, overflow=overflows)

    def _new_values(self, scope: keras.StatelessScope, state: Sequence[tf.Tensor]) -> tuple[list[Any], list[Any]]:
        """State, None where it is the given one, and metrics after a step that ran in `scope`."""
        new_state = [scope.get_current_value(variable) for variable in self._all_state]
        changed = [None if new is old else new for old, new in zip(state, new_state)]
        for i, (old, new) in enumerate(zip(state, changed[: len(self.state)])):
            if new is not None and not is_increment(old, new):
                self._replaced.add(i)
        return changed, [scope.get_current_value(variable) for variable in self.metrics]

    def _find_tables(self) -> None:
        """Fills `tables`, `table_groups` and `whole_tables`.

        A table is looked up by rows if its layer uses it for nothing else, and nothing else reads it: a step is traced
        once with the whole tables as additional inputs, and those that it uses are needed as a whole.
        """
        layers = embedding_layers(self.model, self.trainable)
        if self.own is not None:
            self.whole_tables = dict.fromkeys(layers, "the model's own train_step")
            return
        self.whole_tables = {index: reason for index, layer in layers.items() if (reason := why_needed_whole(layer))}
        candidates = {index: layer for index, layer in layers.items() if index not in self.whole_tables}
        if not candidates:
            return
        readers: dict[int, list[Any]] = {}
        with_gradient: set[int] = set()
        by_rows = can_update_rows(main_optimizer(self.model))
        row_wise = frozenset(i for i, layer in candidates.items() if by_rows and isinstance(layer, PooledLookup))

        def probe(tables: list[tf.Tensor], *arguments: Any) -> None:
            whole = dict(zip(candidates, tables))
            single = single_groups(candidates, row_wise)
            output, lookups = self._run(*arguments, tables=candidates, groups=single, whole_tables=whole)
            self._has_dense = frozenset(i for i, g in enumerate(output.gradients) if isinstance(g, tf.Tensor))
            with_gradient.update(i for i, g in enumerate(output.gradients) if g is not None)
            self.whole_tables |= lookups.hidden
            readers.update((index, table.consumers()) for index, table in whole.items())

        self.tables = candidates
        tables = [_spec(self.trainable[i]) for i in candidates]
        tf.function(probe, autograph=False).get_concrete_function(tables, *self._specs)
        for index, reading in readers.items():
            if reading:
                self.whole_tables.setdefault(index, "another use of it in the model")
        self.tables = {index: layer for index, layer in candidates.items() if index not in self.whole_tables}
        self.table_groups = group_tables(self.tables, row_wise, self.updates, frozenset(with_gradient))


def _divisor(reductions: Sequence[Reduction]) -> tf.Tensor | None:
    """The first divisor of compiled losses that depends on more than the shape of the batch."""
    return next((reduction.divisor for reduction in reductions if reduction.divisor is not None), None)


#: The kind of the whole loss.
_TERMS = {LossWeights.EXAMPLES: Term.MEAN, LossWeights.DIVISORS: Term.OWN_MEAN, LossWeights.SUM: Term.SUM}


def _count(term: Term, num_examples: tf.Tensor | int, divisor: tf.Tensor | None) -> Any:
    """The weight with which a replica counts a loss."""
    if term is Term.SUM:
        return 1
    return divisor if term is Term.OWN_MEAN else num_examples


def _of_tensorflow(variables: Iterable[tf.Variable], known: Iterable[keras.Variable]) -> list[tf.Variable]:
    """The variables that are not those of Keras's variables."""
    values = {id(variable.value) for variable in known}
    return [variable for variable in variables if id(variable) not in values]


def _check_assigned(model: keras.Model, assigned: Mapping[int, keras.Variable]) -> None:
    """Refuses, with a `ConfigError`, a step that assigns a variable of Keras that the model does not know.

    The states of random seeds have a place in the step's scope.
    """
    if others := [v.path for v in _of_others(model, assigned)]:
        raise ConfigError(
            f"model {model.name}: a step assigns {', '.join(others)}, which the model does not have; make it with "
            "self.add_weight(..., trainable=False) of the model or a layer, or assign its owner to an attribute of them"
        )


def _read_beside(model: keras.Model, read: Mapping[int, keras.Variable]) -> list[keras.Variable]:
    """The variables that a step reads beside those of the model and its optimizers: of a loss, a metric, a regularizer.

    A callback may assign them, so they belong to the state of the training.
    """
    of_optimizers = {id(v) for optimizer in optimizers_of(model).values() for v in optimizer.variables}
    if (scaling := loss_scaling(model)) is not None:
        of_optimizers |= {id(v) for v in scaling.variables}
    return [v for v in _of_others(model, read) if id(v) not in of_optimizers]


def _of_others(model: keras.Model, variables: Mapping[int, keras.Variable]) -> list[keras.Variable]:
    """The variables that the model does not know. Seeds are not among them: a step's scope has their states."""
    states = (variable for layer in stateful_layers(model) for variable in layer_states(layer))
    known = {id(v) for v in (*model.variables, *model.metrics_variables, *loss_tracker(model).variables, *states)}
    return [v for key, v in variables.items() if key not in known and not is_seed(v)]


def _check_exchanges(model: keras.Model, exchanges: Sequence[str], assigned: Mapping[int, keras.Variable]) -> None:
    """Refuses, with a `ConfigError`, a step that reads, before its end, what other replicas have computed.

    A layer whose statistics the step assigns is to read it even where Keras's code does not: with a mask it takes the
    moments of the replica alone.
    """
    layers = [layer for layer in layers_of(model) if getattr(layer, "synchronized", False)]
    if not exchanges and not any(id(v) in assigned for layer in layers for v in layer.non_trainable_variables):
        return
    names = [f"{type(layer).__name__} {layer.name}" for layer in layers]
    raise ConfigError(
        f"model {model.name}: {', '.join(names) or 'its step'} (synchronized=True, or the replica context of "
        "tf.distribute) needs values of the other replicas in the middle of a step, which replicas of kdist do not "
        "exchange; set synchronized=False, or train with one replica (cluster=local) or strategy=parameter_server"
    )


def _build(model: keras.Model, batch_spec: Any, num_replicas: int) -> tuple[ReturnedValues, LossTerms, tf.Graph]:
    """Builds model, metrics and optimizer as the first step of `fit` does; `Model.build` leaves the metrics out.

    Returns:
        What the step returns beside metrics; the losses of synchronous replicas; its graph.
    """
    names: list[str] = []
    others: list[str] = []
    terms = [LossTerms()]

    def first_step(batch: Any) -> None:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
        with recorded_reductions(model) as reductions:
            y_pred, loss = forward(model, x, y, sample_weight, training=True)
        if num_replicas > 1:
            terms.append(loss_terms(model, batch, reductions))
        logs = update_metrics(model, x, y, y_pred, sample_weight, loss, batch_size_of(batch))
        # A model may leave a metric out in training. The loss is always reported.
        names.extend(dict.fromkeys(["loss", *logs]))
        others.extend(set(logs) - set(flat(model.get_metrics_result())) - {"loss"})

    graph = tf.function(first_step, autograph=False).get_concrete_function(batch_spec).graph
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    means = {name: keras.metrics.Mean(name=name) for name in sorted(others)}
    if Term.UNKNOWN in (*terms[-1].compiled, *terms[-1].added):
        terms.append(tried_terms(model, batch_spec, terms[-1]))
    return ReturnedValues(means, names), terms[-1], graph


def _spec(variable: keras.Variable) -> tf.TensorSpec:
    return tf.TensorSpec(variable.shape, variable.dtype)
