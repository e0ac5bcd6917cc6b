"""Each private name of TensorFlow means what kdist takes it for; tests of clusters try the connections."""

import gc
import subprocess
import sys
import weakref
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from helpers import environment
from tensorflow.python.eager import context

from kdist._compat import tensorflow as compat


def test_a_function_may_call_next_any_number_of_times() -> None:
    def total(iterator: Any) -> Any:
        numbers = []
        for _ in range(40):
            compat.allow_many_next(iterator)
            numbers.append(next(iterator))
        return tf.add_n(numbers)

    dataset = tf.data.Dataset.range(100)
    traced = tf.function(total).get_concrete_function(tf.data.IteratorSpec(dataset.element_spec))
    assert int(traced(iter(dataset))) == sum(range(40))


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
        for reduce in (compat.all_reduce, tf.distribute.ReplicaContext.all_reduce)
    )
    tf.nest.map_structure(np.testing.assert_array_equal, own, of_tensorflow)
    graph = weakref.ref(traced(compat.all_reduce).graph)
    gc.collect()
    assert graph() is None


def test_an_executor_of_its_own_keeps_no_error() -> None:
    executor = compat.QuietExecutor()
    with pytest.raises(tf.errors.InvalidArgumentError), compat.executor_scope(executor):
        tf.debugging.assert_equal(tf.constant(1), 2)
    executor.wait()
    with compat.executor_scope(compat.QuietExecutor()):
        assert int(tf.constant(1) + 1) == 2


def test_the_config_of_this_process_is_what_tensorflow_sends() -> None:
    assert isinstance(compat.session_config(), tf.compat.v1.ConfigProto)


def test_the_c_functions_that_do_not_hold_pythons_lock_are_there() -> None:
    if sys.platform == "linux":
        assert compat._tensorflow_library() is not None


CONNECT = """
import tensorflow as tf
from kdist._compat import tensorflow as compat
before = tf.Variable(1.0)
# Not in effect any more: the context was made without it.
tf.config.optimizer.set_experimental_options({"dependency_optimization": False})
server = tf.distribute.Server({"ps": ["127.0.0.1:0"]}, job_name="ps", task_index=0)
address = server.target.removeprefix("grpc://")
assert compat.server_def() is None
definition = tf.train.ServerDef(job_name="localhost", task_index=0, protocol="grpc",
                                default_session_config=compat.session_config())
ps = definition.cluster.job.add(); ps.name = "ps"; ps.tasks[0] = address
own = definition.cluster.job.add(); own.name = "localhost"; own.tasks[0] = "127.0.0.1:0"
compat.set_server_def(definition)
tf.config.list_logical_devices()
assert len(compat.server_def().cluster.job) == 2
with tf.device("/job:ps/task:0"):
    assert int(tf.constant(1) + 1) == 2
alone = compat.server_def()
del alone.cluster.job[0]
compat.update_server_def(alone)
assert [job.name for job in compat.server_def().cluster.job] == ["localhost"]
# What was there before still is.
before.assign_add(1.0)
assert float(before) == 2.0
print("connected")
import os; os._exit(0)
"""


def test_a_process_connects_and_disconnects_and_keeps_its_variables() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CONNECT], capture_output=True, text=True, timeout=100, check=False, env=environment()
    )
    assert done.stdout == "connected\n", done.stderr[-2000:]


def test_two_mirrored_strategies_of_one_process_reduce_different_shapes() -> None:
    for size in (2, 3):
        strategy = compat.NumberedMirroredStrategy(["CPU:0"])
        summed = strategy.run(
            lambda values: tf.distribute.get_replica_context().all_reduce("sum", values), args=[tf.ones([size])]
        )
        assert np.allclose(summed, np.ones(size))


COLLECTIVES = """
import tensorflow as tf
from kdist._compat.tensorflow import NumberedMirroredStrategy, number_collectives_when_traced
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


ONE_ROUND = """
import tensorflow as tf
from kdist._compat.tensorflow import NumberedMirroredStrategy, number_collectives_when_traced, reduce_two_in_one_round
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


def test_functions_of_the_kind_of_tf1_get_a_new_name_in_every_trace() -> None:
    def names() -> set[str]:
        labels, logits = tf.constant([[1, 2]]), tf.zeros([1, 4, 3])
        loss = tf.function(lambda x: tf.nn.ctc_loss(labels, x, [2], [4], logits_time_major=False), autograph=False)
        graph = loss.get_concrete_function(logits).graph.as_graph_def()
        return {function.signature.name for function in graph.library.function if "Wrapper" in function.signature.name}

    before = names()
    assert before == names() != set()
    with compat.rename_legacy_functions():
        first = names()
        assert not first & (before | names())
    assert names() == before


def test_a_python_function_is_called_by_the_name_under_which_a_process_offers_it() -> None:
    def double(value: np.ndarray) -> np.ndarray:
        return 2 * value

    compat.offer_python_function("tests.double", double)
    dataset = tf.data.Dataset.range(3).map(
        lambda number: tf.raw_ops.PyFunc(input=[number], token="tests.double", Tout=[tf.int64])[0]
    )
    assert [int(number) for number in dataset] == [0, 2, 4]


def test_idle_threads_sleep_in_the_config_that_tensorflow_begins_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context.context(), "_config", None)
    assert not context.context().config.experimental.disable_thread_spinning
    compat.let_idle_threads_sleep()
    assert context.context().config.experimental.disable_thread_spinning
