"""Joins the losses of synchronous replicas to one: the kind of each term tells how it grows with the batch.

The loss of all examples of a step is the mean of the replicas' losses, weighted by their divisors: the number of
examples, or with masks and `reduction="mean_with_sample_weight"` something else. Losses that are sums add up.
Regularizers are the same on every replica.

The kind of a term is known for the losses of Keras. That of a function, of `add_loss` or of a model's own `train_step`
is found by a try on made-up data: on a batch, and on the same batch several times over.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kdist._compat.keras import Reduction, has_own_compute_loss, num_compiled_losses
from kdist.errors import reason
from kdist.log import warn
from kdist.model.phases import PhaseOfTensor, flat

#: Of a dimension of a made-up batch that its data leaves open.
_UNKNOWN_SIZE = 4
#: How often the larger of two made-up batches has the examples of the smaller one.
REPEATS = 4
_TOLERANCE = 1e-3
#: Of float32, since examples that differ little make almost a mean.
_ROUNDING = 2e-5


class Term(Enum):
    """The growth of a loss, or of a term of it, with the batch."""

    #: No growth: it depends on parameters only.
    CONSTANT = "constant"
    #: A mean over the examples; their number is the weight of a replica's gradient.
    MEAN = "mean"
    #: A mean over something else, of which a batch may have more or less: unmasked steps, the sum of weights. The
    #: divisor of the loss is the weight of a replica's gradient.
    OWN_MEAN = "own mean"
    #: The gradients of replicas add up.
    SUM = "sum"
    #: Values that are not reduced, of which the gradient is that of their sum.
    VALUES = "values"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class LossTerms:
    """The terms of a model's loss.

    Attributes:
        compiled: of the losses that it is compiled with, in their order.
        added: of `model.losses`: regularizers, and losses that layers have added.
        is_whole: True if there is only one, the loss that the model itself makes of all.
        compiled_factors, added_factors: a replica's factor of each; none for 1.
    """

    compiled: tuple[Term, ...] = ()
    added: tuple[Term, ...] = ()
    is_whole: bool = False
    compiled_factors: tuple[float, ...] = ()
    added_factors: tuple[float, ...] = ()

    @property
    def all(self) -> tuple[Term, ...]:
        return *self.compiled, *self.added

    @property
    def together(self) -> Term | None:
        """MEAN, OWN_MEAN or SUM, the growth of the whole loss; None if terms need different weights."""
        kinds = {*self.all} - {Term.CONSTANT}
        if kinds <= {Term.MEAN}:
            return Term.MEAN
        if kinds <= {Term.SUM, Term.VALUES}:
            return Term.SUM
        return Term.OWN_MEAN if kinds == {Term.OWN_MEAN} and self.all.count(Term.OWN_MEAN) == 1 else None

    def known(self, kinds: Sequence[Term] = ()) -> LossTerms:
        """The terms with these kinds, of all terms, in the places of unknown ones; means without any."""
        number, found = len(self.compiled), kinds or [Term.MEAN] * len(self.all)
        known = [new if old is Term.UNKNOWN else old for old, new in zip(self.all, found, strict=True)]
        return replace(self, compiled=tuple(known[:number]), added=tuple(known[number:]))

    def of_replica(self, num_replicas: int, *, has_same_size: bool) -> LossTerms:
        """The terms with factors, so that the gradients of replicas need one weight, if that can be.

        Args:
            has_same_size: True if the batches of all replicas have the same number of examples.
        """
        if self.together is Term.SUM:
            return replace(self, added_factors=_factors(self.added, {Term.CONSTANT: 1 / num_replicas}))
        needs_no_weight = has_same_size and not self.is_whole and {*self.all} <= {Term.CONSTANT, Term.MEAN, Term.SUM}
        if self.together is None and needs_no_weight:
            # The mean of the sums, times their number, is the sum of all.
            factors = {Term.SUM: float(num_replicas)}
            return LossTerms(
                (Term.MEAN,) * len(self.compiled),
                (Term.MEAN,) * len(self.added),
                compiled_factors=_factors(self.compiled, factors),
                added_factors=_factors(self.added, factors),
            )
        return self


def _factors(terms: Sequence[Term], of_kind: Mapping[Term, float]) -> tuple[float, ...]:
    return tuple(of_kind.get(term, 1.0) for term in terms)


def term_of(reduction: Reduction) -> Term:
    """The growth of a compiled loss, as far as its reduction tells."""
    if reduction.is_number:
        return Term.UNKNOWN
    if reduction.is_sum:
        return Term.VALUES if tf.convert_to_tensor(reduction.value).shape.rank else Term.SUM
    return Term.MEAN if reduction.divisor is None else Term.OWN_MEAN


def loss_terms(model: keras.Model, batch: Any, reductions: Sequence[Reduction]) -> LossTerms:
    """The terms of the loss of a built model, as far as its graph tells; called while its step is traced."""
    phases = PhaseOfTensor()
    phases.arrive(flat(batch), 1)
    compiled = tuple(map(term_of, reductions))
    # What can be computed before the batch is there does not depend on it.
    added = tuple(Term.UNKNOWN if phases.of(loss) else Term.CONSTANT for loss in model.losses)
    if not has_own_compute_loss(model) and len(reductions) == num_compiled_losses(model):
        return LossTerms(compiled, added)
    # Only the model knows how it joins its parts.
    own = tuple(term for term in compiled if term is Term.OWN_MEAN)
    return LossTerms(own or (Term.UNKNOWN,), is_whole=True)


def is_of_none(spec: tf.TypeSpec) -> bool:
    """True for a part of a batch that is an optional input without a value."""
    return spec == tf.type_spec_from_value(None)


def make_batch(batch_spec: Any, seed: int) -> Any:
    """A small batch of random numbers; an optional input that is None stays None."""
    rng = np.random.default_rng(seed)

    def array(spec: tf.TypeSpec) -> tf.Tensor:
        shape = [_UNKNOWN_SIZE if size is None else size for size in spec.shape]
        if spec.dtype == tf.string:
            return tf.as_string(rng.integers(0, 2, shape))
        return tf.cast(rng.random(shape) if spec.dtype.is_floating else rng.integers(0, 2, shape), spec.dtype)

    def of_kind(spec: tf.TypeSpec) -> Any:
        if is_of_none(spec):
            return None
        if isinstance(spec, tf.RaggedTensorSpec):
            return tf.RaggedTensor.from_tensor(
                array(spec), ragged_rank=spec.ragged_rank, row_splits_dtype=spec.row_splits_dtype
            )
        return tf.sparse.from_dense(array(spec)) if isinstance(spec, tf.SparseTensorSpec) else array(spec)

    return tf.nest.map_structure(of_kind, batch_spec)


def of_any_size(batch_spec: Any) -> Any:
    """The spec of batches of any number of examples."""

    def open_first(spec: tf.TypeSpec) -> tf.TypeSpec:
        if isinstance(spec, tf.RaggedTensorSpec):
            return tf.RaggedTensorSpec([None, *spec.shape[1:]], spec.dtype, spec.ragged_rank, spec.row_splits_dtype)
        if not isinstance(spec, tf.TensorSpec) or not spec.shape.rank:
            return spec
        return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)

    return tf.nest.map_structure(open_first, batch_spec)


def repeat(batch: Any) -> Any:
    """A batch that has each example `REPEATS` times."""

    def of_part(part: Any) -> Any:
        if part is None:
            return None
        if isinstance(part, tf.SparseTensor):
            return tf.sparse.concat(0, [part] * REPEATS)
        return tf.concat([part] * REPEATS, 0)

    return tf.nest.map_structure(of_part, batch)


def kinds_of(
    values: Callable[[Any, int], Sequence[Any]], batch_spec: Any, model: keras.Model, parts: Collection[int] = ()
) -> list[Term]:
    """The growth of each value that a function computes of a batch; nothing, with a warning, if it takes no made-up
    data.

    Args:
        values: batch, number of a random draw -> numbers, in the same order for every batch.
        model: named in warnings.
        parts: the indices of values that must follow from those of parts of a batch; otherwise there is a warning. The
            root of a mean does not, nor a loss that compares the examples.
    """
    try:
        batch = make_batch(batch_spec, 1)
        found = _compare(values, batch)
        draws = [_differ(once, again) for once, again, _ in found]
        if any(draws):
            # With more examples, random draws matter less.
            found = _compare(values, repeat(batch))
    except Exception as error:  # noqa: BLE001 - whatever the user's code raises of data that nobody promised to it
        warn(
            f"model {model.name}: its loss could not be tried on made-up data and counts as a mean over the examples; "
            f"if it is a sum, synchronous replicas divide it by their number ({reason(error).splitlines()[0]})"
        )
        return []
    kinds = [_kind(*of_value, draws=of_draws) for of_value, of_draws in zip(found, draws)]
    halves = _of_halves(values, batch) if parts and not any(draws) else []
    together = [i for i in parts if halves and not _comes_of_parts(found[i], kinds[i], [of[i] for of in halves])]
    if together:
        warn(
            f"model {model.name}: its loss is neither a mean nor a sum over the examples of a batch; each synchronous "
            "replica computes it of its own examples, which is not what one process computes of all"
        )
    for i in together:
        # One that compares the examples may grow with their number.
        kinds[i] = Term.SUM if kinds[i] is Term.SUM else Term.MEAN
    return kinds


def _compare(values: Callable[[Any, int], Sequence[Any]], batch: Any) -> list[tuple[Any, ...]]:
    """Each value of a batch, of the same again, and of the same repeated."""
    of_batches = [values(some, draw) for draw, some in enumerate((batch, batch, repeat(batch)))]
    return list(zip(*([np.array(v, np.float64) for v in of_batch] for of_batch in of_batches), strict=True))


def _comes_of_parts(of_batch: tuple[np.ndarray, ...], kind: Term, of_halves: Sequence[Any]) -> bool:
    """True if a value of a batch, as of `_compare`, consists of terms of single examples."""
    once, _, often = of_batch
    parts = [np.array(value, np.float64) for value in of_halves]
    if any(part.shape != once.shape for part in parts) or often.shape != once.shape:
        return True
    total = np.sum(parts, 0)
    if kind is Term.MEAN:
        return not _differ(total / len(parts), once, _ROUNDING)
    # A sum beside a mean, or a constant, which all parts have.
    constant = total - once
    return not _differ(REPEATS * (once - constant) + constant, often, _ROUNDING)


def _of_halves(values: Callable[[Any, int], Sequence[Any]], batch: Any) -> list[Sequence[Any]]:
    """The values of the halves of a batch; none if it has other parts than dense tensors, or the function fails."""
    parts = [part for part in tf.nest.flatten(batch) if part is not None]
    if not all(isinstance(part, tf.Tensor) and part.shape.rank for part in parts):
        return []

    def cut(of: slice) -> Any:
        return tf.nest.map_structure(lambda part: None if part is None else part[of], batch)

    middle = parts[0].shape[0] // 2
    try:
        return [values(cut(of), 0) for of in (slice(None, middle), slice(middle, None))]
    except Exception:  # noqa: BLE001 - as of any made-up data; the whole batch has told the kinds
        return []


def _differ(some: np.ndarray, others: np.ndarray, tolerance: float = _TOLERANCE) -> bool:
    return bool(np.linalg.norm(some - others) > tolerance * max(float(np.linalg.norm(others)), 1e-12))


def _kind(once: np.ndarray, again: np.ndarray, often: np.ndarray, *, draws: bool) -> Term:
    """The growth of a value or a gradient, from `_compare`; it may be drawn even if two draws agree by chance."""
    if once.shape != often.shape:
        # Values that are not reduced: their gradient is that of the sum.
        once, again, often = (np.sum(values) for values in (once, again, often))
    if not _differ(often, once):
        return Term.MEAN
    if not _differ(often, REPEATS * once):
        return Term.SUM
    growth = float(np.vdot(once, often)) / max(float(np.vdot(once, once)), 1e-24)
    if draws or _differ(again, once):
        return Term.SUM if growth > REPEATS**0.5 else Term.MEAN
    # A loss that compares the examples of a batch is a mean as well, of another kind.
    return Term.MEAN if growth < REPEATS**0.25 else Term.UNKNOWN
