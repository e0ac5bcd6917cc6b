"""Keras's own tests of `fit`, `evaluate` and `predict`, by plain Keras and by kdist: `make keras-suite` runs this.

    python tests/keras_suite/run.py [--record] [PLACE ...]

The tests are those of the installed Keras. Its source distribution, which has them, comes into a temporary folder.
Exits with 1 if kdist fails a test that plain Keras passes and `EXCEPTIONS` does not name.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tempfile
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from keras_suite.results import KERAS, PLACES, Outcome, Outcomes, record, result, table, unexpected

FOLDERS = ("trainers", "callbacks", "models")


def main(arguments: list[str]) -> int:
    places = [place for place in PLACES if place in arguments] or list(PLACES)
    version = metadata.version("keras")
    with tempfile.TemporaryDirectory() as temporary:
        tests = _fetched(version, Path(temporary))
        if not tests.exists():
            print(f"1 skipped: the source distribution of Keras {version} has no tests")
            return 0
        passed = {test: outcome for test, outcome in _run(tests, KERAS).items() if outcome.passed}
        results = {}
        for place in places:
            # Of the tasks of a cluster, only fit makes use.
            wanted = [test for test, outcome in passed.items() if place == "local" or "fit" in outcome.called]
            results[place] = result(_run(tests, place, wanted))
    print("\n".join(table((version, results))))
    if "--record" in arguments:
        record(version, results)
    return int(bool(unexpected(results)))


def _fetched(version: str, folder: Path) -> Path:
    """The folder of the tests, from the source distribution; it does not exist if that has none."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--no-binary", "keras", "--dest", str(folder), f"keras=={version}"], check=True)
    with tarfile.open(folder / f"keras-{version}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    tests = folder / "tests"
    for name in FOLDERS:
        for file in (folder / f"keras-{version}" / "keras" / "src" / name).rglob("*_test.py"):
            (tests / name).mkdir(parents=True, exist_ok=True)
            file.rename(tests / name / file.name)
    if tests.exists():
        # A test that hangs ends its process, and counts as failed.
        (tests / "pytest.ini").write_text("[pytest]\nfaulthandler_timeout = 240\nfaulthandler_exit_on_timeout = true\n")
    return tests


def _run(tests: Path, place: str, wanted: list[str] | None = None) -> Outcomes:
    """The outcomes of these tests somewhere, of all if None."""
    outcomes, chosen = tests.parent / f"{place}.json", tests.parent / f"{place}.txt"
    options = [] if place == KERAS else ["--place", place]
    if wanted is not None:
        chosen.write_text("\n".join(wanted))
        options += ["--tests", str(chosen)]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", "-p", "keras_suite.placed"]
    command += ["--import-mode", "importlib", "--tb", "no", "-W", "ignore", "--outcomes", str(outcomes), *options, "."]
    paths = os.pathsep.join(map(str, (Path(__file__).parents[1], tests)))
    environment = {**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"}
    print(f"Keras's tests: {place}", flush=True)
    subprocess.run(command, cwd=tests, env=environment, check=False)
    return {test: Outcome(*outcome) for test, *outcome in map(json.loads, outcomes.read_text().splitlines())}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
