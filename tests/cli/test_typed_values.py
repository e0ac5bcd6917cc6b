"""Whole runs of what people type in a shell."""

from pathlib import Path

from commands import kdist
from helpers import result_of


def test_a_run_in_a_folder_with_a_space_and_other_letters(tmp_path: Path) -> None:
    done = kdist("recipe=linear", "train.steps=20", "run.dir=ein lauf ü", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert result_of(tmp_path / "ein lauf ü")["status"] == "done"
    assert "run dir   ein lauf ü      tensorboard --logdir 'ein lauf ü'" in done.stdout


def test_a_sweep_over_recipes_needs_no_plus(tmp_path: Path) -> None:
    keys = ["data=linear", "model=linear", "train.steps=5", "run.dir=ein sweep ü"]
    done = kdist("-m", "recipe=linear,mnist_mlp", *keys, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [result_of(tmp_path / "ein sweep ü" / number)["global_step"] for number in ("0", "1")] == [5, 5]
