"""Changes of the cluster of a run that trains: who asked for them, and what became of them.

A program asks by `trainer.resize` or `session.resize`, another process of the same user by a file in the run dir, as
`kdist resize` does. The folder of these files belongs to the chief, is there while it trains, and is open to its user
alone.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kdist.cluster.resolve import CHIEF_FILE, CONTROL_FOLDER
from kdist.cluster.spec import ClusterChange
from kdist.config.schema import ClusterConfig
from kdist.errors import ClusterError, ConfigError, KdistError, ResizeError, reason
from kdist.log import warn
from kdist.run.result import content_of, now
from kdist.storage.files import write_whole

if TYPE_CHECKING:
    from kdist.strategies.base import PendingResize, Strategy

_REQUEST, _ANSWER = ".request.json", ".answer.json"
#: Seconds between two looks for requests, and for an answer.
_LOOK_SECS, _POLL_SECS = 0.5, 0.2


@dataclass(frozen=True)
class Resize:
    """A change of the cluster, as `result.json` records it.

    Attributes:
        step: the global step after which training went on.
        when: ISO 8601, UTC.
        before, after: the shape of the cluster, as `2ps2w`.
        change: what was asked for, as `workers=4`.
        why: who asked, and why.
        seconds: for which no step was trained because of it.
        waited: seconds from the request until then: mostly the start of tasks.
    """

    step: int
    before: str
    after: str
    change: str
    why: str
    seconds: float
    waited: float
    when: str = ""

    def to_dict(self) -> dict[str, Any]:
        known = asdict(self)
        return {"from" if name == "before" else "to" if name == "after" else name: v for name, v in known.items()}


class ResizeRequest:
    """A change that somebody has asked for; `outcome` has the `Resize`, or the error that refuses it."""

    def __init__(self, change: ClusterChange, why: str, report: Callable[[ResizeRequest], None] | None = None) -> None:
        self.change, self.why = change, why
        self.asked = time.monotonic()
        self.outcome: Future[Resize] = Future()
        if report is not None:
            self.outcome.add_done_callback(lambda _: report(self))


class ResizeRequests:
    """The requests of one fit, one after the other. Thread-safe."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._waiting: deque[ResizeRequest] = deque()
        self._lock = threading.Lock()
        self._looked = 0.0
        self._is_closed = False

    def open(self, run_dir: Path, meeting_place: str | None = None) -> None:
        """Lets other processes ask in a run dir from now on; tasks find there where to ask for a place."""
        self._is_closed = False
        folder = run_dir / CONTROL_FOLDER
        try:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(mode=0o700)
            self._folder = folder
            if meeting_place is not None:
                write_whole(folder / CHIEF_FILE, meeting_place)
        except OSError as error:
            warn(f"{folder}: cannot be made: {error.strerror or error}; kdist resize does not work here")

    def add(self, change: ClusterChange, why: str) -> Future[Resize]:
        """Adds a request of this process."""
        request = ResizeRequest(change, why)
        with self._lock:
            if not self._is_closed:
                self._waiting.append(request)
                return request.outcome
        request.outcome.set_exception(_ended())
        return request.outcome

    def next(self) -> ResizeRequest | None:
        """The next request, if there is one; refuses those that cannot be read."""
        now_secs = time.monotonic()
        if self._folder is not None and now_secs - self._looked >= _LOOK_SECS:
            self._looked = now_secs
            for request in self._arrived(self._folder):
                self._waiting.append(request)
        with self._lock:
            return self._waiting.popleft() if self._waiting else None

    def put_back(self, request: ResizeRequest) -> None:
        """Lets a request be the next one again."""
        with self._lock:
            self._waiting.appendleft(request)

    def close(self) -> None:
        """Refuses all requests, and those to come."""
        with self._lock:
            self._is_closed = True
        if self._folder is not None and self._folder.exists():
            self._waiting.extend(self._arrived(self._folder))
        while self._waiting:
            self._waiting.popleft().outcome.set_exception(_ended())
        if self._folder is not None:
            # Whoever asks takes its answer away.
            with suppress(OSError):
                (self._folder / CHIEF_FILE).unlink(missing_ok=True)
                self._folder.rmdir()

    def _arrived(self, folder: Path) -> list[ResizeRequest]:
        requests = []
        with suppress(FileNotFoundError):
            # One that is still being written has a name that begins with a dot.
            for path in sorted(folder.glob(f"[!.]*{_REQUEST}"), key=lambda path: path.name):
                answer = folder / path.name.replace(_REQUEST, _ANSWER)
                given = content_of(path.read_bytes())
                path.unlink(missing_ok=True)
                try:
                    change = ClusterChange.parse([str(word) for word in given.get("change", [])])
                except ConfigError as error:
                    _write(answer, {"error": str(error), "exit_code": error.exit_code})
                    continue
                who = str(given.get("why", "kdist resize"))
                requests.append(ResizeRequest(change, who, lambda request, to=answer: _report(request, to)))  # type: ignore[misc]
        return requests


def _ended() -> ConfigError:
    return ConfigError("the run has ended, and cannot be resized")


def _report(request: ResizeRequest, answer: Path) -> None:
    error = request.outcome.exception()
    if error is None:
        _write(answer, {"resize": asdict(request.outcome.result())})
    else:
        _write(answer, {"error": str(error), "exit_code": error.exit_code if isinstance(error, KdistError) else 1})


def _write(path: Path, content: dict[str, Any]) -> None:
    with suppress(OSError):
        write_whole(path, json.dumps(content))


