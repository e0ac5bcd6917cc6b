"""Whether a task serves: a refused connection says no at once, silence only after a while."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable

import pytest
from helpers import wait_until

from kdist.cluster.network import names, port_probe
from kdist.cluster.network.port_probe import (
    PortProbes,
    ProbeResult,
    SilenceTimer,
    State,
    accepts_connections,
    not_met,
    probe,
)
from kdist.cluster.spec import Task

LISTENING, REFUSED = ProbeResult(State.LISTENING), ProbeResult(State.REFUSED, "nothing listens at h:1")
SILENT = ProbeResult(State.SILENT, "h:1 has not responded")
WORKER = Task("worker", 1)


def test_a_port_that_is_served_accepts_connections_by_ipv4_and_ipv6() -> None:
    with socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server:
        port = server.getsockname()[1]
        assert probe(f"127.0.0.1:{port}") == LISTENING
        assert accepts_connections(f"[::1]:{port}")
        assert accepts_connections(f"localhost:{port}")


def test_a_refused_connection_is_told_from_silence() -> None:
    with socket.socket() as bound:
        # Bound and not listening: nobody else can take the port meanwhile.
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        assert probe(address) == ProbeResult(State.REFUSED, f"nothing listens at {address}")


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EAFNOSUPPORT])
def test_a_probe_that_gets_no_socket_is_no_error(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    class NoSocket:
        def __init__(self, *_: object) -> None:
            raise OSError(number, os.strerror(number))

    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with monkeypatch.context() as broken:
            broken.setattr(socket, "socket", NoSocket)
            assert probe(address) == ProbeResult(State.SILENT, f"{address} has not responded")
        assert probe(address) == LISTENING


def test_an_address_that_does_not_answer_is_silent_after_the_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        address = server.getsockname()
        # Linux leaves connections beyond the backlog unanswered.
        waiting = [socket.socket() for _ in range(3)]
        for other in waiting:
            other.setblocking(False)
            other.connect_ex(address)
        began = time.monotonic()
        found = probe(f"127.0.0.1:{address[1]}", 0.2)
        assert time.monotonic() - began < 5
        assert found.state is State.SILENT
        assert not found.is_of_lookup
        for other in waiting:
            other.close()


def test_a_name_that_cannot_be_resolved_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise socket.gaierror("no such name")

    monkeypatch.setattr(socket, "getaddrinfo", fails)
    assert probe("gone:1") == ProbeResult(State.SILENT, "the name gone has not been resolved", is_of_lookup=True)


def test_a_lookup_that_hangs_is_given_up_and_not_begun_again(monkeypatch: pytest.MonkeyPatch) -> None:
    lookups: list[str] = []

    def hangs(host: str, *_: object, **__: object) -> list[object]:
        lookups.append(host)
        time.sleep(1.0)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", hangs)
    for _ in range(3):
        began = time.monotonic()
        assert probe("slow:1", 0.05).is_of_lookup
        assert time.monotonic() - began < 0.8
    assert lookups == ["slow"]
    wait_until(lambda: not names._pending, 10, "the lookup ends")


def test_silence_is_lost_after_patience_and_refusal_at_once() -> None:
    silence = SilenceTimer(15)
    assert silence.lost_because is None
    assert not silence.is_silent
    silence.add(LISTENING, 0.5)
    for _ in range(5):
        silence.add(SILENT, 2.5)
        assert silence.is_silent
        assert silence.lost_because is None
    silence.add(SILENT, 2.5)
    assert not silence.is_silent
    assert silence.lost_because == "h:1 has not responded for 15 s, cluster.patience"
    silence.add(LISTENING, 0.5)
    assert silence.lost_because is None
    silence.add(REFUSED, 0.0)
    assert silence.lost_because == "nothing listens at h:1"


def test_one_answer_ends_a_silence() -> None:
    silence = SilenceTimer(15)
    for _ in range(20):
        silence.add(SILENT, 10)
        silence.add(LISTENING, 10)
        assert silence.lost_because is None


def watched(found: Callable[[], ProbeResult], patience: float) -> PortProbes:
    return PortProbes({WORKER: "h:1"}, patience, probe=lambda address, timeout: found())


def test_probes_go_on_and_find_that_a_task_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_probe, "_PAUSE_SECS", 0.01)
    state = [LISTENING]
    probes = watched(lambda: state[0], 0.05)
    try:
        wait_until(lambda: probes.listening() == {WORKER}, 10, "it listens")
        assert probes.lost() == {}
        state[0] = SILENT
        wait_until(lambda: WORKER in probes.lost(), 10, "it is lost")
        assert probes.silent() == set()
        state[0] = LISTENING
        wait_until(lambda: not probes.lost(), 10, "it is back")
    finally:
        probes.stop()


def test_the_last_probe_ends_with_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_probe, "_PAUSE_SECS", 0.01)
    timeouts: list[float] = []

    def silent(_address: str, timeout: float) -> ProbeResult:
        timeouts.append(timeout)
        time.sleep(min(timeout, 0.2))
        return SILENT

    probes = PortProbes({WORKER: "h:1"}, 0.5, probe=silent)
    try:
        wait_until(probes.lost, 10, "it is lost")
    finally:
        probes.stop()
    assert timeouts[0] < 0.5
    assert timeouts[1] < timeouts[0]


def test_time_in_which_a_lookup_could_not_run_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_probe, "_PAUSE_SECS", 0.01)
    monkeypatch.setattr(port_probe, "_PROBE_SECS", 0.05)
    num_probes = []

    def late(_address: str, _timeout: float) -> ProbeResult:
        num_probes.append(1)
        # As when another thread holds Python's lock.
        time.sleep(0.5)
        return ProbeResult(State.SILENT, "the name h has not been resolved", is_of_lookup=True)

    probes = PortProbes({WORKER: "h:1"}, 0.2, probe=late)
    try:
        wait_until(probes.lost, 20, "it is lost")
    finally:
        probes.stop()
    assert len(num_probes) > 2


def test_who_does_not_come_is_named_with_what_was_tried() -> None:
    missing = {Task("ps", 0): "a:1", Task("worker", 1): "b:2", Task("worker", 2): "c:3"}
    why = {Task("ps", 0): "nothing listens at a:1", Task("worker", 1): "the name b has not been resolved"}
    assert str(not_met(missing, why, 30)) == (
        "ps:0 (a:1), worker:1 (b:2), worker:2 (c:3) did not respond within 30 s (cluster.start_timeout): "
        "nothing listens at a:1; the name b has not been resolved"
    )
