"""Prints lines on the console, as text for people or as JSON for programs, and logs them to Python's logger `kdist`.

In JSON, each line is one object: `time` (ISO 8601, UTC), `level`, `event`, `step` (null for a line that belongs to
none), `values` and `message`, the text. Records of the logger have `event`, `step` and `values` as attributes.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import shutil
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TextIO

logger = logging.getLogger("kdist")
logger.setLevel(logging.INFO)

#: Takes the lines of a process whose output another one shows; None if this process shows them itself.
relay: Callable[[Line], None] | None = None
#: True if the console has lines for programs; see `use`.
is_json = False
_STYLE = re.compile(r"\x1b\[[0-9;]*m")
#: The styles of lines that stand out on a terminal, by the word that they begin with.
_STANDS_OUT = {"valid": "36", "save": "32", "done": "1;32"}
_INDENT = " " * 10


class Line(str):
    """A text for people, with its content for programs.

    Attributes:
        event: the kind of the line, in a word.
        step: the global step; None for a line that belongs to none.
        values: the values in the line, by name.
        spare: columns that a narrow terminal does not show, in the order in which they go.
    """

    event: str
    step: int | None
    values: dict[str, Any]
    spare: tuple[str, ...]

    def __new__(
        cls,
        text: str,
        event: str = "message",
        step: int | None = None,
        values: Mapping[str, Any] | None = None,
        spare: Sequence[str] = (),
    ) -> Line:
        line = super().__new__(cls, plain_text(text))
        line.event, line.step, line.values, line.spare = event, step, dict(values or {}), tuple(spare)
        return line

    def within(self, width: int) -> str:
        """The text for a terminal of so many columns: with fewer columns of its own, or else in several lines."""
        text = str(self)
        if len(text) > width and " | " in text:
            for column in self.spare:
                text = re.sub(" {2,}", " ", text)
                if len(text) <= width:
                    break
                text = text.replace(f" | {re.sub(' {2,}', ' ', column)}", "", 1)
        wrapped = textwrap.TextWrapper(width, subsequent_indent=_INDENT, break_long_words=False, break_on_hyphens=False)
        # Those of a traceback stay lines.
        return "\n".join(line if len(line) <= width else wrapped.fill(line) for line in text.split("\n"))

    def to_json(self, **more: Any) -> str:
        """The line as a JSON object, in one line; `more` comes first."""
        content = {**more, "event": self.event, "step": self.step, "values": self.values, "message": str(self)}
        return json.dumps(for_json(content), allow_nan=False)


def plain_text(text: str) -> str:
    """Removes the codes by which a terminal shows text bold or in color; Keras has them in messages of layers."""
    return _STYLE.sub("", text)


def say(text: str, level: int = logging.INFO, stream: TextIO | None = None, *, in_full: bool = False) -> None:
    """Prints a line to `stream`, standard output if None, and logs it.

    On a terminal it is cut to its width, unless wanted `in_full`.
    """
    line = text if isinstance(text, Line) else Line(text)
    if relay is not None:
        relay(line)
        return
    record(line, level)
    console = Console.of(sys.stdout if stream is None else stream)
    print(_as_json(line, level) if is_json else _for_people(line, console, in_full), file=console, flush=True)


class Console:
    """A text stream that never fails: nobody may be there to read it, and training goes on without them.

    A terminal may be closed, the reader of a pipe may have ended, or a disk may be full; a service may have no standard
    streams at all. What cannot be written is dropped, and a character that the encoding lacks is replaced. The log of
    the chief has every line.

    Args:
        stream: None if there is none, as `sys.stdout` of such a service.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = open(os.devnull, "w", encoding="utf-8") if stream is None else stream  # noqa: SIM115 - as long as the process

    @classmethod
    def of(cls, stream: Any) -> Console:
        return stream if isinstance(stream, cls) else cls(stream)

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):
            try:
                self._stream.write(text)
            except UnicodeEncodeError:
                encoding = self._stream.encoding or "ascii"
                self._stream.write(text.encode(encoding, "replace").decode(encoding))
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()

    def isatty(self) -> bool:
        try:
            return self._stream.isatty()
        except (OSError, ValueError):
            return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def stand_in_for_console() -> None:
    """Lets this process print to streams that never fail, also if it has no standard streams."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            # It gets the lowest number that is free: no other file may have it.
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = Console(sys.stdout)
    # It stays on the console when descriptor 2 is redirected.
    sys.stderr = Console(os.fdopen(os.dup(2), "w", buffering=1, errors="backslashreplace"))


def _for_people(line: Line, stream: Console, in_full: bool) -> str:
    if not stream.isatty():
        return str(line)
    text = str(line) if in_full else line.within(shutil.get_terminal_size().columns)
    style = _STANDS_OUT.get(line.event)
    if style is None or os.environ.get("NO_COLOR") or os.environ.get("CI") or os.environ.get("TERM") == "dumb":
        return text
    first, bar, rest = text.partition("|")
    return f"\x1b[{style}m{first}\x1b[0m{bar}{rest}"


def record(line: Line, level: int) -> None:
    """Logs a line without printing it."""
    logger.log(level, "%s", line, extra={"event": line.event, "step": line.step, "values": line.values})


def warn(message: str) -> None:
    """Warns like `warnings.warn`, but shows a message again: a worker that is lost twice is reported twice."""
    line = Line(f"kdist: {message}", "warning")
    record(line, logging.WARNING)
    # Without a registry, Python does not remember what was shown.
    warnings.warn_explicit(str(line), UserWarning, filename="kdist", lineno=1)


def use(log_format: str) -> None:
    """From now on, lines are `text` or `json`."""
    global is_json, _format_before  # noqa: PLW0603 - a process has one console
    is_json = log_format == "json"
    if is_json and warnings.formatwarning is not _format_warning:
        _format_before, warnings.formatwarning = warnings.formatwarning, _format_warning
    elif not is_json and warnings.formatwarning is _format_warning:
        warnings.formatwarning = _format_before


@contextmanager
def in_format(log_format: str) -> Iterator[None]:
    """While entered, lines are `text` or `json`."""
    before = "json" if is_json else "text"
    use(log_format)
    try:
        yield
    finally:
        use(before)


@contextmanager
def file_log(path: Path) -> Iterator[None]:
    """While entered, a file gets every line of the logger, with the time; once, if another caller has entered this."""
    handler = _FileHandler(path)
    if any(isinstance(other, _FileHandler) and other.baseFilename == handler.baseFilename for other in logger.handlers):
        yield
        return
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        handler.close()


def now(seconds: float | None = None) -> str:
    """The time, or `seconds` since the epoch, in ISO 8601 and UTC: `2026-11-25T14:20:33.123Z`."""
    at = datetime.now(timezone.utc) if seconds is None else datetime.fromtimestamp(seconds, timezone.utc)
    return f"{at:%Y-%m-%dT%H:%M:%S}.{at.microsecond // 1000:03}Z"


class _RootHandlers(logging.Handler):
    """Passes records to the root logger's handlers, except handlers for the console: kdist prints there itself."""

    def emit(self, record: logging.LogRecord) -> None:
        for handler in logging.getLogger().handlers:
            gets_it = handler in logger.handlers or _writes_to_console(handler)
            if record.levelno >= handler.level and not gets_it:
                handler.handle(record)


