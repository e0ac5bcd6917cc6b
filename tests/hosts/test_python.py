"""`Trainer` in a program of one's own, on several hosts: the program's process stays whole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from clusters import CHIEF_PORT, PORT, Hosts
from helpers import environment

pytestmark = [pytest.mark.cluster, pytest.mark.long]

PROGRAM = """
import os, sys
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import keras, numpy as np, tensorflow as tf
import kdist, user_code
from helpers import toy_data
from kdist.config.schema import ClusterConfig

job, index = sys.argv[1].split(":")
cluster = ClusterConfig("hosts", ps=["host1:PORT"], worker=["host0:PORT", "host2:PORT"], job=job, task=int(index),
                        chief_port=CHIEF_PORT)
before = tf.Variable([1.0, 2.0])
other = user_code.build()
weights = other.get_weights()
dataset = tf.data.Dataset.range(5)
variables = dict(os.environ)

class Looks(kdist.hooks.Hook):
    def after_run(self, context, values):
        before.assign_add([1.0, 1.0])
        self.sum = float(tf.reduce_sum(before))

hook = Looks()
x, y = toy_data()
trainer = kdist.Trainer(user_code.build, cluster=cluster, run_dir="D", hooks=[hook])
trainer.fit(x, y, batch_size=8, steps=100, verbose=0)
if sys.argv[1] == "worker:0":
    assert before.numpy()[0] > 1, "it counted during training"
    before.assign([5.0, 6.0])
    assert before.numpy().tolist() == [5.0, 6.0]
    assert all((a == b).all() for a, b in zip(other.get_weights(), weights))
    other.fit(x, y, verbose=0)
    assert list(dataset.as_numpy_iterator()) == [0, 1, 2, 3, 4]
    assert trainer.evaluate(x, y, return_dict=True)["loss"] < 1.0
    assert trainer.result.global_step == 100
    # Another cluster, here, in the same process.
    local = kdist.Trainer(user_code.build, cluster="1ps1w", run_dir="E")
    local.fit(x, y, batch_size=8, steps=50, verbose=0)
    assert local.result.global_step == 50
    assert before.numpy().tolist() == [5.0, 6.0]
assert dict(os.environ) == variables
print("whole", flush=True)
"""


def test_the_process_of_a_program_stays_whole(hosts: Hosts, tmp_path: Path) -> None:
    network = hosts.network(3)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.replace("CHIEF_PORT", str(CHIEF_PORT)).replace("PORT", str(PORT)))
    tasks = {"worker:0": network.hosts[0], "ps:0": network.hosts[1], "worker:1": network.hosts[2]}
    processes = {
        task: subprocess.Popen(
            host.inside(sys.executable, str(program), task, cwd=network.disk),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment(),
            text=True,
        )
        for task, host in tasks.items()
    }
    try:
        said = {task: process.communicate(timeout=200)[0] for task, process in processes.items()}
    finally:
        for process in processes.values():
            process.kill()
            process.wait(10)
    codes = {task: process.returncode for task, process in processes.items()}
    assert codes == dict.fromkeys(tasks, 0), said
    assert all("whole" in text for text in said.values()), said
