"""`python -m kdist.evaluate`, `kdist.predict` and `kdist.export`, on runs that have ended."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pyarrow.parquet
import pytest
import served_code
from helpers import result_of

import kdist
from kdist.cli import evaluate, export, main, predict
from kdist.run.checkpoint import Checkpoints
from kdist.storage.object_storage import ObjectStorage, StorageError

TRUST = "run.trust=[served_code]"
KEYS = [
    TRUST,
    "run.seed=1",
    "train.steps=30",
    "train.batch_size=16",
    "hooks.checkpoint.every_steps=10",
    "run.verbose=0",
]
#: Loads a SavedModel where kdist cannot be imported, and prints what it makes of an `npz` file.
SERVER = """
import sys
class NoKdist:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "kdist":
            raise ImportError(name)
sys.meta_path.insert(0, NoKdist())
import numpy as np, tensorflow as tf
inputs = dict(np.load(sys.argv[2]))
model = tf.saved_model.load(sys.argv[1])
served = model.serve(inputs if len(inputs) > 1 else inputs["x"])
np.savez(sys.argv[3], **(served if isinstance(served, dict) else {"predictions": served}))
assert not [name for name in sys.modules if name.startswith("kdist")]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The working directory of all of these commands, with the input files."""
    with pytest.MonkeyPatch.context() as patch:
        path = tmp_path_factory.mktemp("after")
        patch.chdir(path)
        patch.setattr("sys.argv", list(sys.argv))
        patch.setattr("kdist.fit.signals.exit_at_once", None)
        patch.setenv("HYDRA_FULL_ERROR", "1")
        x, _ = served_code.columns(40)
        np.savez("in.npz", **x)
        header = "size,numbers_0,numbers_1,numbers_2,label\n"
        rows = (f"{size[0]},{','.join(map(str, numbers))},a\n" for size, numbers in zip(x["size"], x["numbers"]))
        Path("in.csv").write_text(header + "".join(rows))
        columns = {"numbers": list(x["numbers"]), "size": x["size"][:, 0]}
        pyarrow.parquet.write_table(pyarrow.table(columns), "in.parquet")
        yield path


@pytest.fixture(scope="module")
def mine(folder: Path) -> Path:
    return train("mine", "model._target_=served_code.build", "data._target_=served_code.data", "+data.seed=3")


def train(name: str, *keys: str) -> Path:
    assert main.run([*KEYS, *keys, f"run.dir={name}"]) == 0
    return Path(name)


@pytest.fixture
def done(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command, which has to succeed, and returns the one line that it prints."""

    def call(command: Any, *arguments: Any) -> str:
        capsys.readouterr()
        code = command.run([*map(str, arguments), TRUST])
        captured = capsys.readouterr()
        assert code == 0, captured.err
        assert captured.out.count("\n") == 1
        return captured.out.rstrip()

    return call


def metrics(run_dir: Path) -> Any:
    return pytest.approx(result_of(run_dir)["metrics"]["validation"], rel=1e-6)


def test_evaluate_gives_the_numbers_of_the_result(mine: Path, done: Callable[..., str]) -> None:
    found = json.loads(done(evaluate, mine, "--json"))
    assert found == {"run_dir": "mine", "step": 30, "metrics": metrics(mine)}
    line = done(evaluate, mine)
    assert line.startswith(f"eval  | step     30 | loss {found['metrics']['loss']:.4f} | ")
    assert not (mine / "tb" / "evaluator").exists()


def test_evaluate_can_take_an_earlier_step_and_other_data(mine: Path, done: Callable[..., str]) -> None:
    earlier = json.loads(done(evaluate, mine, "--step", 10, "--json"))
    assert earlier["step"] == 10
    assert abs(earlier["metrics"]["loss"] - result_of(mine)["metrics"]["validation"]["loss"]) > 0.01
    model = keras.saving.load_model(mine / "model.keras")
    other = json.loads(done(evaluate, "--json", mine, "data.seed=8"))["metrics"]
    x, y = served_code.data(8)["validation_data"]
    assert other == pytest.approx(model.evaluate(x, y, 16, verbose=0, return_dict=True), rel=1e-5)
    # Of data that is given for this, everything counts.
    other = ["data=custom", "data._target_=served_code.not_validated"]
    whole = json.loads(done(evaluate, mine, "--json", *other))["metrics"]
    x, y = served_code.columns()
    assert whole == pytest.approx(model.evaluate(x, y, 16, verbose=0, return_dict=True), rel=1e-5)


