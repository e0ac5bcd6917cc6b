"""Measurements that each take a process of their own: `python -m benchmarks.large`, `tables` and `elastic`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Figures = dict[str, Any]


def measured(module: str, *arguments: str, timeout: float = 900, before: Sequence[str] = ()) -> Figures:
    """Runs a measurement of a module, by its name and arguments, in another process; ends this one if it fails.

    Args:
        before: precedes the command, as `benchmarks.isolated.prefix` does.
    """
    command = [*before, sys.executable, "-m", module, "--measure", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    figures: Figures = json.loads(done.stdout.splitlines()[-1])
    return figures


def run(measurements: Mapping[str, Callable[..., Figures]], main: Callable[[], None]) -> None:
    """Runs a module as a program: a measurement of it, or all that it compares."""
    if sys.argv[1:2] == ["--measure"]:
        name, *arguments = sys.argv[2:]
        print(json.dumps(measurements[name](*arguments)))
    else:
        main()


def peak_bytes(pid: int) -> int:
    """The largest resident size that a process has had so far."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024
