"""Models made at random: two synchronous replicas compute what Keras computes in one process with the joined batch."""

import os
import uuid
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from random_models import RandomModel

import kdist

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("tasks_prepared")]

#: The first of the numbers that draw the models of `make long`, the same in all processes of a run; printed.
SEED = int(os.environ.get("KDIST_SEED", int(os.environ.get("PYTEST_XDIST_TESTRUNUID", uuid.uuid4().hex)[:5], 16)))
NUM_MODELS = int(os.environ.get("KDIST_NUM_MODELS", "200"))
PLACES: dict[str, dict[str, Any]] = {
    "1ps2w": {"strategy": "sync_replicas"},
    "2w": {"strategy": "multi_worker_mirrored"},
    "local": {"strategy": "mirrored", "devices": 2},
}
REFUSED = r"neither a mean nor a sum|synchronized=True"


def compare(seed: int, cluster: str, run_dir: Path) -> None:
    random = RandomModel.draw(seed)
    print(f"KDIST_SEED={seed} KDIST_NUM_MODELS=1 draws this model: {random.choices}")
    plain = random.build()
    arguments: dict[str, Any] = {"epochs": 2, "verbose": 0, "class_weight": random.choices["class_weight"]}
    expected = plain.fit(random.joined(), **arguments).history
    trainer = kdist.Trainer(random.build, cluster, run_dir=run_dir, **PLACES[cluster])
    if _is_refused(random):
        with pytest.raises(kdist.ConfigError, match=REFUSED):
            trainer.fit(random.data(), **arguments)
        return
    found = trainer.fit(random.data(), **arguments).history
    _assert_same(dict(enumerate(trainer.model.get_weights())), dict(enumerate(plain.get_weights())))
    _assert_same(_slots(trainer.model), _slots(plain))
    _assert_same(found, expected)
    _assert_same(
        trainer.evaluate(random.joined(), return_dict=True),
        plain.evaluate(random.joined(), return_dict=True, verbose=0),
    )


def _is_refused(random: RandomModel) -> bool:
    """Whether no weight of a replica's gradient is right for all of the model's losses."""
    c = random.choices
    if c["norm"] == "synchronized":
        return True
    is_sum = c["function"] or c["reduction"] in ("sum", None)
    is_weighted = c["weights"] is not None or c["class_weight"] is not None
    is_divided = not is_sum and (c["masked"] or (c["reduction"] == "mean_with_sample_weight" and is_weighted))
    if is_divided:
        return c["outputs"] > 1 or c["adds_loss"] is not None
    return c["adds_loss"] is not None and is_sum != (c["adds_loss"] == "sum") and c["sizes"] != "equal"


def _slots(model: keras.Model) -> dict[str, np.ndarray]:
    return {str(i): v.numpy() for i, v in enumerate(model.optimizer.variables)}


def _assert_same(found: dict[Any, Any], expected: dict[Any, Any]) -> None:
    assert set(found) == set(expected), (set(found), set(expected))
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-5, err_msg=str(name))


@pytest.mark.parametrize("seed", [0])
def test_some_models(seed: int, run_dir: Path) -> None:
    compare(seed, "1ps2w", run_dir)


@pytest.mark.long
@pytest.mark.parametrize("cluster", PLACES)
@pytest.mark.parametrize("number", range(NUM_MODELS))
def test_many_models(number: int, cluster: str, run_dir: Path) -> None:
    compare(SEED + number, cluster, run_dir)
