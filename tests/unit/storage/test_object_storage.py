"""Run dirs on object storage: what is where after which failure, and what a message may say."""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import fsspec
import pytest
from fakes import FakeClock, begun, held_by
from fsspec.implementations.memory import MemoryFileSystem
from helpers import wait_until

from kdist.errors import CheckpointError, ConfigError, KdistError
from kdist.parameters.tables.changed_rows import DeltaBase
from kdist.run.checkpoint import Checkpoints
from kdist.run.run_dir import RunDir
from kdist.storage import lock
from kdist.storage.lock import RunLock
from kdist.storage.mirror import Mirror
from kdist.storage.object_storage import UNFINISHED_SUFFIX, ObjectStorage, StorageError, check_url, working_folder

URL = "memory://bucket/run"
NO_WAIT = 0.1
CHANGES = ("put_file", "pipe_file", "rm_file", "cp_file", "mv")
READS = ("get_file", "cat_file", "find", "modified")


class Killed(BaseException):
    """The process is gone."""


class FaultyStorage(MemoryFileSystem):
    """Memory that notes its operations, and fails when `fault`, which gets operation and name, raises."""

    operations: ClassVar[list[tuple[str, str]]] = []
    fault: ClassVar[Callable[[str, str], None] | None] = None

    def _noted(self, operation: str, path: str) -> None:
        name = str(path).partition("/run/")[2]
        self.operations.append((operation, name))
        if type(self).fault is not None:
            type(self).fault(operation, name)

    def put_file(self, lpath: str, rpath: str, **_: Any) -> None:
        content = Path(lpath).read_bytes()
        try:
            self._noted("put_file", rpath)
        except BaseException:
            # What has arrived of it stays there.
            super().pipe_file(rpath, content[: len(content) // 2])
            raise
        super().pipe_file(rpath, content)


def _note(name: str) -> Callable[..., Any]:
    def operation(self: FaultyStorage, path: str, *others: Any, **options: Any) -> Any:
        self._noted(name, path)
        return getattr(MemoryFileSystem, name)(self, path, *others, **options)

    return operation


for _name in (*CHANGES[1:], *READS):
    setattr(FaultyStorage, _name, _note(_name))


@pytest.fixture(autouse=True)
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[FaultyStorage]]:
    fsspec.register_implementation("memory", FaultyStorage, clobber=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield FaultyStorage
    FaultyStorage.fault = None
    FaultyStorage.operations.clear()
    MemoryFileSystem.store.clear()
    fsspec.register_implementation("memory", MemoryFileSystem, clobber=True)


class Values:
    """Saves the number of a step, in two files with data and an index."""

    shapes: ClassVar[dict[str, tuple[int, ...]]] = {}

    def __init__(self, step: int) -> None:
        self._step = step

    def begin_save(self, prefix: Path, since: Any = None, *, aside: bool = True) -> Future[None]:
        def write() -> None:
            for part in (0, 1):
                Path(f"{prefix}.data-0000{part}-of-00002").write_text(f"data of {self._step}")
            Path(f"{prefix}.index").write_text(f"index of {self._step}")

        return begun(write, aside=aside)

    def restore(self, path: Path, deltas: Any = ()) -> None:
        raise NotImplementedError


def mirror() -> Mirror:
    return Mirror(URL, NO_WAIT)


def checkpoints_of(of: Mirror, folder: str = "checkpoints") -> Checkpoints:
    return Checkpoints(of.path / folder, of)


def save(of: Mirror, *steps: int, keep: int = 5) -> None:
    for step in steps:
        checkpoints_of(of).write(step, Values(step), keep=keep)


def objects() -> dict[str, str]:
    """The objects at the URL, except the lock."""
    found = {path.partition("/run/")[2]: file.getvalue().decode() for path, file in MemoryFileSystem.store.items()}
    return {name: content for name, content in found.items() if not name.startswith(".lock")}


def files_of(*steps: int, folder: str = "checkpoints") -> dict[str, str]:
    """The complete checkpoints at the URL."""
    found = {}
    for step in steps:
        found |= {f"{folder}/ckpt-{step}.data-0000{part}-of-00002": f"data of {step}" for part in (0, 1)}
        found[f"{folder}/ckpt-{step}.index"] = f"index of {step}"
    return found


def move_to_another_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str = "other") -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))


