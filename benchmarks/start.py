"""The time until the first step is done, by what takes it: `python -m benchmarks.start`, about 2 minutes.

Each run is a command of its own, `kdist +recipe=... cluster=2ps2w`; times are seconds, medians of several runs.
"""

from __future__ import annotations

import importlib
import tempfile
import time
from collections.abc import Callable
from functools import wraps
from statistics import median
from typing import Any

from benchmarks.measured import Figures, measured, run

_RECIPES = ("mnist", "criteo")
_RUNS = 5
#: Modules and functions; what comes before a function is called for the first time.
_BEFORE = (
    ("kdist.trainer", "Trainer.of_config", "TensorFlow, Keras and kdist are imported"),
    ("kdist.cluster.local", "LocalCluster.launch", "the model is built, the data read"),
    ("kdist.strategies.on_servers", "ServersStrategy._connect", "tasks are started; the model is copied for servers"),
    ("kdist.strategies.prepared_training", "PreparedTraining.store", "tasks are connected"),
    ("kdist.strategies.prepared_training", "PreparedTraining.trace_dataset", "servers draw the variables"),
    ("kdist.strategies.on_store", "StoreStrategy.run", "datasets are traced, hooks begin, step 0 is saved"),
)
_CONFIG, _FIRST_STEP = "Python; Hydra's config", "the step is traced, prepared on all tasks, and run"


def phases(recipe: str, run_dir: str) -> Figures:
    """The seconds of each phase of a command."""
    import psutil

    from kdist.cli import main

    experiment: Any = importlib.import_module("kdist.cli.experiment")
    last = psutil.Process().create_time()
    secs: Figures = {}

    def ends(phase: str) -> None:
        nonlocal last
        if phase not in secs:
            secs[phase], last = time.time() - last, time.time()

    train = experiment._train

    def train_in_phases(*args: Any) -> None:
        ends(_CONFIG)
        for module, name, phase in _BEFORE:
            *outer, function = name.split(".")
            owner = importlib.import_module(module)
            for each in outer:
                owner = getattr(owner, each)
            setattr(owner, function, _after(ends, phase, getattr(owner, function)))
        train(*args)

    experiment._train = train_in_phases
    command = ["train", f"+recipe={recipe}", "cluster=2ps2w", "train.steps=1", f"run.dir={run_dir}"]
    if code := main.run(command):
        raise SystemExit(code)
    return secs


def _after(ends: Callable[[str], None], phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, before whose call a phase ends; at the end of the last one, the first step is done."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        ends(phase)
        result = function(*args, **kwargs)
        if phase == _BEFORE[-1][-1]:
            ends(_FIRST_STEP)
        return result

    return call


MEASUREMENTS: dict[str, Callable[..., Figures]] = {"phases": phases}


def main() -> None:
    of_recipes = []
    for recipe in _RECIPES:
        with tempfile.TemporaryDirectory() as folder:
            runs = [measured("benchmarks.start", "phases", recipe, f"{folder}/{i}") for i in range(_RUNS)]
        of_recipes.append({phase: median(found[phase] for found in runs) for phase in runs[0]})
        of_recipes[-1]["all"] = median(sum(found.values()) for found in runs)
    print("|", *_RECIPES, sep=" | ")
    for phase in of_recipes[0]:
        print(f"| {phase} |", " | ".join(f"{secs[phase]:.2f}" for secs in of_recipes), "|")


if __name__ == "__main__":
    run(MEASUREMENTS, main)
