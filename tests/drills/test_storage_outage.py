"""Runs whose object storage cannot be reached for a while."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import boto3
import pytest
from drilling import MINE, Drill
from moto.server import ThreadedMotoServer

pytestmark = [pytest.mark.cluster, pytest.mark.long]

URL = "s3://bucket/run"


class Proxy:
    """Passes connections on to a port of this machine, unless it is closed.

    Args:
        target: the port.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self._connections: list[socket.socket] = []
        self.port = 0
        self.open()

    def open(self) -> None:
        """Accepts connections."""
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, args=[self._listener], daemon=True).start()

    def close(self) -> None:
        """Refuses connections, and ends those that there are."""
        for each in [self._listener, *self._connections]:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        self._connections.clear()

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                near = listener.accept()[0]
                far = socket.create_connection(("127.0.0.1", self._target))
                self._connections += [near, far]
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    @staticmethod
    def _pass_on(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while received := source.recv(1 << 16):
                target.sendall(received)
            target.shutdown(socket.SHUT_WR)


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Proxy]:
    """The way to a storage with a bucket."""
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    proxy = Proxy(server.get_host_and_port()[1])
    for name, value in {
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }.items():
        monkeypatch.setenv(name, value)
    boto3.client("s3").create_bucket(Bucket="bucket")
    yield proxy
    proxy.close()
    server.stop()


def test_storage_that_fails_for_20_s_during_a_save_costs_a_delay(drill: Drill, proxy: Proxy) -> None:
    run = drill.start(
        *MINE, "cluster=2ps2w", "hooks.checkpoint.every_secs=1", "train.steps=1000000", "run.verbose=2", url=URL
    )
    run.wait_for(r"(?s)(save  \| step.*){2}")
    proxy.close()
    run.wait_for(r"trying again for 60 s")
    time.sleep(20)
    proxy.open()
    run.wait_for(r"(?s)trying again for 60 s.*(save  \| step.*){2}")
    run.process.send_signal(signal.SIGTERM)
    ended = run.end()
    assert (ended.code, ended.result["status"]) == (143, "preempted")
    assert "could not be uploaded" not in ended.console
    assert "Traceback" not in ended.console
    found = {each["Key"] for each in boto3.client("s3").list_objects_v2(Bucket="bucket")["Contents"]}
    assert f"run/checkpoints/ckpt-{ended.step}.index" in found
    body = boto3.client("s3").get_object(Bucket="bucket", Key="run/result.json")["Body"].read()
    assert json.loads(body) == ended.result
    drill.report(50, "object storage refuses for 20 s during a save", "a warning; the checkpoint arrived", ended)


def test_storage_that_fails_at_the_last_save_fails_the_run_and_names_the_checkpoint(drill: Drill, proxy: Proxy) -> None:
    arguments = (*MINE, "hooks.checkpoint.every_secs=1", "train.steps=1000000", "run.storage_timeout=2")
    run = drill.start(*arguments, url=URL)
    run.wait_for(r"(?s)(save  \| step.*){2}")
    proxy.close()
    run.wait_for(r"could not be uploaded: .*; training continues")
    run.process.send_signal(signal.SIGTERM)
    failed = run.end()
    assert failed.result["status"] == "failed"
    path = run.run_dir / "checkpoints" / f"ckpt-{failed.step}"
    assert f"it stays in {path}" in failed.console
    assert Path(f"{path}.index").exists()
    assert "Traceback" not in failed.console
    drill.report(50, "object storage refuses until the end", "error; the checkpoint is on this machine", failed)
    proxy.open()
    resumed = drill.start(*MINE, "train.steps=20", "run.resume=never", url=URL).end()
    assert "did not arrive there; they are in" in resumed.console
    assert (resumed.code, resumed.step) == (0, 20)
    drill.report(50, "the next run on that machine", "sets what did not arrive aside", resumed)
