from __future__ import annotations

import http.client
import json
from typing import Any

import pytest
from fakes import make_session, run_all
from helpers import free_ports

from kdist.errors import ConfigError
from kdist.hooks import HealthCheck, Hook, StopAtStep


def test_the_chief_says_its_step_and_when_it_was_reached() -> None:
    (port,) = free_ports(1)
    now = [100.0]
    said: list[tuple[int, Any]] = []

    class Asks(Hook):
        def ask(self) -> None:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            connection.request("GET", "/readyz")
            answer = connection.getresponse()
            said.append((answer.status, json.loads(answer.read())))

        def begin(self, session: Any) -> None:
            self.ask()

        def after_run(self, context: Any, values: Any) -> None:
            now[0] += 2.5
            self.ask()

    run_all(make_session([HealthCheck(port, clock=lambda: now[0]), Asks(), StopAtStep(last_step=3)]))
    before = {"task": "chief", "ready": False, "step": None, "seconds_since_progress": None}
    assert said[0] == (503, before)
    assert said[-1] == (200, {"task": "chief", "ready": True, "step": 3, "seconds_since_progress": 2.5})


def test_its_port_is_a_port() -> None:
    with pytest.raises(ConfigError, match=r"run\.health_port=0"):
        HealthCheck(0)
