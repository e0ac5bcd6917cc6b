"""Time to accuracy: that no speed is bought with wrong numbers.

MNIST by the convolutional network of the `mnist` recipe, over several seeds, each contender in a process of its own.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

_GOAL = 0.97
_BATCHES = 550
_TIMEOUT_SECS = 300
#: For each contender the arguments of its `Trainer`.
_CONTENDERS: dict[str, dict[str, Any]] = {
    "one process": {},
    "asynchronous": {"cluster": "2ps2w"},
    "synchronous": {"cluster": "2ps2w", "strategy": "sync_replicas"},
}
#: Other algorithms, which have to come to the same all the same.
_OPTIONS: dict[str, dict[str, Any]] = {
    "asynchronous, 4 local steps": {"cluster": "2ps2w", "local_steps": 4},
    "asynchronous, bfloat16 on the wire": {"cluster": "2ps2w", "wire_dtype": "bfloat16"},
}


def measure(*, quick: bool) -> dict[str, dict[str, Any]]:
    """For each contender: seconds of training until the goal and the final validation accuracy, medians over seeds."""
    runs_of = [(name, arguments, 1 if quick else 5) for name, arguments in _CONTENDERS.items()]
    if not quick:
        runs_of += [(name, arguments, 1) for name, arguments in _OPTIONS.items()]
    outcome = {}
    for name, arguments, num_seeds in runs_of:
        command = [sys.executable, "-m", "benchmarks.accuracy", json.dumps(arguments), str(num_seeds)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_TIMEOUT_SECS)
        runs = json.loads(done.stdout.splitlines()[-1])
        reached = [run["secs"] for run in runs if run["secs"] is not None]
        finals = [run["final"] for run in runs]
        outcome[name] = {
            "seeds": num_seeds,
            "reached": len(reached),
            "secs": statistics.median(reached) if reached else None,
            "final": statistics.median(finals),
            "lowest": min(finals),
            "highest": max(finals),
        }
        print(f"  {name}: {outcome[name]}", flush=True)
    return outcome


def main(arguments: dict[str, Any], num_seeds: int) -> None:
    """The runs of one contender."""
    import keras
    from kdist.recipes.mnist import build_cnn, load_data

    import kdist

    class Watch(kdist.hooks.Hook):
        """Notes when the goal was reached."""

        secs: float | None = None
        started = 0.0

        def after_create_session(self, session: Any) -> None:
            self.started = time.monotonic()

        def after_validation(self, session: Any, logs: Any) -> None:
            if self.secs is None and logs["accuracy"] >= _GOAL:
                self.secs = time.monotonic() - self.started

    data, runs = load_data(), []
    # The same number of examples, however many batches make an update.
    batches_per_step = 2 if arguments.get("strategy") == "sync_replicas" else arguments.get("local_steps", 1)
    steps, every = _BATCHES // batches_per_step, 100 // batches_per_step
    for seed in range(num_seeds):
        keras.utils.set_random_seed(seed)
        watch = Watch()
        with tempfile.TemporaryDirectory() as folder:
            trainer = kdist.Trainer(build_cnn, run_dir=folder, hooks=[watch], seed=seed, **arguments)
            trainer.fit(**data, batch_size=64, steps=steps, validation_every_steps=every, verbose=0)
        runs.append({"secs": watch.secs, "final": trainer.result.metrics["validation"]["accuracy"]})
    print(json.dumps(runs))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), int(sys.argv[2]))
