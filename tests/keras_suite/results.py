"""The places in which Keras's own tests run, and the last recorded results, which `make keras-suite` makes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

RECORD = Path(__file__).with_name("results.json")
KERAS = "Keras"
PLACES: dict[str, dict[str, Any]] = {
    "local": {"cluster": "local"},
    "1ps1w": {"cluster": "1ps1w"},
    "sync": {"cluster": "1ps1w", "strategy": "sync_replicas"},
    "1w": {"cluster": "1w"},
}
#: Tests that cannot pass, by pattern, and why.
EXCEPTIONS = {
    "callbacks/backup_and_restore_test.py::*": "refused: the run directory has the backup, from which a run resumes",
    "*::test_swap_ema_weights_with_tf_distribute": "refused: its model is made in the scope of a TensorFlow strategy",
    "*::test_raise_error_terminate_preserves_backup": "refused: it uses BackupAndRestore",
}
#: What kdist does otherwise in tests that fail, by pattern; the tables count each as a failure.
DIFFERENCES = {
    "*::test_TensorBoard_weight_images": "diverges from some initial values, and a run whose loss is not finite ends",
    "*::test_custom_summary": "tf.summary inside a step writes nothing: a step runs where no callback has a writer",
}
#: The errors with which these fail, in part.
_THEIR_ERRORS = ("NanTensor: the loss became", "tag='custom_summary'")


class Outcome(NamedTuple):
    """The outcome of one test, and the methods that it has called."""

    called: list[str]
    passed: bool
    error: str = ""


#: By test, as `callbacks/history_test.py::HistoryTest::test_name`.
Outcomes = dict[str, Outcome]


class Result(NamedTuple):
    """The tests that plain Keras passes, in one place: how many there are, and why some fail."""

    tests: int
    failed: dict[str, str]


#: The version of Keras, and the results by place.
Results = tuple[str, dict[str, Result]]


def result(outcomes: Outcomes) -> Result:
    """The result of a place."""
    failed = {test: _reason(test) or _without_folders(o.error) for test, o in outcomes.items() if not o.passed}
    return Result(len(outcomes), failed)


def unexpected(results: Mapping[str, Result]) -> list[str]:
    """The failures that nothing explains: neither an exception nor a difference with its own error."""
    failures = [(place, test, why) for place, result in results.items() for test, why in result.failed.items()]
    return [
        f"{place}: {test}: {why}"
        for place, test, why in failures
        if not _reason(test) and not (_reason(test, DIFFERENCES) and any(error in why for error in _THEIR_ERRORS))
    ]


def _reason(test: str, reasons: dict[str, str] = EXCEPTIONS) -> str:
    # The last pattern that fits is the most special one.
    return next((reasons[pattern] for pattern in reversed(reasons) if fnmatch(test, pattern)), "")


def _without_folders(error: str) -> str:
    """An error with the names of files only: where they were is of one machine, or of one run."""
    return re.sub(r"(?<![\w.])/(?:[\w.+~-]+/)+", "", error)


def recorded() -> Results:
    version, places = json.loads(RECORD.read_text())
    return version, {place: Result(*result) for place, result in places.items()}


def record(version: str, results: Mapping[str, Result]) -> None:
    """Writes what a run found over what an earlier one with the same Keras did."""
    before = recorded() if RECORD.exists() else (version, {})
    merged = {**before[1], **results} if before[0] == version else results
    RECORD.write_text(json.dumps([version, merged], indent=1) + "\n")


def table(results: Results) -> Iterator[str]:
    """Tables in Markdown: the numbers, and the tests that fail."""
    version, places = results
    yield f"| cluster | Keras {version} passes | kdist passes |"
    yield "| --- | --- | --- |"
    failures: dict[tuple[str, str], list[str]] = {}
    for place, found in places.items():
        yield f"| `{place}` | {found.tests} | {found.tests - len(found.failed)} |"
        for test, error in found.failed.items():
            failures.setdefault((test, _reason(test, EXCEPTIONS | DIFFERENCES) or error), []).append(f"`{place}`")
    if failures:
        yield ""
        yield "| test | fails on | reason |"
        yield "| --- | --- | --- |"
        for (test, reason), where in sorted(failures.items()):
            shown = reason[:160].replace("|", "\\|").replace("<", "\\<")
            yield f"| `{test.rpartition('::')[2]}` | {', '.join(where)} | {shown} |"
