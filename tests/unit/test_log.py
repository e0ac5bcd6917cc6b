"""Lines for people, for programs, and for Python's logging."""

from __future__ import annotations

import io
import json
import logging
import re
import subprocess
import sys
import warnings
from datetime import datetime
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
from helpers import toy_data

import kdist
from kdist import log
from kdist.console import lines, live
from kdist.errors import ConfigError, TaskError, traceback_of
from kdist.log import warn
from kdist.run.result import describe

X, Y = toy_data(64)


def objects(text: str) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    found = [json.loads(line, parse_constant=refuse) for line in text.splitlines()]
    for each in found:
        assert set(each) == {"time", "level", "event", "step", "values", "message"}
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", each["time"])
        datetime.fromisoformat(each["time"].replace("Z", "+00:00"))
    return found


def fit(run_dir: Path, **arguments: Any) -> kdist.Trainer:
    trainer = kdist.Trainer(models.mlp, run_dir=run_dir, **arguments)
    trainer.fit(X, Y, batch_size=8, epochs=2, validation_data=(X, Y))
    return trainer


def test_every_line_of_a_run_is_an_object(run_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trainer = fit(run_dir, log_format="json")
    printed = capfd.readouterr()
    assert printed.err == ""
    found = objects(printed.out)
    events = [each["event"] for each in found]
    assert events == ["start", "run_dir", "save", *["valid", "epoch"] * 2, "save", "done"]
    assert found[0]["values"] == {
        "version": kdist.__version__, "name": trainer.name, "strategy": "single", "cluster": "local"
    }  # fmt: skip
    done = found[-1]
    assert (done["level"], done["step"]) == ("info", 16)
    assert done["values"]["loss"] == pytest.approx(trainer.result.metrics["validation"]["loss"])
    assert [each["values"]["epoch"] for each in found if each["event"] == "epoch"] == [1, 2]
    logged = objects((run_dir / "logs" / "chief-0.log").read_text())
    assert [each | {"time": None} for each in logged] == [each | {"time": None} for each in found]
    log.say("text again")
    assert capfd.readouterr().out == "text again\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has /dev/full")
def test_a_log_on_a_full_disk_does_not_hide_how_the_run_ends() -> None:
    with pytest.raises(ConfigError, match="as it was"), log.file_log(Path("/dev/full")):  # noqa: PT012
        log.record(log.Line("a line"), logging.INFO)
        raise ConfigError("as it was")


