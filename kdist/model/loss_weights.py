"""How the losses of synchronous replicas make one: by what each was divided by.

The loss of all examples of a step is the mean of the replicas' losses if all were divided by the same number. With
masks, or with `reduction="mean_with_sample_weight"`, they are not: each replica then also says what it has divided by.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from kdist._compat.keras import Reduction


class LossWeights(Enum):
    """What weight the gradient of a replica has."""

    #: All the same.
    EQUAL = "equal"
    #: What its loss was divided by.
    DIVISORS = "divisors"
    #: Losses are sums, and so is the gradient of all.
    SUM = "sum"
    #: Several losses with divisors of their own, or losses that say nothing: all the same, which is not exact.
    UNKNOWN = "unknown"


def loss_weights(reductions: Sequence[Reduction], *, has_other_losses: bool) -> LossWeights:
    """The weights of a model's gradients.

    Args:
        reductions: of the losses that it is compiled with, in one step.
        has_other_losses: whether there are others, such as regularizers, or the step is the model's own.
    """
    if all(not reduction.is_sum and reduction.divisor is None for reduction in reductions):
        return LossWeights.EQUAL
    if len(reductions) > 1 or (reductions[0].is_sum and has_other_losses):
        return LossWeights.UNKNOWN
    return LossWeights.SUM if reductions[0].is_sum else LossWeights.DIVISORS