def failing(error: Exception, *operations: str, of: str = "") -> Callable[[str, str], None]:
    def fault(operation: str, name: str) -> None:
        # The lock comes and goes, so that it is about what the test is about.
        if operation in operations and not name.startswith(".lock") and of in name:
            raise error

    return fault


# URLs


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://key:hunter2@bucket/run", r"run\.dir=s3://\*\*\*: has a user"),
        ("s3://bucket/run?secret=hunter2", r"run\.dir=s3://\*\*\*: has a user, a query"),
        ("s3://key:hunter2/run", r"run\.dir=s3://\*\*\*: has a user"),
        ("az://bucket/run", "unknown protocol az; choose one of s3, gs, file, memory"),
        ("file://run", "has to be absolute, as file:///folder"),
        ("s3://", "names no bucket; write s3://bucket/folder"),
    ],
)
def test_urls_that_are_refused(url: str, message: str) -> None:
    for refused in (check_url, working_folder, lambda url: RunDir(url, "x")):
        with pytest.raises(ConfigError, match=message) as caught:
            refused(url)
        assert "hunter2" not in str(caught.value)


def test_a_path_that_was_a_url_makes_no_folder_of_that_name() -> None:
    with pytest.raises(ConfigError, match=r"run\.dir=s3://\.\.\.: is a Path; give a URL as a string"):
        RunDir(Path("s3://bucket/run"), "x")


def test_each_url_has_a_private_folder_of_its_own() -> None:
    folders = set()
    for url in (URL, "memory://bucket/other"):
        with Mirror(url, NO_WAIT) as entered:
            assert entered.path.stat().st_mode & 0o777 == 0o700
        folders.add(entered.path)
        assert Mirror(f"{url}/", NO_WAIT).path == entered.path
    assert len(folders) == 2


# Failures of single operations


def test_storage_that_fails_for_a_while_costs_one_warning(storage: type[FaultyStorage], tmp_path: Path) -> None:
    clock = FakeClock()

    def fault(operation: str, name: str) -> None:
        if clock.now < 20:
            raise ConnectionError("reset by peer")

    def sleep(seconds: float) -> None:
        clock.now += seconds

    storage.fault = fault
    (tmp_path / "name").write_text("content")
    with pytest.warns(
        UserWarning, match=rf"{URL}: storage fails: ConnectionError: reset by peer; trying .* 60"
    ) as warned:
        ObjectStorage(URL, 60, tmp_path, sleep=sleep, clock=clock).publish(["name"])
    assert len(warned) == 1
    assert 20 <= clock.now <= 25
    assert objects() == {"name": "content"}


def test_storage_that_keeps_failing_is_an_error_when_the_time_is_over(storage: type[FaultyStorage]) -> None:
    clock = FakeClock()

    def sleep(seconds: float) -> None:
        clock.now += seconds

    storage.fault = failing(TimeoutError("no answer"), "find")
    with (
        pytest.warns(UserWarning, match="again"),
        pytest.raises(StorageError, match=f"{URL}: storage fails: TimeoutError: no answer"),
    ):
        ObjectStorage(URL, 60, sleep=sleep, clock=clock).sizes()
    assert 50 < clock.now <= 60


