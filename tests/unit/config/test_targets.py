"""The allow-list of `_target_`, and what else a config or a file must not bring about."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import pytest
import yaml
from helpers import REPO

import kdist
from kdist.config import targets as trusted
from kdist.config.build import build_model, check_targets
from kdist.config.schema import Config, OptimizerConfig, RunConfig
from kdist.errors import ConfigError

LINEAR = {"_target_": "kdist.recipes.linear.build_model"}
DATA = {"_target_": "kdist.recipes.linear.load_data"}


@pytest.fixture(autouse=True)
def trust_ends_with_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trusted, "_trusted", set())


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package of somebody's; a test sees in `sys.modules` whether it was imported."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "somebodys").mkdir()
    (tmp_path / "somebodys" / "__init__.py").write_text("")
    (tmp_path / "somebodys" / "models.py").write_text(
        "import functools, keras\n"
        "from os import system\n"
        "from numpy import load\n"
        "from keras.utils import get_file\n"
        "def build(units=3): return keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(units)])\n"
        "small = functools.partial(build, units=1)\n"
        "run = functools.partial(system, 'id')\n"
    )
    yield "somebodys"
    for name in [name for name in sys.modules if name.partition(".")[0] == "somebodys"]:
        del sys.modules[name]


def targets_in(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if node.get("_target_"):
            yield node["_target_"]
        for value in node.values():
            yield from targets_in(value)


def config_with(**parts: Any) -> Config:
    return Config(**{"model": LINEAR, "data": DATA, **parts})


def test_everything_that_ships_is_trusted() -> None:
    files = (yaml.safe_load(path.read_text()) for path in (REPO / "conf").rglob("*.yaml"))
    targets = {target for content in files for target in targets_in(content)}
    assert len(targets) > 10
    hooks = {str(index): {"_target_": target} for index, target in enumerate(sorted(targets))}
    trusted.check("hooks", hooks)
    for target in targets:
        module, _, name = target.rpartition(".")
        trusted.check_origin("x", target, getattr(__import__(module, fromlist=[name]), name))


@pytest.mark.parametrize(
    "target",
    [
        "keras.Sequential",
        "keras.optimizers.schedules.CosineDecay",
        "keras.losses.Huber",
        "keras.applications.MobileNet",
        "keras.saving.load_model",
    ],
)
def test_keras_is_trusted(target: str) -> None:
    trusted.check("model", {"_target_": target})
    module, _, name = target.rpartition(".")
    trusted.check_origin("model", target, getattr(__import__(module, fromlist=[name]), name))


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("os.system", "os is not trusted"),
        ("subprocess.Popen", "subprocess is not trusted"),
        ("builtins.eval", "builtins is not trusted"),
        ("kerasx.build", r"run\.trust=\[kerasx\].*kdist\.trust\(\"kerasx\"\)"),
        ("tensorflow.saved_model.load", "tensorflow is not trusted"),
        ("build", "not of the form"),
        (".os.system", "not of the form"),
        ("keras..src.x", "not of the form"),
        ("kdist.trust", "kdist is not trusted"),
        ("kdist.launch.program.main", "kdist is not trusted"),
        ("kdist.config.build.importlib.import_module", "kdist is not trusted"),
        ("kdist.hooks.base._private", "is private"),
        ("keras._tf_keras.keras.config.enable_unsafe_deserialization", "is private"),
        ("keras.src.saving.serialization_lib.enable_unsafe_deserialization", "private to Keras"),
        ("keras.config.enable_unsafe_deserialization", "keras.config changes"),
        ("keras.utils.get_file", "writes what it downloads"),
        ("keras.layers.TFSMLayer", "runs the graph"),
        ("keras.ops.cond", "calls functions"),
    ],
)
def test_what_is_not_on_the_list_is_refused_wherever_it_is_named(target: str, why: str) -> None:
    bad = {"_target_": target}
    places: list[tuple[str, dict[str, Any]]] = [
        ("model", {"model": bad}),
        ("data", {"data": bad}),
        ("hooks.mine", {"hooks": {"mine": bad}}),
        ("hooks.mine.deep.deeper", {"hooks": {"mine": {**LINEAR, "deep": {"deeper": bad}}}}),
        ("hooks.mine.many[0]", {"hooks": {"mine": {**LINEAR, "many": [bad]}}}),
        ("optimizer.learning_rate", {"optimizer": OptimizerConfig(learning_rate=bad)}),
        ("loss", {"loss": bad}),
        ("metrics[1]", {"metrics": ["accuracy", bad]}),
    ]
    for key, parts in places:
        with pytest.raises(ConfigError, match=why) as error:
            check_targets(config_with(**parts))
        assert str(error.value).startswith(f"{key}._target_={target}: ")


def test_a_package_is_imported_only_if_it_is_trusted(package: str) -> None:
    config = config_with(model={"_target_": "somebodys.models.build"})
    for refuse in (check_targets, build_model):
        with pytest.raises(ConfigError, match=r"somebodys is not trusted.*run\.trust=\[somebodys\]"):
            refuse(config)
    assert "somebodys" not in sys.modules
    kdist.trust(package)
    check_targets(config)
    assert "somebodys.models" in sys.modules


def test_the_trust_of_a_run_is_in_its_config(package: str) -> None:
    parts: dict[str, Any] = {"loss": "mse", "optimizer": OptimizerConfig(name="sgd")}
    config = config_with(model={"_target_": "somebodys.models.small"}, run=RunConfig(trust=[package]), **parts)
    check_targets(config)
    assert build_model(config).output_shape == (None, 1)


def test_trust_goes_to_a_package_and_what_is_in_it(package: str) -> None:
    trusted.check("model", {"_target_": "somebodys.models.build"}, ["somebodys.models"])
    for target in ("somebodys.build", "somebodys.models_too.build", "somebodys_too.build"):
        with pytest.raises(ConfigError, match="is not trusted"):
            trusted.check("model", {"_target_": target}, ["somebodys.models"])


@pytest.mark.parametrize(
    ("name", "origin"), [("system", "posix"), ("load", "numpy"), ("get_file", "keras.src"), ("run", "posix")]
)
def test_what_a_trusted_module_imported_from_elsewhere_is_refused(package: str, name: str, origin: str) -> None:
    config = config_with(model={"_target_": f"somebodys.models.{name}"}, run=RunConfig(trust=[package]))
    with pytest.raises(ConfigError, match=rf"somebodys\.models\.{name}: comes from {origin}"):
        check_targets(config)


@pytest.mark.parametrize("name", ["os", "subprocess", "builtins", "importlib.util"])
def test_pythons_own_library_cannot_be_trusted(name: str) -> None:
    for trust in (kdist.trust, lambda name: RunConfig(trust=[name])):
        with pytest.raises(ConfigError, match="is Python's own"):
            trust(name)


@pytest.mark.parametrize("name", ["", "a b", "a.", "../a", "*"])
def test_what_is_no_name_of_a_package_cannot_be_trusted(name: str) -> None:
    with pytest.raises(ConfigError, match="is not the name of a package"):
        kdist.trust(name)


def test_run_trust_counts_on_the_command_line_only() -> None:
    of = trusted.of_command_line
    assert of([], []) == []
    assert of(["a", "b"], ["run.trust=[a,b]", "train.steps=3"]) == ["a", "b"]
    assert of(["a"], ["++run.trust=['a']"]) == ["a"]
    # In a sweep each job has one of the lists.
    assert of(["b"], ["run.trust=[a],[b]"]) == ["b"]
    for overrides in ([], ["run.trust=[b]"], ["run.name=a"], ["run.trust=${run.others}"]):
        with pytest.raises(ConfigError, match=r"run\.trust: a is not from the command line"):
            of(["a"], overrides)
    kdist.trust("of_python")
    assert of([], []) == ["of_python"]


@pytest.mark.parametrize("value", [False, None, 0, "true"])
def test_the_safe_mode_of_keras_cannot_be_turned_off(value: Any) -> None:
    node = {"_target_": "keras.saving.load_model", "filepath": "x.keras", "safe_mode": value}
    with pytest.raises(ConfigError, match="safe mode"):
        check_targets(config_with(model=node))
    check_targets(config_with(model={**node, "safe_mode": True}))


def test_a_config_brings_no_code_in_a_lambda_layer() -> None:
    layer = keras.saving.serialize_keras_object(keras.layers.Lambda(lambda x: x))
    with pytest.raises(ValueError, match="unsafe deserialization|arbitrary code"):
        build_model(config_with(model={"_target_": "keras.layers.deserialize", "config": layer}))


def calls_in(folder: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Every call in the Python files of a folder: where, the dotted name that is called, constant keywords."""
    for path in (REPO / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                keywords = {k.arg or "**": getattr(k.value, "value", ...) for k in node.keywords}
                yield f"{path.relative_to(REPO)}:{node.lineno}", ast.unparse(node.func), keywords


def test_no_shell_and_no_unsafe_loading() -> None:
    shells = ("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "eval", "exec")
    pickles = []
    for folder in ("kdist", "recipes"):
        for where, name, keywords in calls_in(folder):
            assert name not in shells, where
            assert "shell" not in keywords, where
            if name in ("np.load", "numpy.load"):
                assert keywords.get("allow_pickle") is False, where
            if name.endswith("load_model"):
                assert keywords.get("safe_mode") is True, where
            if name.endswith(("pickle.load", "pickle.loads")):
                pickles.append(where.partition(":")[0])
    # Between processes of one run, in a folder that only its owner can enter.
    assert set(pickles) <= {"kdist/data/pickling.py"}
