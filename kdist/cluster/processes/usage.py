"""The memory and CPU time of processes of this machine, and the memory that is left on it; see proc(5)."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def resident_bytes(pid: int) -> int | None:
    """The resident memory of a process; None if it has ended, or this system has no /proc."""
    with suppress(OSError, IndexError, ValueError):
        pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    return None


def cpu_secs(pid: int) -> float | None:
    """The CPU time of a process in seconds; None if it has ended, or this system has no /proc."""
    with suppress(OSError, IndexError, ValueError):
        # The fields after the name.
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return None


def memory_left() -> int | None:
    """The bytes that are left on this machine, or in its container if those are fewer; None if nobody tells."""
    left = []
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        left.append(next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable")))
    with suppress(OSError, ValueError):
        folder = Path("/sys/fs/cgroup")
        most, used = ((folder / name).read_text(encoding="utf-8").strip() for name in ("memory.max", "memory.current"))
        left.append(int(most) - int(used))
    return min(left, default=None)
