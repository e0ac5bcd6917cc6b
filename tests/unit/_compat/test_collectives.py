"""Each private name of TensorFlow's collectives means what kdist takes it for; tests of clusters join processes."""

import gc
import itertools
import subprocess
import sys
import weakref
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from helpers import environment

from kdist._compat import collectives


def test_an_all_reduce_is_that_of_tensorflow_and_keeps_no_graph() -> None:
    distribution = tf.distribute.MirroredStrategy(["CPU:0"])

    def traced(reduce: Any) -> Any:
        def step(x: tf.Tensor) -> Any:
            def replica() -> Any:
                # TensorFlow reduces a value on its own device.
                own = tf.identity(x)
                rows = tf.IndexedSlices(own, tf.identity([0, 2]), tf.constant([3]))
                how, replica_context = tf.distribute.ReduceOp.SUM, tf.distribute.get_replica_context()
                dense = reduce(replica_context, how, [own, 2 * own])
                return dense, tf.convert_to_tensor(reduce(replica_context, how, rows))

            return distribution.run(replica)

        return tf.function(step, autograph=False).get_concrete_function(tf.TensorSpec([2], tf.float32))

    x = tf.constant([1.0, 2.0])
    own, of_tensorflow = (
        tf.nest.map_structure(lambda value: value.numpy(), traced(reduce)(x))
        for reduce in (collectives.all_reduce, tf.distribute.ReplicaContext.all_reduce)
    )
    tf.nest.map_structure(np.testing.assert_array_equal, own, of_tensorflow)
    graph = weakref.ref(traced(collectives.all_reduce).graph)
    gc.collect()
    assert graph() is None


def test_two_mirrored_strategies_of_one_process_reduce_different_shapes() -> None:
    for size in (2, 3):
        strategy = collectives.NumberedMirroredStrategy(["CPU:0"])
        summed = strategy.run(
            lambda values: tf.distribute.get_replica_context().all_reduce("sum", values), args=[tf.ones([size])]
        )
        assert np.allclose(summed, np.ones(size))


COLLECTIVES = """
import tensorflow as tf
from kdist._compat.collectives import NumberedMirroredStrategy, number_collectives_when_traced
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
number_collectives_when_traced()
number_collectives_when_traced()
strategy = NumberedMirroredStrategy(["CPU:0", "CPU:1"])

def summed(values):
    reduced = strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("sum", tf.identity(values)))
    return strategy.experimental_local_results(reduced)[0]

for size in (3, None):
    function = tf.function(summed, autograph=False).get_concrete_function(tf.TensorSpec([size]))
    results = [function(tf.ones([length])).numpy().tolist() for length in ([3, 3] if size else [3, 4])]
    print(len(function.graph.deferred_external_captures), results)
"""


def test_a_collective_gets_a_number_once_if_its_shape_is_static_and_otherwise_in_every_call() -> None:
    done = subprocess.run(
        [sys.executable, "-c", COLLECTIVES], capture_output=True, text=True, timeout=100, check=False, env=environment()
    )
    once, each = done.stdout.splitlines() or pytest.fail(done.stderr[-2000:])
    assert once == "0 [[2.0, 2.0, 2.0], [2.0, 2.0, 2.0]]"
    assert int(each.split()[0]) > 0
    assert each.endswith("[[2.0, 2.0, 2.0], [2.0, 2.0, 2.0, 2.0]]")


ROWS = """
import tensorflow as tf
from kdist._compat.collectives import NumberedMirroredStrategy, number_collectives_when_traced
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
number_collectives_when_traced()
strategy = NumberedMirroredStrategy(["CPU:0", "CPU:1"])

def summed(rows, number_less):
    def own():
        context = tf.distribute.get_replica_context()
        last = tf.shape(rows)[0] - tf.where(context.replica_id_in_sync_group == 1, number_less, 0)
        slices = tf.IndexedSlices(tf.identity(rows[:last]), tf.range(last), tf.constant([300, 2]))
        return tf.convert_to_tensor(context.all_reduce("sum", slices))
    return strategy.experimental_local_results(strategy.run(own))

specs = tf.TensorSpec([None, 2]), tf.TensorSpec([], tf.int32)
function = tf.function(summed, autograph=False).get_concrete_function(*specs)
print(len(function.graph.deferred_external_captures))
for number, number_less in [(1, 0), (1, 1), (8, 0), (9, 1), (17, 16), (200, 0), (200, 100), (3, 0)]:
    rows = tf.range(1.0, 1.0 + number)[:, None] * [1.0, 10.0]
    expected = sum(tf.pad(own, [[0, 300 - len(own)], [0, 0]]) for own in (rows, rows[: number - number_less]))
    print(number, *(bool(tf.reduce_all(each == expected)) for each in function(rows, tf.constant(number_less))))
"""


def test_rows_whose_number_varies_are_gathered_under_few_numbers() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ROWS], capture_output=True, text=True, timeout=100, check=False, env=environment()
    )
    numbered_in_every_call, *sums = done.stdout.splitlines() or pytest.fail(done.stderr[-2000:])
    assert numbered_in_every_call == "0"
    assert sums == [f"{number} True True" for number in (1, 1, 8, 9, 17, 200, 200, 3)], done.stderr[-2000:]


def test_sizes_of_gathered_rows_leave_little_room() -> None:
    sizes = collectives._SIZES
    assert sizes == sorted(set(sizes))
    assert sizes[-1] < 2**31
    assert all(larger - smaller <= smaller / 8 for smaller, larger in itertools.pairwise(sizes))


ONE_ROUND = """
import tensorflow as tf
from kdist._compat.collectives import NumberedMirroredStrategy, number_collectives_when_traced, reduce_two_in_one_round
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 3)
number_collectives_when_traced()
reduce_two_in_one_round()
for num_replicas, length, dtype in [
    (2, 5, "float32"), (2, (1 << 18) - 1, "float32"), (2, 1 << 18, "float32"), (2, 1 << 17, "int64"),
    (2, 5, "bfloat16"), (3, 5, "float32"),
]:
    strategy = NumberedMirroredStrategy([f"CPU:{index}" for index in range(num_replicas)])

    def summed():
        def own():
            context = tf.distribute.get_replica_context()
            replica = tf.cast(context.replica_id_in_sync_group, dtype)
            return context.all_reduce("sum", [tf.fill([length], 1 + replica), tf.fill([], 2 * replica)])
        return [strategy.experimental_local_results(each) for each in strategy.run(own)]

    function = tf.function(summed, autograph=False).get_concrete_function()
    kinds = sorted({op.type for op in function.graph.get_operations() if op.type.startswith("Collective")})
    of_long, of_short = function()
    sums = {float(number) for each in of_long for number in each.numpy()[[0, -1]]}
    print(num_replicas, length, dtype, *kinds, sums, {float(each) for each in of_short})
"""


def test_two_workers_exchange_small_tensors_in_one_round() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ONE_ROUND], capture_output=True, text=True, timeout=100, check=False, env=environment()
    )
    assert done.stdout.splitlines() == [
        "2 5 float32 CollectiveGatherV2 {3.0} {2.0}",
        "2 262143 float32 CollectiveGatherV2 {3.0} {2.0}",
        "2 262144 float32 CollectiveReduceV2 {3.0} {2.0}",
        "2 131072 int64 CollectiveReduceV2 {3.0} {2.0}",
        "2 5 bfloat16 CollectiveReduceV2 {3.0} {2.0}",
        "3 5 float32 CollectiveReduceV2 {6.0} {6.0}",
    ], done.stderr[-2000:]
