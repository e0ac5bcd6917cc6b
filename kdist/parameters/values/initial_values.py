"""The initial values of large variables, which are made without any."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import keras
import numpy as np
import tensorflow as tf

from kdist._compat.lazy_variable import hand_over, made_by
from kdist.errors import ConfigError
from kdist.layers.initial_rows import TableInitializer
from kdist.parameters.placement.blocks import Blocks
from kdist.parameters.placement.plan import Shard
from kdist.parameters.values.named_values import NamedValues, assign_rows


def set_initial_values(
    blocks: Blocks,
    variables: Sequence[keras.Variable],
    originals: Sequence[keras.Variable],
    names: Sequence[str],
    slots: Mapping[str, keras.Variable],
    values: NamedValues,
) -> None:
    """Sets the values of slots, and of blocks that start empty.

    Servers draw values that the model does not have: of tables some rows at a time, each server for itself; of other
    variables all at once, on the first of their servers, so that any initializer will do. Other values travel some rows
    at a time.

    Args:
        originals, names: the variables of the model, and their names in `values`.
        slots: the model's, by name; where it has no values, servers have made the slots, too.

    Raises:
        ConfigError: an initializer returns values of another shape than its variable's.
    """
    values.write({name: slot.numpy() for name, slot in slots.items() if made_by(slot) is None})
    rows_to_draw: list[Callable[[tf.Tensor], None]] = []
    #: The devices of each, by index; the first one's draws it.
    others: dict[int, list[str]] = defaultdict(list)
    for b, block in enumerate(blocks):
        for i in block.shards if blocks.starts_empty(b) else ():
            shard, variable = blocks.shards[i], variables[b].value
            original = originals[shard.variable]
            if isinstance(initializer := made_by(original), TableInitializer):
                shift = blocks.first_row(i) - shard.start
                rows_to_draw.append(partial(_draw, variable, initializer, tuple(original.shape), shard, shift))
            else:
                others[shard.variable].append(variable.device)

    def draw(zero: tf.Tensor) -> None:
        for draw_rows in rows_to_draw:
            draw_rows(zero)

    if rows_to_draw:
        tf.function(draw, autograph=False)(tf.constant(0, tf.uint32))
    # One after the other: each may be as large as a task can hold.
    for index, devices in others.items():
        _set_whole(names[index], originals[index], devices[0], values)
    for original in [*originals, *slots.values()]:
        hand_over(original, on_servers(original.path))


def on_servers(path: str) -> ConfigError:
    """The error for reading values of a model that are not in this process."""
    return ConfigError(
        f"the values of {path} are on the parameter servers and in checkpoints; the model gets them at the end of fit, "
        "if it takes no more than export_max_bytes"
    )


def _set_whole(name: str, original: keras.Variable, device: str, values: NamedValues) -> None:
    """Sets a value to that of a variable of the model, or to what its initializer draws on a device."""
    initializer = made_by(original)
    if initializer is None:
        values.write({name: original.numpy()})
        return
    with tf.device(device):
        drawn = initializer(original.shape, dtype=original.dtype)
    if (shape := tuple(np.shape(drawn))) != tuple(original.shape):
        raise ConfigError(
            f"the initializer of {name} returned values of shape {shape}; the variable has the shape "
            f"{tuple(original.shape)}"
        )
    if tf.is_tensor(drawn):
        values.write_from(name, tf.cast(drawn, original.dtype))
    else:
        values.write({name: np.asarray(drawn)})


def _draw(
    variable: tf.Variable,
    initializer: TableInitializer,
    shape: tuple[int, ...],
    shard: Shard,
    shift: int,
    zero: tf.Tensor,
) -> None:
    """Draws the rows of a shard on the device of their variable, block by block; traced.

    Args:
        shape: of the whole table.
        shift: from rows of the table to rows of the variable.
        zero: an argument of the function that is traced.
    """
    before: list[tf.Operation] = []
    for number, (begin, end) in enumerate(initializer.blocks(shape, variable.dtype.name)):
        start, stop = max(begin, shard.start), min(end, shard.stop)
        if start < stop:
            with tf.device(variable.device), tf.control_dependencies(before):
                rows = initializer.block(number, shape, variable.dtype.name, zero)[start - begin : stop - begin]
                before = [assign_rows(variable, start + shift, stop + shift, rows)]