def test_the_best_checkpoint_is_evaluated_predicted_and_exported(
    folder: Path, done: Callable[..., str], tmp_path: Path
) -> None:
    keys = ["model._target_=served_code.build", "data._target_=served_code.data", "+data.seed=3"]
    best = "+hooks.best={_target_: kdist.hooks.BestCheckpoint, mode: max}"
    # The largest loss is that of the first validation.
    run_dir = train("best", *keys, best, "train.validation_every_steps=10", "hooks.checkpoint.keep=1")
    kept = json.loads((run_dir / "best" / "validation.json").read_text())
    assert kept["global_step"] < 30
    found = json.loads(done(evaluate, run_dir, "--best", "--json"))
    assert found["step"] == kept["global_step"]
    assert found["metrics"] == pytest.approx(kept["validation"], rel=1e-5)
    # The step that `best/` alone has, by its number, and by workers.
    step = kept["global_step"]
    by_worker = json.loads(done(evaluate, run_dir, "--step", step, "cluster=1ps1w", "--json"))
    assert by_worker["metrics"] == pytest.approx(found["metrics"], rel=1e-5)
    done(predict, run_dir, "--best", "--input", "in.npz", "--output", tmp_path / "best.npz")
    done(predict, run_dir, "--input", "in.npz", "--output", tmp_path / "last.npz")
    outputs = [np.load(tmp_path / f"{name}.npz") for name in ("best", "last")]
    assert any(not np.allclose(outputs[0][name], outputs[1][name]) for name in outputs[0])
    assert f"step {step:>6} | keras" in done(export, run_dir, "--best", "--to", tmp_path / "x", "--format", "keras")
    # Checkpoints that the run set aside are found, too.
    (run_dir / "best").rename(run_dir / "checkpoints-before-1")
    assert json.loads(done(evaluate, run_dir, "--step", step, "--json"))["metrics"] == pytest.approx(found["metrics"])


def test_the_newest_undamaged_checkpoint_counts(mine: Path, done: Callable[..., str], tmp_path: Path) -> None:
    import shutil

    shutil.copytree(mine, tmp_path / "damaged")
    index = tmp_path / "damaged" / "checkpoints" / "ckpt-30.index"
    index.write_bytes(index.read_bytes()[:40])
    with pytest.warns(UserWarning, match="step 30 is damaged"):
        assert json.loads(done(evaluate, tmp_path / "damaged", "--json"))["step"] == 20


@pytest.mark.parametrize("form", ["npz", "csv", "parquet"])
def test_predict_reads_and_writes_each_format(mine: Path, done: Callable[..., str], form: str, tmp_path: Path) -> None:
    x, _ = served_code.columns(40)
    expected = keras.saving.load_model(mine / "model.keras").predict(x, verbose=0)
    output = tmp_path / f"out.{form}"
    line = done(predict, mine, "--input", f"in.{form}", "--output", output)
    assert line == f"predict | step     30 | 40 rows of kind, price | {output}"
    found = {"npz": dict_of_npz, "csv": dict_of_csv, "parquet": dict_of_parquet}[form](output)
    np.testing.assert_allclose(found["kind"], expected["kind"], rtol=1e-5)
    np.testing.assert_allclose(
        found["price"], expected["price"][:, 0] if form != "npz" else expected["price"], rtol=1e-5
    )
    assert list(tmp_path.iterdir()) == [output]


def dict_of_npz(path: Path) -> Any:
    return dict(np.load(path))


