"""Locks of rows."""

from concurrent.futures import ThreadPoolExecutor

import tensorflow as tf
from helpers import wait_until

from kdist.parameters.tables.rows import RowLock


def test_a_lock_is_released_whatever_another_one_of_the_same_call_waits_for() -> None:
    """They are on different servers, and a call that waits for both at the ends of two queues would wait for ever."""
    held_long, other = RowLock(is_shared=True), RowLock(is_shared=True)
    arriving, row = tf.queue.FIFOQueue(1, [tf.int32]), tf.Variable(0)

    @tf.function(autograph=False)
    def update_both() -> None:
        with held_long.held([]) as updates:
            updates.append(arriving.dequeue().op)
        with other.held([]) as updates:
            updates.append(row.assign_add(1).op)

    @tf.function(autograph=False)
    def update_one() -> None:
        with other.held([]) as updates:
            updates.append(row.assign_add(1).op)

    functions = [function.get_concrete_function() for function in (update_both, update_one)]
    with ThreadPoolExecutor(2) as threads:
        try:
            both = threads.submit(functions[0])
            wait_until(lambda: int(row) == 1, 10, "the second update of the first call")
            threads.submit(functions[1]).result(10)
            assert int(row) == 2
            assert not both.done()
        finally:
            arriving.enqueue(0)
        both.result(10)
