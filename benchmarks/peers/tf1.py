"""TF1: between-graph replication with MonitoredTrainingSession, asynchronous or with SyncReplicasOptimizer."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.peers.task import Task, run_processes, serve, session_config, this_task, with_addresses
from benchmarks.workloads import (
    NUM_COUNTS,
    Clicks,
    Conv,
    Dense,
    Embedding,
    Flatten,
    Layer,
    SimulatedCompute,
    dataset,
    dot_products,
    log_counts,
    sleep,
)

v1 = tf.compat.v1


def layer_output(x: Any, layer: Layer, name: str, partitioner: Any) -> Any:
    with v1.variable_scope(name):
        match layer:
            case Dense(units, relu, bias):
                x = tf.matmul(x, v1.get_variable("kernel", [x.shape[-1], units]))
                if bias:
                    x = tf.nn.bias_add(x, v1.get_variable("bias", [units], initializer=v1.zeros_initializer()))
                return tf.nn.relu(x) if relu else x
            case Conv(filters):
                x = tf.nn.conv2d(x, v1.get_variable("kernel", [3, 3, x.shape[-1], filters]), 1, "VALID")
                x = tf.nn.bias_add(x, v1.get_variable("bias", [filters], initializer=v1.zeros_initializer()))
                return tf.nn.max_pool2d(tf.nn.relu(x), 2, 2, "VALID")
            case Flatten():
                return tf.reshape(x, [x.shape[0], int(np.prod(x.shape[1:]))])
            case Embedding(rows, units):
                return tf.reduce_mean(tf.nn.embedding_lookup(v1.get_variable("table", [rows, units]), x), 1)
            case Clicks(tables, units):
                vectors = [layer_output(log_counts(x), Dense(units), "counts", None)]
                for i, rows in enumerate(tables):
                    table = v1.get_variable(f"table_{i}", [rows, units], partitioner=partitioner)
                    vectors.append(tf.nn.embedding_lookup(table, x[:, NUM_COUNTS + i]))
                return dot_products(vectors)
            case SimulatedCompute():
                return sleep(x)


def train(task: Task) -> None:
    """One worker."""
    server = tf.distribute.Server(task.jobs, job_name="worker", task_index=task.index, config=session_config())
    device, is_chief = f"/job:worker/task:{task.index}", task.index == 0
    setter = v1.train.replica_device_setter(cluster=tf.train.ClusterSpec(task.jobs), worker_device=device)
    with tf.Graph().as_default(), v1.device(setter):
        x, labels = v1.data.make_one_shot_iterator(dataset(task.what)).get_next()
        x.set_shape([task.what.batch_size, *task.what.input_shape])
        # The tables of `Clicks` are split by rows over the servers, if that is asked for; round-robin otherwise.
        is_split = task.options.get("partitioned_tables", False)
        partitioner = v1.fixed_size_partitioner(task.num_ps) if is_split else None
        for i, layer in enumerate(task.what.layers):
            x = layer_output(x, layer, f"layer_{i}", partitioner)
        loss = v1.losses.sparse_softmax_cross_entropy(labels, x)
        global_step = v1.train.get_or_create_global_step()
        optimizers = {
            "sgd": v1.train.GradientDescentOptimizer,
            "adam": v1.train.AdamOptimizer,
            "adagrad": v1.train.AdagradOptimizer,
        }
        optimizer = optimizers[task.optimizer](1e-3)
        hooks = []
        if task.sync:
            optimizer = v1.train.SyncReplicasOptimizer(optimizer, task.num_workers)
            # The default, -1, lets one worker do all the work.
            hooks.append(optimizer.make_session_run_hook(is_chief, num_tokens=0))
        train_op = optimizer.minimize(loss, global_step=global_step)
        config = session_config()
        config.device_filters[:] = ["/job:ps", device]
        if not is_chief:
            wait_for_chief(task)
        progress, local_step = task.counter(), 0
        with v1.train.MonitoredTrainingSession(server.target, is_chief, hooks=hooks, config=config) as session:
            if is_chief:
                (task.folder / "initialized").touch()
            while not session.should_stop():
                _, step = session.run([train_op, global_step])
                local_step += 1
                # An asynchronous step is one update; of a synchronous one every worker has a part.
                progress.set(int(step) if task.sync else local_step)


def wait_for_chief(task: Task) -> None:
    """Otherwise TF1 looks every 30 s whether the chief is done."""
    while not (task.folder / "initialized").exists():
        time.sleep(0.1)


def main(task: Task) -> None:
    if task.job == "ps":
        serve(task)
    else:
        train(task)


if __name__ == "__main__":
    v1.disable_eager_execution()
    run_processes(main, with_addresses(this_task()))
