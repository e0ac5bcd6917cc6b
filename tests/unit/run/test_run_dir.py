"""Files that are written once, where they can be and where they cannot, and who may read them."""

import json
import zipfile
from dataclasses import asdict, replace
from pathlib import Path

import keras
import models
import pytest

from kdist.errors import ConfigError, KdistError
from kdist.run.result import FORMAT, Result
from kdist.run.run_dir import RunDir
from kdist.storage.lock import LockOwner


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_a_run_dir_is_made_for_its_owner_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "usual").mkdir()
    given = RunDir("of/mine", "x")
    given.write_result(Result())
    for path in (given.path, RunDir(None, "x").path):
        assert mode_of(path) == 0o700
        assert mode_of(path.parent) == mode_of(tmp_path / "usual")


def test_a_run_dir_that_is_there_keeps_its_mode(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    RunDir(tmp_path, "x").write_result(Result())
    assert mode_of(tmp_path) == 0o755


def test_who_only_reads_makes_no_run_dir(run_dir: Path) -> None:
    run = RunDir(run_dir, "name")
    assert (run.result_written_at(), run.read_result()) == (None, {})
    assert not run_dir.exists()


def test_the_record_of_a_newer_version_is_refused(run_dir: Path) -> None:
    folder = RunDir(run_dir, "mine")
    folder.write_result(Result("done", 7))
    assert folder.read_result()["format"] == FORMAT
    (run_dir / "result.json").write_text('{"format": 2, "status": "done", "versions": {"kdist": "9.1"}}')
    with pytest.raises(ConfigError, match=r"result\.json: was written by kdist 9\.1, in format 2; this version reads"):
        folder.read_result()
    # Unreadable, or of a version that knew no formats.
    for content in ("{", '{"status": "done"}'):
        (run_dir / "result.json").write_text(content)
        assert folder.read_result() in ({}, {"status": "done"})


def full(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_result_that_cannot_be_written_hides_no_other_error(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunDir(run_dir, "mine")
    folder.write_result(Result("done", 7))
    before = (run_dir / "result.json").read_text()
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.warns(UserWarning, match=r"result\.json: cannot be written: No space left on device"):
        folder.write_result(Result("failed", 8, error="the first error"))
    for status in ("done", "preempted"):
        with pytest.raises(KdistError, match=r"result\.json: cannot be written: No space left on device"):
            folder.write_result(Result(status, 8))
    assert (run_dir / "result.json").read_text() == before
    assert [path.name for path in run_dir.iterdir()] == ["result.json"]


@pytest.mark.parametrize("when", [(keras.saving, "save_model"), (zipfile.ZipFile, "write")])
def test_a_model_that_cannot_be_written_is_an_error_and_leaves_nothing(
    when: tuple[object, str], run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir.mkdir()
    monkeypatch.setattr(*when, full)
    with pytest.raises(KdistError, match=r"model\.keras: cannot be written: No space.*\n  last checkpoint: none was"):
        RunDir(run_dir, "mine").write_model(models.mlp())
    assert list(run_dir.iterdir()) == []


def test_a_disk_that_is_full_when_hdf5_closes_a_file_is_an_error(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise RuntimeError("Can't decrement id ref count (file write failed: errno = 28, error message = '...')")

    run_dir.mkdir()
    monkeypatch.setattr(keras.saving, "save_model", fail)
    with pytest.raises(KdistError, match=r"model\.keras: cannot be written: No space left on device"):
        RunDir(run_dir, "mine").write_model(models.mlp())
    assert list(run_dir.iterdir()) == []


def test_a_chief_that_was_replaced_writes_nothing_over_what_its_successor_wrote(run_dir: Path) -> None:
    folder = RunDir(run_dir, "mine")
    folder.write_result(Result("done", 7))
    successor = replace(LockOwner.this_process(), boot="another", host="elsewhere")
    (run_dir / ".lock").write_text(json.dumps(asdict(successor)))
    before = (run_dir / "result.json").read_text()
    with pytest.raises(ConfigError, match="was taken over by process"):
        folder.write_result(Result("done", 8))
    with pytest.warns(UserWarning, match="was taken over by process"):
        folder.write_result(Result("failed", 8))
    with pytest.raises(ConfigError, match="was taken over by process"):
        folder.write_model(models.mlp())
    assert (run_dir / "result.json").read_text() == before
    assert {path.name for path in run_dir.iterdir()} == {".lock", "result.json"}


def test_a_model_with_a_lambda_of_an_interactive_session_is_left_to_the_checkpoint(run_dir: Path) -> None:
    loss = eval(compile("lambda y, p: (y - p) ** 2", "<stdin>", "eval"))
    model = models.mlp(loss=loss)
    folder = RunDir(run_dir, "x")
    with pytest.warns(UserWarning, match=r"model\.keras could not be written \(a lambda: could not get source code\)"):
        folder.write_model(model)