def _writes_to_console(handler: logging.Handler) -> bool:
    # Python's own handler, that of absl, which TensorFlow uses, and that of rich.
    owners = (handler, getattr(handler, "python_handler", None), getattr(handler, "console", None))
    streams = [getattr(owner, name, None) for owner in owners for name in ("stream", "file")]
    # A live line stands in for standard output meanwhile.
    console = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    return any(stream is not None and stream in console for stream in streams)


# In the place of propagation; kdist is imported once.
logger.propagate = False
logger.addHandler(_RootHandlers())


class _FileHandler(logging.FileHandler):
    """Makes the file, and its folder, with the first line. A file that cannot be written does not disturb the run."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, encoding="utf-8", delay=True)

    def _open(self) -> Any:
        Path(self.baseFilename).parent.mkdir(parents=True, exist_ok=True)
        return super()._open()

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):
            super().emit(record)

    def close(self) -> None:
        with suppress(OSError):
            super().close()

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        if not is_json:
            return f"{now(record.created)} {record.levelname.lower():<7} {text}"
        known = vars(record)
        line = Line(text, known.get("event", "message"), known.get("step"), known.get("values"))
        return _as_json(line, record.levelno, record.created)

    def handleError(self, record: logging.LogRecord) -> None:
        """The console has the line."""


def _as_json(line: Line, level: int, seconds: float | None = None) -> str:
    return line.to_json(time=now(seconds), level=logging.getLevelName(level).lower())


_format_before = warnings.formatwarning


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Formats kdist's warnings as JSON; others as before."""
    if filename == "kdist":
        return _as_json(Line(str(message), "warning"), logging.WARNING) + "\n"
    return _format_before(message, category, filename, lineno, line)


def for_json(value: Any) -> Any:
    """Converts a value for JSON: numbers of NumPy to Python's, NaN and infinity to null."""
    if isinstance(value, Mapping):
        return {str(name): for_json(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [for_json(item) for item in value]
    if isinstance(value, bool) or value is None or isinstance(value, (str, int)):
        return value
    if hasattr(value, "tolist"):
        return for_json(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return str(value)
