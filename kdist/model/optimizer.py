"""Properties of a Keras optimizer: its slots by name, its clipping, its abilities."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar

import keras
import tensorflow as tf

from kdist._compat.keras import (
    is_multi_optimizer,
    learning_rate_variable,
    own_variables,
    parallel_variables,
    step_counter,
)
from kdist.errors import ConfigError

K = TypeVar("K", bound=Hashable)
Gradient: TypeAlias = "tf.Tensor | tf.IndexedSlices"

# They compute each element of a variable separately, so that rows can be updated independently.
_ELEMENTWISE = frozenset(("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Ftrl", "Adadelta", "Adamax", "Lion"))


def is_elementwise(optimizer: keras.optimizers.Optimizer) -> bool:
    """True if a variable can be split without changing the result of the optimizer."""
    # With gradient accumulation, each variable is clipped where it is.
    is_known = type(optimizer).__name__ in _ELEMENTWISE and type(optimizer).__module__.startswith("keras.")
    return is_known and not optimizer.gradient_accumulation_steps


def leaves_other_rows_alone(optimizer: keras.optimizers.Optimizer) -> bool:
    """True if Keras itself neither reads nor writes rows without a gradient."""
    is_plain = type(optimizer) is keras.optimizers.SGD and optimizer.momentum == 0
    return is_plain and optimizer.weight_decay is None and not optimizer.use_ema


def check_optimizer(optimizer: keras.optimizers.Optimizer, strategy: str) -> None:
    """Refuses, with a `ConfigError`, optimizers that the strategy of this name cannot reproduce exactly."""
    steps = optimizer.gradient_accumulation_steps
    if steps and optimizer.ema_overwrite_frequency:
        raise ConfigError(
            f"optimizer {optimizer.name}: gradient_accumulation_steps={steps} and ema_overwrite_frequency do not go "
            "together here; leave one of them out"
        )
    if steps and optimizer.global_clipnorm and strategy in ("parameter_server", "sync_replicas"):
        raise ConfigError(
            f"optimizer {optimizer.name}: gradient_accumulation_steps={steps}: global_clipnorm needs the mean of all "
            "gradients, which no server has; use clipnorm, or a larger train.batch_size"
        )
    if is_multi_optimizer(optimizer):
        for part in optimizer.optimizers:
            check_optimizer(part, strategy)
            if part.use_ema:
                raise ConfigError(
                    f"optimizer {part.name}: use_ema is not supported inside MultiOptimizer; leave it out, or "
                    "compile the model with one optimizer"
                )
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ConfigError(
            f"optimizer {optimizer.name}: only the model's own optimizer, the one that it is compiled with, may be a "
            "LossScaleOptimizer; use the policy mixed_bfloat16, which needs no loss scaling"
        )


def optimizer_state(
    optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable], names: Sequence[str], owner: str = ""
) -> dict[str, keras.Variable]:
    """The optimizer's variables except its step counter, by names that depend on neither process nor server.

    Args:
        variables: as the optimizer was built with.
        names: their names in checkpoints.
        owner: the attribute of the model that holds it; empty for the optimizer that the model was compiled with.

    Returns:
        `slots/<variable>/<slot>` for each slot, `optimizer/learning_rate`, and `optimizer/state_<n>` for the rest; with
        an owner `slots/<variable>/<owner>.<slot>`, `optimizer/<owner>.learning_rate` and so on.
    """
    dot = f"{owner}." if owner else ""
    by_prefix: dict[str, list[str]] = defaultdict(list)
    for variable, name in zip(variables, names):
        by_prefix[variable.path.replace("/", "_") + "_"].append(name)
    seen: dict[str, int] = defaultdict(int)
    parallel = parallel_variables(optimizer)
    state: dict[str, keras.Variable] = {}
    for variable in own_variables(optimizer):
        if variable is step_counter(optimizer):
            continue
        prefixes = [prefix for prefix in by_prefix if variable.name.startswith(prefix)]
        if prefixes:
            prefix = max(prefixes, key=len)
            # Variables of the same path are in the order of `variables`, and so are their slots.
            name = by_prefix[prefix][seen[variable.name]]
            seen[variable.name] += 1
            state[f"slots/{name}/{dot}{variable.name.removeprefix(prefix)}"] = variable
        elif variable is learning_rate_variable(optimizer):
            state[f"optimizer/{dot}learning_rate"] = variable
        elif id(variable) in parallel:
            index, slot = parallel[id(variable)]
            state[f"slots/{names[index]}/{dot}{slot}"] = variable
        else:
            # Keras numbers their names per process.
            others = f"optimizer/{dot}state_"
            state[f"{others}{sum(name.startswith(others) for name in state)}"] = variable
    return state


def unscale(
    optimizer: keras.optimizers.Optimizer, gradients: Sequence[Gradient | None], scale: tf.Tensor | None
) -> list[Any]:
    """Divides gradients by the scale of the loss: `scale`, or else the factor of `optimizer.scale_loss`."""
    factor = optimizer.loss_scale_factor if scale is None else scale
    if factor is None:
        return list(gradients)
    return [None if g is None else map_values(lambda v: v / tf.cast(factor, v.dtype), g) for g in gradients]


def overflow_of(gradients: Sequence[Gradient | None], scale: tf.Tensor | None) -> tf.Tensor | None:
    """The scale of the loss, if it makes an element of the gradients infinite or no number, otherwise 0."""
    if scale is None:
        return None
    values = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients if g is not None]
    is_finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(tensor)) for tensor in values])
    return tf.where(is_finite, 0.0, scale)


def map_values(function: Callable[[tf.Tensor], tf.Tensor], gradient: Gradient) -> Gradient:
    """Applies a function to the values of a gradient, of all rows or of some."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(function(gradient.values), gradient.indices)
    return function(gradient)


