"""Applying gradients where the parameters are, by the user's own Keras optimizer and its exact maths."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.optimizers.base_optimizer import BaseOptimizer

from kdist.errors import ConfigError
from kdist.parameters.kernels import by_kernel
from kdist.parameters.names import LEARNING_RATE


class ServerOptimizer:
    """A copy of the user's optimizer that owns the variables of one server.

    Its slots are created beside their variables, so `apply` moves nothing between tasks. The step that learning-rate
    schedules and bias corrections follow is an argument: Keras's own counter loses updates under several workers.

    Args:
        optimizer: the optimizer that the model was compiled with.
        originals: the model's trainable variables of this server.
        variables: the server's variables that stand for them or for some of their rows, in the same order.
        row_wise: for each whether a sparse gradient touches its own rows only, whatever Keras does with the others.
        device: the device of the server.
    """

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        originals: Sequence[keras.Variable],
        variables: Sequence[keras.Variable],
        row_wise: Sequence[bool],
        device: str,
    ) -> None:
        self._variables = list(variables)
        with tf.device(device):
            self._by_rows = {
                i: RowOptimizer(optimizer, originals[i], variable)
                for i, variable in enumerate(self._variables)
                if row_wise[i]
            }
            self._dense = [i for i in range(len(self._variables)) if i not in self._by_rows]
            self._optimizer = _copy_for(
                optimizer, [originals[i] for i in self._dense], [self._variables[i] for i in self._dense]
            )

    def state(self, names: Sequence[str]) -> list[tuple[str, keras.Variable]]:
        """The optimizer's variables as `optimizer_state` names them; the learning rate once for each copy of it."""
        state = list(
            optimizer_state(
                self._optimizer, [self._variables[i] for i in self._dense], [names[i] for i in self._dense]
            ).items()
        )
        for i, by_rows in self._by_rows.items():
            state += optimizer_state(by_rows.optimizer, [self._variables[i]], [names[i]]).items()
        return state

    def learning_rate(self, step: tf.Tensor) -> tf.Tensor:
        """The learning rate after `step` updates, scalar int64: a scalar."""
        with keras.StatelessScope([(self._optimizer._iterations, step)]):
            return tf.convert_to_tensor(self._optimizer.learning_rate)

    def apply(self, gradients: Sequence[tf.Tensor | tf.IndexedSlices | None], step: tf.Tensor) -> None:
        """Updates the variables.

        Args:
            gradients: one per variable of this server, already clipped; None leaves its variable alone.
            step: scalar int64, how many updates were applied before this one.
        """
        for i, by_rows in self._by_rows.items():
            if gradients[i] is not None:
                by_rows.apply(gradients[i], step)
        pairs = [
            (_with_shape(gradients[i], self._variables[i]), self._variables[i])
            for i in self._dense
            if gradients[i] is not None
        ]
        if not pairs:
            return
        # In the scope `iterations` reads as `step`. The TF optimizer updates tf.Variables in place and atomically all
        # the same; what Keras assigns by `Variable.assign` (constraints, moving averages) is collected, and written
        # below.
        with keras.StatelessScope([(self._optimizer._iterations, step)]) as scope:
            self._optimizer.apply([g for g, _ in pairs], [v for _, v in pairs])
        for variable in [*self._variables, *self._optimizer.variables]:
            new_value = scope.get_current_value(variable)
            if new_value is not None and variable is not self._optimizer._iterations:
                variable.value.assign(new_value)


