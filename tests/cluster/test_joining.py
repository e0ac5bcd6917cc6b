"""Programs in Python that a launcher starts once for each task of a cluster."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import environment, free_addresses

pytestmark = pytest.mark.cluster

_EVERY_TASK = """
import json, sys
import kdist
import keras, numpy as np

def build():
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model

x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
y = x.sum(1)
way, folder = sys.argv[1:]
trainer = kdist.Trainer(build, cluster="tf_config", run_dir=f"{folder}/run")
found = {"is_chief": trainer.is_chief, "runs": 0}
# A program that trains in stages.
trainer.fit(x, y, batch_size=8, steps=4, verbose=0)
if way == "fit":
    trainer.fit(x, y, batch_size=8, steps=8, verbose=0)
else:
    with trainer.session(x, y, batch_size=8, steps=8, verbose=0) as session:
        while not session.should_stop():
            session.run()
            found["runs"] += 1

found["steps"] = trainer.result.global_step

def tried(name, use):
    try:
        use()
    except kdist.ConfigError as error:
        found[name] = str(error)
    else:
        found[name] = "done"

tried("save", lambda: trainer.model.save(f"{folder}/mine.keras"))
tried("evaluate", lambda: trainer.evaluate(x, y))
tried("predict", lambda: trainer.predict(x))
tried("summary", lambda: trainer.model.summary(print_fn=lambda *a, **k: None))
if way == "session":
    tried("global_step", lambda: session.global_step)
print(json.dumps(found))
"""


def _in_every_task(way: str, folder: Path, jobs: dict[str, int]) -> dict[str, dict[str, Any]]:
    """The lines that the program printed in each task of a cluster."""
    cluster = {job: free_addresses(number) for job, number in jobs.items()}
    processes = {}
    for job, addresses in cluster.items():
        for index in range(len(addresses)):
            config = json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})
            processes[f"{job}:{index}"] = subprocess.Popen(
                [sys.executable, "-c", _EVERY_TASK, way, str(folder)],
                env={**environment(), "TF_CONFIG": config},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
    said = {}
    try:
        for task, process in processes.items():
            out, err = process.communicate(timeout=240)
            assert process.returncode == 0, err
            assert "retracing" not in err
            said[task] = json.loads(out.splitlines()[-1])
    finally:
        for process in processes.values():
            process.kill()
    return said


@pytest.mark.long
def test_a_session_takes_the_role_of_its_task_and_only_the_chief_has_a_model_afterwards(tmp_path: Path) -> None:
    said = _in_every_task("session", tmp_path, {"ps": 1, "worker": 2})
    chief = said.pop("worker:0")
    assert chief.pop("runs") > 0
    assert chief == {
        "is_chief": True,
        "steps": 8,
        **dict.fromkeys(("save", "evaluate", "predict", "summary", "global_step"), "done"),
    }
    for task, found in said.items():
        assert (found["is_chief"], found["runs"], found["summary"]) == (False, 0, "done")
        for name in ("save", "evaluate", "predict"):
            assert found[name] == (
                f"{task} is not the chief, and its model does not have the trained values: the chief alone saves, "
                "evaluates and predicts; write `if trainer.is_chief:` before it"
            )
        assert found["global_step"].startswith(f"session.global_step: {task} is not the chief")


@pytest.mark.long
def test_a_worker_of_an_all_reduce_has_the_trained_values_and_writes_nothing(tmp_path: Path) -> None:
    said = _in_every_task("fit", tmp_path, {"worker": 2})
    assert [(found["is_chief"], found["steps"]) for found in said.values()] == [(True, 8), (False, 0)]
    assert [found["save"] for found in said.values()] == [
        "done",
        "worker:1 is not the chief, which alone writes; write `if trainer.is_chief:` before it",
    ]
    assert {found[name] for found in said.values() for name in ("evaluate", "predict", "summary")} == {"done"}
