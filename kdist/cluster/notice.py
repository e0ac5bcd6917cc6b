"""How tasks that were started one by one learn that their chief is done: by a queue that each of them reads from.

TensorFlow's servers have no stop. Programs of TF1 let every parameter server wait at a queue ("done queue") until the
chief had put something into it, and so does kdist, by the same means: a shared queue on the chief's server.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, TimeoutError

import tensorflow as tf

from kdist.cluster.rendezvous import accepts_connections
from kdist.cluster.spec import ClusterSpec, Task
from kdist.errors import ClusterError

_PROBE_SECS = 0.5
# Nobody listens at an address for so long: its task has ended.
_GONE_SECS = 3.0
_QUEUE = "kdist_the_chief_is_done"


def chief_server(spec: ClusterSpec) -> tuple[str, Task]:
    """Address and task of the server that belongs to the chief: its own, or that of worker 0, which it also is."""
    return (spec.chief, Task("chief", 0)) if spec.chief else (spec.worker[0], Task("worker", 0))


def wait_for_chief(spec: ClusterSpec, who: Task, start_timeout: float) -> None:
    """Returns when the chief says that it is done.

    Raises:
        ClusterError: there was no chief within `start_timeout` seconds, or it is gone without a word.
    """
    address, task = chief_server(spec)
    deadline = time.monotonic() + start_timeout
    while not accepts_connections(address):
        if time.monotonic() > deadline:
            raise ClusterError(
                f"{who}: the chief ({task} at {address}) did not answer within {start_timeout:g} s "
                "(cluster.start_timeout)"
            )
        time.sleep(_PROBE_SECS)
    outcome: Future[None] = Future()

    def wait() -> None:
        try:
            session, queue = _session(address, task)
            with queue.queue_ref.graph.as_default():
                session.run(queue.dequeue())
            outcome.set_result(None)
        except BaseException as error:  # noqa: BLE001 - raised below
            outcome.set_exception(error)

    threading.Thread(target=wait, daemon=True).start()
    silent_since: float | None = None
    while True:
        try:
            outcome.result(_PROBE_SECS)
            return
        except TimeoutError:
            # A machine that is switched off ends no connection; that nobody listens there any more says it, too.
            now = time.monotonic()
            silent_since = None if accepts_connections(address) else silent_since or now
            if silent_since is not None and now - silent_since > _GONE_SECS:
                raise ClusterError(f"{who}: the chief ({task} at {address}) is gone without a word") from None
        except tf.errors.OpError as error:
            raise ClusterError(f"{who}: the chief ({task} at {address}) is gone without a word") from error


def tell_tasks(spec: ClusterSpec, timeout: float) -> None:
    """Tells every task that waits that the chief is done, and gives them `timeout` seconds to take note."""
    address, task = chief_server(spec)
    waiting = len(spec.ps) + len(spec.worker) - (spec.chief is None)
    done = threading.Event()

    def tell() -> None:
        try:
            session, queue = _session(address, task)
            with queue.queue_ref.graph.as_default():
                session.run(queue.enqueue_many([[0] * waiting]))
                size = queue.size()
                while session.run(size):
                    time.sleep(_PROBE_SECS / 10)
        except tf.errors.OpError:
            # Its own server is gone; the tasks have noticed that.
            pass
        finally:
            done.set()

    threading.Thread(target=tell, daemon=True).start()
    done.wait(timeout)


def _session(address: str, task: Task) -> tuple[tf.compat.v1.Session, tf.queue.FIFOQueue]:
    """A session on a server, and the queue there. It is never closed: that would wait for a server that is gone."""
    device = f"/job:{task.job}/replica:0/task:{task.index}"
    graph = tf.Graph()
    with graph.as_default(), tf.device(f"{device}/device:CPU:0"):
        queue = tf.queue.FIFOQueue(1 << 20, [tf.int32], [()], shared_name=_QUEUE)
    # The other tasks of the cluster need not be there.
    config = tf.compat.v1.ConfigProto(device_filters=[device])
    return tf.compat.v1.Session(f"grpc://{address}", graph=graph, config=config), queue
