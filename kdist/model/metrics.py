"""Exact metrics of distributed steps: workers sum from zero, the chief adds the sums, Keras computes the result.

The variables of most metrics add up. A metric of the user's own that keeps something else says so in its class:
`merge_rule = "max"`, or a dict of rules by the names of its variables; or it has a method `merge_state(metrics)`, as
metrics of Keras 2 do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kdist._compat.keras import call, global_seed, loss_tracker, metrics_are_built
from kdist.errors import ConfigError
from kdist.model.forward import SeededScope
from kdist.model.logs import Logs, as_logs
from kdist.model.loss_weights import make_batch

RULES = ("sum", "mean", "max", "min", "product", "last")
#: Other names of some, in Keras; "none" stands in metrics written before Keras 3.3.
_OF_AGGREGATION = {"none": "sum", "only_first_replica": "last"}
_TOLERANCE = 1e-3


def merge_by(rule: str, rows: np.ndarray, initial: np.ndarray) -> np.ndarray:
    """Makes one of any number of values `[n, ...]`, each of which started from `initial`."""
    if rule == "sum":
        return rows.sum(0) - (len(rows) - 1) * initial
    if rule == "product":
        return rows.prod(0) / np.where(initial == 0, 1, initial) ** (len(rows) - 1)
    return rows[-1] if rule == "last" else getattr(rows, rule)(0)


def rules_of(metrics: Sequence[keras.metrics.Metric], variables: Sequence[keras.Variable]) -> list[str]:
    """The rule of each variable.

    Raises:
        ConfigError: a metric names a rule that does not exist.
    """
    named: dict[int, str] = {}
    for metric in _flat(metrics):
        rule = getattr(metric, "merge_rule", None)
        found = {
            id(v): rule.get(v.name, "sum") if isinstance(rule, Mapping) else rule for v in metric.variables if rule
        }
        if wrong := set(found.values()) - set(RULES):
            raise ConfigError(f"metric {metric.name}: merge_rule={wrong.pop()!r}: must be one of {', '.join(RULES)}")
        named |= found
    return [named.get(id(v)) or _OF_AGGREGATION.get(v.aggregation, v.aggregation) for v in variables]


def _state_merger(metric: keras.metrics.Metric) -> Callable[[Sequence[np.ndarray]], list[np.ndarray]]:
    """A function that makes one state of several, `[n, ...]` for each variable, by the metric's own `merge_state`."""
    variables = metric.variables
    # The other one of two that are merged.
    twins = {id(v): keras.Variable(v.numpy(), dtype=v.dtype, trainable=False) for v in variables}
    # Without `copy`, which saves and loads the metric.
    other = object.__new__(type(metric))
    vars(other).update({key: twins.get(id(value), value) for key, value in vars(metric).items()})

    def merge(rows: Sequence[np.ndarray]) -> list[np.ndarray]:
        state, *others = ([tf.constant(row, v.dtype) for row, v in zip(one, variables)] for one in zip(*rows))
        for values in others:
            with keras.StatelessScope([*zip(variables, state), *zip(twins.values(), values)]) as scope:
                metric.merge_state([other])
            state = [scope.get_current_value(variable) for variable in variables]
        return [value.numpy() for value in state]

    return merge


def check_metrics(model: keras.Model, batch_spec: Any) -> None:
    """Refuses, with a `ConfigError`, custom metrics of a built model that do not add up and have no `merge_rule`, after
    a try on made-up batches.
    """
    metrics = [m for m in _flat(model.metrics) if not type(m).__module__.startswith("keras.") and not _has_rule(m)]
    wrong = None
    # A metric that fails on such batches tells nothing.
    with suppress(Exception):
        wrong = next((m for m in metrics if not _adds_up(m, model, batch_spec)), None)
    if wrong is not None:
        raise ConfigError(
            f"metric {wrong.name}: {type(wrong).__name__} does not add up: counting two batches one after the other is "
            "not the sum of counting each, which is how steps and workers count; give the class a merge_rule, one of "
            f"{', '.join(RULES)}, or a dict of them by variable name, or a method merge_state(metrics)"
        )


