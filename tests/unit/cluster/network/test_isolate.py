"""The network namespace of a run: entered, or said to be missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import models
import pytest

import kdist
from kdist.cluster.network import isolate, sockets
from kdist.config.schema import ClusterConfig
from kdist.errors import ConfigError

needs_namespaces = pytest.mark.skipif(
    not shutil.which("unshare") or subprocess.run(["unshare", "-rn", "true"], check=False).returncode != 0,
    reason="the system permits no network namespaces",
)


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that is not isolated."""
    monkeypatch.setattr(isolate, "is_isolated", lambda: False)
    monkeypatch.setattr(isolate, "_has_warned", False)
    monkeypatch.setattr(isolate, "_why_not", isolate._IN_PYTHON)


def trainer(mode: str, shape: str = "1ps1w") -> kdist.Trainer:
    return kdist.Trainer(models.mlp, cluster=ClusterConfig(shape, isolate=mode))


def test_python_is_warned_once_and_told_how(outside: None) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            trainer("auto")
    (warning,) = said
    assert str(warning.message).startswith("kdist: cluster.isolate=auto: not in a private network namespace: ")
    assert "unshare -rn python" in str(warning.message)
    assert "TensorFlow's servers" in str(warning.message)


def test_must_is_refused_where_it_is_not(outside: None) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.isolate=must: .*unshare -rn python"):
        trainer("must")


@pytest.mark.parametrize(("mode", "shape"), [("never", "1ps1w"), ("must", "local")])
def test_nothing_is_said_where_nothing_is_asked_or_nothing_serves(
    outside: None, mode: str, shape: str, recwarn: pytest.WarningsRecorder
) -> None:
    trainer(mode, shape)
    assert not recwarn.list


def test_what_stands_in_the_way_is_said(
    outside: None, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    def refuse() -> None:
        raise OSError("unshare(2): Operation not permitted")

    monkeypatch.setattr(isolate, "_try_in_a_child", refuse)
    monkeypatch.setattr(isolate, "_unshare", lambda: pytest.fail("it was tried all the same"))
    with pytest.raises(ConfigError, match=r"cluster\.isolate=must: .*Operation not permitted"):
        isolate.enter("must")
    isolate.enter("auto")
    assert not recwarn.list
    isolate.require("auto")
    assert "Operation not permitted" in str(recwarn.pop().message)


def test_a_process_with_threads_does_not_try(outside: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolate, "_unshare", lambda: pytest.fail("it was tried all the same"))
    monkeypatch.setattr(os, "listdir", lambda _: ["1", "2"])
    with pytest.raises(ConfigError, match="this process has threads already"):
        isolate.enter("must")


def test_the_first_lines_of_a_run_say_what_is_true(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolate, "is_isolated", lambda: False)
    monkeypatch.setattr(isolate, "_has_told", False)
    monkeypatch.setattr(sockets, "_interface", None)
    assert isolate.network_line() == (
        "network   TensorFlow's servers listen on all interfaces, without authentication or encryption: "
        "let only machines that you trust reach them"
    )
    assert isolate.network_line() is None, "once a process"
    monkeypatch.setattr(isolate, "_has_told", False)
    monkeypatch.setattr(sockets, "_interface", "lo")
    closed = "network   closed to other machines, not to other users here (cluster.bind)"
    assert isolate.network_line() == closed
    monkeypatch.setattr(isolate, "is_isolated", lambda: True)
    monkeypatch.setattr(isolate, "_has_told", False)
    assert isolate.network_line() == "network   private namespace: only processes of this run reach its servers"


ENTERED = """
import os, socket
from pathlib import Path
from kdist.cluster.network import isolate

def namespace():
    return os.stat("/proc/self/ns/net").st_ino

user, before = (os.getuid(), os.getgid()), namespace()
isolate.enter("must")
entered = namespace()
isolate.enter("must")
assert before != entered == namespace()
assert isolate.is_isolated()
assert (os.getuid(), os.getgid()) == user
Path("file").write_text("mine")
server = socket.create_server(("127.0.0.1", 0))
socket.create_connection(server.getsockname(), 1).close()
try:
    socket.create_connection(("192.0.2.1", 80), 1)
except OSError as error:
    assert "unreachable" in str(error), error
print("done")
"""


@needs_namespaces
@pytest.mark.parametrize("outside", [[], ["unshare", "-rn"]], ids=["with a network", "without"])
def test_a_process_enters_with_its_loopback_and_its_user(tmp_path: Path, outside: list[str]) -> None:
    command = [*outside, sys.executable, "-c", ENTERED]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("done\n", 0), done.stderr
    assert (tmp_path / "file").stat().st_uid == os.getuid()


@needs_namespaces
def test_a_process_started_by_unshare_is_isolated_and_gets_its_loopback() -> None:
    code = """
import socket
from kdist.cluster.network import isolate
isolate.require("must")
server = socket.create_server(("127.0.0.1", 0))
socket.create_connection(server.getsockname(), 1).close()
"""
    subprocess.run(["unshare", "-rn", sys.executable, "-c", code], check=True)


@needs_namespaces
def test_a_process_that_may_not_is_left_in_its_network() -> None:
    """The limits of a user namespace are its own."""
    code = """
import socket
from kdist.cluster.network import isolate
before = socket.if_nameindex()
isolate.enter("auto")
assert socket.if_nameindex() == before
isolate._try_in_a_child = None  # Once is enough.
try:
    isolate.enter("must")
except isolate.ConfigError as error:
    print(error)
"""
    limit = 'echo 0 > /proc/sys/user/max_net_namespaces && exec "$0" "$@"'
    done = subprocess.run(
        ["unshare", "-r", "sh", "-c", limit, sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    if "/proc/sys/user" in done.stderr:
        pytest.skip("the limit cannot be set here")
    if not isolate.is_isolated():
        assert done.stdout.startswith("cluster.isolate=must: no private network namespace here: unshare(2): "), done
