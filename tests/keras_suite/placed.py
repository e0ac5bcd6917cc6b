"""Plugin of pytest for Keras's own tests: a `kdist.Trainer` in the place of `fit`, `evaluate` and `predict`.

    pytest -p keras_suite.placed --place 1ps1w --outcomes FILE FOLDER

Without `--place`, plain Keras runs them. `--outcomes` names a file for the outcomes of the tests that called one of the
three methods.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import pytest
from keras.src.backend.tensorflow import trainer as keras_trainer
from keras_suite.results import PLACES, Outcome

import kdist
from kdist.cluster.processes.forkserver import share_fork_server

METHODS = ("fit", "evaluate", "predict")
#: The methods that the present test has called, and those that run now.
_called: set[str] = set()
_running: list[str] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--place", choices=PLACES, help="where kdist runs the tests; without it, Keras does")
    parser.addoption("--outcomes", type=Path, required=True, help="file for the outcomes")
    parser.addoption("--tests", type=Path, help="file with the tests to run, a line each; all without it")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "requires_trainable_backend: of Keras; TensorFlow is one")
    if importlib.util.find_spec("jax") is None:
        # Imported at the top of a file, and used by tests of other backends.
        sys.modules["jax"] = types.ModuleType("jax")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Writer(config.getoption("--outcomes")))
    place = config.getoption("--place")
    for name in METHODS:
        setattr(keras_trainer.TensorFlowTrainer, name, _placed(name, place))
    keras_trainer.TensorFlowTrainer = _MixedIn("TensorFlowTrainer", (keras_trainer.TensorFlowTrainer,), {})


def _placed(name: str, place: str | None) -> Any:
    """The method of a model that calls that of a `Trainer`; what a Trainer itself calls is Keras's own."""
    own = getattr(keras_trainer.TensorFlowTrainer, name)

    @functools.wraps(own)
    def method(self: keras.Model, *args: Any, **kwargs: Any) -> Any:
        if _running:
            return own(self, *args, **kwargs)
        _running.append(name)
        _called.add(name)
        try:
            if place is None:
                return own(self, *args, **kwargs)
            with tempfile.TemporaryDirectory() as folder:
                # The model itself: what the trainer gives it (weights, optimizer's variables, stop_training) it has.
                trainer = kdist.Trainer(self, run_dir=Path(folder) / "run", **PLACES[place])
                return getattr(trainer, name)(*args, **kwargs)
        finally:
            _running.pop()

    return method


class _MixedIn(type):
    """Makes a `keras.Model` of each class that mixes Keras's trainer into a layer: a Trainer takes nothing else."""

    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> Any:
        if not any(isinstance(base, _MixedIn) for base in bases):
            return super().__new__(cls, name, bases, namespace)
        others = tuple(base for base in bases if not isinstance(base, _MixedIn) and base is not keras.layers.Layer)
        return type(name, (*others, keras.Model), namespace)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (tests := config.getoption("--tests")) is not None:
        chosen = set(tests.read_text().splitlines())
        items[:] = [item for item in items if item.nodeid in chosen]
    # It changes tf.config after TensorFlow's first operation, after which a process connects to no cluster.
    items.sort(key=lambda item: item.name == "test_swap_ema_weights_with_tf_distribute")


@pytest.fixture(scope="session", autouse=True)
def tasks_prepared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The process from which the tasks of all clusters are forked: it imports TensorFlow once."""
    with share_fork_server(tmp_path_factory.mktemp("prepared") / "log", train=True):
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if call.when == "call":
        if _called:
            error = "" if call.excinfo is None else f"{call.excinfo.typename}: {call.excinfo.value}"
            outcome = Outcome(sorted(_called), report.outcome == "passed", " ".join(error.split())[:500])
            # As a list: what workers of xdist send.
            report.user_properties.append(("outcome", list(outcome)))
        _called.clear()
    return report


class _Writer:
    """Writes an outcome a line as soon as it is known."""

    def __init__(self, file: Path) -> None:
        self._file = file
        file.write_text("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        with self._file.open("a") as lines:
            for outcome in [
                value for name, value in report.user_properties if name == "outcome" and report.when == "call"
            ]:
                lines.write(json.dumps([report.nodeid, *outcome]) + "\n")
