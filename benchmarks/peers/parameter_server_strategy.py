"""What two TF2 contenders share: servers, and `ParameterServerStrategy` connected to them."""

from __future__ import annotations

from typing import Any

from benchmarks.peers.task import Task, limit_threads, serve, start_processes, with_addresses


def main(task: Task, module: str) -> Any:
    """Serves, if `task` says so; otherwise starts the others and returns a connected strategy."""
    if task.job:
        serve(task)
    task = with_addresses(task)
    import tensorflow as tf

    limit_threads()
    processes = start_processes(module, task)
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec(task.jobs), rpc_layer="grpc")
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    if any(process.poll() is not None for process in processes):
        raise SystemExit("a server has ended")
    return strategy


def steps_between_joins(task: Task) -> int:
    """Steps after which the workers wait for each other, as an epoch does: about a second of them."""
    return 20 if task.what.num_parameters() > 10**7 else 100
