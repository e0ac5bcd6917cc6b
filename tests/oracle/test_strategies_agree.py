"""The same batches come to the same parameters, whatever strategy spreads them and wherever the parameters are."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import agreement
import keras
import numpy as np
import pytest
from helpers import environment, free_addresses, in_short, skip_before_keras_3_13

import kdist

#: Of those that are left to `make long` the maths is tested in `test_keras_parity.py`.
OPTIMIZERS = in_short(agreement.optimizers(), {"adam"})


@cache
def one_process(optimizer: str, folder: Path) -> list[np.ndarray]:
    return agreement.train(optimizer, folder / f"single-{optimizer}", "local", 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("agreement")


def programs(request: pytest.FixtureRequest, folder: Path, *kinds: str, environments: list[dict[str, str]]) -> None:
    """Runs `agreement.py` once per kind, side by side, with the optimizers of all tests that are to run."""
    here = [item.callspec.params for item in request.session.items if item.path == request.path and "[" in item.name]
    optimizers = sorted({str(params["optimizer"]) for params in here if "optimizer" in params})
    path = os.pathsep.join([environment()["PYTHONPATH"], str(Path(__file__).parent)])
    running = [
        subprocess.Popen(
            [sys.executable, agreement.__file__, kind, str(folder), *optimizers],
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
def mirrored(request: pytest.FixtureRequest, folder: Path) -> Path:
    programs(request, folder, "mirrored", environments=[{}])
    return folder


@pytest.fixture(scope="module")
def multi_worker(request: pytest.FixtureRequest, folder: Path) -> Path:
    cluster = {"worker": free_addresses(2)}
    environments = [
        {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})} for index in (0, 1)
    ]
    programs(request, folder, "worker-0", "worker-1", environments=environments)
    return folder


@pytest.mark.long
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_two_mirrored_devices_are_one_process_with_twice_the_batch(optimizer: str, mirrored: Path) -> None:
    agreement.assert_same(saved(mirrored / f"mirrored-{optimizer}.npz"), one_process(optimizer, mirrored))


@pytest.mark.cluster
@pytest.mark.usefixtures("tasks_prepared")
def test_two_workers_that_kdist_starts_are_one_process_with_twice_the_batch(folder: Path) -> None:
    ours = agreement.train("weighted", folder / "two-workers", "2w", 2)
    agreement.assert_same(ours, one_process("weighted", folder))


@pytest.mark.long
@pytest.mark.parametrize("optimizer", agreement.optimizers())
def test_two_workers_are_one_process_with_twice_the_batch(optimizer: str, multi_worker: Path) -> None:
    expected = one_process(optimizer, multi_worker)
    agreement.assert_same(saved(multi_worker / f"worker-0-{optimizer}.npz"), expected)
    # Every worker ends with the same.
    for ours, chiefs in zip(
        saved(multi_worker / f"worker-1-{optimizer}.npz"), saved(multi_worker / f"worker-0-{optimizer}.npz")
    ):
        np.testing.assert_array_equal(ours, chiefs)


@pytest.mark.cluster
@pytest.mark.usefixtures("tasks_prepared")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_two_synchronous_workers_are_one_process_with_twice_the_batch(optimizer: str, folder: Path) -> None:
    if optimizer == agreement.STATEFUL:
        # One of its inputs is not used.
        skip_before_keras_3_13()
    ours = agreement.train(optimizer, folder / f"sync-{optimizer}", "1ps2w", 2, strategy="sync_replicas")
    agreement.assert_same(ours, one_process(optimizer, folder))


@pytest.mark.cluster
@pytest.mark.usefixtures("tasks_prepared")
@pytest.mark.parametrize(
    ("cluster", "placement", "strategy"),
    [
        pytest.param("1ps1w", "round_robin", "parameter_server", marks=pytest.mark.long),
        pytest.param("2ps1w", "greedy", "parameter_server", marks=pytest.mark.long),
        ("3ps1w", "partitioned", "parameter_server"),
        pytest.param("3ps2w", "partitioned", "sync_replicas", marks=pytest.mark.long),
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


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.usefixtures("tasks_prepared")
def test_local_steps_of_a_single_worker_are_plain_gradient_descent(folder: Path) -> None:
    """The worker pushes the sum of what it has done already: nobody else has moved the parameters."""
    (data, y), results = agreement.data(), []

    def build() -> keras.Model:
        dense = keras.layers.Dense
        normalization = keras.layers.BatchNormalization()
        model = keras.Sequential([keras.layers.Input((6,)), dense(8, "tanh"), normalization, dense(3, "softmax")])
        model.compile(keras.optimizers.SGD(0.1, clipnorm=0.5), "sparse_categorical_crossentropy")
        return model

    for cluster, options, steps in (("local", {}, 30), ("2ps1w", {"local_steps": 3}, 10)):
        trainer = kdist.Trainer(
            build,
            cluster,
            run_dir=folder / f"local-steps-{cluster}",
            seed=3,
            steps_per_call=5,
            **options,
        )
        keras.utils.set_random_seed(7)
        trainer.fit(data["numbers"], y, batch_size=32, steps=steps, shuffle=False, verbose=0)
        results.append(trainer)
    plain, ours = results
    agreement.assert_same(ours.model.get_weights(), plain.model.get_weights())
    assert (ours.result.global_step, ours.result.examples) == (10, plain.result.examples)
    assert plain.result.examples == 30 * 32


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.usefixtures("tasks_prepared")
def test_bfloat16_on_the_wire_rounds_what_travels_and_nothing_else(folder: Path) -> None:
    ours = {
        dtype: agreement.train("adam", folder / f"wire-{dtype}", "2ps1w", 1, wire_dtype=dtype)
        for dtype in (None, "bfloat16")
    }
    for rounded, exact in zip(ours["bfloat16"], ours[None]):
        error = np.linalg.norm(rounded - exact) / np.linalg.norm(exact)
        # A bfloat16 has 8 bits; what is kept has all of them.
        assert 0 < error < 0.05
        assert (rounded.view(np.uint32) & 0xFFFF).any()
