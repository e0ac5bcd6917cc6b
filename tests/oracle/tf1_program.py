"""Strict synchronous training as a TF1 program writes it: what kdist's `sync_replicas` and hooks are compared with.

A two-layer perceptron is trained by `tf.compat.v1`'s own classes: `SyncReplicasOptimizer` over one parameter server and
`num_workers` workers, each in a thread of this process with a graph and a server of its own, or, with `local`, the
wrapped optimizer alone in one plain session. `run_tf1` runs it in a process of its own, because TF1's threads and
servers do not end cleanly; by hand it is `python tests/oracle/tf1_program.py spec.json out_dir`.

The spec:
    arrays          npz file with w1 [d, h], b1 [h], w2 [h, c], b2 [c], x [n, d] (float32) and y [n] (int64)
    optimizer       a key of `_optimizer`
    learning_rate   with `decay` (optional: the other arguments of `exponential_decay`) where the decay begins
    num_workers, batch_size (of each worker), last_step, save_steps, summary_steps
    local           true: no servers and no SyncReplicasOptimizer
"""

from __future__ import annotations

import functools
import json
import logging
import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np

PARAMETERS = ("w1", "b1", "w2", "b2")


def run_tf1(spec: dict[str, Any], out_dir: Path) -> dict[str, Any]:
    """Runs the program and returns its result.json, with the trained arrays as `parameters`."""
    out_dir.mkdir(parents=True, exist_ok=True)
    spec_file = out_dir / "spec.json"
    spec_file.write_text(json.dumps(spec, default=str))
    command = [sys.executable, str(Path(__file__).resolve()), str(spec_file), str(out_dir)]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, timeout=120, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the TF1 program ended with status {done.returncode}:\n{done.stderr}")
    with np.load(out_dir / "result.npz") as trained:
        parameters = dict(trained)
    return {**json.loads((out_dir / "result.json").read_text()), "parameters": parameters}


def _optimizer(name: str, learning_rate: Any) -> Any:
    from tensorflow.compat.v1 import train

    makers = {
        "sgd": train.GradientDescentOptimizer,
        "momentum": functools.partial(train.MomentumOptimizer, momentum=0.9),
        "adagrad": train.AdagradOptimizer,
        "adam": train.AdamOptimizer,
        "ftrl": train.FtrlOptimizer,
        "rmsprop": train.RMSPropOptimizer,
    }
    return makers[name](learning_rate)


def _start_servers(num_workers: int) -> tuple[Any, list[Any]]:
    """The cluster and its servers, the parameter server first."""
    import tensorflow as tf

    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(1 + num_workers)]
    addresses = [f"127.0.0.1:{s.getsockname()[1]}" for s in sockets]
    for s in sockets:
        s.close()
    cluster = tf.train.ClusterSpec({"ps": addresses[:1], "worker": addresses[1:]})
    tasks = [("ps", 0), *(("worker", w) for w in range(num_workers))]
    return cluster, [tf.distribute.Server(cluster, job_name=job, task_index=index) for job, index in tasks]


