"""Variables whose number of rows changes, and locks of rows."""

import math
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from helpers import wait_until

from kdist.parameters.tables.rows import RowLock, resizable_variable, resize, resize_in_use, set_rows


@pytest.mark.parametrize("is_in_use", [False, True])
@pytest.mark.parametrize(
    ("dtype", "row_shape"), [("int32", ()), ("int64", ()), ("float32", (16,)), ("bfloat16", (3,)), ("float64", (3, 2))]
)
def test_rows_are_kept_and_new_ones_take_no_memory_before_they_are_written(
    dtype: str, row_shape: tuple[int, ...], is_in_use: bool
) -> None:
    # Of 32 MB.
    count = (32 << 20) // (tf.as_dtype(dtype).size * math.prod(row_shape))
    variable = resizable_variable(row_shape, tf.as_dtype(dtype), count)
    size = tf.TensorSpec([], "int64")
    rows, of_rows = tf.TensorSpec([None], "int64"), tf.TensorSpec([None, *row_shape], dtype)

    @tf.function(autograph=False, input_signature=[rows, of_rows])
    def write(rows: tf.Tensor, values: tf.Tensor) -> None:
        set_rows(variable, rows, values)

    @tf.function(autograph=False, input_signature=[size, size])
    def move(size: tf.Tensor, capacity: tf.Tensor) -> None:
        if is_in_use:
            resize_in_use(variable, size, capacity, rows_at_once=count // 100)
        else:
            resize([variable], size, capacity)

    values = tf.cast(np.random.default_rng(1).integers(0, 100, (count + 1000, *row_shape), np.int8), dtype)
    write(tf.range(count, dtype="int64"), values[:count])
    before = most_resident_bytes(anew=True)

    move(tf.constant(count, "int64"), tf.constant(9 * count, "int64"))
    write(tf.range(count, count + 1000, dtype="int64"), values[count:])

    # 32 MB, and the numbers of the rows; all of it would take 288 MB, and another copy of the rows 32.
    assert most_resident_bytes() - before < (32 << 20) + 4 * count + (14 << 20)
    np.testing.assert_array_equal(variable.sparse_read(tf.range(count + 1000)), values)


def most_resident_bytes(*, anew: bool = False) -> int:
    """The most memory that this process has ever had, or has from now on; see proc(5). 0 on other systems."""
    if sys.platform != "linux":
        return 0
    if anew:
        # Of this process, so that no other test hides what this one needs.
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) << 10


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