def test_the_logger_and_the_file_have_what_is_printed(
    run_dir: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    fit(run_dir)
    printed = capsys.readouterr().out.splitlines()
    records = [record for record in caplog.records if record.name == "kdist"]
    assert [record.getMessage() for record in records] == printed
    assert {record.levelno for record in records} == {logging.INFO}
    assert (records[-1].event, records[-1].step) == ("done", 16)
    logged = (run_dir / "logs" / "chief-0.log").read_text().splitlines()
    assert [re.sub(r"^\S+Z info    ", "", line) for line in logged] == printed


def test_warnings_are_logged(caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder) -> None:
    warn("worker:1 is lost")
    assert caplog.record_tuples == [("kdist", logging.WARNING, "kdist: worker:1 is lost")]
    assert [str(each.message) for each in recwarn] == ["kdist: worker:1 is lost"]


def test_a_program_that_logs_to_the_console_shows_each_line_once(tmp_path: Path) -> None:
    program = """
import logging, sys
from absl import logging as absl_logging
from rich.logging import RichHandler
from kdist import log
from kdist.log import warn
absl_logging.use_absl_handler()
root = logging.getLogger()
root.setLevel(logging.INFO)
for handler in (logging.StreamHandler(), logging.StreamHandler(sys.stdout), RichHandler()):
    root.addHandler(handler)
root.addHandler(logging.FileHandler(sys.argv[1]))
log.say("a line")
warn("worker:1 is lost")
logging.getLogger("mine").info("of the program")
"""
    command = [sys.executable, "-c", program, str(tmp_path / "program.log")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    console = done.stdout + done.stderr
    assert (console.count("a line"), console.count("worker:1 is lost")) == (1, 1)
    assert console.count("of the program") > 1
    assert (tmp_path / "program.log").read_text().splitlines() == [
        "a line", "kdist: worker:1 is lost", "of the program"
    ]  # fmt: skip


def test_messages_of_keras_are_plain_in_lines_errors_and_logs() -> None:
    bold = "Exception encountered when calling Dense.call().\n\n\x1b[1mno such shape\x1b[0m"
    for text in (str(log.Line(bold)), str(ConfigError(bold)), str(TaskError("chief", ValueError(bold)))):
        assert "no such shape" in text
        assert "\x1b" not in text
    assert "\x1b" not in describe(ValueError(bold)) + traceback_of(ValueError(bold))


def test_warnings_are_objects_too_and_those_of_others_are_left_alone() -> None:
    program = """
import warnings
from kdist import log
from kdist.log import warn
before = warnings.formatwarning
with log.in_format("json"):
    warn("worker:1 is lost")
    warnings.warn("of another library")
assert warnings.formatwarning is before
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    # Python 3.13 adds the line of the program.
    first, other, *_ = done.stderr.splitlines()
    (found,) = objects(first)
    assert (found["level"], found["event"], found["message"]) == ("warning", "warning", "kdist: worker:1 is lost")
    assert other.endswith("UserWarning: of another library")


def test_a_value_that_json_has_not_is_null() -> None:
    line = lines.train_line(np.int64(3), 5, {"loss": float("nan"), "f1": [0.5, np.float32(1)]}, 2, None)
    assert json.loads(line.to_json())["values"] == {
        "loss": None, "f1": [0.5, 1.0], "over_steps": 2, "steps_per_second": None
    }  # fmt: skip


def test_other_formats_are_refused(run_dir: Path) -> None:
    with pytest.raises(ConfigError, match="log_format=xml: choose one of text, json"):
        kdist.Trainer(models.mlp, run_dir=run_dir, log_format="xml")


def test_a_log_that_cannot_be_written_does_not_disturb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "logs").write_text("a file in the place of the folder")
    with log.file_log(tmp_path / "logs" / "chief-0.log"):
        log.say("training goes on")
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("training goes on\n", "")


def test_a_log_that_two_callers_keep_has_each_line_once(tmp_path: Path) -> None:
    path = tmp_path / "chief-0.log"
    with log.file_log(path):
        log.say("first")
        with log.file_log(path):
            log.say("second")
        log.say("third")
    assert [line.split()[-1] for line in path.read_text().splitlines()] == ["first", "second", "third"]


def test_a_trainer_says_in_a_line_what_it_is(run_dir: Path) -> None:
    trainer = kdist.Trainer(models.mlp, "2ps2w", run_dir=run_dir, name="mnist")
    assert repr(trainer) == f"Trainer(mnist, parameter_server on 2ps2w, run dir {run_dir})"


def test_a_warning_is_shown_each_time() -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        for _ in range(2):
            warn("worker:1 is lost")
    assert [str(warning.message) for warning in said] == ["kdist: worker:1 is lost"] * 2


class Terminal(io.StringIO):
    """Standard output that is a terminal."""

    def isatty(self) -> bool:
        return True


LOGS = {"loss": 0.85301, "accuracy": 0.7084, "top_5_categorical_accuracy": 0.91}


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (
            lines.train_line(100, 2000, {"loss": 0.85301, "accuracy": 0.7084}, 100, 86.52),
            "train | step 100/2000 | loss 0.8530 | accuracy 0.7084 | 86.5 steps/s | ETA 22s",
        ),
        (
            lines.train_line(100, 2000, LOGS, 100, 86.52),
            "train | step 100/2000 | loss 0.8530 | accuracy 0.7084 | 86.5 steps/s | ETA 22s",
        ),
        (
            lines.validation_line(157, 2000, {"loss": 0.00012341, "accuracy": 0.927}),
            "valid | step    157/2000 | loss 0.0001234 | accuracy 0.9270",
        ),
        (
            lines.done_line(2000, 2000, LOGS, "of validation", "steps=2000 done", 18.7),
            "done | step 2000/2000 | loss 0.8530 | accuracy 0.7084 | 18.7s",
        ),
        (
            lines.run_dir_line("/data/experiments/of/somebody/mnist/2026-11-27_21-34-21", Path("/data/experiments/of")),
            "run dir   /data/experiments/of/somebody/mnist/2026-11-27_21-34-21\n"
            "          tensorboard --logdir /data/experiments/of",
        ),
    ],
)
def test_a_line_fits_a_narrow_terminal_and_is_whole_elsewhere(
    line: log.Line, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    terminal, file = Terminal(), io.StringIO()
    log.say(line, stream=terminal)
    log.say(line, stream=file)
    log.say(line, stream=terminal, in_full=True)
    assert file.getvalue() == f"{line}\n"
    assert terminal.getvalue() == f"{shown}\n{line}\n"
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize("variable", [None, "NO_COLOR", "CI"])
def test_what_stands_out_does_so_on_a_terminal_only(variable: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "CI", "TERM"):
        monkeypatch.delenv(name, raising=False)
    if variable is not None:
        monkeypatch.setenv(variable, "1")
    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file):
        log.say(lines.save_line(5, 10, Path("checkpoints/ckpt-5")), stream=stream)
        log.say(lines.train_line(5, 10, {"loss": 1.0}, 5, None), stream=stream)
    plain = "save  | step      5    | checkpoints/ckpt-5\ntrain | step      5/10 | loss 1.0000 | over 5 steps\n"
    assert file.getvalue() == plain
    colored = plain.replace("save  |", "\x1b[32msave  \x1b[0m|")
    assert terminal.getvalue() == (plain if variable else colored)


class Gone(io.StringIO):
    """A terminal that was closed."""

    def write(self, text: str) -> int:
        raise OSError(5, "Input/output error")

    def isatty(self) -> bool:
        raise OSError(5, "Input/output error")


def test_a_console_that_cannot_be_written_ends_nothing() -> None:
    log.say("a line", stream=Gone())
    closed = io.StringIO()
    closed.close()
    log.say("a line", stream=closed)


def test_without_standard_streams_nothing_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    log.say("a line")
    assert not live.is_terminal()


def test_a_character_that_the_console_lacks_is_replaced() -> None:
    console = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    log.say("gr\u00f6\u00dfe 0.1", stream=console)
    assert console.buffer.getvalue() == b"gr??e 0.1\n"  # type: ignore[attr-defined]


def test_the_lines_of_a_traceback_stay_lines_on_a_narrow_terminal() -> None:
    code = '  File "a.py", line 1, in f\n    g(x)\n    ^^^^'
    message = "kdist: error: chief: NameError: name 'x' is not defined, and this is a long reason"
    first, second, *others = log.Line(f"{message}\n{code}").within(70).split("\n")
    assert f"{first} {second.strip()}" == message
    assert "\n".join(others) == code