def clip_gradients(
    optimizer: keras.optimizers.Optimizer,
    gradients: Mapping[K, Gradient],
    variable_of: Callable[[K], Hashable] = lambda key: key,
    device_of: Callable[[K], str] = lambda _: "",
) -> dict[K, Gradient]:
    """Clips gradients of variables, or of parts of them, as Keras would clip the whole ones; only norms travel.

    Args:
        gradients: the norm of a sparse one is that of its slices, as in Keras.
        variable_of: key -> its variable, whose parts have one norm.
        device_of: key -> the device of its gradient; empty for the caller's.
    """
    kinds = ("clipnorm", "global_clipnorm", "clipvalue")
    # As in Keras, a number that is not positive clips nothing.
    kind = next((kind for kind in kinds if (getattr(optimizer, kind) or 0) > 0), None)
    if kind is None or optimizer.gradient_accumulation_steps:
        # The mean of accumulated gradients is clipped where they are accumulated.
        return dict(gradients)
    limit, scale_of = getattr(optimizer, kind), dict[Hashable, tf.Tensor]()
    if kind != "clipvalue":
        squares = defaultdict[Hashable, list[tf.Tensor]](list)
        for key, gradient in gradients.items():
            device = device_of(key)
            with tf.device(device):
                values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
                wide = tf.cast(values, tf.float64 if values.dtype == tf.float64 else tf.float32)
                square = tf.reduce_sum(tf.square(wide))
            of = variable_of(key) if kind == "clipnorm" else None
            squares[of].append(tf.identity(square) if device else square)
        for of, parts in squares.items():
            widest = max((part.dtype for part in parts), key=lambda dtype: dtype.size)
            total = tf.sqrt(tf.add_n([tf.cast(part, widest) for part in parts]))
            scale_of[of] = limit / tf.maximum(total, limit)
            if kind == "global_clipnorm":
                # As in Keras: no number if the norm is infinite.
                scale_of[of] += total - total

    def clip(key: K, values: tf.Tensor) -> tf.Tensor:
        if kind == "clipvalue":
            return tf.clip_by_value(values, -limit, limit)
        return values * tf.cast(scale_of[variable_of(key) if kind == "clipnorm" else None], values.dtype)

    clipped: dict[K, Gradient] = {}
    for key, gradient in gradients.items():
        with tf.device(device_of(key)):
            clipped[key] = map_values(partial(clip, key), gradient)
    return clipped
