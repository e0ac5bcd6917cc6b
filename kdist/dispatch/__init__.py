"""Calls from the chief to the workers, and the search for tasks that do not respond.

`coordinator` sends calls and hands out results; each worker has a thread. `health` watches the tasks, and
every wait has a limit. Strategies may catch `CallsCancelled`, TensorFlow's `OutOfRangeError` (a worker has no more
data), and the errors that `may_be_lost` recognizes (a task does not respond); all others pass through.
"""