def _adds_up(metric: keras.metrics.Metric, model: keras.Model, batch_spec: Any) -> bool:
    batches = []
    for seed in (1, 2):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(make_batch(batch_spec, seed))
        with keras.StatelessScope():
            batches.append((x, y, call(model, x, training=False), sample_weight))
    nothing, one, other, both = (_count(metric, model, some) for some in ([], batches[:1], batches[1:], batches))
    added = [first + second - initial for initial, first, second in zip(nothing, one, other)]
    # A metric that draws by other means than Keras's never counts the same twice, which tells nothing.
    return _are_close(added, both) or not _are_close(both, _count(metric, model, batches))


def _are_close(some: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> bool:
    return all(np.allclose(*pair, _TOLERANCE, _TOLERANCE, equal_nan=True) for pair in zip(some, others))


def _count(metric: keras.metrics.Metric, model: keras.Model, batches: Sequence[tuple[Any, ...]]) -> list[np.ndarray]:
    """The variables of a metric after batches `(x, y, y_pred, sample_weight)`; random draws are the same for each."""
    variables, seed = metric.variables, global_seed()
    with keras.StatelessScope():
        metric.reset_state()
        values = [variable.value for variable in variables]
    for batch in batches:
        with SeededScope([*zip(variables, values), (seed, tf.zeros(seed.shape, seed.dtype))]):
            model.compute_metrics(*batch)
            values = [variable.value for variable in variables]
    return [np.array(value, float) for value in values]


def _flat(metrics: Sequence[Any]) -> list[keras.metrics.Metric]:
    """The single metrics; Keras keeps all that a model was compiled with in one."""
    flat = []
    for metric in metrics:
        parts = getattr(metric, "metrics", None)
        flat += _flat(parts) if isinstance(parts, list) and type(metric).__module__.startswith("keras.") else [metric]
    return flat


def _has_rule(metric: keras.metrics.Metric) -> bool:
    says = hasattr(metric, "merge_rule") or hasattr(metric, "merge_state")
    return says or any(v.aggregation not in ("sum", "none") for v in metric.variables)


def _is_plain_mean(metric: keras.metrics.Metric) -> bool:
    own, mean = type(metric), keras.metrics.Mean
    return (own.result, own.reset_state) == (mean.result, mean.reset_state)


@dataclass(frozen=True)
class ReturnedValues:
    """Values that a step returns beside metrics, if the model overrides `train_step` or `compute_metrics`.

    Attributes:
        means: for each value that no metric has counted: its mean, weighted by examples.
        names: of the values to report, in this order; None for all.
        counts_loss: True if the step updates Keras's tracker of the loss.
        sums: names of the values that add up over synchronous replicas.
    """

    means: dict[str, keras.metrics.Mean] = field(default_factory=dict)
    names: Sequence[str] | None = None
    counts_loss: bool = True
    sums: frozenset[str] = frozenset()


@dataclass(frozen=True)
class LossCount:
    """The way in which synchronous replicas count a loss, so that their counts of a step add up.

    Attributes:
        metric: counts it.
        is_sum: True if the loss of a step is the sum of those of the replicas; otherwise their sum and their count are
            weighted.
        power: of the number of examples of a step: the weight with which Keras counts it, that number or 1.
        own_counts: the number of replicas, if a model's own step counts the sum, with whatever weight.
    """

    metric: keras.metrics.Mean
    is_sum: bool = False
    power: int = 1
    own_counts: int | None = None

    def as_by_keras(self, total: np.ndarray, count: np.ndarray, num_examples: np.ndarray) -> tuple[Any, Any]:
        """Returns total and count of steps as one process with all their examples counts them."""
        if self.own_counts is not None:
            return total, count / self.own_counts
        loss = total if self.is_sum else np.divide(total, count, out=np.zeros_like(total), where=count != 0)
        weight = num_examples.astype(total.dtype) ** self.power
        return loss * weight, weight


def metric_variables(model: keras.Model, means: Iterable[keras.metrics.Mean] = ()) -> list[keras.Variable]:
    """The variables of a built model's metrics, of its loss, which an overridden `metrics` may leave out, and of the
    means of returned values.
    """
    variables = [v for metric in (loss_tracker(model), *means) for v in metric.variables]
    known = {id(variable) for variable in model.metrics_variables}
    return [*model.metrics_variables, *(variable for variable in variables if id(variable) not in known)]


class MetricReader:
    """The metric variables of the steps of a compiled and built model, and their rules.

    Args:
        model: the chief's own; its metric variables keep their values.
        loss_counts: of the losses that replicas count otherwise than Keras.
    """

    def __init__(
        self, model: keras.Model, returned: ReturnedValues | None = None, loss_counts: Sequence[LossCount] = ()
    ) -> None:
        self.model = model
        self.returned = returned = returned or ReturnedValues()
        self.variables = metric_variables(model, returned.means.values())
        self.metrics = [*model.metrics, loss_tracker(model), *returned.means.values()]
        for metric in self.metrics:
            metric.reset_state()
        self.initial_values = [variable.numpy() for variable in self.variables]
        self._rules = rules_of(model.metrics, self.variables)
        self._index_of = {id(variable): i for i, variable in enumerate(self.variables)}

        def places(metric: keras.metrics.Metric) -> list[int]:
            return [self._index_of[id(variable)] for variable in metric.variables]

        own = [metric for metric in _flat(model.metrics) if hasattr(metric, "merge_state")]
        #: The places of the variables of metrics that merge their states themselves, and functions that do it.
        self.mergers = [(places(metric), _state_merger(metric)) for metric in own]
        of_step = [mean for name, mean in returned.means.items() if name.endswith("loss")]
        self.loss_counts = [(loss, places(loss.metric)) for loss in loss_counts]
        #: The places of total and count of each loss.
        self.losses = [places(mean) for mean in ([loss_tracker(model)] if returned.counts_loss else of_step)]

    def merge(self, rows: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
        """Merges any number of values that were counted separately: `[n, ...]` for each variable."""
        values = [merge_by(rule, r, initial) for r, initial, rule in zip(rows, self.initial_values, self._rules)]
        for indices, merge in self.mergers:
            for i, value in zip(indices, merge([rows[i] for i in indices])):
                values[i] = value
        return tuple(values)

    def results(self, values: Sequence[np.ndarray]) -> Logs:
        """The results of all metrics, as named by Keras, for these values of the variables."""
        if self._means is not None:
            return {name: self._mean(values, *places) for name, places in self._means.items()}
        return self._results_by_keras(values)

    def reset(self, values: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
        """The values with which the next epoch begins: the initial ones, unless a custom metric keeps some."""
        if self._means is not None:
            return tuple(self.initial_values)
        with self.scope(values) as scope:
            for metric in self.metrics:
                metric.reset_state()
        return tuple(np.asarray(scope.get_current_value(variable)) for variable in self.variables)

    def _mean(self, values: Sequence[np.ndarray], total: int, count: int) -> float:
        # In the dtype of the variables, as in Keras: values of several steps are added up in float64.
        dtype = self.initial_values[total].dtype
        with np.errstate(all="ignore"):
            dividend, divisor = (np.asarray(values[i]).astype(dtype) for i in (total, count))
            return float(dividend / divisor) if divisor else 0.0

    def _results_by_keras(self, values: Sequence[np.ndarray]) -> Logs:
        model = self.model
        with self.scope(values):
            if metrics_are_built(model):
                results = model.get_metrics_result()
            else:
                # The model's own `train_step` leaves the compiled metrics alone, which have no result then.
                results = {m.name: m.result() for m in model.metrics if getattr(m, "built", True)}
            # A result may be a variable, which has its value in this scope only.
            return as_logs({**results, **{name: mean.result() for name, mean in self.returned.means.items()}})

    @cached_property
    def _means(self) -> dict[str, list[int]] | None:
        """The places of total and count by the name of each result, if all of them are means as Keras computes them.

        Most are, and a hook that reports them would spend most of its time in the ops of such a division.
        """
        metrics = _flat(self.metrics)
        is_named_by_keras = type(self.model).get_metrics_result is keras.Model.get_metrics_result
        if not is_named_by_keras or not all(map(_is_plain_mean, metrics)):
            return None
        # Keras has the names: each mean gets another value, by which its name is found.
        values, places = list(self.initial_values), {}
        for number, metric in enumerate(metrics, 1):
            total, count = (self._index_of[id(variable)] for variable in (metric.total, metric.count))
            values[total], values[count] = np.full_like(values[total], number), np.ones_like(values[count])
            places[float(number)] = [total, count]
        results = self._results_by_keras(values)
        return {name: places[value] for name, value in results.items()} if {*results.values()} <= {*places} else None

    def scope(self, values: Sequence[np.ndarray]) -> keras.StatelessScope:
        """A scope in which the variables have these values."""
        # Assigning the variables would take several times longer than the arithmetic.
        return keras.StatelessScope([(v, tf.constant(value, v.dtype)) for v, value in zip(self.variables, values)])


@dataclass(frozen=True)
class MetricRows:
    """Metrics of single steps.

    Attributes:
        values: for each metric variable of the model its value after each step, `[num_steps, ...]`; every step starts
            from the initial value.
    """

    reader: MetricReader
    values: tuple[np.ndarray, ...]

    def __add__(self, later: MetricRows) -> MetricRows:
        return MetricRows(self.reader, tuple(np.concatenate(pair) for pair in zip(self.values, later.values)))

    def __getitem__(self, steps: slice) -> MetricRows:
        return MetricRows(self.reader, tuple(values[steps] for values in self.values))

    def beside(self, other: MetricRows) -> MetricRows:
        """The counts of two replicas for the same steps."""
        pairs = [np.stack(pair) for pair in zip(self.values, other.values)]
        if not self.reader.mergers:
            return MetricRows(self.reader, self.reader.merge(pairs))
        steps = [self.reader.merge([pair[:, i] for pair in pairs]) for i in range(len(self.values[0]))]
        return MetricRows(self.reader, tuple(np.stack(of_variable) for of_variable in zip(*steps)))

    def count_as_keras(self, num_examples: np.ndarray) -> MetricRows:
        """Turns the counts of all replicas together into those of one process, given the examples of each step."""
        values = list(self.values)
        for loss, (total, count) in self.reader.loss_counts:
            values[total], values[count] = loss.as_by_keras(self.values[total], self.values[count], num_examples)
        return MetricRows(self.reader, tuple(values))

    def total(self) -> MetricTotals:
        return MetricTotals(self.reader, self.reader.merge(self.values))


@dataclass(frozen=True)
class MetricTotals:
    """Metrics over some steps. Totals of different steps add up: `a + b` is the count of a single worker.

    Attributes:
        values: the model's metric variables after those steps, starting from their initial values.
    """

    reader: MetricReader
    values: tuple[np.ndarray, ...]

    def __add__(self, other: MetricTotals) -> MetricTotals:
        return MetricRows(self.reader, tuple(np.stack(pair) for pair in zip(self.values, other.values))).total()

    def reset(self) -> MetricTotals:
        """The totals with which the next epoch begins."""
        return MetricTotals(self.reader, self.reader.reset(self.values))

    @cached_property
    def logs(self) -> Logs:
        """Loss and metrics, `{"loss": ..., "accuracy": ...}`, as named and computed by Keras.

        The loss is always there, unless the model's own `train_step` returns none.
        """
        logs = self.reader.results(self.values)
        logs = logs if "loss" in logs else {"loss": self.loss, **logs}
        return {name: logs[name] for name in self.reader.returned.names or logs}

    @property
    def loss(self) -> float:
        """The loss, without TensorFlow: cheap enough for every run. If a `train_step` has several, their sum."""
        pairs = [(float(self.values[total]), float(self.values[count])) for total, count in self.reader.losses]
        return sum(total / count for total, count in pairs if count)
