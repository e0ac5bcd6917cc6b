"""The end of a fit of a task that is not the chief; tests/hosts has real ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import keras  # noqa: F401 - it changes the environment, which no test may do
import pytest

from kdist.cluster.spec import ClusterSpec, Membership, Task
from kdist.config.schema import ClusterConfig, Config, RunConfig
from kdist.errors import ChiefStoppedError
from kdist.fit import follow


@pytest.fixture
def fit_of_a_stopped_chief(monkeypatch: pytest.MonkeyPatch) -> Any:
    def serve(membership: Membership, *_: object, **__: object) -> None:
        raise ChiefStoppedError(f"{membership.task}: the chief was told to stop")

    monkeypatch.setattr(follow, "serve_until_done", serve)
    config = Config(ClusterConfig("1ps1w", stay=True), run=RunConfig(stop_signals=[]))
    return SimpleNamespace(config=config, grace_secs=20.0, fingerprint=None)


@pytest.fixture
def server() -> Membership:
    return Membership(ClusterSpec(("127.0.0.1:1",), ("127.0.0.1:2",)), Task("ps", 0))


def test_a_program_exits_as_that_of_its_chief_does(
    server: Membership, fit_of_a_stopped_chief: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        follow.follow_chief(fit_of_a_stopped_chief, server)
    assert raised.value.code == 143
    assert capsys.readouterr().out == "done  | ps:0: the chief was told to stop\n"


def test_the_command_line_may_start_anew(
    server: Membership, fit_of_a_stopped_chief: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow.signals, "exit_at_once", lambda code: pytest.fail(f"exits with {code}"))
    with pytest.raises(ChiefStoppedError):
        follow.follow_chief(fit_of_a_stopped_chief, server)
