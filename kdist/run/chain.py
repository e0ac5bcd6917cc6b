"""`Chain`: a full checkpoint and the deltas that follow it, and the values that they have together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kdist.model.names import CHANGED_IDS, EVICTED, FOLLOWS, dynamic_names


@dataclass(frozen=True)
class Chain:
    """The global steps of a full checkpoint, and of the deltas from it up to the next full one, oldest first."""

    full: int
    deltas: Sequence[int]


def chains(full: Sequence[int], deltas: Iterable[int]) -> list[Chain]:
    """The chains of full checkpoints, oldest first; deltas before all of them belong to none."""
    found = sorted(deltas)
    ends = [*full[1:], float("inf")]
    return [Chain(step, [d for d in found if step < d <= end]) for step, end in zip(full, ends)]


def way_to(step: int, follows: Mapping[int, int]) -> list[int]:
    """The delta of a step after those that it follows, oldest first, as far as they are there.

    Args:
        follows: the step that each delta follows.
    """
    way = [step]
    while follows[way[0]] in follows:
        way.insert(0, follows[way[0]])
    return way


def replayed(values: Mapping[str, np.ndarray], delta: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The values of a checkpoint, and then of a delta of it, by name."""
    new = {name: value for name, value in delta.items() if not name.startswith((CHANGED_IDS, EVICTED, FOLLOWS))}
    for name, ids in delta.items():
        if name.startswith(CHANGED_IDS):
            table = name.removeprefix(CHANGED_IDS)
            fixed = dynamic_names(table, ["vectors", "ids", "counts", "last_steps"])
            own = [n for n in delta if n in fixed.values() or n.rpartition("/")[0] == f"slots/{table}"]
            gone = delta.get(f"{EVICTED}{table}")
            if gone is None:
                new |= {n: _with_rows(values[n], ids, delta[n]) for n in own}
            else:
                old_ids = values[fixed["ids"]]
                stays = ~np.isin(old_ids, np.concatenate([gone, ids]))
                new |= {n: np.concatenate([values[n][stays], delta[n]]) for n in own}
                new[fixed["ids"]] = np.concatenate([old_ids[stays], ids])
    return {**values, **new}


def _with_rows(value: np.ndarray, rows: np.ndarray, new: np.ndarray) -> np.ndarray:
    changed = value.copy()
    changed[rows] = new
    return changed
