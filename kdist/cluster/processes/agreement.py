"""How tasks that were started one by one find out, before training, that they have the same versions and config.

The chief lays its description out on its own server, where every other task reads it: a staging area, whose elements
can be read without being taken away. Each compares it with its own, and reports the outcome to a queue, which the chief
reads. So a difference is known to both, and to a task that is started later as well.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection
from concurrent.futures import TimeoutError
from contextlib import suppress

import tensorflow as tf

from kdist._compat import op_libraries
from kdist.cluster.description import Description, differences, differing
from kdist.cluster.processes.chief_board import chief_server, server_session
from kdist.cluster.spec import ClusterSpec, Task
from kdist.errors import ClusterError
from kdist.threads import in_thread

_DESCRIPTION, _REPORTS = "kdist_description", "kdist_reports"
_MAX_REPORTS = 1 << 20
_POLL_SECS = 0.2
_LEAST_SECS = 5.0
#: For others to report as well, after the first that differs.
_OTHERS_SECS = 10.0


class Agreement:
    """The chief's side, once its server serves.

    Args:
        spec: the cluster.
        description: of the chief.
    """

    def __init__(self, spec: ClusterSpec, description: Description) -> None:
        self._spec = spec
        self._description = description
        #: What each task has reported; empty for one that agrees.
        self._reported: dict[str, list[str]] = {}
        self._differs_since: float | None = None
        self._reading = in_thread(self._work)

    def missing(self, tasks: Collection[Task]) -> set[Task]:
        """Those that have not reported yet.

        Raises:
            ConfigError: some differ, and there was time for the others to report, too.
            ClusterError: reports cannot be read.
        """
        if self._reading.done():
            raise ClusterError(f"the reports of the tasks cannot be read: {self._reading.exception()}")
        missing = {task for task in tasks if str(task) not in self._reported}
        if found := self.differing:
            self._differs_since = self._differs_since or time.monotonic()
            if not missing or time.monotonic() - self._differs_since > _OTHERS_SECS:
                raise differing(found)
        return missing

    @property
    def differing(self) -> dict[str, list[str]]:
        """The differences of the tasks that have any, by their names."""
        return {task: found for task, found in dict(self._reported).items() if found}

    def _work(self) -> None:
        address, chief = chief_server(self._spec)
        with server_session(address, chief) as session:
            lay_out = tf.raw_ops.Stage(values=[tf.constant(self._description.to_json())], shared_name=_DESCRIPTION)
            report = _reports().dequeue()
            session.run(lay_out)
            while True:
                task, found = json.loads(session.run(report))
                self._reported[task] = found


def agree_with_chief(spec: ClusterSpec, who: Task, description: Description, timeout: float) -> None:
    """Compares this task with the chief, which serves, and loads the libraries of ops that the chief has loaded.

    Args:
        timeout: seconds for it.

    Raises:
        ConfigError: they differ.
        ClusterError: the chief does not say what it is.
    """
    address, chief = chief_server(spec)
    deadline = time.monotonic() + max(timeout, _LEAST_SECS)

    def compare() -> list[str]:
        with server_session(address, chief) as session:
            size = tf.raw_ops.StageSize(dtypes=[tf.string], shared_name=_DESCRIPTION)
            peek = tf.raw_ops.StagePeek(index=0, dtypes=[tf.string], shared_name=_DESCRIPTION)
            # One that waits keeps a thread of the server, which has few, from laying the description out.
            while not session.run(size):
                if time.monotonic() > deadline:
                    raise TimeoutError
                time.sleep(_POLL_SECS)
            of_chief = Description.from_json(session.run(peek)[0])
            found = differences(of_chief, description)
            if not found:
                op_libraries.load(of_chief.op_libraries)
            session.run(_reports().enqueue(json.dumps([str(who), found])))
            return found

    while time.monotonic() < deadline:
        # A chief that has just exited fails the call; another one may come.
        with suppress(TimeoutError, tf.errors.OpError):
            if found := in_thread(compare).result(deadline - time.monotonic()):
                raise differing({str(who): found})
            return
        time.sleep(_POLL_SECS)
    raise ClusterError(
        f"{who}: the chief ({chief} at {address}) has not said within {timeout:g} s (cluster.start_timeout) which "
        "versions and config it has; is its kdist another version?"
    )


def _reports() -> tf.queue.FIFOQueue:
    return tf.queue.FIFOQueue(_MAX_REPORTS, [tf.string], [()], shared_name=_REPORTS)
