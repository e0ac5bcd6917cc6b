"""Fixtures of tests over several hosts. Where the system does not permit network namespaces they are skipped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from clusters import Hosts
from drilling import record


@pytest.fixture
def hosts(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Hosts]:
    hosts = Hosts(tmp_path)
    try:
        yield hosts
    finally:
        hosts.remove()
    record(request, hosts.reports)
