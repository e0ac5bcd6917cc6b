"""Points of two rings around each other."""

from typing import Any

import numpy as np


def rings(num_examples: int = 2048, noise: float = 0.1, seed: int = 0) -> dict[str, Any]:
    """The data arguments of `fit`: points `[n, 2]` float32, and the ring that each is of, int64 `[n]`."""
    rng = np.random.default_rng(seed)
    ring = rng.integers(0, 2, num_examples)
    angle = rng.uniform(0, 2 * np.pi, num_examples)
    radius = 1 + ring + rng.normal(0, noise, num_examples)
    points = np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1).astype(np.float32)
    held_out = num_examples // 4
    return {
        "x": points[held_out:],
        "y": ring[held_out:],
        "validation_data": (points[:held_out], ring[:held_out]),
    }
