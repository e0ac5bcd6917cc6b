"""`ObjectStorage`: a folder at a URL, such as `s3://bucket/run`, whose short failures are waited out.

fsspec reaches it; `s3fs` and `gcsfs` take credentials and endpoints from the environment. No message says one of them.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import fsspec

from kdist.errors import ConfigError, KdistError, install_command
from kdist.log import warn
from kdist.storage.files import INDEX_SUFFIX, relative, written_whole
from kdist.storage.folder import Folder
from kdist.storage.tensorflow_paths import cache_folder
from kdist.threads import in_thread

T = TypeVar("T")

# The package that each protocol needs, by the name of kdist's extra.
_PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "file": None, "memory": None}
_OPTIONS: dict[str, dict[str, Any]] = {
    "s3": {"config_kwargs": {"retries": {"max_attempts": 0}}},
    "file": {"auto_mkdir": True},
}
#: Where credentials and endpoints are given, which no URL may hold.
_ENVIRONMENT = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_ENDPOINT_URL, or ~/.aws",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS and STORAGE_EMULATOR_HOST, or gcloud",
}
# Elsewhere an object appears when it is complete. Here a file grows, and is renamed.
_WITH_RENAME = ("file", "memory")
UNFINISHED_SUFFIX = ".unfinished-upload"
_SECRET_NAME = re.compile(r"SECRET|TOKEN|PASSWORD|CREDENTIAL|ACCESS_KEY", re.IGNORECASE)
_SILENCE_SECS = 30.0
_FIRST_PAUSE_SECS = 0.5
_LONGEST_PAUSE_SECS = 5.0


class StorageError(KdistError):
    """Object storage did not do what it was asked to, within the time that it has."""


class NotThereError(StorageError):
    """There is no such bucket or object."""


def is_url(location: object) -> bool:
    """True if a location is a URL; raises `ConfigError` if it is a `Path` that was made of one."""
    if isinstance(location, Path) and location.parts and location.parts[0] in {f"{name}:" for name in _PACKAGES}:
        raise ConfigError(f"run.dir={location.parts[0]}//...: is a Path; give a URL as a string")
    return isinstance(location, str) and "://" in location


def check_url(url: str, key: str = "run.dir") -> str:
    """The URL without a slash at its end; raises `ConfigError` if it is not allowed, or may hold a secret."""
    protocol, _, rest = url.partition("://")
    if re.search(r"[@?#]", url) or ":" in rest.partition("/")[0]:
        raise ConfigError(
            f"{key}={protocol.rpartition('@')[2]}://***: has a user, a query or a fragment (@ : ? or #), which may "
            "be secret; credentials come from the environment"
        )
    if protocol not in _PACKAGES:
        raise ConfigError(f"{key}={url}: unknown protocol {protocol}; choose one of {', '.join(_PACKAGES)}")
    if protocol == "file" and not rest.startswith("/"):
        raise ConfigError(f"{key}={url}: has to be absolute, as file:///folder")
    if not rest.strip("/"):
        raise ConfigError(f"{key}={url}: names no bucket; write {protocol}://bucket/folder")
    return url.rstrip("/")


def working_folder(url: str, key: str = "run.dir") -> Path:
    """The folder on this machine in which the chief of a run dir at a URL works: always the same one."""
    return cache_folder() / hashlib.sha256(check_url(url, key).encode()).hexdigest()[:16]


class ObjectStorage(Folder):
    """A folder at a URL, whose failures are waited out: an operation is tried again for `timeout` seconds.

    Args:
        url: as `check_url` returns it.
        path: a folder on this machine for copies of its files; None: `working_folder` of the URL.
        key: the config key that holds the URL.
        sleep, clock: replaced in tests.
    """

    looks_are_free: ClassVar[bool] = False

    def __init__(
        self,
        url: str,
        timeout: float,
        path: Path | None = None,
        *,
        key: str = "run.dir",
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(path or working_folder(url, key), url)
        self.url, self.timeout, self._key = url, timeout, key
        self._protocol = url.partition("://")[0]
        self._sleep, self._clock = sleep, clock

    def __truediv__(self, name: str) -> ObjectStorage:
        return ObjectStorage(f"{self.url}/{name}", self.timeout, self.path / name, key=self._key)

    def __getstate__(self) -> dict[str, Any]:
        # Another process connects for itself.
        return {name: value for name, value in vars(self).items() if name != "_connected"}

    def refusal(self, error: StorageError) -> ConfigError:
        """The error of a run that cannot start because of `error`."""
        hint = _ENVIRONMENT.get(self._protocol)
        return ConfigError(
            f"{self._key}={error}" + (f"\n  credentials and endpoint come from the environment: {hint}" if hint else "")
        )

    def connect(self) -> ObjectStorage:
        """Returns itself once the storage has answered; raises `ConfigError` if it fails or refuses."""
        try:
            self.sizes()
        except StorageError as error:
            raise self.refusal(error) from None
        return self

    def without_retries(self) -> ObjectStorage:
        return ObjectStorage(self.url, 0, self.path, key=self._key)

    def make(self) -> None:
        """Does nothing: object storage has no folders without files."""

    def place_of(self, name: str) -> str:
        return f"{self}/{name}"

    def names(self, under: str = "", *, ends: Collection[str] = ()) -> set[str]:
        start = f"{under}/" if under else ""
        return {name.removeprefix(start) for name in self.sizes() if name.startswith(start)}

    def sizes(self) -> dict[str, int]:
        def find() -> dict[str, int]:
            files, root = self._connected
            found = files.find(root, detail=True)
            return {path[len(root) :].lstrip("/"): int(info["size"]) for path, info in found.items()}

        return self._insist(find)

    def publish(self, names: Sequence[str], instead_of: Sequence[str] = ()) -> None:
        """As of any folder. Each object is complete or absent, or as it was before."""
        renames = self._protocol in _WITH_RENAME

        def put(name: str) -> None:
            target = self._path(name)
            first = f"{target}{UNFINISHED_SUFFIX}" if renames else target
            self._files.put_file(str(self.path / name), first)
            if renames:
                self._files.mv(first, target)

        self.delete(instead_of)
        for name in names:
            self._insist(partial(put, name))

    def publish_after(self, written: Future[None], publish: Callable[[], None]) -> Future[None]:
        def wait_and_publish() -> None:
            written.result()
            publish()

        return in_thread(wait_and_publish)

    def fetch(self, names: Sequence[str]) -> None:
        """As of any folder; raises `NotThereError` if a file is not there."""

        def get(name: str) -> None:
            path = self.path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with written_whole(path) as unfinished:
                self._files.get_file(self._path(name), str(unfinished))

        for name in names:
            self._insist(partial(get, name))

    def discard_copies(self, under: str) -> None:
        shutil.rmtree(self.path / under, ignore_errors=True)

    def delete(self, names: Sequence[str]) -> None:
        def remove(name: str) -> None:
            with suppress(FileNotFoundError):
                self._files.rm_file(self._path(name))

        for name in names:
            self._insist(partial(remove, name))

    def move(self, under: str, to: str, names: Sequence[str] | None = None) -> None:
        if names is None:
            names = sorted(self.names(under), key=lambda name: name.endswith(INDEX_SUFFIX))
        for name in names:
            self._insist(partial(self._files.cp_file, self._path(f"{under}/{name}"), self._path(f"{to}/{name}")))
        self.delete([f"{under}/{name}" for name in reversed(names)])

    def read(self, name: str) -> bytes | None:
        with suppress(NotThereError):
            return bytes(self._insist(lambda: self._files.cat_file(self._path(name))))
        return None

    def write(self, name: str, content: bytes) -> None:
        self._insist(lambda: self._files.pipe_file(self._path(name), content))

    def touch(self, name: str, content: bytes) -> None:
        self.write(name, content)

    def modified(self, name: str) -> float | None:
        with suppress(NotThereError):
            return float(self._insist(lambda: self._files.modified(self._path(name))).timestamp())
        return None

    @contextmanager
    def alone(self, name: str) -> Iterator[None]:
        # Object storage has no locks.
        yield

    @cached_property
    def _connected(self) -> tuple[Any, str]:
        try:
            if self._protocol == "gs":
                return _google_files(), self.url.partition("://")[2]
            files, root = fsspec.url_to_fs(
                self.url, skip_instance_cache=True, use_listings_cache=False, **_OPTIONS.get(self._protocol, {})
            )
        except ImportError:
            package = _PACKAGES[self._protocol]
            raise ConfigError(
                f"{self._key}={self.url}: needs the package {package}: {install_command(self._protocol)}"
            ) from None
        if self._protocol == "s3":
            # Failures are waited out here. s3fs would try a silent server five times before it says so.
            files.retries = 1
        return files, root

    @property
    def _files(self) -> Any:
        return self._connected[0]

    def _path(self, name: str) -> str:
        return f"{self._connected[1]}/{name}"

    def _insist(self, function: Callable[[], T]) -> T:
        """Calls a function until it succeeds, is refused, or the time is over."""
        deadline, pause, has_warned = self._clock() + self.timeout, _FIRST_PAUSE_SECS, False
        while True:
            try:
                return function()
            except KdistError:
                raise
            except Exception as error:  # noqa: BLE001 - every library that fsspec calls has errors of its own
                text = f"{type(error).__name__}: {_without_secrets(str(error))}"
                # The library's error may hold more than a message should.
                if isinstance(error, FileNotFoundError):
                    raise NotThereError(f"{self.url}: there is no such bucket or object ({text})") from None
                if _is_denied(error):
                    raise StorageError(f"{self.url}: access is denied: {text}") from None
                if self._clock() + pause > deadline:
                    raise StorageError(f"{self.url}: storage fails: {text}") from None
            if not has_warned:
                warn(f"{self.url}: storage fails: {text}; trying again for {self.timeout:g} s")
                has_warned = True
            self._sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECS)


def folder_at(place: str | Path, timeout: float, key: str = "run.dir") -> Folder:
    """The folder at a path or a URL, whose storage may fail for `timeout` seconds; `key` is that of the config.

    Raises `ConfigError` if the URL is not allowed, or the storage fails or refuses.
    """
    if is_url(place):
        return ObjectStorage(check_url(str(place), key), timeout, key=key).connect()
    return Folder(Path(place), str(relative(Path(place))))


def _google_files() -> Any:
    """Google Cloud Storage, without its zonal buckets, whose client would load a second gRPC beside TensorFlow's."""
    import aiohttp
    from gcsfs.core import GCSFileSystem

    # It would print a traceback for each failure that is reported here.
    if not (logger := logging.getLogger("gcsfs")).handlers:
        logger.addHandler(logging.NullHandler())
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_SILENCE_SECS, sock_read=_SILENCE_SECS)
    return GCSFileSystem(skip_instance_cache=True, use_listings_cache=False, session_kwargs={"timeout": timeout})


def _is_denied(error: Exception) -> bool:
    """True if access was refused, or a library found no credentials."""
    is_googles = str(error).startswith("Forbidden: ") or getattr(error, "code", None) == 401
    return isinstance(error, PermissionError) or "Credentials" in type(error).__name__ or is_googles


def _without_secrets(text: str, limit: int = 300) -> str:
    """A message in one line, without users and queries of URLs and the values of secret environment variables."""
    for name, value in os.environ.items():
        # A shorter value is a part of many words.
        if len(value) > 4 and _SECRET_NAME.search(name):
            text = text.replace(value, "***")
    text = re.sub(r"//[^/\s\"']*@", "//***@", text)
    return re.sub(r"\?[^\s\"']*", "?***", " ".join(text.split()))[:limit]
