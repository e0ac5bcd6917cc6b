"""How the results of steps, and of workers, that counted separately make one: the variables of most metrics add up.

A metric of the user's own that keeps something else says so in its class: `merge_rule = "max"`, or a dict of rules by
the names of its variables; or it has a method `merge_state(metrics)`, as metrics of Keras 2 do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kdist._compat.keras import call, global_seed
from kdist.errors import ConfigError
from kdist.model.loss_weights import made_up
from kdist.model.seeded_scope import SeededScope

RULES = ("sum", "mean", "max", "min", "product", "last")
#: What Keras calls some of them; "none" is that of metrics written before Keras 3.3.
_OF_AGGREGATION = {"none": "sum", "only_first_replica": "last"}
_TOLERANCE = 1e-3


def merged(rule: str, rows: np.ndarray, initial: np.ndarray) -> np.ndarray:
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
        named |= _rules(metric)
    return [named.get(id(v)) or _OF_AGGREGATION.get(v.aggregation, v.aggregation) for v in variables]


class StateMerger:
    """Merges the states of a metric by its own `merge_state`.

    Args:
        metric: has such a method, and its variables as attributes.
        variables: all variables of all metrics, in which its own are found.

    Attributes:
        indices: of its variables among them.
    """

    def __init__(self, metric: keras.metrics.Metric, variables: Sequence[keras.Variable]) -> None:
        index_of = {id(variable): i for i, variable in enumerate(variables)}
        self._metric = metric
        self.indices = [index_of[id(variable)] for variable in metric.variables]
        # The other one of two that are merged.
        twins = {id(v): keras.Variable(v.numpy(), dtype=v.dtype, trainable=False) for v in metric.variables}
        # Without `copy`, which saves and loads the metric.
        self._other = object.__new__(type(metric))
        vars(self._other).update({key: twins.get(id(value), value) for key, value in vars(metric).items()})
        self._twins = list(twins.values())

    def merged(self, rows: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Makes one state of any number of them: `[n, ...]` for each variable."""
        variables = self._metric.variables
        state = [tf.constant(of_variable[0], v.dtype) for of_variable, v in zip(rows, variables)]
        for i in range(1, len(rows[0])):
            others = [tf.constant(of_variable[i], v.dtype) for of_variable, v in zip(rows, variables)]
            with keras.StatelessScope([*zip(variables, state), *zip(self._twins, others)]) as scope:
                self._metric.merge_state([self._other])
            state = [scope.get_current_value(variable) for variable in variables]
        return [value.numpy() for value in state]


def state_mergers(metrics: Sequence[keras.metrics.Metric], variables: Sequence[keras.Variable]) -> list[StateMerger]:
    """Those of the metrics that merge their states themselves."""
    return [StateMerger(metric, variables) for metric in _flat(metrics) if hasattr(metric, "merge_state")]


def check_metrics(model: keras.Model, batch_spec: Any) -> None:
    """Refuses metrics of the user's own that do not add up and have no `merge_rule`, after a try on made-up batches.

    Args:
        model: built, and compiled with the metrics.
        batch_spec: nested `tf.TensorSpec`s of a batch.

    Raises:
        ConfigError: names the metric.
    """
    metrics = [m for m in _flat(model.metrics) if not type(m).__module__.startswith("keras.") and not _has_rule(m)]
    wrong = None
    # A metric that fails on such batches says nothing about how it counts.
    with suppress(Exception):
        wrong = next((m for m in metrics if not _adds_up(m, model, batch_spec)), None)
    if wrong is not None:
        raise ConfigError(
            f"metric {wrong.name}: {type(wrong).__name__} does not add up: counting two batches one after the other is "
            "not the sum of counting each, which is how steps and workers count; give the class a merge_rule, one of "
            f"{', '.join(RULES)}, or a dict of them by variable name, or a method merge_state(metrics)"
        )


def _adds_up(metric: keras.metrics.Metric, model: keras.Model, batch_spec: Any) -> bool:
    batches = [_made_up(model, batch_spec, seed) for seed in (1, 2)]
    nothing, one, other, both = (_count(metric, model, some) for some in ([], batches[:1], batches[1:], batches))
    added = [first + second - initial for initial, first, second in zip(nothing, one, other)]
    # One that draws by other means than Keras's never counts the same twice, which says nothing about how it counts.
    return _are_close(added, both) or not _are_close(both, _count(metric, model, batches))


def _are_close(some: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> bool:
    return all(np.allclose(*pair, _TOLERANCE, _TOLERANCE, equal_nan=True) for pair in zip(some, others))


def _count(metric: keras.metrics.Metric, model: keras.Model, batches: Sequence[tuple[Any, ...]]) -> list[np.ndarray]:
    """The variables of a metric after some batches `(x, y, y_pred, sample_weight)`.

    A metric that draws, as one that breaks ties at random, draws the same for each batch.
    """
    variables, seed = metric.variables, global_seed()
    with keras.StatelessScope():
        metric.reset_state()
        values = [variable.value for variable in variables]
    for batch in batches:
        with SeededScope([*zip(variables, values), (seed, tf.zeros(seed.shape, seed.dtype))]):
            model.compute_metrics(*batch)
            values = [variable.value for variable in variables]
    return [np.array(value, float) for value in values]


def _made_up(model: keras.Model, batch_spec: Any, seed: int) -> tuple[Any, ...]:
    """A small batch of random numbers, with what the model makes of it."""
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(made_up(batch_spec, seed))
    with keras.StatelessScope():
        return x, y, call(model, x, training=False), sample_weight


def _flat(metrics: Sequence[Any]) -> list[keras.metrics.Metric]:
    """The metrics themselves, also those that a model was compiled with, which Keras keeps in one."""
    flat = []
    for metric in metrics:
        parts = getattr(metric, "metrics", None)
        flat += _flat(parts) if isinstance(parts, list) and type(metric).__module__.startswith("keras.") else [metric]
    return flat


def _has_rule(metric: keras.metrics.Metric) -> bool:
    says = hasattr(metric, "merge_rule") or hasattr(metric, "merge_state")
    return says or any(v.aggregation not in ("sum", "none") for v in metric.variables)


def _rules(metric: keras.metrics.Metric) -> dict[int, str]:
    """The rules that a metric names, by the id of the variable."""
    rule = getattr(metric, "merge_rule", {})
    found = {id(v): rule.get(v.name, "sum") if isinstance(rule, Mapping) else rule for v in metric.variables if rule}
    if wrong := set(found.values()) - set(RULES):
        raise ConfigError(f"metric {metric.name}: merge_rule={wrong.pop()!r}: must be one of {', '.join(RULES)}")
    return found
