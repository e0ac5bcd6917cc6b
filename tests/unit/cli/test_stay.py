"""Tasks whose chief has stopped or is lost; `tests/hosts/test_pods.py` has real ones."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import keras  # noqa: F401 - it changes the environment, which no test may do
import pytest
from omegaconf import DictConfig

from kdist.cli import experiment
from kdist.cluster.spec import ClusterSpec, Membership, Task
from kdist.config.schema import ClusterConfig, RunConfig
from kdist.errors import ChiefStoppedError, ClusterError
from kdist.fit.signals import TaskSignals


class StartedAnew(Exception):
    """Stands for another process."""


@pytest.fixture
def take_part(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool, Callable[[TaskSignals], None]], None]:
    """Takes part as `ps:0`, with or without `cluster.wait_for_next_chief`, in what is given."""

    def anew() -> None:
        raise StartedAnew

    monkeypatch.setattr(experiment, "start_anew", anew)
    monkeypatch.setattr(experiment.signals, "exit_at_once", None)
    membership = Membership(ClusterSpec(("127.0.0.1:1",), ("127.0.0.1:2",)), Task("ps", 0))

    def take(stay: bool, serve: Callable[[TaskSignals], None]) -> None:
        monkeypatch.setattr(experiment, "_serve", lambda _composed, _config, _membership, stop: serve(stop))
        config: Any = SimpleNamespace(cluster=ClusterConfig("1ps1w", wait_for_next_chief=stay), run=RunConfig())
        experiment.take_part(DictConfig({}), config, membership)

    return take


def lose_chief(stop: TaskSignals) -> None:
    stop.begin_to_serve()
    raise ClusterError("ps:0: the chief is lost")


def test_a_task_that_stays_starts_anew_when_its_chief_is_lost(take_part: Callable[..., None]) -> None:
    said = r"the chief is lost; it waits for the next chief \(cluster\.wait_for_next_chief\)"
    with pytest.warns(UserWarning, match=said), pytest.raises(StartedAnew):
        take_part(True, lose_chief)


def test_without_it_the_task_fails(take_part: Callable[..., None]) -> None:
    with pytest.raises(ClusterError, match="the chief is lost"):
        take_part(False, lose_chief)


def test_a_chief_that_never_comes_is_not_waited_for_again(take_part: Callable[..., None]) -> None:
    def wait(stop: TaskSignals) -> None:
        raise ClusterError("ps:0: the chief did not respond")

    with pytest.raises(ClusterError, match="did not respond"):
        take_part(True, wait)


def test_a_task_that_is_told_to_stop_itself_does_not_stay(take_part: Callable[..., None]) -> None:
    def stop_with_chief(stop: TaskSignals) -> None:
        stop.begin_to_serve()
        signal.raise_signal(signal.SIGTERM)
        raise ChiefStoppedError("ps:0: the chief was told to stop")

    with pytest.warns(UserWarning, match="SIGTERM"), pytest.raises(ChiefStoppedError) as raised:
        take_part(True, stop_with_chief)
    assert raised.value.exit_code == 143