def test_slow_storage_is_no_failure(storage: type[FaultyStorage]) -> None:
    clock = FakeClock()

    def slow(operation: str, name: str) -> None:
        clock.now += 300

    storage.fault = slow
    ObjectStorage(URL, 60, clock=clock).write("name", b"content")
    assert objects() == {"name": "content"}


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (PermissionError("Forbidden"), "access is denied: PermissionError: Forbidden"),
        (FileNotFoundError("NoSuchBucket"), r"there is no such bucket or object \(FileNotFoundError: NoSuchBucket\)"),
        (type("NoCredentialsError", (Exception,), {})("Unable to locate"), "access is denied: NoCredentialsError"),
        # As gcsfs says it.
        (OSError("Forbidden: b/bucket/o"), "access is denied: OSError: Forbidden: b/bucket/o"),
        (type("HttpError", (Exception,), {"code": 401})("Anonymous caller"), "access is denied: HttpError: Anonymous"),
    ],
)
def test_what_is_refused_is_not_tried_again(storage: type[FaultyStorage], error: Exception, message: str) -> None:
    storage.fault = failing(error, "find")
    with pytest.raises(StorageError, match=message):
        ObjectStorage(URL, 60, sleep=pytest.fail).sizes()
    # At the start of a run, it is what is wrong with run.dir.
    with pytest.raises(ConfigError, match=rf"^run\.dir={URL}: {message}"), mirror():
        pytest.fail("it has started")
    # Nobody is kept out by what did not start.
    storage.fault = None
    with mirror():
        pass


