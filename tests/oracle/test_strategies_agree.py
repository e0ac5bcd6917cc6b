"""The same batches come to the same parameters, whatever strategy spreads them and wherever the parameters are."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import agreement
import numpy as np
import pytest
from helpers import environment

from kdist.cluster.local import free_ports

OPTIMIZERS = tuple(agreement.optimizers())


@cache
def one_process(optimizer: str, folder: Path) -> list[np.ndarray]:
    return agreement.train(optimizer, folder / f"single-{optimizer}", "local", 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("agreement")


def programs(folder: Path, *kinds: str, environments: list[dict[str, str]]) -> None:
    """Runs `agreement.py` once per kind, side by side."""
    path = os.pathsep.join([environment()["PYTHONPATH"], str(Path(__file__).parent)])
    running = [
        subprocess.Popen(
            [sys.executable, agreement.__file__, kind, str(folder)],
            env={**environment(), **more, "PYTHONPATH": path},
            stderr=subprocess.PIPE,
            text=True,
        )
        for kind, more in zip(kinds, environments)
    ]
    try:
        for process in running:
            _, said = process.communicate(timeout=180)
            assert process.returncode == 0, said[-3000:]
    finally:
        for process in running:
            process.kill()


def saved(path: Path) -> list[np.ndarray]:
    with np.load(path) as arrays:
        return [arrays[name] for name in arrays.files]


@pytest.fixture(scope="module")
def mirrored(folder: Path) -> Path:
    programs(folder, "mirrored", environments=[{}])
    return folder


@pytest.fixture(scope="module")
def multi_worker(folder: Path) -> Path:
    cluster = {"worker": [f"127.0.0.1:{port}" for port in free_ports(2)]}
    environments = [
        {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})} for index in (0, 1)
    ]
    programs(folder, "worker-0", "worker-1", environments=environments)
    return folder


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_two_mirrored_devices_are_one_process_with_twice_the_batch(optimizer: str, mirrored: Path) -> None:
    agreement.assert_same(saved(mirrored / f"mirrored-{optimizer}.npz"), one_process(optimizer, mirrored))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_two_workers_are_one_process_with_twice_the_batch(optimizer: str, multi_worker: Path) -> None:
    expected = one_process(optimizer, multi_worker)
    agreement.assert_same(saved(multi_worker / f"worker-0-{optimizer}.npz"), expected)
    # Every worker ends with the same.
    for ours, chiefs in zip(
        saved(multi_worker / f"worker-1-{optimizer}.npz"), saved(multi_worker / f"worker-0-{optimizer}.npz")
    ):
        np.testing.assert_array_equal(ours, chiefs)


@pytest.mark.cluster
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_two_synchronous_workers_are_one_process_with_twice_the_batch(optimizer: str, folder: Path) -> None:
    ours = agreement.train(optimizer, folder / f"sync-{optimizer}", "1ps2w", 2, strategy="sync_replicas")
    agreement.assert_same(ours, one_process(optimizer, folder))


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("cluster", "placement", "strategy"),
    [
        ("1ps1w", "round_robin", "parameter_server"),
        ("2ps1w", "greedy", "parameter_server"),
        ("3ps1w", "partitioned", "parameter_server"),
        ("3ps2w", "partitioned", "sync_replicas"),
    ],
)
def test_placement_only_moves_bytes(cluster: str, placement: str, strategy: str, folder: Path) -> None:
    num_workers = int(cluster[-2])
    ours = agreement.train(
        "adam",
        folder / f"{cluster}-{strategy}",
        cluster,
        num_workers,
        strategy=strategy,
        placement=placement,
        partition_min_bytes=64,
    )
    agreement.assert_same(ours, one_process("adam", folder))
