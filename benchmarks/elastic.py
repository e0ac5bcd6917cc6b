"""Clusters that are resized while they train: `python -m benchmarks.elastic`, about 10 minutes.

Values that move: seconds in which training stands still, and the growth of the chief. Workers that join: the rate of
those that were there, and that of all afterwards beside runs that began in that shape, in pairs. Each run is a process
of its own.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.measured import Figures, measured, run
from benchmarks.workloads import sleep

_STATE_GB, _WIDTH = 1.0, 64
_PAIRS = 3
#: Seconds of training at a shape, after the first of them.
_WARM_UP_SECS, _MEASURED_SECS = 8.0, 15.0
#: Around a join, seconds of which the rate is that during the join.
_DURING_SECS = 2.0


def moves(run_dir: str) -> Figures:
    """Trains 1 GB of state, a table with Adagrad, on 2, 3, 1 and 2 servers."""
    import keras

    import kdist

    rows = int(_STATE_GB * 1e9 / (_WIDTH * 4 * 2))

    def build() -> keras.Model:
        layers = [keras.layers.Input((8,), dtype="int64"), kdist.layers.Embedding(rows, _WIDTH)]
        model = keras.Sequential([*layers, keras.layers.Flatten(), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adagrad(0.1), "mse")
        return model

    hook = _hook([{"ps": 3}, {"ps": 1}, {"ps": 2}], first_after=_WARM_UP_SECS, every=5.0)
    x = np.random.default_rng(0).integers(0, rows, (20_000, 8))
    trainer = kdist.Trainer(build, "2ps2w", run_dir=run_dir, hooks=[hook], export_max_bytes=0)
    trainer.fit(x, (x.sum(1) % 7).astype(np.float32), batch_size=64, steps=10**6, verbose=0)
    return {
        "still_secs": [round(resize.seconds, 2) for resize in hook.done],
        "chief_mb": [round((after - hook.sizes[0]) / 1e6) for after in hook.sizes[1:]],
    }


def joins(run_dir: str, kind: str, cluster: str, *workers: str) -> Figures:
    """Trains an MLP, or a model whose steps rest for 20 ms, on a cluster to which workers are added one by one."""
    import keras

    import kdist

    if kind == "rests":
        x = np.full((4_000, 1), 0.02, np.float32)
        layers = [keras.layers.Input((1,)), keras.layers.Lambda(sleep, output_shape=lambda shape: shape)]
        batch_size = 1
    else:
        # Epochs of several seconds, and no more data than a worker that joins gets in a moment.
        x = np.random.default_rng(0).random((600_000, 64), np.float32)
        layers = [keras.layers.Input((64,)), keras.layers.Dense(600, "relu")]
        batch_size = 100
    model = keras.Sequential([*layers, keras.layers.Dense(10)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    hook = _hook([{"workers": int(number)} for number in workers], _WARM_UP_SECS + _MEASURED_SECS, _MEASURED_SECS)
    trainer = kdist.Trainer(model, cluster, run_dir=run_dir, hooks=[hook], steps_per_call=1 if kind == "rests" else 10)
    trainer.fit(x, np.arange(len(x)) % 10, batch_size=batch_size, steps=10**7, verbose=0)
    figures: Figures = {"rate": hook.rate(hook.ended_at - _MEASURED_SECS + 2, hook.ended_at)}
    if hook.done:
        asked, made = hook.asked_at[0], hook.made_at[0]
        before = hook.rate(asked - 8, asked)
        figures |= {
            "during": hook.rate(asked, max(made, asked + _DURING_SECS)) / before,
            "longest_gap": hook.longest_gap(asked, made + _DURING_SECS),
            "join_secs": made - asked,
        }
    return figures


MEASUREMENTS: dict[str, Callable[..., Figures]] = {f.__name__: f for f in (moves, joins)}


def _hook(changes: Sequence[dict[str, int]], first_after: float, every: float) -> Any:
    """A hook that makes changes, seconds apart, and notes when steps were done; the run ends after the last one."""
    import kdist

    class Changes(kdist.hooks.Hook):
        def __init__(self) -> None:
            self.steps: list[tuple[float, int]] = []
            self.asked_at: list[float] = []
            self.made_at: list[float] = []
            self.done: list[Any] = []
            self.sizes: list[int] = []
            self.ended_at = 0.0
            self._changes, self._next, self._asked = deque(changes), first_after, None

        def after_run(self, context: Any, values: Any) -> None:
            now = time.monotonic()
            self.steps.append((now, values.num_steps))
            if self._asked is not None:
                if not self._asked.done():
                    return
                self.done.append(self._asked.result())
                self.made_at.append(now)
                self.sizes.append(_own_bytes())
                self._asked, self._next = None, now - self.steps[0][0] + every
            if now - self.steps[0][0] < self._next:
                return
            if self._changes:
                self.sizes = self.sizes or [_own_bytes()]
                self.asked_at.append(now)
                self._asked = context.session.resize(**self._changes.popleft())
            else:
                self.ended_at = now
                context.request_stop("measured")

        def due_in(self, step: int) -> int:
            return 20

        def rate(self, since: float, until: float) -> float:
            return sum(number for at, number in self.steps if since < at <= until) / (until - since)

        def longest_gap(self, since: float, until: float) -> float:
            times = [at for at, _ in self.steps if since <= at <= until]
            return max(later - earlier for earlier, later in pairwise(times))

    return Changes()


def _own_bytes() -> int:
    """Resident memory of this process that is its own."""
    _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return (resident - shared) * 4096


def _measured(folder: str, *arguments: str) -> Figures:
    return measured("benchmarks.elastic", arguments[0], tempfile.mkdtemp(dir=folder), *arguments[1:])


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        if not sys.argv[1:] or "moves" in sys.argv:
            print("1 GB of state, 2ps2w -> 3ps2w -> 1ps2w -> 2ps2w:", _measured(folder, "moves"), flush=True)
        for kind in ("mlp", "rests"):
            if sys.argv[1:] and kind not in sys.argv:
                continue
            pairs = []
            for _ in range(_PAIRS):
                began = _measured(folder, "joins", kind, "2ps2w")
                joined = _measured(folder, "joins", kind, "2ps1w", "2")
                pairs.append((began, joined))
                print(f"{kind}: {joined['rate'] / began['rate']:.2f}", began, joined, flush=True)
            ratios = median(joined["rate"] / began["rate"] for began, joined in pairs)
            others = {key: round(median(joined[key] for _, joined in pairs), 3) for key in pairs[0][1]}
            print(f"{kind}: 2ps1w -> 2ps2w, of the rate of a run that began as 2ps2w: {ratios:.2f}", others, flush=True)


if __name__ == "__main__":
    run(MEASUREMENTS, main)