class _Program:
    def __init__(self, spec: dict[str, Any], out_dir: Path) -> None:
        self.spec = spec
        self.out_dir = out_dir
        self.local = bool(spec.get("local"))
        self.num_workers = int(spec["num_workers"])
        if self.local and self.num_workers != 1:
            raise ValueError(f"a local program has one worker, not {self.num_workers}")
        with np.load(spec["arrays"]) as arrays:
            self.arrays = dict(arrays)
        self.chief_ready = threading.Event()
        self.final: dict[str, np.ndarray] = {}

    def run(self) -> None:
        cluster, servers = (None, [None, None]) if self.local else _start_servers(self.num_workers)
        pool = ThreadPoolExecutor(self.num_workers)
        workers = [pool.submit(self._work, w, cluster, server) for w, server in enumerate(servers[1:])]
        # A worker that fails leaves the others waiting for tokens: do not wait for those.
        done, _ = wait(workers, return_when=FIRST_EXCEPTION)
        for worker in done:
            worker.result()
        iterations = [worker.result() for worker in workers]
        if len(set(iterations)) != 1:
            raise RuntimeError(f"not strict: the workers ran {iterations} iterations")
        self._write(iterations)

    def _work(self, w: int, cluster: Any, server: Any) -> int:
        """Trains as worker `w` until the last step; returns how many iterations that took."""
        import tensorflow as tf
        from tensorflow.python.training.training_util import _get_or_create_global_step_read

        if w:
            # A worker that finds the variables uninitialized sleeps for 30 s before it looks again.
            self.chief_ready.wait()
        v1, spec, task = tf.compat.v1, self.spec, f"/job:worker/task:{w}"
        setter = None if self.local else v1.train.replica_device_setter(cluster=cluster, worker_device=task)
        with tf.Graph().as_default(), v1.device(setter):
            global_step = v1.train.get_or_create_global_step()
            x = v1.placeholder(tf.float32, [None, self.arrays["x"].shape[1]])
            y = v1.placeholder(tf.int64, [None])
            w1, b1, w2, b2 = variables = [v1.get_variable(p, initializer=self.arrays[p]) for p in PARAMETERS]
            # SummarySaverHook fetches this in the run that updates the step and takes it for the step before. Unless it
            # is read first it is now and then the step after, and the next summary is written too early.
            with tf.control_dependencies([_get_or_create_global_step_read()]):
                features = tf.identity(x)
            logits = tf.tanh(features @ w1 + b1) @ w2 + b2
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))
            learning_rate = spec["learning_rate"]
            if spec.get("decay"):
                learning_rate = v1.train.exponential_decay(learning_rate, global_step, **spec["decay"])
            optimizer = _optimizer(spec["optimizer"], learning_rate)
            hooks = [v1.train.StopAtStepHook(last_step=spec["last_step"])]
            if not self.local:
                optimizer = v1.train.SyncReplicasOptimizer(
                    optimizer, replicas_to_aggregate=self.num_workers, total_num_replicas=self.num_workers
                )
                hooks.append(optimizer.make_session_run_hook(is_chief=w == 0, num_tokens=0))
            train_op = optimizer.minimize(loss, global_step=global_step)

            scaffold = v1.train.Scaffold(saver=v1.train.Saver(max_to_keep=1000))
            summary = v1.summary.scalar("loss", loss)
            final = v1.train.FinalOpsHook({"global_step": global_step, **dict(zip(PARAMETERS, variables))})
            chief_hooks = [
                v1.train.CheckpointSaverHook(
                    str(self.out_dir / "checkpoints"),
                    save_steps=spec["save_steps"],
                    scaffold=scaffold,
                    # TensorFlow 2.20 cannot write it with protobuf 7.
                    save_graph_def=False,
                ),
                v1.train.SummarySaverHook(
                    save_steps=spec["summary_steps"], output_dir=str(self.out_dir / "tb"), summary_op=summary
                ),
                final,
            ]
            iterations = 0
            with v1.train.MonitoredTrainingSession(
                master="" if self.local else server.target,
                is_chief=w == 0,
                scaffold=scaffold,
                hooks=hooks,
                chief_only_hooks=chief_hooks,
                config=None if self.local else v1.ConfigProto(device_filters=["/job:ps", task]),
                # The chief's queue runner never leaves its wait for the gradients of another step.
                stop_grace_period_secs=1,
            ) as session:
                if w == 0:
                    self.chief_ready.set()
                while not session.should_stop():
                    batch = self._batch(w, iterations)
                    session.run(train_op, {x: self.arrays["x"][batch], y: self.arrays["y"][batch]})
                    iterations += 1
        if w == 0:
            self.final = final.final_ops_values
        return iterations

    def _batch(self, w: int, k: int) -> np.ndarray:
        """The batch that worker `w` reads at iteration `k`: of every N-th example from `w` on, the k-th batch."""
        size = self.spec["batch_size"]
        return (w + self.num_workers * np.arange(k * size, (k + 1) * size)) % len(self.arrays["x"])

    def _write(self, iterations: list[int]) -> None:
        import tensorflow as tf

        checkpoints = (self.out_dir / "checkpoints").glob("model.ckpt-*.index")
        events = (self.out_dir / "tb").glob("events.out.tfevents.*")
        result = {
            "global_step": int(self.final.pop("global_step")),
            "num_updates": sum(iterations) // self.num_workers,
            "iterations": iterations,
            "checkpoint_steps": sorted(int(file.stem.rpartition("-")[2]) for file in checkpoints),
            "summary_steps": [
                event.step
                for file in events
                for event in tf.compat.v1.train.summary_iterator(str(file))
                if any(value.tag == "loss" for value in event.summary.value)
            ],
        }
        np.savez(self.out_dir / "result.npz", **self.final)
        (self.out_dir / "result.json").write_text(json.dumps(result, indent=2))


def main(spec_file: str, out_dir: str) -> None:
    status = 1
    try:
        _Program(json.loads(Path(spec_file).read_text()), Path(out_dir)).run()
        status = 0
    except BaseException:
        logging.exception("the TF1 program failed")
    # Servers cannot be stopped, and a worker that waits for a token cannot be woken.
    os._exit(status)


if __name__ == "__main__":
    main(*sys.argv[1:])
