"""Finds the name that a user meant: a synonym first, then the names beside it, then a similar one anywhere."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

#: What others call a key, by the last part of the key.
_SYNONYMS = {
    "learning_rate": ("lr", "rate", "step_size"),
    "batch_size": ("bs", "batch"),
    "epochs": ("num_epochs", "n_epochs", "epoch", "max_epochs"),
    "steps": ("max_steps", "num_steps", "last_step", "step"),
    "dir": ("folder", "path", "logdir", "log_dir", "output_dir", "model_dir"),
    "name": ("type", "kind"),
    "build_model": ("model", "model_fn"),
    "run_dir": ("model_dir", "checkpoint_dir", "log_dir", "dir"),
}


def similar(key: str, known: Iterable[str]) -> list[str]:
    """The keys that a key may stand for, the most likely first; dots separate their parts."""
    keys = list(dict.fromkeys(known))
    parent, dot, name = key.rpartition(".")
    siblings = [other for other in keys if other.rpartition(".")[0] == parent]
    called = [other for other in siblings if name in _SYNONYMS.get(other.rpartition(".")[2], ())]
    # `every` for `every_steps` and `every_secs`.
    begun = [other for other in siblings if other.startswith(f"{parent}{dot}{name}_")]
    return (
        called
        or begun
        or difflib.get_close_matches(key, siblings, n=1, cutoff=0.8)
        or difflib.get_close_matches(key, keys, n=1, cutoff=0.7)
    )


def did_you_mean(key: str, known: Iterable[str]) -> str | None:
    """A question that names the keys that are meant; None if none is similar."""
    found = similar(key, known)
    return f"did you mean {' or '.join(found)}?" if found else None