def dict_of_csv(path: Path) -> Any:
    assert path.read_text().splitlines()[0] == "kind_0,kind_1,kind_2,price"
    table = np.loadtxt(path, delimiter=",", skiprows=1)
    return {"kind": table[:, :3], "price": table[:, 3]}


def dict_of_parquet(path: Path) -> Any:
    table = pyarrow.parquet.read_table(path)
    return {name: np.array(table[name].to_pylist()) for name in table.column_names}


def test_predict_takes_what_a_function_returns(mine: Path, done: Callable[..., str]) -> None:
    done(predict, mine, "--input", "in.npz", "--output", "a.npz")
    done(predict, mine, "--input", "served_code.records", "--output", "b.npz")
    np.testing.assert_allclose(np.load("a.npz")["kind"], np.load("b.npz")["kind"], rtol=1e-5)
    Path("b.npz").write_text("old")
    done(predict, mine, "--input", "served_code.records", "--output", "b.npz", "--overwrite", "--step", 0)
    assert np.abs(np.load("a.npz")["kind"] - np.load("b.npz")["kind"]).max() > 0.01


def served(saved_model: Path, inputs: Path, tmp_path: Path) -> Any:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    output = tmp_path / "served.npz"
    command = [sys.executable, "-c", SERVER, str(saved_model), str(inputs), str(output)]
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, check=False, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return dict(np.load(output))


def test_each_export_is_a_version_that_loads_without_kdist(
    mine: Path, done: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "served" / "7").mkdir(parents=True)
    assert done(export, mine, "--to", tmp_path / "served").endswith(f"saved_model | {tmp_path}/served/8")
    done(export, mine, "--to", tmp_path / "served", "--format", "keras", "--step", 10)
    assert sorted(path.name for path in (tmp_path / "served").iterdir()) == ["7", "8", "9"]
    done(predict, mine, "--input", "in.npz", "--output", tmp_path / "own.npz")
    found = served(tmp_path / "served" / "8", Path("in.npz").absolute(), tmp_path)
    np.testing.assert_allclose(found["price"], np.load(tmp_path / "own.npz")["price"], rtol=1e-5)
    x, y = served_code.data()["validation_data"]
    earlier = keras.saving.load_model(tmp_path / "served" / "9" / "model.keras").evaluate(x, y, verbose=0)
    assert earlier[0] == pytest.approx(json.loads(done(evaluate, mine, "--step", 10, "--json"))["metrics"]["loss"])


