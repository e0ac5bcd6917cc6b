"""Applying gradients where the parameters are, by the user's own Keras optimizer and its exact maths."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import keras
import tensorflow as tf

from kdist.errors import ConfigError
from kdist.parameters.names import LEARNING_RATE


class ServerOptimizer:
    """A copy of the user's optimizer that owns the variables of one server.

    Its slots are created beside their variables, so `apply` moves nothing between tasks. The step that learning-rate
    schedules and bias corrections follow is an argument: Keras's own counter loses updates under several workers.

    Args:
        optimizer: the optimizer that the model was compiled with.
        originals: the model's trainable variables of this server.
        variables: the server's variables that stand for them, in the same order.
        device: the device of the server.
    """

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        originals: Sequence[keras.Variable],
        variables: Sequence[keras.Variable],
        device: str,
    ) -> None:
        self._variables = list(variables)
        with tf.device(device):
            self.optimizer = _clone(optimizer)
            excluded = [
                variable
                for original, variable in zip(originals, variables)
                # The TF optimizer looks exclusions up by the underlying tf.Variable, as it does when it applies.
                if optimizer.weight_decay is not None and not optimizer._use_weight_decay(original.value)
            ]
            if excluded:
                self.optimizer.exclude_from_weight_decay(var_list=excluded)
            self.optimizer.build(self._variables)

    def apply(self, gradients: Sequence[tf.Tensor | tf.IndexedSlices | None], step: tf.Tensor) -> None:
        """Updates the variables.

        Args:
            gradients: one per variable of this server, already clipped; None leaves its variable alone.
            step: scalar int64, how many updates were applied before this one.
        """
        pairs = [(g, v) for g, v in zip(gradients, self._variables) if g is not None]
        if not pairs:
            return
        # In the scope `iterations` reads as `step`. The TF optimizer updates tf.Variables in place and atomically all
        # the same; what Keras assigns by `Variable.assign` (constraints, moving averages) is collected, and written
        # below.
        with keras.StatelessScope([(self.optimizer._iterations, step)]) as scope:
            self.optimizer.apply([g for g, _ in pairs], [v for _, v in pairs])
        for variable in [*self._variables, *self.optimizer.variables]:
            new_value = scope.get_current_value(variable)
            if new_value is not None and variable is not self.optimizer._iterations:
                variable.value.assign(new_value)


def check_optimizer(optimizer: keras.optimizers.Optimizer) -> None:
    """Refuses what no strategy of kdist can do exactly.

    Raises:
        ConfigError: says which option, and what to use instead.
    """
    if optimizer.gradient_accumulation_steps:
        raise ConfigError(
            f"optimizer {optimizer.name}: gradient_accumulation_steps={optimizer.gradient_accumulation_steps} is not "
            "supported; use a larger train.batch_size"
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
    state = optimizer_state(optimizer, trainable, [str(i) for i in range(len(trainable))])
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
    optimizer: keras.optimizers.Optimizer, gradients: Sequence[tf.Tensor | None]
) -> list[tf.Tensor | None]:
    """Clips as the optimizer would. Only the worker can: a global norm needs the gradients of every server."""
    present = iter(optimizer._clip_gradients([g for g in gradients if g is not None]))
    return [None if g is None else next(present) for g in gradients]


def _clone(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    try:
        clone = type(optimizer).from_config(optimizer.get_config())
    except Exception as error:
        raise ConfigError(
            f"optimizer {type(optimizer).__name__} cannot be copied to the servers: from_config(get_config()) raised "
            f"{type(error).__name__}: {error}"
        ) from error
    clone.clipnorm = clone.clipvalue = clone.global_clipnorm = None
    return clone
