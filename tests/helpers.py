"""Small things that several tests use."""

from __future__ import annotations

import glob
import json
import os
import re
import sys
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packaging.version import Version

from kdist.cluster.network.sockets import held_ports
from kdist.cluster.processes.forkserver import NAME as FORK_SERVER

REPO = Path(__file__).resolve().parents[1]

_IS_KERAS_3_12 = Version(version("keras")) < Version("3.13")
_SINCE_3_13 = "plain Keras does it since 3.13 only"
#: Before, `set_random_seed` kept the generator of seeds, an input could not be None or unused, and so on.
needs_keras_3_13 = pytest.mark.skipif(_IS_KERAS_3_12, reason=_SINCE_3_13)

_held = ExitStack()
_TASK = re.compile(r"(ps|worker|chief|evaluator):\d+")


def skip_before_keras_3_13() -> None:
    """As `needs_keras_3_13`, for one of several cases."""
    if _IS_KERAS_3_12:
        pytest.skip(_SINCE_3_13)


def toy_data(num_examples: int = 256, num_features: int = 6, num_classes: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Separable points: the class is the largest of the first features."""
    rng = np.random.default_rng(7)
    x = rng.normal(size=(num_examples, num_features)).astype(np.float32)
    return x, x[:, :num_classes].argmax(1).astype(np.int64)


def toy_batches() -> Any:
    """Batches of `toy_data`, without end."""
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices(toy_data()).repeat().batch(8, drop_remainder=True)


def delayed(batches: Any, seconds: Any) -> Any:
    """The same batches, each after a wait without the CPU."""
    import tensorflow as tf

    variant = tf.raw_ops.ExperimentalSleepDataset(
        input_dataset=batches._variant_tensor,
        sleep_microseconds=tf.cast(seconds * 1e6, tf.int64),
        output_types=[spec.dtype for spec in batches.element_spec],
        output_shapes=[spec.shape for spec in batches.element_spec],
    )
    return tf.data.experimental.from_variant(variant, batches.element_spec)


def result_of(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "result.json").read_text())


def objects_in(bucket: Any, under: str = "") -> dict[str, bytes]:
    """The contents of an S3 bucket, by names in which the time and the process of an event file are left out."""
    return {
        re.sub(r"(tfevents)\..*", r"\1", each.key.removeprefix(under)): each.get()["Body"].read()
        for each in bucket.objects.filter(Prefix=under)
    }


def as_on_macos(processes: Path | None = None) -> dict[str, str]:
    """The environment of a process that has no name that only Linux has; nor have its children.

    Args:
        processes: a folder that gets a file for each of them, named by its number.
    """
    own = {"PYTHONPATH": os.pathsep.join([str(REPO / "tests" / "macos"), str(REPO), *sys.path])}
    return {**os.environ, **own} if processes is None else {**os.environ, **own, "MACOS_PROCESSES": str(processes)}


def free_ports(count: int) -> list[int]:
    """Ports at which nothing listens, and that nobody else gets before this process ends."""
    return _held.enter_context(held_ports(count))


def free_addresses(count: int) -> list[str]:
    """Addresses of this machine, with such ports."""
    return [f"127.0.0.1:{port}" for port in free_ports(count)]


def process_name(pid: int) -> str:
    """The name of a process.

    Raises:
        OSError: it is gone, or has ended and nobody has asked how.
    """
    name, _, rest = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(")")
    if rest.split(maxsplit=1)[0] == "Z":
        raise ProcessLookupError(pid)
    return name


def is_task(pid: int) -> bool:
    """Whether a process is a task of kdist that runs."""
    return bool(_TASK.fullmatch(_name_if_it_runs(pid)))


def tasks_running(under: int, *, and_fork_servers: bool = False) -> list[int]:
    """Process ids of the tasks that a process has started, itself or by fork servers.

    Args:
        and_fork_servers: also those of its fork servers.
    """
    started = children(under)
    servers = [pid for pid in started if _name_if_it_runs(pid) == FORK_SERVER]
    # What a fork server has forked has its name until it takes its own, or executes a program, as the filter of
    # TensorFlow's messages does.
    started += [pid for server in servers for pid in children(server)]
    return [*filter(is_task, started), *(servers if and_fork_servers else ())]


def _name_if_it_runs(pid: int) -> str:
    """Its name; empty if it has ended."""
    try:
        return process_name(pid)
    except OSError:
        return ""


def children(pid: int) -> list[int]:
    """Process ids of the children of all threads of a process; none if it is gone."""
    found: list[int] = []
    # Every test looks twice: pathlib would take ten times as long.
    for path in glob.glob(f"/proc/{pid}/task/*/children"):
        # A thread may have ended; its children are another one's then.
        with suppress(OSError), open(path, "rb", buffering=0) as file:
            found += map(int, file.read().split())
    return found


def descendants(pid: int) -> list[int]:
    """Process ids of the children of a process, and of theirs."""
    own = children(pid)
    return [*own, *(below for child in own for below in descendants(child))]


def ignores(pid: int, number: int) -> bool:
    """Whether a process ignores a signal."""
    return _is_among(pid, "SigIgn", number)


def catches(pid: int, number: int) -> bool:
    """Whether a process handles a signal itself."""
    return _is_among(pid, "SigCgt", number)


def _is_among(pid: int, name: str, number: int) -> bool:
    """Whether a signal is in a set of signals of a process; see proc(5)."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def loopback_bytes() -> int:
    """Bytes that the loopback interface has carried so far."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[0])
    raise LookupError("no loopback interface")


def wait_until(condition: Any, timeout: float, what: str | Callable[[], str]) -> None:
    """Waits for another process, checking often; fails after `timeout` seconds, and says what did not come."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout} s: {what() if callable(what) else what}"
        time.sleep(0.05)


def tags_of(folder: Path) -> set[str]:
    """Every tag in the TensorBoard event files of a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    return {tag for tags in events.Tags().values() if isinstance(tags, list) for tag in tags}


def environment() -> dict[str, str]:
    """This process's environment, for one that imports from `tests` as well."""
    path = os.pathsep.join(filter(None, [str(REPO / "tests"), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path}


def in_short(values: Iterable[Any], chosen: Collection[Any]) -> list[Any]:
    """The values of a test's parameter; those that are not chosen are left to `make long`."""
    return [value if value in chosen else pytest.param(value, marks=pytest.mark.long) for value in values]
