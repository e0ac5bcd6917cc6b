"""Each private name of TensorFlow means what kdist takes it for; tests of clusters try the connections."""

import subprocess
import sys
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
