"""The common part of two TF2 contenders: servers, and `ParameterServerStrategy` connected to them."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from benchmarks.peers.task import Task, limit_threads, serve, start_processes, with_addresses


def connected(task: Task) -> Any:
    """Starts the servers and workers of `task` and returns a strategy on them."""
    task = with_addresses(task)
    start_processes(serve, task)
    limit_threads()
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec(task.jobs), rpc_layer="grpc")
    return tf.distribute.ParameterServerStrategy(resolver)


def steps_between_joins(task: Task) -> int:
    """Steps after which the workers wait for each other, as an epoch does: a second of them, or two."""
    return {"deep": 50, "embedding_1M": 50, "criteo": 20}.get(task.workload, 100)
