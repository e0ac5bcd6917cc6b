"""Trackers, without a cluster: what they send, and what happens if they cannot."""

import json
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kdist.errors import ConfigError
from kdist.extras.trackers import Tracker
from kdist.hooks import MlflowTracker, WandbTracker
from kdist.run.result import Result


class Notebook(Tracker):
    """Writes down what it would send; `fails_at` names a call that fails."""

    def __init__(
        self,
        fails_at: str = "",
        timeout: float = 10.0,
        save_model: bool = False,
        error: type[BaseException] = ConnectionError,
    ) -> None:
        super().__init__("json", "notebook", save_model, timeout)
        self.sent: list[Any] = []
        self.may_end = threading.Event()
        self.may_end.set()
        self._fails_at, self._fails_with = fails_at, error

    def _send_or_fail(self, name: str, *what: Any) -> None:
        if name == self._fails_at:
            raise self._fails_with(f"no route to {name}")
        self.sent.append((name, *what))

    def _start(self, earlier: Mapping[str, Any], result: Result) -> Mapping[str, Any]:
        self._send_or_fail("start", dict(earlier), result.strategy)
        return {"id": 7}

    def _log(self, metrics: Mapping[str, float], step: int) -> None:
        self._send_or_fail("log", dict(metrics), step)

    def _finish(self, result: Result, files: list[Path]) -> None:
        self.may_end.wait(10)
        self._send_or_fail("finish", result.status, [file.name for file in files])


def run(tracker: Tracker, run_dir: Path) -> list[str]:
    """One run as the tracker sees it; kdist's warnings."""
    session: Any = SimpleNamespace(global_step=100, learning_rate=lambda: 0.5)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        tracker.before_fit(run_dir, Result(status="running", strategy="single"))
        tracker.after_logging(session, {"loss": 2.0, "each": [0.0, 1.0]}, 50.0)
        tracker.after_validation(session, {"loss": 3.0})
        tracker.after_fit(Result(status="done"))
    # Trackers have their own, which differ with their versions.
    return [str(warning.message) for warning in said if str(warning.message).startswith("kdist: ")]


def test_what_is_sent_in_its_order(tmp_path: Path) -> None:
    (tmp_path / "result.json").touch()
    (tmp_path / "model.keras").touch()
    tracker = Notebook()
    assert run(tracker, tmp_path) == []
    train = {"train/loss": 2.0, "train/each/0": 0.0, "train/each/1": 1.0}
    assert tracker.sent[0] == ("start", {}, "single")
    assert tracker.sent[1][2] == 100
    assert train.items() <= tracker.sent[1][1].items()
    assert {"train/learning_rate": 0.5, "steps_per_second": 50.0}.items() <= tracker.sent[1][1].items()
    assert tracker.sent[2:] == [("log", {"validation/loss": 3.0}, 100), ("finish", "done", ["result.json"])]


def test_a_run_that_resumes_continues_in_the_tracker(tmp_path: Path) -> None:
    run(Notebook(), tmp_path)
    again = Notebook(save_model=True)
    (tmp_path / "model.keras").touch()
    run(again, tmp_path)
    assert again.sent[0] == ("start", {"id": 7}, "single")
    assert again.sent[-1] == ("finish", "done", ["model.keras"])


@pytest.mark.parametrize(("fails_at", "sent"), [("start", 0), ("log", 1), ("finish", 3)])
def test_a_tracker_that_is_not_there_costs_one_warning(tmp_path: Path, fails_at: str, sent: int) -> None:
    tracker = Notebook(fails_at)
    (warning,) = run(tracker, tmp_path)
    assert f"Notebook: no route to {fails_at}; training goes on" in warning
    assert len(tracker.sent) == sent


def test_a_tracker_that_exits_costs_a_warning_and_not_the_rest_of_the_run_in_silence(tmp_path: Path) -> None:
    tracker = Notebook("log", error=SystemExit)
    (warning,) = run(tracker, tmp_path)
    assert "Notebook: no route to log; training goes on" in warning


def test_a_tracker_that_does_not_end_is_left_behind(tmp_path: Path) -> None:
    tracker = Notebook(timeout=0.05)
    tracker.may_end.clear()
    (warning,) = run(tracker, tmp_path)
    assert "did not confirm the end of the run within 0.05 s (Notebook.timeout)" in warning
    tracker.may_end.set()


def test_a_tracker_of_a_fit_that_did_not_begin_does_nothing() -> None:
    tracker = Notebook()
    tracker.after_fit(Result())
    assert tracker.sent == []


def test_the_thread_of_a_tracker_ends_with_the_fit(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    run(Notebook(), tmp_path)
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
        assert not thread.is_alive()


def test_what_is_not_installed_or_not_allowed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"WandbTracker.mode=sometimes"):
        WandbTracker(mode="sometimes")
    with pytest.raises(ConfigError, match=r"MlflowTracker.timeout=0"):
        MlflowTracker(timeout=0)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"mlflow is not installed; run pip install 'mlflow-skinny>=2.16' 'sqlalchemy>=2'"
    ):
        MlflowTracker()


def test_wandb_gets_all_of_it_offline(tmp_path: Path) -> None:
    assert run(WandbTracker(project="tests", mode="offline"), tmp_path) == []
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    assert json.loads((tmp_path / "wandb.json").read_text())["id"] in folder.name
    (record,) = folder.glob("*.wandb")
    content = record.read_bytes()
    for text in (b"train/loss", b"validation/loss", b"global_step", b"done"):
        assert text in content
