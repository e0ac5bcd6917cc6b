"""Lint's import checks, unit, oracle and Keras's own tests with the lowest and the highest versions: `make matrix`.

The ranges are those of `pyproject.toml`; the versions are those that the package index and the interpreters of this
machine offer. Each row has a virtual environment of its own in `build/matrix`, which later runs use again. To try one
row, also outside the ranges:

    make matrix ROW="3.12 2.19.1 3.11.0"        # Python, TensorFlow, Keras
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "matrix"
REQUIREMENTS = [Requirement(text) for text in metadata.requires("kdist") or ()]
PYTHONS = SpecifierSet(metadata.metadata("kdist")["Requires-Python"])
CHECKS = {
    "lint": (("lint-imports", "--no-cache"), ("python", "tests/lint/rules.py")),
    "tests": (("python", "-m", "pytest", "-q", "-n", "2", "-m", "not long", "tests/unit", "tests/oracle"),),
    "keras-suite": (("python", "tests/keras_suite/run.py", "local"),),
}


class Row(NamedTuple):
    """One combination: the Python as `3.12`, the others as full versions."""

    python: str
    tensorflow: str
    keras: str


def main(arguments: list[str]) -> int:
    """Runs the row that the arguments name, or the lowest and the highest; 1 if a check of one failed."""
    rows = [Row(*arguments)] if arguments else [_corner(min), _corner(max)]
    table = [[*row, *_run(row)] for row in rows]
    print(f"\n| Python | TensorFlow | Keras | {' | '.join(CHECKS)} |\n|{'---|' * (3 + len(CHECKS))}")
    print("\n".join(f"| {' | '.join(cells)} |" for cells in table))
    return int("FAILED" in str(table))


def _corner(pick: Callable[..., str]) -> Row:
    python = pick(filter(_interpreter, (f"3.{minor}" for minor in range(30) if f"3.{minor}" in PYTHONS)), key=Version)
    return Row(python, *(pick(_offered(name, python), key=Version) for name in ("tensorflow", "keras")))


def _interpreter(python: str) -> str | None:
    """The interpreter of a version, on PATH or under pyenv; None if there is none that starts."""
    installed = Path.home().glob(f".pyenv/versions/{python}.*/bin/python{python}")
    for candidate in (shutil.which(f"python{python}"), *map(str, installed)):
        if candidate and subprocess.run([candidate, "--version"], capture_output=True, check=False).returncode == 0:
            return candidate
    return None


def _offered(package: str, python: str) -> list[str]:
    """The versions of a package in its range that the index has for a Python."""
    command = [sys.executable, "-m", "pip", "index", "versions", package, "--python-version", python]
    listed = subprocess.run([*command, "--only-binary", ":all:"], capture_output=True, text=True, check=True).stdout
    versions = re.findall(r"[\w.]+", listed.partition("Available versions:")[2].partition("\n")[0])
    in_range = next(requirement.specifier for requirement in REQUIREMENTS if requirement.name == package)
    return list(in_range.filter(versions))


def _run(row: Row) -> list[str]:
    """The outcome of each check of a row: `ok` or `FAILED`, with pytest's counts."""
    environment = BUILD / "-".join(row)
    if not (environment / "ready").exists():
        _install(row, environment)
    return [_check(row, name, environment / "bin") for name in CHECKS]


def _install(row: Row, environment: Path) -> None:
    interpreter = _interpreter(row.python)
    if interpreter is None:
        raise SystemExit(f"matrix: no interpreter python{row.python} was found on PATH or under pyenv")
    subprocess.run([interpreter, "-m", "venv", "--clear", str(environment)], check=True)
    # kdist comes last, alone: pip refuses what is outside its ranges. grain needs a newer protobuf than the lowest
    # TensorFlow takes; its tests are skipped.
    left_out = {"tensorflow", "keras", "kdist", "grain"}
    wanted = {None, "dev", "parquet", "kafka", "pandas", "mlflow", "wandb", "optuna", "joblib"}
    others = [
        # The TensorBoard that goes with the TensorFlow.
        requirement.name if requirement.name == "tensorboard" else f"{requirement.name}{requirement.specifier}"
        for requirement in REQUIREMENTS
        if requirement.name not in left_out
        and any(requirement.marker is None or requirement.marker.evaluate({"extra": extra or ""}) for extra in wanted)
    ]
    pip = [str(environment / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, f"tensorflow=={row.tensorflow}", f"keras=={row.keras}", *others], check=True)
    subprocess.run([*pip, "--no-deps", "--editable", str(ROOT)], check=True)
    (environment / "ready").touch()


def _check(row: Row, name: str, binaries: Path) -> str:
    began = time.monotonic()
    log = BUILD / f"{'-'.join(row)}-{name}.log"
    with log.open("w") as file:
        codes = [
            subprocess.run([str(binaries / program), *rest], cwd=ROOT, stdout=file, stderr=file, check=False).returncode
            for program, *rest in CHECKS[name]
        ]
    counts = re.findall(r"\d+ (?:passed|failed|errors?|skipped)", log.read_text()[-300:])
    result = ", ".join([f"FAILED ({log.relative_to(ROOT)})" if any(codes) else "ok", *counts])
    print(f"{' '.join(row)}: {name} {result}, {(time.monotonic() - began) / 60:.1f} min", flush=True)
    return result


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
