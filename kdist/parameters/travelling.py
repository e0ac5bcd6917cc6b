"""What travels between servers and a worker in a step: the values that it pulls, the changes that it pushes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import tensorflow as tf

from kdist.model.lookup_rounds import RowSource
from kdist.parameters.transport import Fused

#: What a step computes for a variable: a gradient, for an embedding that of some rows; None for no change.
Change: TypeAlias = "tf.Tensor | tf.IndexedSlices | None"


@dataclass(frozen=True)
class Assigned:
    """The key of what a step has assigned to the parameters of a block."""

    block: int


@dataclass(frozen=True)
class Overflow:
    """The key of what tells a server whether the gradients of a step have overflowed."""

    server: int


@dataclass(frozen=True)
class Weight:
    """The key of the weight of what one of several replicas has computed, for a server: of its gradients, or of what it
    has done to state.
    """

    server: int
    of_state: bool = False


#: Changes by shard, or by block, `Assigned`, `Overflow` or `Weight`; those without one are missing.
Changes: TypeAlias = "dict[Any, tf.Tensor | tf.IndexedSlices]"


@dataclass(frozen=True)
class Pulled:
    """The values that a replica step starts from.

    Attributes:
        trainable: values of the trainable variables, in the model's order; None for tables that are looked up by rows.
        state: values of the state variables (BatchNormalization statistics), in the model's order.
        global_step: scalar int64 on the first server: the number of updates in these values.
        rows: those of the tables; None if there are none.
    """

    trainable: list[tf.Tensor | None]
    state: list[tf.Tensor]
    global_step: tf.Tensor
    rows: RowSource | None = None


@dataclass(frozen=True)
class Gathered:
    """Values on their servers, ready to be sent: by block in one process (`single`), fused on servers."""

    single: dict[int, tf.Tensor]
    fused: list[Fused]
    global_step: tf.Tensor