def test_no_message_says_a_secret(storage: type[FaultyStorage], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI")
    said = "http://user:hunter2@host/bucket?X-Signature=abc123 refused wJalrXUtnFEMI\nand more"
    storage.fault = failing(OSError(said), "find")
    with pytest.raises(StorageError) as caught:
        ObjectStorage(URL, 0).sizes()
    assert "http://***@host/bucket?*** refused *** and more" in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    message = r"^run\.dir=gs://bucket/run: needs the package gcsfs: pip install 'gcsfs>=2024.6'$"
    with pytest.raises(ConfigError, match=message), Mirror("gs://bucket/run", NO_WAIT):
        pytest.fail("it has started")
    with pytest.raises(ConfigError, match=message):
        Mirror("gs://bucket/run", NO_WAIT).check()


def test_another_process_connects_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    here = ObjectStorage(URL, NO_WAIT)
    here.write("name", b"content")
    received = pickle.loads(pickle.dumps(here))

    def refuses(*_: object, **__: object) -> None:
        raise PermissionError("Forbidden")

    monkeypatch.setattr(fsspec, "url_to_fs", refuses)
    assert here.read("name") == b"content"
    with pytest.raises(StorageError, match="Forbidden"):
        received.read("name")


# Checkpoints


def test_an_index_is_uploaded_last_and_deleted_first(storage: type[FaultyStorage]) -> None:
    with mirror() as entered:
        save(entered, 10)
        storage.operations.clear()
        save(entered, 20, keep=1)
        changes = [
            (operation, name.removesuffix(UNFINISHED_SUFFIX))
            for operation, name in storage.operations
            if operation == "put_file" or not name.endswith(UNFINISHED_SUFFIX)
        ]
        assert [name for operation, name in changes if operation == "put_file"] == [
            "checkpoints/ckpt-20.data-00000-of-00002",
            "checkpoints/ckpt-20.data-00001-of-00002",
            "checkpoints/ckpt-20.index",
        ]
        assert [name for operation, name in changes if operation == "rm_file"] == [
            "checkpoints/ckpt-10.index",
            "checkpoints/ckpt-10.data-00000-of-00002",
            "checkpoints/ckpt-10.data-00001-of-00002",
        ]
    assert objects() == files_of(20) | {"checkpoints/checkpoint": (entered.path / "checkpoints/checkpoint").read_text()}


@pytest.mark.parametrize("url", [URL, "file://{}/store/run"])
def test_another_machine_reads_the_newest_checkpoint_and_nothing_else(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = url.format(tmp_path)
    with Mirror(url, NO_WAIT) as entered:
        save(entered, 10, 20)
    move_to_another_machine(monkeypatch, tmp_path)
    with Mirror(url, NO_WAIT) as entered:
        checkpoints = checkpoints_of(entered)
        assert checkpoints.steps() == [10, 20]
        assert not checkpoints.folder.exists()
        checkpoints.read(20)
        assert {path.name: path.read_text() for path in checkpoints.folder.iterdir()} == {
            name.partition("/")[2]: content for name, content in files_of(20).items()
        }
        # The old ones are deleted as if they were here.
        save(entered, 30, keep=2)
        assert checkpoints.steps() == [20, 30]
        assert set(entered.names("checkpoints")) >= {"ckpt-20.index", "ckpt-30.index"}
        assert "ckpt-10.index" not in entered.names("checkpoints")


def test_whatever_operation_is_the_last_one_every_checkpoint_is_complete_or_absent(
    storage: type[FaultyStorage], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(kill_at: int | None) -> tuple[int, list[int]]:
        """The number of changes, and the steps whose save has returned."""
        changes, saved = 0, []

        def fault(operation: str, name: str) -> None:
            nonlocal changes
            changes += operation in CHANGES
            if kill_at is not None and changes > kill_at:
                raise Killed

        storage.fault = fault
        with suppress(Killed), mirror() as entered:
            for step in (10, 20, 30):
                save(entered, step, keep=2)
                saved.append(step)
            # A step that is saved again is absent meanwhile.
            saved.pop()
            checkpoints_of(entered).write(30, Values(31), keep=2)
            saved.append(30)
            checkpoints_of(entered).set_aside()
            save(entered, 20)
            saved.append(20)
        storage.fault = None
        return changes, saved

    number, _ = run(None)
    assert number > 40
    for kill_at in range(number):
        MemoryFileSystem.store.clear()
        move_to_another_machine(monkeypatch, tmp_path, f"killed-{kill_at}")
        _, saved = run(kill_at)
        MemoryFileSystem.store.pop("/bucket/run/.lock", None)
        left = objects()
        for name in left:
            if name.endswith(".index"):
                data = [left[name.replace(".index", f".data-0000{part}-of-00002")] for part in (0, 1)]
                assert data == [left[name].replace("index", "data")] * 2, (kill_at, name)
        move_to_another_machine(monkeypatch, tmp_path, f"after-{kill_at}")
        with mirror() as entered:
            steps = {*checkpoints_of(entered).steps(), *checkpoints_of(entered, "checkpoints-before-1").steps()}
            assert set(saved[-1:]) <= steps, kill_at
            # Nothing is left of what is not complete.
            left = {name for name in objects() if "/ckpt-" in name}
            kept = files_of(*checkpoints_of(entered).steps())
            kept |= files_of(*checkpoints_of(entered, "checkpoints-before-1").steps(), folder="checkpoints-before-1")
            assert left == set(kept), kill_at


def test_a_save_that_does_not_arrive_stays_here_and_the_next_one_may_arrive(storage: type[FaultyStorage]) -> None:
    with mirror() as entered:
        save(entered, 10)
        storage.fault = failing(ConnectionError("reset by peer"), "put_file")
        with pytest.raises(CheckpointError) as caught:
            save(entered, 20)
        path = checkpoints_of(entered).path(20)
        assert str(caught.value) == (
            f"step 20 could not be uploaded: {URL}: storage fails: ConnectionError: reset by peer\n"
            f"  it stays in {path}\n"
            f"  if the run ends, copy its files to {URL}/checkpoints, or the same run.dir resumes from an earlier step"
        )
        assert Path(f"{path}.index").exists()
        assert "checkpoints/ckpt-20.index" not in objects()
        storage.fault = None
        save(entered, 20, 30)
        assert files_of(10, 20, 30).items() <= objects().items()


def test_a_save_in_the_background_is_uploaded_there(storage: type[FaultyStorage]) -> None:
    with mirror() as of:
        written = checkpoints_of(of).begin_save(3, Values(3))
        written.result()
        assert objects().items() >= files_of(3).items()
        storage.operations.clear()
        assert checkpoints_of(of).finish_save(3, written.result, keep=1) == of.path / "checkpoints" / "ckpt-3"
        assert not any(operation == "put_file" for operation, _ in storage.operations)
        storage.fault = failing(OSError("broken"), "put_file", of="ckpt-4")
        written = checkpoints_of(of).begin_save(4, Values(4))
        with pytest.raises(CheckpointError, match="step 4 could not be uploaded"):
            checkpoints_of(of).finish_save(4, written.result, keep=1)
        storage.fault = None
        assert objects().items() >= files_of(3).items()


def test_deltas_are_uploaded_fetched_and_deleted_as_checkpoints_are(
    storage: type[FaultyStorage], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def names() -> set[str]:
        return {name.partition("/")[2] for name in objects() if name.endswith(".index")}

    with mirror() as entered:
        checkpoints = checkpoints_of(entered)
        save(entered, 10)
        checkpoints.write(20, Values(20), since=DeltaBase(10, 1))
        written = checkpoints.begin_save(30, Values(30), since=DeltaBase(20, 2))
        written.result()
        assert names() == {"ckpt-10.index", "delta-20.index", "delta-30.index"}
        assert checkpoints.finish_save(30, written.result, since=DeltaBase(20, 2)) == checkpoints.delta_path(30)
    move_to_another_machine(monkeypatch, tmp_path)
    with mirror() as entered:
        checkpoints = checkpoints_of(entered)
        assert checkpoints.newest() == checkpoints.delta_path(30)
        assert not checkpoints.folder.exists()
        checkpoints._fetch(checkpoints.delta_path(30))
        assert {path.name for path in checkpoints.folder.iterdir()} == {
            *(f"delta-30.data-0000{part}-of-00002" for part in (0, 1)),
            "delta-30.index",
        }
        storage.operations.clear()
        save(entered, 40, keep=1)
        deleted = [n for operation, n in storage.operations if operation == "rm_file" and n.endswith(".index")]
        assert deleted == [f"checkpoints/{name}.index" for name in ("delta-30", "delta-20", "ckpt-10")]
        assert names() == {"ckpt-40.index"}


def test_a_checkpoint_that_cannot_be_downloaded_is_an_error_of_storage_and_of_the_checkpoint(
    storage: type[FaultyStorage], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with mirror() as entered:
        save(entered, 10)
    move_to_another_machine(monkeypatch, tmp_path)
    with mirror() as entered:
        storage.fault = failing(PermissionError("Forbidden"), "get_file", "cat_file", of="ckpt-10.")
        with pytest.raises(CheckpointError, match=f"{URL}/checkpoints/ckpt-10 cannot be downloaded: ") as raised:
            checkpoints_of(entered).read(10)
        assert isinstance(raised.value, StorageError)
        storage.fault = None


def test_an_old_checkpoint_that_cannot_be_deleted_costs_a_warning_and_goes_later(storage: type[FaultyStorage]) -> None:
    with mirror() as entered:
        save(entered, 10)
        storage.fault = failing(PermissionError("Forbidden"), "rm_file", of="ckpt-10.")
        with pytest.warns(UserWarning, match=f"{URL}/checkpoints/ckpt-10 could not be deleted: .*Forbidden"):
            save(entered, 20, keep=1)
        storage.fault = None
        save(entered, 30, keep=1)
        assert not files_of(10, 20).keys() & objects().keys()


def test_starting_over_sets_checkpoints_aside_at_the_url_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with mirror() as entered:
        save(entered, 10, 20)
    move_to_another_machine(monkeypatch, tmp_path)
    for number in (1, 2):
        with mirror() as entered:
            checkpoints_of(entered).set_aside()
            save(entered, 5)
        assert files_of(5).items() <= objects().items()
        assert not files_of(20).keys() & objects().keys()
        assert files_of(10, 20, folder="checkpoints-before-1").items() <= objects().items()
        assert ("checkpoints-before-2/ckpt-5.index" in objects()) is (number == 2)


def test_going_back_sets_later_checkpoints_aside_at_the_url_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with mirror() as entered:
        save(entered, 10, 20, 30)
    move_to_another_machine(monkeypatch, tmp_path)
    with mirror() as entered:
        with pytest.warns(UserWarning, match="checkpoints after step 10 are moved to checkpoints-before-1"):
            checkpoints_of(entered).set_aside(after=10)
        save(entered, 15, keep=2)
    assert files_of(10, 15).items() <= objects().items()
    assert not files_of(20, 30).keys() & objects().keys()
    assert files_of(20, 30, folder="checkpoints-before-1").items() <= objects().items()


# The folder on this machine


def test_what_an_earlier_run_left_on_this_machine_never_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    with mirror() as here:
        save(here, 10, 20)
        (here.path / ".hydra").mkdir()
        for name in ("result.json", "tb/train/events", ".hydra/config.yaml"):
            (here.path / name).parent.mkdir(parents=True, exist_ok=True)
            (here.path / name).write_text("here")
    # The run starts over elsewhere, and its step 20 has other values.
    move_to_another_machine(monkeypatch, tmp_path)
    with mirror() as elsewhere:
        checkpoints_of(elsewhere).set_aside()
        checkpoints_of(elsewhere).write(20, Values(21), keep=1)
        (elsewhere.path / "result.json").write_text("elsewhere")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with mirror() as here:
        assert {path.name for path in here.path.iterdir()} == {".lock", ".hydra", "result.json"}
        assert (here.path / "result.json").read_text() == "elsewhere"
        checkpoints = checkpoints_of(here)
        assert checkpoints.steps() == [20]
        checkpoints.read(20)
        assert Path(f"{checkpoints.path(20)}.index").read_text() == "index of 21"
    assert objects()["tb/train/events"] == "here"
    assert not recwarn.list


def test_what_did_not_arrive_is_set_aside(storage: type[FaultyStorage]) -> None:
    with mirror() as entered:
        save(entered, 10)
        storage.fault = failing(ConnectionError("reset by peer"), "put_file", of="ckpt-")
        with pytest.raises(CheckpointError):
            save(entered, 20)
        storage.fault = None
    with ExitStack() as stack:
        with pytest.warns(UserWarning, match=rf"{URL}: files .* did not arrive there; they are in .*-unsent-1$"):
            again = stack.enter_context(mirror())
        assert checkpoints_of(again).steps() == [10]
    aside = again.path.with_name(f"{again.path.name}-unsent-1")
    assert {path.name: path.read_text() for path in aside.rglob("ckpt-*")} == {
        name.partition("/")[2]: content for name, content in files_of(20).items()
    }
    assert aside.stat().st_mode & 0o777 == 0o700


# Other files


def test_small_files_are_uploaded_when_they_have_changed(storage: type[FaultyStorage]) -> None:
    def uploads() -> list[str]:
        storage.operations.clear()
        entered.push()
        return [
            name.removesuffix(UNFINISHED_SUFFIX) for operation, name in storage.operations if operation == "put_file"
        ]

    with mirror() as entered:
        (entered.path / "logs").mkdir()
        for name in ("logs/ps-0.log", "placement.txt", ".result.json", "ckpt-1.index", "unfinished-5.index"):
            (entered.path / name).write_text("one")
        assert uploads() == ["logs/ps-0.log", "placement.txt"]
        assert uploads() == []
        (entered.path / "logs/ps-0.log").write_text("one and two")
        assert uploads() == ["logs/ps-0.log"]
        (entered.path / "placement.txt").unlink()
        assert uploads() == []
        assert objects() == {"logs/ps-0.log": "one and two"}


def test_they_are_uploaded_while_the_run_trains(storage: type[FaultyStorage]) -> None:
    with Mirror(URL, NO_WAIT, interval_secs=0.01) as entered:
        (entered.path / "log").write_text("a line")
        wait_until(lambda: objects() == {"log": "a line"}, 10, "the log is there")


def test_what_did_not_arrive_at_the_end_is_an_error_unless_there_is_one(storage: type[FaultyStorage]) -> None:
    message = rf"{URL}: storage fails: .*\n  not everything is there; all of it is in {working_folder(URL)}"

    def run(*, fails: bool) -> None:
        storage.fault = None
        with mirror() as entered:
            (entered.path / "result.json").write_text("{}")
            storage.fault = failing(ConnectionError("reset"), "put_file")
            if fails:
                raise ZeroDivisionError

    with pytest.raises(KdistError, match=message):
        run(fails=False)
    with pytest.warns(UserWarning, match=message), pytest.raises(ZeroDivisionError):
        run(fails=True)


# One chief


def another_chief(**other: object) -> None:
    fsspec.filesystem("memory").pipe_file(f"{URL}/.lock", held_by(host="other", boot="another", **other).encode())


def test_a_second_chief_is_refused_with_how_to_take_over(monkeypatch: pytest.MonkeyPatch) -> None:
    another_chief(pid=4711)
    now, beats = [1000.0], [1]

    def sleep(secs: float) -> None:
        now[0] += secs
        if beats:
            MemoryFileSystem.store["/bucket/run/.lock"].modified += timedelta(seconds=1)

    monkeypatch.setattr(lock, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    monkeypatch.setattr(lock, "_heard", {})
    message = (
        rf"^run\.dir={URL}: is in use by process 4711 on other since .*\n"
        rf"  wait for it, or choose another run\.dir; if it is killed now, start again, which waits 60 s, or delete "
        rf"{URL}/\.lock"
    )
    waits = pytest.warns(UserWarning, match="was in use by process 4711 on other; waiting for its heartbeat, at most")
    # It beats in the first pause.
    with waits, pytest.raises(ConfigError, match=message):
        mirror().check()
    beats.clear()
    with waits, mirror():
        assert json.loads(MemoryFileSystem.store["/bucket/run/.lock"].getvalue())["host"] != "other"
    assert not MemoryFileSystem.store


def test_those_who_look_for_a_chief_at_once_do_not_disturb_each_other(storage: type[FaultyStorage]) -> None:
    another_chief(pid=4711)

    def another_look(operation: str, name: str) -> None:
        if operation == "modified" and name != ".lock":
            storage.fault = None
            assert RunLock(ObjectStorage(URL, NO_WAIT)).living() is not None

    storage.fault = another_look
    assert RunLock(ObjectStorage(URL, NO_WAIT)).living() is not None
    assert list(objects()) == []


def test_a_second_chief_on_this_machine_is_refused_by_the_url() -> None:
    with mirror(), pytest.raises(ConfigError, match=rf"run\.dir={URL}: is in use by this process itself"):
        mirror().check()


def test_a_chief_that_was_replaced_changes_nothing_more() -> None:
    message = rf"run\.dir={URL}: was taken over by process 4711 on other"
    with mirror() as entered:
        save(entered, 10)
    before = objects()
    entered = mirror()
    with pytest.raises(ConfigError, match=message), entered:
        another_chief(pid=4711)
    for change in (
        lambda: save(entered, 10),
        lambda: save(entered, 20),
        lambda: entered.delete(["checkpoints/ckpt-10.index"]),
        entered.push,
    ):
        with pytest.raises(ConfigError, match=message):
            change()
    assert objects() == before
    assert "/bucket/run/.lock" in MemoryFileSystem.store
