"""A folder does the same on a disk, at a URL, and on a disk whose files go to a URL."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from kdist.storage.folder import Folder
from kdist.storage.mirror import Mirror
from kdist.storage.object_storage import ObjectStorage


@pytest.fixture(params=["a disk", "a URL", "a mirror"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Folder]:
    url, here = f"file://{tmp_path}/there", tmp_path / "here"
    kinds = {"a disk": Folder(here), "a URL": ObjectStorage(url, 1.0, here), "a mirror": Mirror(url, 1.0, here)}
    folder = kinds[request.param]
    with folder if isinstance(folder, Mirror) else nullcontext():
        yield folder


def make(folder: Folder, *names: str) -> None:
    """Makes files where the folder has its files, or copies of them, on this machine, and publishes them."""
    for name in names:
        (folder.path / name).parent.mkdir(parents=True, exist_ok=True)
        (folder.path / name).write_text(f"content of {name}")
    folder.publish(names)


def test_a_file_that_is_written_is_read(folder: Folder) -> None:
    assert folder.read("trial.json") is None
    assert folder.modified("trial.json") is None
    folder.write("trial.json", b"{}")
    assert folder.read("trial.json") == b"{}"
    assert abs((folder.modified("trial.json") or 0) - time.time()) < 60
    folder.write("0/trial.json", b"{}")
    assert (folder / "0").read("trial.json") == b"{}"


def test_names_are_relative_to_the_folder_below(folder: Folder) -> None:
    make(folder, "checkpoints/ckpt-1.index", "checkpoints/of/others", "result.json")
    assert folder.names("checkpoints") == {"ckpt-1.index", "of/others"}
    assert {"checkpoints/ckpt-1.index", "checkpoints/of/others", "result.json"} <= folder.names()
    assert folder.names("tb") == set()


def test_folders_beside_an_ending_need_not_be_looked_at(tmp_path: Path) -> None:
    make(folder := Folder(tmp_path), "1/result.json", "1/checkpoints/ckpt-1.index", "2/result.json")
    assert folder.names(ends=("result.json",)) == {"1/result.json", "2/result.json"}


def test_a_reader_begins_with_an_empty_folder(tmp_path: Path) -> None:
    mirror = Mirror(f"file://{tmp_path}/there", 1.0, tmp_path / "here")
    make(Folder(tmp_path / "here-evaluator-0"), "model.keras", "checkpoints/ckpt-1.index")
    with mirror.open_for("evaluator:0") as opened:
        assert Folder(opened.path).names() <= {".lock"}


def test_files_that_are_published_can_be_fetched_until_they_are_deleted(folder: Folder) -> None:
    make(folder, "checkpoints/data", "checkpoints/index")
    folder.fetch(["checkpoints/data", "checkpoints/index"])
    assert (folder.path / "checkpoints/data").read_text() == "content of checkpoints/data"
    folder.delete(["checkpoints/index", "checkpoints/data", "checkpoints/never there"])
    assert folder.names("checkpoints") == set()


@pytest.mark.parametrize("names", [None, ["data"]])
def test_files_are_moved_to_another_folder(folder: Folder, names: list[str] | None) -> None:
    make(folder, "checkpoints/data", "checkpoints/index")
    folder.move("checkpoints", "aside", names)
    moved = {"data", "index"} if names is None else {"data"}
    assert folder.names("aside") == moved
    assert folder.names("checkpoints") == {"data", "index"} - moved


def test_a_reader_sees_what_is_published(folder: Folder) -> None:
    make(folder, "result.json")
    with folder.open_for("evaluator:0") as opened:
        assert opened.names() - {".lock"} == {"result.json"}
        opened.fetch(["result.json"])
        assert (opened.path / "result.json").read_text() == "content of result.json"
    assert (folder.path / "result.json").exists()