class Resizer:
    """Carries out the requests of a session, one after the other, between its runs.

    While the tasks start that are to join, training continues.

    Args:
        requests: to carry out.
        timeout: seconds that a change may take until it is finished.
        min_workers: a request for fewer is refused; a task that is told to leave leaves all the same.
    """

    def __init__(self, requests: ResizeRequests, timeout: float, min_workers: int = ClusterConfig.min_workers) -> None:
        self.requests, self._timeout, self._min_workers = requests, timeout, min_workers
        self._present: tuple[ResizeRequest, PendingResize, float] | None = None

    def advance(self, strategy: Strategy, step: int, finish: Callable[[ResizeRequest, PendingResize], Resize]) -> None:
        """Begins the next change, or finishes the present one if its tasks are ready; never waits for them.

        Args:
            step: the present global step.
            finish: finishes a change; a `ClusterError` of it is raised, for the session to recover from.
        """
        for task in sorted(strategy.tasks_to_leave(), key=str):
            self.requests.add(ClusterChange(leave=task), f"{task} was told to leave (SIGTERM)")
        if self._present is None:
            self._begin(strategy, step)
        if self._present is None:
            return
        request, resize, began = self._present
        try:
            if not strategy.may_finish(resize):
                if time.monotonic() - began <= self._timeout:
                    return
                raise ResizeError(f"not finished in {self._timeout:g} s (cluster.step_timeout)")
        except (ClusterError, ResizeError, OSError) as error:
            why = f"{request.change}: {reason(error)}; training continues on {resize.before}"
            self.cancel(strategy, ResizeError(why))
            return
        self._present = None
        try:
            request.outcome.set_result(finish(request, resize))
        except ResizeError as error:
            failure = ResizeError(f"{request.change}: {error}; training continues on {resize.before}")
            warn(str(failure))
            request.outcome.set_exception(failure)
        except BaseException as error:
            # Whoever waits for it in another thread must not wait for ever.
            request.outcome.set_exception(error)
            raise

    def _begin(self, strategy: Strategy, step: int) -> None:
        """Begins the next change that is asked for, or the one by which tasks join that others have started."""
        request, joining = self.requests.next(), None
        if request is None and (joining := strategy.tasks_to_join()) is not None:
            request = ResizeRequest(joining, "tasks that others have started asked to join")
        if request is None:
            return
        change = request.change
        try:
            if change.workers is not None and change.workers < self._min_workers:
                raise ConfigError(f"{change}: fewer than cluster.min_workers={self._min_workers}")
            resize = strategy.begin_resize(change)
        except (KdistError, OSError) as error:
            if joining is not None:
                strategy.refuse_to_join(reason(error))
            if isinstance(error, OSError):
                # As of a disk that is full.
                error = ResizeError(f"{change}: {reason(error)}; training continues as before")
            request.outcome.set_exception(error)
            return
        if resize.before == resize.after and change.move is None:
            shape = str(resize.after)
            request.outcome.set_result(Resize(step, shape, shape, str(change), request.why, 0.0, 0.0, now()))
            return
        self._present = request, resize, time.monotonic()

    def cancel(self, strategy: Strategy, why: KdistError) -> None:
        """Ends the present change, if there is one, before it is finished."""
        if self._present is not None:
            (request, resize, _), self._present = self._present, None
            strategy.cancel_resize(resize)
            warn(str(why))
            request.outcome.set_exception(why)

    def begin_again(self) -> None:
        """Lets the present change begin again, on another cluster: the tasks that were to join are gone."""
        if self._present is not None:
            (request, _, _), self._present = self._present, None
            self.requests.put_back(request)

    def close(self, strategy: Strategy) -> None:
        """Ends the present change, and refuses all others."""
        self.cancel(strategy, _ended())
        self.requests.close()


def of_another_user(run_dir: Path) -> ConfigError:
    """The error for a run of somebody else."""
    return ConfigError(f"{run_dir}: its run belongs to another user, who alone may resize it")


def ask(run_dir: Path, words: list[str], why: str, is_alive: Callable[[], bool], timeout: float) -> Resize:
    """Asks the chief that trains in a run dir on this machine for a change, and waits until it is made.

    Raises:
        ConfigError: the change is refused, nothing trains there, or another user does.
        ResizeError: it failed; the run goes on as before.
        ClusterError: the chief has not answered in `timeout` seconds.
    """
    ClusterChange.parse(words)
    folder = run_dir / CONTROL_FOLDER
    # The order of requests is that of their names.
    name = f"{time.time():020.6f}-{uuid.uuid4().hex[:8]}"
    answer = folder / f"{name}{_ANSWER}"
    try:
        write_whole(folder / f"{name}{_REQUEST}", json.dumps({"change": words, "why": why, "when": now()}))
    except FileNotFoundError:
        raise ConfigError(f"{run_dir}: no run is training there") from None
    except PermissionError:
        raise of_another_user(run_dir) from None
    deadline = time.monotonic() + timeout
    while not answer.exists():
        if not is_alive() and not answer.exists():
            raise ConfigError(f"{run_dir}: the run has ended, and was not resized")
        if time.monotonic() > deadline:
            raise ClusterError(
                f"{run_dir}: the chief has not answered for {timeout:g} s (--timeout); it may still resize"
            )
        time.sleep(_POLL_SECS)
    content = content_of(answer.read_bytes())
    with suppress(OSError):
        answer.unlink()
        if not is_alive():
            folder.rmdir()
    if "resize" in content:
        return Resize(**content["resize"])
    error = str(content.get("error", "the answer of the chief cannot be read"))
    raise ConfigError(error) if content.get("exit_code") == ConfigError.exit_code else ResizeError(error)
