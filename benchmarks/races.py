"""Which contenders race each other, and what has to come out of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec

from benchmarks.contender import Entry

# Until the calls have their length.
_KDIST_WARM_UP_SECS = {"deep": 20.0, "wide": 12.0}
_WITH_ALL_PEERS = ("null", "mlp", "deep", "cnn", "embedding_200k")


def kdist(workload: str, name: str = "kdist", **arguments: object) -> Entry:
    """kdist with its default settings."""
    return Entry(name, "kdist_trainer", workload, warm_up_secs=_KDIST_WARM_UP_SECS.get(workload, 8.0), **arguments)  # type: ignore[arg-type]


def asynchronous(workload: str) -> list[Entry]:
    """Asynchronous parameter servers, and one process without any."""
    entries = [kdist(workload), Entry("TF1", "tf1", workload), Entry("one Keras process", "plain_keras", workload)]
    if workload in _WITH_ALL_PEERS:
        entries.append(Entry("tf_keras fit", "tf_keras_fit", workload))
        entries.append(Entry("coordinator loop", "coordinator_loop", workload))
    if workload in ("mlp", "deep", "embedding_200k"):
        entries.append(kdist(workload, optimizer="adam"))
    if workload == "mlp":
        entries.append(kdist(workload, "kdist without hooks", options={"use_default_hooks": False}))
    return entries


def synchronous(workload: str) -> list[Entry]:
    """Synchronous updates of two workers, with servers and without."""
    entries = [
        kdist(workload, sync=True),
        Entry("TF1", "tf1", workload, sync=True),
        Entry("MultiWorkerMirrored", "multi_worker_mirrored", workload, sync=True, can_rest=False),
    ]
    if find_spec("torch"):
        entries.append(Entry("PyTorch DDP", "torch_ddp", workload, sync=True))
    return entries


def scaling(name: str, module: str) -> list[Entry]:
    """The same contender with more and more workers, each of which rests instead of computing."""
    return [Entry(f"{name}, {n} workers", module, "sleep", num_workers=n, warm_up_secs=8.0) for n in (1, 2, 4, 8)]


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
    fixed = [kdist(workload, f"kdist, steps_per_call={n}", options={"steps_per_call": n}) for n in (1, 4, 16, 64)]
    return [kdist(workload), *fixed]


@dataclass(frozen=True)
class Goal:
    """A ratio of two medians that should be reached.

    Attributes:
        what: the contender that is asked, by key.
        against: the one that it is compared with.
        at_least: the ratio of their steps per second.
    """

    what: str
    against: str
    at_least: float

    def ratio(self, medians: Mapping[str, float]) -> float | None:
        """What it is; None if one of them did not race."""
        if self.what in medians and self.against in medians:
            return medians[self.what] / medians[self.against]
        return None


def _async(workload: str, name: str = "kdist") -> str:
    return f"{workload}/sgd/async/{name}"


def _sync(workload: str, name: str = "kdist") -> str:
    return f"{workload}/sgd/sync/{name}"


_TABLES = ("embedding_200k", "embedding_1M")
_ADAM = ("mlp", "deep", "embedding_200k")
GOALS = [
    *(Goal(_async(w), _async(w, "TF1"), r) for w, r in [("mlp", 3), ("deep", 5), ("cnn", 1.6)]),
    *(Goal(_async(w), _async(w, "tf_keras fit"), r) for w, r in [("mlp", 5), ("deep", 12), ("cnn", 2.4)]),
    *(Goal(_async(w), _async(w, "one Keras process"), r) for w, r in [("deep", 0.7), ("cnn", 0.9)]),
    *(Goal(_async(w), _async(w, "TF1"), 1.5) for w in _TABLES),
    Goal(_async("embedding_200k"), _async("embedding_200k", "tf_keras fit"), 8),
    *(Goal(_sync(w), _sync(w, "TF1"), r) for w, r in [("mlp", 2.5), ("deep", 5), ("cnn", 1.8)]),
    *(Goal(_sync(w), _sync(w, "MultiWorkerMirrored"), 0.85) for w in ("mlp", "deep", "cnn")),
    *(Goal(f"{w}/adam/async/kdist", _async(w), 1 / 1.25) for w in _ADAM),
    *(
        Goal(_async("sleep", f"kdist, {n} workers"), _async("sleep", "kdist, 1 workers"), r)
        for n, r in [(2, 1.95), (4, 3.85), (8, 7.5)]
    ),
    Goal(_sync("sleep", "kdist, one 5 x slower"), _sync("sleep", "kdist, 3 workers, 1 backup"), 0.85),
    Goal(_async("mlp"), _async("mlp", "kdist without hooks"), 0.99),
]
