"""A bucket on a real S3 server, for the tests that ask for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SECRET = "not-to-be-seen-anywhere"


@pytest.fixture(scope="module")
def s3_endpoint() -> Iterator[str]:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def secret() -> str:
    """The text that no message and no file may hold."""
    return SECRET


@pytest.fixture
def bucket(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """An empty bucket, `s3://bucket`, which kdist finds by the environment."""
    import boto3

    for name, value in {
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": s3_endpoint,
        "XDG_CACHE_HOME": str(tmp_path / "one machine"),
    }.items():
        monkeypatch.setenv(name, value)
    bucket = boto3.resource("s3").create_bucket(Bucket="bucket")
    yield bucket
    bucket.objects.delete()
    bucket.delete()