class RowOptimizer:
    """Keras's own maths on some rows of a variable and of its slots; the other rows are neither read nor written.

    For that the optimizer is built once more, on stand-ins whose number of rows is open, and its step run as a pure
    function of the rows' present values. What TF1 called lazy: moments of rows that a batch does not touch do not
    decay.

    Args:
        optimizer: the one that the model was compiled with.
        original: the model's variable.
        variable: the server's variable that stands for it or for some of its rows.

    Attributes:
        optimizer: a copy that owns the slots of `variable`.
    """

    def __init__(
        self, optimizer: keras.optimizers.Optimizer, original: keras.Variable, variable: keras.Variable
    ) -> None:
        self.optimizer = _copy_for(optimizer, [original], [variable])
        pure: Any = type(type(optimizer).__name__, (_PureUpdates, type(optimizer)), {})
        self._pure = pure.from_config(self.optimizer.get_config())
        with tf.device("CPU:0"):
            self._stand_in = keras.Variable(np.zeros((1, *variable.shape[1:])), dtype=variable.dtype)
            self._stand_in._path = variable.path
            if not decays(optimizer, original):
                self._pure.exclude_from_weight_decay(var_list=[self._stand_in])
            self._pure.build([self._stand_in])
        stand_ins = optimizer_state(self._pure, [self._stand_in], ["it"])
        slots = optimizer_state(self.optimizer, [variable], ["it"])
        self._pairs = [(self._stand_in, variable)]
        self._pairs += [(stand_in, slots[name]) for name, stand_in in stand_ins.items() if name.startswith("slots/")]
        for stand_in, _ in self._pairs:
            # Keras takes None as "any".
            stand_in._shape = (None, *stand_in.shape[1:])

    def apply(self, gradient: tf.IndexedSlices, step: tf.Tensor) -> None:
        """Updates the rows of `gradient`, each of which it has once; `step` as in `ServerOptimizer.apply`."""
        rows = [real.value.sparse_read(gradient.indices) for _, real in self._pairs]
        with keras.StatelessScope([(self._pure._iterations, step)]) as scope:
            scope.state_mapping |= {id(stand_in): row for (stand_in, _), row in zip(self._pairs, rows)}
            if isinstance(self._pure._learning_rate, keras.Variable):
                scope.state_mapping[id(self._pure._learning_rate)] = self.optimizer._learning_rate.value.read_value()
            self._pure.apply([gradient.values], [self._stand_in])
        for (stand_in, real), row in zip(self._pairs, rows):
            # As a sum, so that workers that update a row at the same time do not undo each other.
            change = scope.get_current_value(stand_in) - row
            real.value.scatter_add(tf.IndexedSlices(change, gradient.indices))


class _PureUpdates:
    """Gives a Keras optimizer for TensorFlow back what all backends share: updates that a StatelessScope collects."""

    assign = BaseOptimizer.assign
    assign_add = BaseOptimizer.assign_add
    assign_sub = BaseOptimizer.assign_sub
    _var_key = BaseOptimizer._var_key
    _apply_weight_decay = BaseOptimizer._apply_weight_decay
    _backend_update_step = BaseOptimizer._backend_update_step
    _overwrite_model_variables_with_average_value = BaseOptimizer._overwrite_model_variables_with_average_value


# They compute each element of a variable by itself, so that rows may be updated without the others.
_ELEMENTWISE = {
    *("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Ftrl", "Adadelta", "Adamax", "Lion"),
}


