"""The processes of a `Remote` strategy, and the pipe to them."""

import os
import threading
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kdist.cluster.processes.child import Child
from kdist.config.schema import ClusterConfig
from kdist.data.pickling import dumps, loads
from kdist.errors import ClusterError, ConfigError
from kdist.strategies.remote import Processes, limit_waits


class Ended:
    """A process that has ended."""

    pid = 0

    def __init__(self, code: int) -> None:
        self._code = code

    def poll(self) -> int:
        return self._code

    def wait(self, _timeout: float) -> int:
        return self._code


def ended(folder: Path, *codes: int, left: dict[int, BaseException]) -> Processes:
    """Processes that have ended, some of which have sent an error before."""
    processes: Any = Processes(len(codes), 0, ClusterConfig("2w"), join=True)
    for index, code in enumerate(codes):
        here, there = Pipe()
        if index in left:
            there.send_bytes(dumps((True, left[index])))
        there.close()
        processes._children.append(Child(partial(Ended, code), log := folder / f"worker-{index}.log"))
        log.write_text(f"the last of {index}\n")
        processes._pipes.append(here)
    return processes  # type: ignore[no-any-return]


@pytest.mark.parametrize("index", [0, 1])
def test_a_killed_worker_is_named_with_the_end_of_its_log_and_not_those_that_ended_because_of_it(
    tmp_path: Path, index: int
) -> None:
    codes = [-9 if i == index else 1 for i in range(2)]
    processes = ended(tmp_path, *codes, left={1 - index: ClusterError("a worker is lost, or the chief")})
    with pytest.raises(ClusterError, match=rf"(?s)worker:{index} died \(signal 9, SIGKILL\).*the last of {index}"):
        processes.call("run", 1, None)


def test_the_error_that_a_worker_has_sent_is_raised(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not like this"):
        ended(tmp_path, 0, 1, left={1: ConfigError("not like this")})._check()


def test_a_process_that_stops_in_the_middle_of_a_message_does_not_hold_up_this_one() -> None:
    here, there = Pipe()
    limit_waits(here, 0.05)
    with here, there:
        # Says that 1000 bytes follow, of which 10 come.
        os.write(there.fileno(), (1000).to_bytes(4, "big") + bytes(10))
        assert here.poll()
        with pytest.raises(BlockingIOError):
            here.recv_bytes()


def test_a_process_that_reads_nothing_does_not_hold_up_this_one() -> None:
    here, there = Pipe()
    limit_waits(here, 0.05)
    with here, there, pytest.raises(BlockingIOError):
        here.send_bytes(bytes(1 << 24))


class Alive(Ended):
    """A process that goes on."""

    def poll(self) -> None:  # type: ignore[override]
        return None


def test_a_worker_that_takes_no_message_is_named_and_not_waited_for(tmp_path: Path) -> None:
    processes: Any = Processes(2, 0, ClusterConfig("2w", step_timeout=1), join=True)
    ends = [Pipe() for _ in range(2)]
    for index, (here, _) in enumerate(ends):
        processes._children.append(Child(partial(Alive, 0), tmp_path / f"worker-{index}.log"))
        processes._pipes.append(here)
    limit_waits(ends[1][0], 0.05)
    threading.Thread(target=ends[0][1].recv_bytes, daemon=True).start()
    with pytest.raises(ClusterError, match=r"worker:1 took nothing of a message for 1 s \(cluster.step_timeout\)"):
        processes.call_all("run", 1, [np.zeros(1 << 21)])


def test_all_workers_are_told_what_they_take_part_in_and_worker_0_alone_what_it_does_alone(tmp_path: Path) -> None:
    processes: Any = Processes(2, 0, ClusterConfig("2w"), join=True)
    ends = [Pipe() for _ in range(2)]
    for index, (here, _) in enumerate(ends):
        processes._children.append(Child(partial(Alive, 0), tmp_path / f"worker-{index}.log"))
        processes._pipes.append(here)
    (_, of_chief), (_, of_other) = ends
    for answer in range(4):
        of_chief.send_bytes(dumps((False, answer)))
    assert processes.call_all("run", 4, None) == 0
    assert processes.call("of_values", "write", {}) == 1
    assert processes.call_all("share") == 2
    assert processes.call_all("run", 1, None) == 3
    told = [loads(of_chief.recv_bytes()) for _ in range(4)]
    assert [name for name, _ in told] == ["run", "of_values", "share", "run"]
    told_too = [loads(of_other.recv_bytes()) for _ in range(3)]
    assert told_too == [("run", (4, None)), ("share", ()), ("run", (1, None))]
    assert not of_other.poll()
