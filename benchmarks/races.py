"""The contenders of each race, and the goals."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from benchmarks.contender import Entry
from benchmarks.peers.task import Task

_WITH_ADAM = ("mlp", "deep")
#: kdist as most users call it.
ARRAYS = "kdist, fit of arrays"
_OF_ARRAYS = {"arrays": True}


def kdist(workload: str, name: str = "kdist", **task: Any) -> Entry:
    """kdist with its default settings, but for what `task` says."""
    return Entry(name, "kdist_trainer", Task(workload, **task))


def all_reduce(workload: str, name: str = "kdist, 2w", **task: Any) -> Entry:
    """kdist on workers without servers."""
    # They take each other for dead after a rest.
    return replace(kdist(workload, name, sync=True, num_ps=0, **task), can_rest=False)


def asynchronous(workload: str) -> list[Entry]:
    """Asynchronous parameter servers, and one process without any."""
    task = Task(workload)
    entries = [kdist(workload), Entry("TF1", "tf1", task)]
    if workload in ("mlp", "deep", "cnn"):
        entries += [kdist(workload, ARRAYS, options=_OF_ARRAYS), Entry("one Keras process", "plain_keras", task)]
    if workload not in ("null", "wide"):
        entries.append(Entry("tf_keras fit", "tf_keras_fit", task))
    if workload == "mlp":
        entries.append(Entry("coordinator loop", "coordinator_loop", task))
    if workload in _WITH_ADAM:
        entries.append(kdist(workload, optimizer="adam"))
    if workload == "mlp":
        entries.append(kdist(workload, "kdist, 4 local steps", options={"local_steps": 4}))
    if workload == "wide":
        entries.append(kdist(workload, "kdist, bfloat16 on the wire", options={"wire_dtype": "bfloat16"}))
    if workload == "embedding_1M":
        entries.append(kdist("embedding_10k"))
    return entries


def synchronous(workload: str) -> list[Entry]:
    """Synchronous updates of two workers, with servers and without."""
    task = Task(workload, sync=True)
    # It could rest, but the machine may be faster a few minutes later: without servers, all race one after the other.
    ddp = [Entry("PyTorch DDP", "torch_ddp", task, can_rest=False)] if find_spec("torch") else []
    return [
        all_reduce(workload, f"{ARRAYS}, 2w", options=_OF_ARRAYS),
        all_reduce(workload),
        *ddp,
        Entry("MultiWorkerMirrored", "multi_worker_mirrored", task, can_rest=False),
        kdist(workload, sync=True),
        kdist(workload, ARRAYS, sync=True, options=_OF_ARRAYS),
        Entry("TF1", "tf1", task),
    ]


def scaling(workload: str, optimizer: str) -> list[Entry]:
    """The same contenders with more and more workers, each of which rests instead of computing."""
    tasks = [Task(workload, optimizer, num_workers=n) for n in (1, 2, 4, 8)]
    entries = [
        kdist(workload, f"kdist, {task.num_workers} workers", optimizer=optimizer, num_workers=task.num_workers)
        for task in tasks
    ]
    return entries + [Entry(f"TF1, {task.num_workers} workers", "tf1", task) for task in tasks]


def slow_worker() -> list[Entry]:
    """Three workers of which an update waits for two, and one of them slow."""
    backup = {"backup_workers": 1}
    slow = backup | {"slow_last_worker": 5.0}
    return [
        kdist("sleep", "kdist, 3 workers, 1 backup", sync=True, num_workers=3, options=backup),
        kdist("sleep", "kdist, one 5 x slower", sync=True, num_workers=3, options=slow),
    ]


def steps_per_call(workload: str) -> list[Entry]:
    """`auto` beside fixed numbers."""
    # A call has to end within a turn.
    numbers = (1, 4) if workload == "wide" else (1, 4, 16, 64)
    fixed = [kdist(workload, f"kdist, steps_per_call={n}", options={"steps_per_call": n}) for n in numbers]
    return [kdist(workload), *fixed]


def criteo() -> list[Entry]:
    """A click model with 26 tables: asynchronous and synchronous, with servers and without."""
    task, sync = Task("criteo", "adagrad"), Task("criteo", "adagrad", sync=True)
    entries = [
        kdist("criteo", optimizer="adagrad"),
        Entry("TF1", "tf1", task),
        Entry("TF1, partitioned tables", "tf1", replace(task, options={"partitioned_tables": True})),
        Entry("tf_keras fit", "tf_keras_fit", task),
        Entry("one Keras process", "plain_keras", task),
        kdist("criteo", ARRAYS, optimizer="adagrad", options=_OF_ARRAYS),
        kdist("criteo", optimizer="adagrad", sync=True),
        all_reduce("criteo", optimizer="adagrad"),
        Entry("TF1", "tf1", sync),
    ]
    if find_spec("torch"):
        entries.append(Entry("one PyTorch process", "torch_ddp", replace(task, num_workers=1)))
        entries.append(Entry("PyTorch DDP", "torch_ddp", sync))
    else:
        print("PyTorch is not installed: its contenders are left out", flush=True)
    return entries


def is_another_algorithm(name: str) -> bool:
    """Whether a contender does not compute what asynchronous training computes, so that rates cannot be compared."""
    return "local steps" in name or "bfloat16" in name


@dataclass(frozen=True)
class Goal:
    """A ratio of two rates that should be reached.

    Attributes:
        what: the contender that is asked, by key.
        against: the one that it is compared with.
        at_least: the ratio of their steps per second.
    """

    what: str
    against: str
    at_least: float

    def ratio(self, turns: Mapping[str, Sequence[float]]) -> float | None:
        """The median of the ratios of each round; None if one of them did not race.

        The machine may become faster from one round to the next, but hardly within one.

        Args:
            turns: steps per second of each turn, by key.
        """
        if self.what in turns and self.against in turns:
            return statistics.median(rate / other for rate, other in zip(turns[self.what], turns[self.against]))
        return None


def _async(workload: str, name: str = "kdist") -> str:
    return f"{workload}/sgd/async/{name}"


def _sync(workload: str, name: str = "kdist") -> str:
    return f"{workload}/sgd/sync/{name}"


def _criteo(how: str, name: str = "kdist") -> str:
    return f"criteo/adagrad/{how}/{name}"


_TABLES = ("embedding_200k", "embedding_1M")
GOALS = [
    *(Goal(_async(w, ARRAYS), _async(w), 0.95) for w in ("mlp", "deep", "cnn")),
    *(Goal(_sync(w, ARRAYS), _sync(w), 0.95) for w in ("mlp", "deep", "cnn")),
    *(Goal(_sync(w, f"{ARRAYS}, 2w"), _sync(w, "kdist, 2w"), 0.95) for w in ("mlp", "deep", "cnn")),
    *(Goal(_async(w), _async(w, "TF1"), r) for w, r in [("mlp", 3), ("deep", 6), ("cnn", 2)]),
    *(Goal(_async(w), _async(w, "tf_keras fit"), r) for w, r in [("mlp", 5), ("deep", 12), ("cnn", 3)]),
    *(Goal(_async(w), _async(w, "one Keras process"), r) for w, r in [("deep", 0.7), ("cnn", 1)]),
    *(Goal(_async(w), _async(w, "TF1"), r) for w, r in zip(_TABLES, (1.7, 1.5))),
    *(Goal(_async(w), _async(w, "tf_keras fit"), r) for w, r in zip(_TABLES, (8, 40))),
    Goal(_async("embedding_1M"), _async("embedding_10k"), 1 / 1.2),
    *(Goal(_sync(w), _sync(w, "TF1"), r) for w, r in [("mlp", 3), ("deep", 11), ("cnn", 2.4)]),
    *(Goal(_criteo(how), _criteo(how, "TF1"), r) for how, r in [("async", 2.2), ("sync", 2.5)]),
    Goal(_criteo("async"), _criteo("async", "one PyTorch process"), 1.7),
    Goal(_async("wide"), _async("wide", "TF1"), 1.2),
    *(Goal(_sync(w), _sync(w, "MultiWorkerMirrored"), r) for w, r in [("mlp", 3.6), ("deep", 3.3), ("cnn", 2.5)]),
    *(
        Goal(_sync(w, "kdist, 2w"), _sync(w, "MultiWorkerMirrored"), r)
        for w, r in [("mlp", 4), ("deep", 3), ("cnn", 2.4)]
    ),
    *(Goal(_sync(w, "kdist, 2w"), _sync(w, "PyTorch DDP"), r) for w, r in [("mlp", 1.5), ("deep", 1.7), ("cnn", 1.5)]),
    *(Goal(f"{w}/adam/async/kdist", _async(w), 1 / 1.25) for w in _WITH_ADAM),
    *(
        Goal(_async("sleep", f"kdist, {n} workers"), _async("sleep", "kdist, 1 workers"), r)
        for n, r in [(2, 1.95), (4, 3.85), (8, 7.5)]
    ),
    Goal(_sync("sleep", "kdist, one 5 x slower"), _sync("sleep", "kdist, 3 workers, 1 backup"), 0.85),
]
