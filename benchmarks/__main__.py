"""Runs the races and writes what came out: `python -m benchmarks`, or `make bench`.

Contenders of one race are started one after another and stopped (SIGSTOP) when they are warm. Then they train in turns,
in an order that is drawn anew in each round, so that whatever else the machine does meets all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Iterable
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks import accuracy, hook_overhead, races, report
from benchmarks.contender import Contender, Entry, Turn
from benchmarks.workloads import WORKLOADS

# Where steps are slow a turn has to be long to hold some.
_LONGER_TURNS = {"wide": 2.0, "sleep": 6.0, "criteo": 1.5, "criteo_sleep": 2.5}
_PACKAGES = ("tensorflow", "keras", "tf_keras", "torch", "numpy")


def race(entries: Iterable[Entry], *, rounds: int, turn_secs: float) -> dict[str, dict[str, Any]]:
    """Lets `entries` race each other; what came out, by key."""
    outcome: dict[str, dict[str, Any]] = {}
    turns: dict[str, list[Turn]] = {}
    with ExitStack() as stack:
        contenders: list[Contender] = []
        for entry in entries:
            try:
                contender = Contender(entry).start()
                stack.callback(contender.stop)
                print(f"  started {entry.key} in {contender.start_secs:.1f} s", flush=True)
                turns[entry.key] = []
                if entry.can_rest:
                    contenders.append(contender)
                    continue
                outcome[entry.key] = summary(contender, [contender.take_turn(turn_secs) for _ in range(rounds)])
                contender.stop()
            except RuntimeError as error:
                print(f"left out: {error}", file=sys.stderr, flush=True)
        for _ in range(rounds):
            for contender in random.sample(contenders, len(contenders)):
                try:
                    turns[contender.entry.key].append(contender.take_turn(turn_secs))
                except RuntimeError as error:
                    # The others have not raced in vain.
                    print(f"left out: {error}", file=sys.stderr, flush=True)
                    contenders.remove(contender)
        for contender in contenders:
            outcome[contender.entry.key] = summary(contender, turns[contender.entry.key])
    for key, row in outcome.items():
        print(f"  {key}: {row['steps_per_sec']:.1f} steps/s", flush=True)
    return outcome


def summary(contender: Contender, turns: list[Turn]) -> dict[str, Any]:
    """The figures of one contender."""
    entry, task = contender.entry, contender.entry.task
    workload = task.what
    rates = [turn.steps_per_sec for turn in turns]
    median = statistics.median(rates)
    batches = task.num_workers if task.sync else task.options.get("local_steps", 1)
    exchanges = task.num_workers if task.sync else 1
    wire = [turn.bytes_per_step for turn in turns if turn.bytes_per_step is not None]
    return {
        "workload": task.workload,
        "optimizer": task.optimizer,
        "sync": task.sync,
        "name": entry.name,
        "steps_per_sec": median,
        "lowest": min(rates),
        "highest": max(rates),
        "turns": rates,
        "examples_per_sec": median * workload.batch_size * batches,
        "ids_per_sec": median * workload.batch_size * batches * workload.ids_per_example,
        "cpu_ms_per_batch": 1000 * statistics.median(turn.cpu_secs_per_step for turn in turns) / batches,
        "wire_ratio": statistics.median(wire) / (8 * workload.num_parameters() * exchanges) if wire else None,
        "memory_mib": contender.memory_mib(),
        "start_secs": contender.start_secs,
        "steps_at_once": contender.said("best"),
        "keeps_to_cores": contender.keeps_to_cores,
        "save_secs": None if (secs := contender.said("save_secs")) is None else float(secs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one model, in 5 to 8 minutes")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each contender")
    parser.add_argument("--turn-secs", type=float, default=1.0, help="seconds of a turn")
    parser.add_argument(
        "--only", nargs="*", help="workloads, or criteo, scaling, slow_worker, hooks, accuracy, steps_per_call"
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for results")
    options = parser.parse_args()
    started = time.monotonic()
    record: dict[str, Any] = {
        "machine": {"processor": platform.machine(), "cores": os.cpu_count(), "system": platform.platform()},
        "versions": {"python": platform.python_version(), **installed_versions()},
        "command": "python -m benchmarks " + " ".join(sys.argv[1:]),
        "results": {},
        "hooks": {},
        "accuracy": {},
    }

    def begin(name: str) -> None:
        print(f"{name} ({time.monotonic() - started:.0f} s)", flush=True)

    def write() -> None:
        """Writes what has been measured so far: an hour of races is not lost with the last of them."""
        record["seconds"] = time.monotonic() - started
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "results.json").write_text(json.dumps(record, indent=1))
        report.draw(record["results"], options.out / "results.png")
        (options.out / "results.md").write_text(report.table(record))

    for name, entries in chosen_races(options.quick, options.only).items():
        begin(name)
        turn_secs = options.turn_secs * _LONGER_TURNS.get(entries[0].task.workload, 1.0)
        if name.startswith("steps_per_call"):
            turn_secs *= 4
        record["results"] |= race(entries, rounds=options.rounds, turn_secs=turn_secs)
        write()
    if not options.only or "hooks" in options.only:
        begin("hooks")
        record["hooks"] = hook_overhead.measure(quick=options.quick)
        write()
    if not options.only or "accuracy" in options.only:
        begin("accuracy")
        record["accuracy"] = accuracy.measure(quick=options.quick)
        write()
    print(report.table(record))


def chosen_races(quick: bool, only: list[str] | None) -> dict[str, list[Entry]]:
    """The races to run, by name."""
    trained = [name for name in WORKLOADS if name not in ("sleep", "embedding_10k", "criteo", "criteo_sleep")]
    every = {
        **{f"{name}, asynchronous": races.asynchronous(name) for name in trained},
        **{f"{name}, synchronous": races.synchronous(name) for name in ("mlp", "deep", "cnn")},
        "scaling": races.scaling("sleep", "sgd"),
        "slow_worker": races.slow_worker(),
        "criteo": races.criteo(),
        "criteo scaling": races.scaling("criteo_sleep", "adagrad"),
    }
    if quick:
        return {
            name: [e for e in entries if e.module != "multi_worker_mirrored" and not e.name.startswith("kdist, ")]
            for name, entries in every.items()
            if name.startswith("mlp")
        }
    if only is None:
        return every
    every |= {f"steps_per_call, {name}": races.steps_per_call(name) for name in trained}
    return {name: entries for name, entries in every.items() if any(name.startswith(begin) for begin in only)}


def installed_versions() -> dict[str, str]:
    """Versions of what raced."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    main()
