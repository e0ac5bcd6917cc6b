"""The program that `kdist launch` runs on each host, which starts the tasks there and ends them.

Its source is sent over the connection, so that it needs nothing but Python there. Messages are JSON, one a line. On
standard input come `prepare`, then `start`, and from then on signals for the tasks, and a sign of life every few
seconds. Standard output has the answers, which begin with `MARK`, unlike the messages of a shell at login.

No task outlives the connection: when standard input closes, or has been silent for too long, all of them are killed. On
Linux so they are when this process is killed.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from typing import IO, Any

MARK = "kdist-agent "
_LINE_BYTES = 1 << 16
#: A child of a task in its own session ends by itself, and closes the output then.
_OUTPUT_SECS = 6.0
# linux/prctl.h
_PR_SET_PDEATHSIG = 1
_LAST_PORT = 65535
#: For the first order of a launcher that connects.
_FIRST_ORDER_SECS = 60.0

_orders = sys.stdin.buffer
_says = threading.Lock()
_held: list[socket.socket] = []


def main() -> None:
    """Obeys the launcher until all tasks have ended."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    asked = _next_order(_FIRST_ORDER_SECS)
    _say(**_prepare(asked["folder"], asked["number"], asked["port"]))
    # No thread runs before the tasks are started: this process forks, and its children end with the thread that did.
    order = _next_order(asked["patience"])
    running = {}
    for name, argv, own in order["tasks"]:
        if (task := _start(name, argv, {**os.environ, **order["environment"], **own})) is not None:
            running[name] = task
    signal.alarm(0)
    _watch(running, asked["patience"])


def _next_order(patience: float) -> Any:
    """The next message, without signs of life; ends this process if the launcher is gone, or silent."""
    while True:
        signal.alarm(math.ceil(patience))
        line = _orders.readline()
        if not line:
            os._exit(0)
        if order := json.loads(line):
            return order


def _prepare(folder: str, number: int, port: int | None) -> dict[str, Any]:
    """Finds ports for tasks; returns the answer: the `ready` ports, or the reason why tasks are `refused`."""
    try:
        os.chdir(folder)
    except OSError as error:
        return {"refused": f"{folder}: {error.strerror} (--workdir names another folder)"}
    sockets = [socket.socket() for _ in range(number)]
    try:
        for index, held in enumerate(sockets):
            wanted = port + index if port else 0
            if wanted > _LAST_PORT:
                return {"refused": f"port {wanted}: the last one is {_LAST_PORT} (--port names others)"}
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind(("", wanted))
        return {"ready": [held.getsockname()[1] for held in sockets]}
    except OSError as error:
        return {"refused": f"port {wanted}: {error.strerror} (--port names others)"}
    finally:
        if sys.platform == "linux":
            # Nobody else gets them while this process runs; see kdist.cluster.network.sockets.held_ports.
            _held.extend(sockets)
        else:
            for held in sockets:
                held.close()


def _start(name: str, argv: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes] | None:
    """Starts the process of a task, in its own session; one that cannot be started has exited with code 127."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None

    def end_with_parent() -> None:
        if libc is not None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    try:
        return subprocess.Popen(
            argv,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=end_with_parent,  # noqa: PLW1509 - there are no threads yet
        )
    except OSError as error:
        _say(task=name, stream=2, text=f"{argv[0]}: {error.strerror}")
        _say(task=name, code=127)
        return None


def _watch(running: dict[str, subprocess.Popen[bytes]], patience: float) -> None:
    """Handles events until all tasks have ended or the launcher is gone."""
    events: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
    for name, task in running.items():
        threading.Thread(target=_follow, args=(name, task, events), daemon=True).start()
    threading.Thread(target=_read_orders, args=(events,), daemon=True).start()
    while running:
        try:
            what, value = events.get(timeout=patience)
        except queue.Empty:
            break
        if what == "gone":
            break
        if what == "ended":
            del running[value]
        elif "signal" in value:
            for task in running.values():
                # Not `send_signal`, which would wait for a task that has exited; `_follow` does.
                if task.returncode is None:
                    with suppress(ProcessLookupError):
                        os.kill(task.pid, value["signal"])
    for task in running.values():
        _kill_group(task.pid)
    os._exit(0)


def _read_orders(events: queue.SimpleQueue[tuple[str, Any]]) -> None:
    for line in _orders:
        events.put(("order", json.loads(line)))
    events.put(("gone", None))


def _follow(name: str, task: subprocess.Popen[bytes], events: queue.SimpleQueue[tuple[str, Any]]) -> None:
    """Passes on the output of a task, and its end."""
    readers = [
        threading.Thread(target=_read_output, args=(name, number, stream), daemon=True)
        for number, stream in ((1, task.stdout), (2, task.stderr))
    ]
    for reader in readers:
        reader.start()
    if sys.platform == "linux":
        # Until it has been waited for, no other process has its number, nor its group's.
        os.waitid(os.P_PID, task.pid, os.WEXITED | os.WNOWAIT)
    else:
        # macOS has no such call before Python 3.13; a number comes back after thousands of others.
        task.wait()
    _kill_group(task.pid)
    code = task.wait()
    for reader in readers:
        reader.join(_OUTPUT_SECS)
    _say(task=name, code=code)
    events.put(("ended", name))


def _read_output(name: str, number: int, stream: IO[bytes]) -> None:
    while line := stream.readline(_LINE_BYTES):
        _say(task=name, stream=number, text=line.decode(errors="replace").rstrip("\r\n"))


def _kill_group(leader: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _say(**message: Any) -> None:
    with _says, suppress(OSError):
        # If nobody listens, standard input is closed as well.
        sys.stdout.buffer.write((MARK + json.dumps(message) + "\n").encode())
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