def is_elementwise(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether a variable can be cut without changing what the optimizer does to it."""
    return type(optimizer).__name__ in _ELEMENTWISE and type(optimizer).__module__.startswith("keras.")


def leaves_other_rows_alone(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether Keras itself neither reads nor writes rows that have no gradient."""
    is_plain = type(optimizer) is keras.optimizers.SGD and optimizer.momentum == 0
    return is_plain and optimizer.weight_decay is None and not optimizer.use_ema


def check_optimizer(optimizer: keras.optimizers.Optimizer, strategy: str) -> None:
    """Refuses what no strategy of kdist can do exactly.

    Args:
        strategy: the name of the one that is asked.

    Raises:
        ConfigError: says which option, and what to use instead.
    """
    if optimizer.gradient_accumulation_steps:
        instead = "strategy.replicas_to_aggregate, of more than there are workers, or " * (strategy == "sync_replicas")
        raise ConfigError(
            f"optimizer {optimizer.name}: gradient_accumulation_steps={optimizer.gradient_accumulation_steps} is not "
            f"supported by strategy={strategy}; use {instead}a larger train.batch_size"
        )
    if isinstance(optimizer, keras.optimizers.Muon):
        # It tells variables apart by an attribute that they lack inside a tf.function.
        raise ConfigError("optimizer Muon is not supported; choose another optimizer")
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ConfigError(
            "the model scales its loss (mixed_float16); use the policy mixed_bfloat16, which needs no loss scaling, or "
            "compile with auto_scale_loss=False"
        )


def check_slots_only(optimizer: keras.optimizers.Optimizer, trainable: Sequence[keras.Variable]) -> None:
    """Refuses optimizers with state that belongs to no single parameter, which cannot live on a server.

    Raises:
        ConfigError: names the optimizer.
    """
    state = optimizer_state(optimizer, trainable, _numbers(trainable))
    loose = [name for name in state if name.startswith("optimizer/") and name != LEARNING_RATE]
    if loose:
        raise ConfigError(
            f"optimizer {type(optimizer).__name__}: it keeps state that belongs to no single parameter, which "
            "asynchronous workers cannot share; choose another optimizer, or strategy=single"
        )


def optimizer_state(
    optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable], names: Sequence[str]
) -> dict[str, keras.Variable]:
    """The optimizer's variables but its step counter, by names that do not depend on process or server.

    Args:
        optimizer: a built optimizer.
        variables: the variables it was built with.
        names: their names in checkpoints.

    Returns:
        `slots/<variable>/<slot>` for each slot, `optimizer/learning_rate`, and `optimizer/state_<n>` for the rest.
    """
    by_prefix: dict[str, list[str]] = defaultdict(list)
    for variable, name in zip(variables, names):
        by_prefix[variable.path.replace("/", "_") + "_"].append(name)
    seen: dict[str, int] = defaultdict(int)
    state: dict[str, keras.Variable] = {}
    for variable in optimizer.variables:
        if variable is optimizer._iterations:
            continue
        prefixes = [prefix for prefix in by_prefix if variable.name.startswith(prefix)]
        if prefixes:
            prefix = max(prefixes, key=len)
            # Variables of one path come in the order of `variables`, and so do their slots.
            name = by_prefix[prefix][seen[variable.name]]
            seen[variable.name] += 1
            state[f"slots/{name}/{variable.name.removeprefix(prefix)}"] = variable
        elif variable is getattr(optimizer, "_learning_rate", None):
            state[LEARNING_RATE] = variable
        else:
            # Keras numbers their names by what else the process has made.
            state[f"optimizer/state_{len(state)}"] = variable
    return state


def clip_gradients(
    optimizer: keras.optimizers.Optimizer, gradients: Sequence[tf.Tensor | tf.IndexedSlices | None]
) -> list[tf.Tensor | tf.IndexedSlices | None]:
    """Clips as the optimizer would. Only the worker can: a global norm needs the gradients of every server.

    Args:
        gradients: None stays None; the norm of a sparse one is that of its slices, as in Keras.
    """
    values = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients if g is not None]
    clipped = iter(optimizer._clip_gradients(values))
    return [
        None if g is None else tf.IndexedSlices(next(clipped), g.indices) if hasattr(g, "indices") else next(clipped)
        for g in gradients
    ]


def _copy_for(
    optimizer: keras.optimizers.Optimizer, originals: Sequence[keras.Variable], variables: Sequence[keras.Variable]
) -> keras.optimizers.Optimizer:
    """A copy of `optimizer`, built for `variables` that stand for `originals`; it clips nothing."""
    try:
        copy = by_kernel(type(optimizer)).from_config(optimizer.get_config())
    except Exception as error:
        raise ConfigError(
            f"optimizer {type(optimizer).__name__} cannot be copied to the servers: from_config(get_config()) raised "
            f"{type(error).__name__}: {error}"
        ) from error
    copy.clipnorm = copy.clipvalue = copy.global_clipnorm = None
    excluded = [variable for original, variable in zip(originals, variables) if not decays(optimizer, original)]
    if excluded:
        copy.exclude_from_weight_decay(var_list=excluded)
    copy.build(list(variables))
    return copy


def decays(optimizer: keras.optimizers.Optimizer, original: keras.Variable) -> bool:
    """Whether a variable is not exempt from weight decay."""
    # The TF optimizer looks exclusions up by the underlying tf.Variable, as it does when it applies.
    return optimizer.weight_decay is None or optimizer._use_weight_decay(original.value)


def _with_shape(gradient: tf.Tensor | tf.IndexedSlices, variable: keras.Variable) -> tf.Tensor | tf.IndexedSlices:
    """A sparse gradient with the shape of its variable, without which Keras cannot make it dense."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    return tf.IndexedSlices(gradient.values, gradient.indices, tf.constant(tuple(variable.shape)))


def _numbers(variables: Sequence[keras.Variable]) -> list[str]:
    return [str(i) for i in range(len(variables))]
