"""Errors are one message, without the traces of TensorFlow."""

import tensorflow as tf

from kdist.errors import ClusterError, ConfigError, KdistError, TaskError

GRAPH_ERROR = """Graph execution error:

Detected at node compile_loss/Sparse defined at (most recent call last):
  File "train.py", line 16, in <module>

  File "keras/losses.py", line 34, in call

{{function_node __inference_call_2050}} Received a label value of 9 which is outside the valid range of [0, 3).
\t [[{{node compile_loss/Sparse}}]]
Additional GRPC error information from remote target /job:worker/replica:0/task:1 while calling Enqueue:
:UNKNOWN:Error received from peer  {grpc_message:"Received a label value", grpc_status:3} [Op:__inference_call_2050]"""


def test_of_a_graph_error_only_the_reason_is_said() -> None:
    error = TaskError("worker:1", tf.errors.InvalidArgumentError(None, None, GRAPH_ERROR))
    assert str(error) == (
        "worker:1: InvalidArgumentError: Received a label value of 9 which is outside the valid range of [0, 3)."
    )


SEVERAL_ERRORS = """Graph execution error:

2 root error(s) found.
  (0) INVALID_ARGUMENT:  {{function_node __inference_call_3}} Received a label value of 9.
\t [[{{node compile_loss/Sparse}}]]
\t [[Identity/_16]]
  (1) INVALID_ARGUMENT:  {{function_node __inference_call_3}} Received a label value of 7.
\t [[{{node compile_loss/Sparse}}]]
0 successful operations.
0 derived errors ignored."""


def test_of_several_errors_the_first_is_said() -> None:
    error = TaskError("worker:0", tf.errors.InvalidArgumentError(None, None, SEVERAL_ERRORS))
    assert str(error) == "worker:0: InvalidArgumentError: Received a label value of 9."


ASSERTION_IN_A_DATASET = (
    "Error in user-defined function passed to MapDataset:4 transformation with iterator: Iterator::Root::Map: "
    "assertion failed: [a.tsv, line 3: label=2: must be 0 or 1]\n\t [[{{node Assert}}]] [Op:IteratorGetNext]"
)


def test_of_an_assertion_in_a_dataset_its_message_is_said() -> None:
    error = TaskError("worker:0", tf.errors.InvalidArgumentError(None, None, ASSERTION_IN_A_DATASET))
    assert str(error) == "worker:0: InvalidArgumentError: a.tsv, line 3: label=2: must be 0 or 1"


def test_other_messages_are_said_whole() -> None:
    assert str(TaskError("chief", ValueError("first\nsecond"))) == "chief: ValueError: first\nsecond"
    assert str(TaskError("chief", ValueError())) == "chief: ValueError: (no message)"


def test_exit_codes_tell_a_wrong_config_a_failed_run_and_a_failed_cluster_apart() -> None:
    assert (ConfigError.exit_code, KdistError.exit_code, TaskError.exit_code, ClusterError.exit_code) == (2, 1, 1, 75)
