"""Folders that only their owner can enter: what a run leaves behind is nobody else's business."""

from __future__ import annotations

from pathlib import Path

OWNER_ONLY = 0o700


def make_private(path: Path) -> None:
    """Makes a folder for its owner alone, and those above it as usual; one that is there stays as it is."""
    path.mkdir(OWNER_ONLY, parents=True, exist_ok=True)
