"""What a traced step returns, and what its trace tells of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from kdist._compat.keras import global_seed
from kdist.model.embedding_lookup import RowLookups
from kdist.model.increments import is_increment
from kdist.model.loss_weights import LossTerms
from kdist.model.metrics import ReturnedValues, metric_variables
from kdist.model.names import is_seed
from kdist.model.state import choose_variables, layer_states, stateful_layers
from kdist.model.step_variables import read_beside
from kdist.model.traced_step import TracedScope


class StepOutputs(NamedTuple):
    """The outputs of a traced step: tensors of its graph.

    Attributes:
        gradients: of each update of the step, one for each trainable variable, or None.
        assigned: before each update, and at the end: by how much trainable variables were changed, by index.
        state: new values; None where the step did not change them.
        metrics: the same of the model's metrics.
        values: those that the step returned and no metric has counted.
        divisor: what the loss was divided by, if that depends on more than the shape of the batch.
        overflow: see `ReplicaOutput`.
        of_rows: gradients of rows that were looked up, by round and lookup; None where there is none.
        tried: the values that tell how the loss grows with the batch; none if that is known.
    """

    gradients: list[list[Any]]
    assigned: list[dict[int, tf.Tensor]]
    state: list[tf.Tensor | None]
    metrics: list[tf.Tensor | None]
    values: list[tf.Tensor]
    divisor: tf.Tensor | None
    overflow: tf.Tensor | None
    of_rows: list[list[Any]]
    tried: list[Any]


@dataclass(frozen=True)
class StepFindings:
    """What a trace tells of a step.

    Attributes:
        lookups: of rows of tables.
        returned: the values that it returns beside metrics.
        trainable, state, seeds: its variables. The last seed is that of keras.random.
        worker_state: of stateful layers.
        replaced: the state that it replaces instead of adding to it, by index: whole numbers, and all other functions.
        terms: of the loss of a synchronous replica, as far as its graph tells.
        assumed: the terms for which it was traced.
        num_divisors: how many losses of a model's own step were divided by more than the shape of a batch.
    """

    lookups: RowLookups
    returned: ReturnedValues
    trainable: list[keras.Variable]
    state: list[keras.Variable]
    seeds: list[keras.Variable]
    worker_state: list[keras.Variable]
    replaced: frozenset[int]
    terms: LossTerms
    assumed: LossTerms
    num_divisors: int

    @staticmethod
    def of(
        model: keras.Model,
        scope: TracedScope,
        lookups: RowLookups,
        returned: ReturnedValues,
        trainable: list[keras.Variable],
        *,
        terms: LossTerms | None = None,
        assumed: LossTerms | None = None,
        num_divisors: int = 0,
    ) -> StepFindings:
        """Called at the end of a trace in `scope`."""
        chosen, others = choose_variables(model, trainable, read_beside(model, scope.variables))
        state = [v for v in others if not is_seed(v)]
        replaced = set[int]()
        for i, variable in enumerate(state):
            old, new = scope.inputs.get((id(variable), 0)), scope.new_value(variable)
            adds = new is None or (old is not None and is_increment(old, new))
            if not adds or not tf.as_dtype(variable.dtype).is_floating:
                replaced.add(i)
        seeds = [*(v for v in others if is_seed(v)), global_seed()]
        worker_state = [variable for layer in stateful_layers(model) for variable in layer_states(layer)]
        none = LossTerms()
        return StepFindings(
            lookups,
            returned,
            chosen,
            state,
            seeds,
            worker_state,
            frozenset(replaced),
            terms or none,
            assumed or none,
            num_divisors,
        )

    def changed(self, model: keras.Model, scope: TracedScope) -> tuple[list[Any], list[Any]]:
        """The new values of state and worker state, and of the model's metrics; None where they did not change."""
        state = [scope.new_value(variable) for variable in [*self.state, *self.worker_state]]
        return state, [scope.new_value(variable) for variable in metric_variables(model)]
