"""Recipes by the command in their first comment; the long ones shortened. `recipes/README.md` has their last lines."""

import gzip
import re
import signal
from pathlib import Path

import keras  # noqa: F401 - it changes the environment, which no test may do
import pytest
from commands import Command, kdist
from helpers import REPO, result_of, wait_until
from kdist.recipes.criteo import write_sample

pytestmark = pytest.mark.cluster


def command_of(recipe: str) -> list[str]:
    """The arguments in the first comment behind the package line."""
    for line in (REPO / "conf" / "recipe" / f"{recipe}.yaml").read_text().splitlines():
        if line.startswith("# python -m kdist "):
            return line.removeprefix("# python -m kdist ").split()
    raise AssertionError(f"{recipe} names no command")


def run(recipe: str, tmp_path: Path, *more: str) -> str:
    done = kdist(*command_of(recipe), "run.dir=D", *more, cwd=tmp_path, timeout=150)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert result_of(tmp_path / "D")["status"] == "done"
    return done.stdout


@pytest.mark.long
def test_linear_finds_the_line(tmp_path: Path) -> None:
    lines = run("linear", tmp_path).splitlines()
    last = [line for line in lines if line.startswith("line  | step   1000/1000")][-1]
    weight, bias = (float(number) for number in re.findall(r"[wb] (-?[\d.]+)", last))
    assert weight == pytest.approx(2, abs=0.1)
    assert bias == pytest.approx(10, abs=0.1)


@pytest.mark.long
def test_mnist_towers_writes_and_reads_tfrecords(tmp_path: Path) -> None:
    lines = run("mnist_towers", tmp_path, "train.steps=100", "train.validation_every_steps=null").splitlines()
    assert any(re.match(r"data      4 TFRecord files in data/mnist_tfrecords, 4 of them written now", x) for x in lines)
    assert any(re.fullmatch(r"speed \| step    100/100 \| [\d.]+ examples/sec \| [\d.]+ sec/batch", x) for x in lines)
    assert "mirrored on local" in lines[0]
    assert result_of(tmp_path / "D")["workers"] == 2


@pytest.mark.long
def test_recommender_looks_rows_up(tmp_path: Path) -> None:
    small = ["model.num_users=3000", "model.num_items=1000", "data.num_ratings=60000", "data.num_validation=5000"]
    lines = run("recommender", tmp_path, *small, "train.steps=300", "train.batch_size=512").splitlines()
    assert lines[2] == "data      3000 users x 1000 items, 60000 + 5000 ratings, noise 0.70 (the floor of the RMSE)"
    assert "users/embeddings: looked up by rows" in (tmp_path / "D" / "placement.txt").read_text()
    # Better than the mean rating, whose error is 1.47 times the noise.
    assert result_of(tmp_path / "D")["metrics"]["validation"]["rmse"] < 1.35 * 0.7


SMALL_CRITEO = ["model.max_rows=500", "model.dim=4", "data.num_validation=2000", "train.batch_size=64"]


@pytest.mark.long
def test_criteo_generates_clicks(tmp_path: Path) -> None:
    lines = run("criteo", tmp_path, *SMALL_CRITEO, "train.steps=100", "model.interaction=cross").splitlines()
    start = "data      generated, 44921 ids in 26 columns, 2000 rows to validate with: "
    assert re.fullmatch(start + r"the AUC of the true probabilities is 0\.\d{4}", lines[2])
    assert "ids_1/embeddings: looked up by rows" in (tmp_path / "D" / "placement.txt").read_text()
    # Better than chance.
    metrics = result_of(tmp_path / "D")["metrics"]
    assert metrics["validation"]["auc"] > 0.55
    assert [name for name in metrics["train"] if name.startswith("progressive")] == ["progressive_auc"]
    assert any(f"| progressive_auc {metrics['train']['progressive_auc']:.4f} |" in line for line in lines)


@pytest.mark.long
def test_criteo_reads_tsv_files_and_names_a_wrong_line(tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    for number in range(2):
        write_sample(folder / f"{number}.tsv.gz", 2001, seed=number)
    files = [*SMALL_CRITEO, "data.path=files", "train.steps=60"]
    lines = run("criteo", tmp_path, *files, "data.num_validation=150").splitlines()
    assert lines[2] == "data      2 files in files, 150 rows of every 20th line to validate with"
    wrong = folder / "0.tsv.gz"
    with gzip.open(wrong, "ab") as file:
        file.write(b"1\t2\t3\n")
    done = kdist(*command_of("criteo"), "run.dir=E", *files, cwd=tmp_path, timeout=150)
    assert done.returncode == 1
    assert re.search(rf"worker:[01]: InvalidArgumentError: {wrong}, line 2002: 3 columns: must be 40", done.stderr)
    log = re.search(r"^  full traceback: (\S+)$", done.stderr, re.MULTILINE)
    assert log is not None
    assert "Traceback (most recent call last)" in (tmp_path / log[1]).read_text(encoding="utf-8")


@pytest.mark.long
def test_criteo_without_an_end_is_scored_evaluated_and_exported_until_it_is_stopped(tmp_path: Path) -> None:
    log, run_dir = tmp_path / "log", tmp_path / "D"
    log.touch()
    endless = ["+recipe=criteo", "cluster=1ps1w1e", "train.steps=null", f"run.dir={run_dir}", *SMALL_CRITEO]
    often = ["hooks.checkpoint.every_steps=50", "hooks.logging.every_steps=50"]
    export = "+hooks.export={_target_: kdist.hooks.Export, every_steps: 50}"
    process = Command(*endless, *often, export, cwd=tmp_path, stdout=log)
    try:
        # The evaluator, which is late, has seen trained values.
        wait_until(lambda: re.search(r"^eval  \| step +[1-9]", log.read_text(), re.MULTILINE), 90, log.read_text)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 143
    finally:
        process.kill()
    result, said = result_of(run_dir), log.read_text()
    assert (result["status"], result["stopped_by"]) == ("preempted", "SIGTERM")
    assert f"save  | step {result['global_step']:>6} | checkpoints/ckpt-{result['global_step']}\n" in said
    assert re.search(r"^save  \| step +50 \| D/saved_model$", said, re.MULTILINE)
    assert (run_dir / "saved_model" / "saved_model.pb").exists()
    assert len(re.findall(r"^train .* \| progressive_auc 0\.\d{4} \|", said, re.MULTILINE)) >= 2
    assert 0 < result["metrics"]["train"]["progressive_auc"] < 1


@pytest.mark.long
@pytest.mark.parametrize("interaction", ["dot", "cross"])
def test_criteo_comes_close_to_the_auc_of_the_true_probabilities(interaction: str, tmp_path: Path) -> None:
    whole = [*command_of("criteo"), f"model.interaction={interaction}", "run.dir=D"]
    done = kdist(*whole, cwd=tmp_path, timeout=600)
    assert done.returncode == 0, done.stderr
    (data,) = (line for line in done.stdout.splitlines() if line.startswith("data "))
    ceiling = float(data.rpartition(" ")[2])
    assert ceiling - result_of(tmp_path / "D")["metrics"]["validation"]["auc"] < 0.01


def test_every_recipe_is_in_the_readme_with_its_command_and_last_line() -> None:
    text = (REPO / "recipes" / "README.md").read_text()
    for path in (REPO / "conf" / "recipe").glob("*.yaml"):
        assert "python -m kdist " + " ".join(command_of(path.stem)) in text
