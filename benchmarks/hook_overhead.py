"""The cost of the default hooks: one run that trains with them and without them by turns.

Two contenders that race each other differ by more than hooks cost.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from benchmarks.preparation import Preparation
from benchmarks.workloads import WORKLOADS, compiled_keras_model, dataset

_WARM_UP_SECS = 180.0
_TURN_SECS = 1.5
_ROUNDS = 16
_TIMEOUT_SECS = 400


def measure(*, quick: bool) -> dict[str, float]:
    """Medians of the rates over the turns, in steps per second, and their `ratio`."""
    command = [sys.executable, "-m", "benchmarks.hook_overhead", str(_ROUNDS // 3 if quick else _ROUNDS)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_TIMEOUT_SECS)
    outcome: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    print(f"  {outcome}", flush=True)
    return outcome


def main(rounds: int) -> None:
    import keras

    import kdist

    workload = WORKLOADS["mlp"]
    rates: dict[bool, list[float]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as folder:
        trainer = kdist.Trainer(lambda: compiled_keras_model(workload, keras, "sgd"), "2ps2w", run_dir=folder)
        with trainer.session(lambda _: dataset(workload), verbose=0) as session:
            _prepare(session)
            every = list(session.hooks)
            for number in range(rounds):
                for with_hooks in (True, False) if number % 2 else (False, True):
                    session.hooks[:] = every if with_hooks else []
                    # What was begun before is not of this turn.
                    session.run()
                    rates[with_hooks].append(_train(session, _TURN_SECS))
            session.hooks[:] = every
    on, off = (statistics.median(rates[with_hooks]) for with_hooks in (True, False))
    print(json.dumps({"ratio": on / off, "with": on, "without": off}))


def _prepare(session: Any) -> None:
    """Trains until calls have their length."""
    preparation, started = Preparation(), time.monotonic()
    while not preparation.is_over_after(session.run()):
        if time.monotonic() > started + _WARM_UP_SECS:
            raise SystemExit(f"calls were still prepared after {_WARM_UP_SECS:g} s")


def _train(session: Any, secs: float) -> float:
    """Trains for so long; steps per second."""
    step, started = session.global_step, time.monotonic()
    while time.monotonic() < started + secs:
        session.run()
    return (session.global_step - step) / (time.monotonic() - started)


if __name__ == "__main__":
    main(int(sys.argv[1]))
