"""Time to accuracy: that no speed is bought with wrong numbers.

MNIST by the convolutional network of the `mnist` recipe, asynchronous, synchronous, and in one process.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from typing import Any

_GOAL = 0.97
_STEPS = 1200
_CONTENDERS = {
    "kdist, asynchronous": ("2ps2w", "parameter_server"),
    "kdist, synchronous": ("2ps2w", "sync_replicas"),
    "kdist, one process": ("local", "single"),
}


def measure(num_seeds: int) -> dict[str, dict[str, Any]]:
    """For each contender: seconds of training until the goal and the final validation accuracy, medians over seeds."""
    outcome = {}
    for name, (cluster, strategy) in _CONTENDERS.items():
        runs = []
        for seed in range(num_seeds):
            arguments = json.dumps([cluster, strategy, seed])
            command = [sys.executable, "-m", "benchmarks.accuracy", arguments]
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
            runs.append(json.loads(done.stdout.splitlines()[-1]))
        reached = [run["secs"] for run in runs if run["secs"] is not None]
        finals = [run["final"] for run in runs]
        outcome[name] = {
            "reached": len(reached),
            "secs": statistics.median(reached) if reached else None,
            "final": statistics.median(finals),
            "lowest": min(finals),
            "highest": max(finals),
        }
        print(f"  accuracy, {name}: {outcome[name]}", flush=True)
    return outcome


def main() -> None:
    """One run, in a process of its own."""
    cluster, strategy, seed = json.loads(sys.argv[1])
    import tempfile
    import time

    import keras
    from kdist.recipes.mnist import build_cnn, load_data

    import kdist

    keras.utils.set_random_seed(seed)

    class Watch(kdist.hooks.Hook):
        """Notes when the goal was reached."""

        secs: float | None = None
        started = 0.0

        def after_create_session(self, session: Any) -> None:
            self.started = time.monotonic()

        def after_validation(self, session: Any, logs: Any) -> None:
            if self.secs is None and logs["accuracy"] >= _GOAL:
                self.secs = time.monotonic() - self.started

        def idle_in(self, step: int) -> int | None:
            return None

    data = load_data()
    watch = Watch()
    with tempfile.TemporaryDirectory() as folder:
        trainer = kdist.Trainer(build_cnn, cluster, strategy, run_dir=folder, hooks=[watch], seed=seed)
        # The same number of examples, however many make an update.
        steps = _STEPS // 2 if strategy == "sync_replicas" else _STEPS
        trainer.fit(**data, batch_size=64, steps=steps, validation_every_steps=100, verbose=0)
    print(json.dumps({"secs": watch.secs, "final": trainer.result.metrics["validation"]["accuracy"]}))


if __name__ == "__main__":
    main()