def test_an_export_that_fails_leaves_nothing(
    mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(self: Any, folder: Path, **_: Any) -> None:
        (folder / "saved_model.pb").write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(keras.Model, "export", fail)
    assert main.run(["export", str(mine), "--to", str(tmp_path), TRUST]) == 2
    assert capsys.readouterr().err == f"kdist: error: --to={tmp_path}: cannot be written: No space left on device\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_averages_are_what_is_evaluated_and_exported(folder: Path, done: Callable[..., str], tmp_path: Path) -> None:
    run_dir = train(
        "averaged", "model._target_=served_code.build", "+model.use_ema=true", "data._target_=served_code.data"
    )
    assert json.loads(done(evaluate, run_dir, "--json"))["metrics"] == metrics(run_dir)
    done(export, run_dir, "--to", tmp_path)
    expected = keras.saving.load_model(run_dir / "model.keras").predict(served_code.columns(40)[0], verbose=0)
    found = served(tmp_path / "1", Path("in.npz").absolute(), tmp_path)
    np.testing.assert_allclose(found["price"], expected["price"], rtol=1e-5)
    # Those of the checkpoint, not the parameters beside them.
    values = Checkpoints(run_dir / "checkpoints").read(30)
    assert values is not None
    assert np.abs(values["parameters/dense_2/kernel"] - values["slots/dense_2/kernel/average"]).max() > 1e-3


@pytest.mark.long
def test_rows_of_a_dynamic_table_are_evaluated_and_exported(
    folder: Path, done: Callable[..., str], tmp_path: Path
) -> None:
    run_dir = train("words", "model._target_=served_code.build_words", "data._target_=served_code.words")
    assert json.loads(done(evaluate, run_dir, "--json"))["metrics"] == metrics(run_dir)
    done(export, run_dir, "--to", tmp_path)
    np.savez("words.npz", x=served_code.words()["x"][:20].numpy().astype(str))
    done(predict, run_dir, "--input", "words.npz", "--output", "words_out.npz")
    found = served(tmp_path / "1", Path("words.npz").absolute(), tmp_path)["predictions"]
    np.testing.assert_allclose(found, np.load("words_out.npz")["predictions"], rtol=1e-5)
    assert np.ptp(found) > 0.01


@pytest.mark.long
def test_a_model_that_is_built_for_its_data(folder: Path, done: Callable[..., str], tmp_path: Path) -> None:
    run_dir = train("subclassed", "model._target_=served_code.build_subclassed", "data._target_=served_code.kinds")
    assert json.loads(done(evaluate, run_dir, "--json"))["metrics"] == metrics(run_dir)
    with pytest.warns(UserWarning, match="the model does not take size, label"):
        done(predict, run_dir, "--input", "in.csv", "--output", "kinds.csv")
    done(export, run_dir, "--to", tmp_path)
    assert (tmp_path / "1" / "saved_model.pb").exists()


def test_a_run_without_checkpoints_has_its_model_file(folder: Path, done: Callable[..., str]) -> None:
    mine = ["model._target_=served_code.build", "data._target_=served_code.data"]
    run_dir = train("unsaved", *mine, "hooks.checkpoint=null")
    assert json.loads(done(evaluate, run_dir, "--json")) == {
        "run_dir": "unsaved",
        "step": 30,
        "metrics": metrics(run_dir),
    }


@pytest.mark.long
def test_a_run_from_python_needs_to_be_told_its_data(folder: Path, done: Callable[..., str], tmp_path: Path) -> None:
    x, y = served_code.columns()
    trainer = kdist.Trainer(served_code.build, run_dir="python")
    trainer.fit(x, y, batch_size=16, steps=30, validation_data=served_code.columns(100, 4), verbose=0)
    found = json.loads(done(evaluate, "python", "--json", "data._target_=served_code.data", "train.batch_size=16"))
    assert found["metrics"] == metrics(Path("python"))
    assert json.loads(done(evaluate, "python", "--json", "data._target_=served_code.data", "--step", 0))["step"] == 0
    done(predict, "python", "--input", "in.npz", "--output", tmp_path / "out.npz")
    np.testing.assert_allclose(
        np.load(tmp_path / "out.npz")["price"], trainer.predict(served_code.columns(40)[0])["price"], rtol=1e-5
    )
    done(export, "python", "--to", tmp_path / "served")
    # Its code is an even better source.
    (Path("python") / "model.keras").unlink()
    code = ["model._target_=served_code.build", "data=custom", "data._target_=served_code.data", "train.batch_size=16"]
    assert json.loads(done(evaluate, "python", "--json", *code))["metrics"] == metrics(Path("python"))


def test_a_run_dir_at_a_url(folder: Path, mine: Path, done: Callable[..., str], tmp_path: Path) -> None:
    url = f"file://{tmp_path}/bucket/mine"
    train(url, "model._target_=served_code.build", "data._target_=served_code.data")
    before = sorted((tmp_path / "bucket").rglob("*"))
    found = json.loads(done(evaluate, url, "--json"))
    assert found["metrics"] == metrics(tmp_path / "bucket" / "mine")
    done(export, url, "--to", tmp_path / "served", "--step", 20)
    assert sorted((tmp_path / "bucket").rglob("*")) == before


BROKEN = {
    "sweep": {"multirun.yaml": "", "lr=1/trial.json": "{}"},
    "broken": {".hydra/config.yaml": "{model: [}"},
    "newer": {
        ".hydra/config.yaml": "{model: {_target_: keras.Model}, optimizer: {warmth: 3}}",
        "result.json": '{"versions": {"kdist": "9.1"}}',
    },
    "format": {"result.json": '{"format": 2, "versions": {"kdist": "9.2"}}'},
    "python_only": {"result.json": '{"status": "done"}'},
    "no_model": {"result.json": '{"status": "done"}', "model.keras": "no archive"},
}

WRONG: list[tuple[Any, list[str], list[str]]] = [
    (evaluate, ["nowhere"], ["nowhere: there is no such run dir"]),
    (evaluate, ["."], [".: is not the run dir of a run"]),
    (evaluate, ["sweep"], ["sweep: is not the run dir of a run", "give that of a trial"]),
    (evaluate, ["broken"], ["broken", "config.yaml"]),
    (evaluate, ["newer"], ["newer: was trained by kdist 9.1", "knows no optimizer.warmth"]),
    (evaluate, ["format"], ["was written by kdist 9.2, in format 2", "reads format 1"]),
    (evaluate, ["python_only"], ["python_only: was trained from Python", "model._target_=package.function"]),
    (export, ["no_model", "--to", "x"], ["model.keras cannot be loaded", "model._target_=package.function"]),
    (evaluate, ["mine", "--step", "7"], ["--step=7", "mine/checkpoints", "there are 0, 10, 20, 30"]),
    (evaluate, ["mine", "--best"], ["--best: no best checkpoint", "BestCheckpoint", "0, 10, 20, 30 in checkpoints"]),
    (evaluate, ["mine", "--best", "--step", "7"], ["--step", "--best", "not allowed"]),
    (evaluate, ["mine", "--step", "x"], ["--step", "'x'"]),
    (evaluate, [], ["required: RUN_DIR; --help"]),
    (evaluate, ["mine", "--jsn"], ["--jsn", "--help"]),
    (evaluate, ["mine", "30"], ["30: is neither an option nor of the form KEY=VALUE"]),
    (evaluate, ["mine", "data.sed=1"], ["mine: data.sed", "+data.sed=..."]),
    (evaluate, ["mine", "+recipe=mnist"], ["recipe", "data=mnist"]),
    (evaluate, ["mine", "data=nope"], ["data=nope", "choose one of"]),
    (evaluate, ["mine", "cluster=4w"], ["cluster=4w", "cluster=2ps2w"]),
    (evaluate, ["mine", "data=custom", "data._target_=served_code.endless"], ["without end"]),
    (evaluate, ["mine", "+model.unit=3"], ["model", "unit"]),
    (evaluate, ["mine", "optimizer.use_ema=true"], ["use_ema", "no moving averages"]),
    (evaluate, ["mine", "model._target_=served_code.build_other"], ["is of another model", "dense_1/kernel"]),
    (evaluate, ["mine", "run.export_max_bytes=50"], ["more than run.export_max_bytes=50", "cluster=2ps2w"]),
    (evaluate, ["file:///nowhere/at/all"], ["is not the run dir of a run"]),
    (predict, ["mine", "--input", "in.npz"], ["--output"]),
    (predict, ["mine", "--input", "nowhere.csv", "--output", "o.csv"], ["nowhere.csv: there is no such file"]),
    (
        predict,
        ["mine", "--input", "in.txt", "--output", "o.csv"],
        ["--input=in.txt", ".npz, .csv, .parquet", "No module"],
    ),
    (predict, ["mine", "--input", "in.csv", "--output", "o.txt"], ["--output=o.txt", ".npz, .csv, .parquet"]),
    (predict, ["mine", "--input", "in.csv", "--output", "in.npz"], ["--output=in.npz: exists", "--overwrite"]),
    (predict, ["mine", "--input", "in.csv", "--output", "no/o.npz"], ["--output=no/o.npz", "no folder no"]),
    (
        predict,
        ["mine", "--input", "other.csv", "--output", "o.csv"],
        ["no column numbers", "float32 (3,)", "it has a, b"],
    ),
    (predict, ["mine", "--input", "text.csv", "--output", "o.csv"], ["column size: has text", "int32 (1,)"]),
    (predict, ["mine", "--input", "half.csv", "--output", "o.csv"], ["row 2 has 1 values"]),
    (predict, ["mine", "--input", "empty.csv", "--output", "o.csv"], ["at least 1"]),
    (predict, ["mine", "--input", "wide.npz", "--output", "o.csv"], ["column numbers", "shape (4,)", "float32 (3,)"]),
    (predict, ["mine", "--input", "served_code.no", "--output", "o.csv"], ["--input", "has no no"]),
    (predict, ["mine", "--input", "os.getcwd", "--output", "o.csv"], ["--input", "Python's own"]),
    (export, ["mine", "--to", "in.csv/x"], ["--to=in.csv/x: cannot be written: Not a directory"]),
    (export, ["mine", "--to", "s3://b/x"], ["--to=s3://b/x", "folder"]),
    (export, ["mine", "--to", "x", "--format", "h5"], ["--format=h5", "saved_model, keras, onnx"]),
    (export, ["mine", "--to", "x", "--format", "onnx"], ["pip install tf2onnx"]),
]


@pytest.mark.parametrize(("command", "arguments", "said"), WRONG, ids=lambda value: str(value)[-60:])
def test_what_is_wrong_is_said_once(
    command: Any, arguments: list[str], said: list[str], mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("other.csv").write_text("a,b\n1,2\n")
    Path("text.csv").write_text("numbers_0,numbers_1,numbers_2,size\n1,2,3,x\n")
    Path("half.csv").write_text("a,b\n1,2\n3\n")
    Path("empty.csv").write_text("a,b\n")
    for name, files in BROKEN.items():
        for path, content in files.items():
            (Path(name) / path).parent.mkdir(parents=True, exist_ok=True)
            (Path(name) / path).write_text(content)
    np.savez("wide.npz", numbers=np.zeros((2, 4)), size=np.zeros(2))
    before = sorted(Path().rglob("*"))
    assert command.run([*arguments, *([TRUST] if arguments else [])]) == 2
    captured = capsys.readouterr()
    # What the user's code prints comes before.
    assert captured.err.removeprefix("reading\n").startswith("kdist: error: ")
    assert captured.err.count("kdist: error") == 1
    assert "Traceback" not in captured.err
    for words in said:
        assert words in captured.err
    assert captured.out == ""
    assert sorted(Path().rglob("*")) == before


def test_storage_that_fails_can_be_asked_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"file://{tmp_path}/mine"
    train(url, "model._target_=served_code.build", "data._target_=served_code.data")

    def fail(*_: Any) -> None:
        raise StorageError(f"{url}: storage fails: out of order")

    monkeypatch.setattr(ObjectStorage, "fetch", fail)
    assert main.run(["evaluate", url, TRUST]) == 75
    assert capsys.readouterr().err == f"kdist: error: {url}: storage fails: out of order\n"


def test_code_of_the_run_has_to_be_trusted_again(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["evaluate", str(mine)]) == 2
    assert "give run.trust=[served_code] there" in capsys.readouterr().err


def test_a_run_that_has_just_begun_can_be_asked_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from kdist.storage.folder import Folder
    from kdist.storage.lock import RunLock

    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "config.yaml").write_text(
        "model: {_target_: keras.Sequential}\ndata: {_target_: keras.Model}\n"
    )
    with RunLock(Folder(tmp_path)):
        assert main.run(["evaluate", str(tmp_path)]) == 75
    assert "has just begun: try again later" in capsys.readouterr().err
    assert main.run(["evaluate", str(tmp_path)]) == 2


def test_help_needs_no_tensorflow(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom kdist.cli import evaluate, export, predict\n"
        "for command in (evaluate, export, predict):\n"
        "    assert command.run(['--help']) == 0\n"
        "    command.run(['nowhere', '--to=x', '--input=x.csv', '--output=y.csv'])\n"
        "assert not {'tensorflow', 'keras'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage: kdist ") == 3
