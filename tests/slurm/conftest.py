"""A Slurm system that all tests of this folder share. Where Slurm is not installed they are skipped, and say so."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from network import Network
from slurm_system import SlurmSystem, why_not

NUM_NODES = 4


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmSystem]:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("slurm")
    with Network(1 + NUM_NODES, folder) as network, SlurmSystem(network, folder / "slurm") as system:
        yield system
