"""Whether tasks answer: each is asked to do next to nothing, all at the same time."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Collection
from contextlib import suppress

import tensorflow as tf
from tensorflow.python.eager import context

from kdist.cluster.lanes import QuietExecutor
from kdist.cluster.spec import Task


def ask(tasks: Collection[Task], timeout: float) -> tuple[set[Task], set[Task]]:
    """Asks connected tasks for a sign of life.

    Args:
        timeout: seconds to wait for answers; threads that wait longer are left behind.

    Returns:
        Those that say nothing in time, and those that are not there or are other processes than they were.
    """
    answers: queue.SimpleQueue[tuple[Task, bool]] = queue.SimpleQueue()

    def wait_for(task: Task) -> None:
        try:
            with context.executor_scope(QuietExecutor()), tf.device(task.device):
                tf.identity(0).numpy()
            answers.put((task, True))
        except tf.errors.OpError:
            answers.put((task, False))

    for task in tasks:
        threading.Thread(target=wait_for, args=[task], daemon=True).start()
    deadline = time.monotonic() + timeout
    answered: dict[Task, bool] = {}
    with suppress(queue.Empty):
        while len(answered) < len(tasks):
            task, is_well = answers.get(timeout=max(0.0, deadline - time.monotonic()))
            answered[task] = is_well
    return set(tasks) - set(answered), {task for task, is_well in answered.items() if not is_well}
