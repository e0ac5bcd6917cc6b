"""Exports while training goes on; `tests/cluster/test_callbacks.py` has that at the end."""

import os
import signal
from pathlib import Path
from typing import Any

import keras
import models
import numpy as np
import pytest
from helpers import toy_batches, toy_data

import kdist
from kdist.errors import ConfigError
from kdist.hooks import Export, Hook


class Ends(Hook):
    """Keeps the values of step 6, and sends this process what a scheduler sends after step 8."""

    def after_run(self, context: Any, values: Any) -> None:
        if values.global_step == 6:
            self.kept = context.session.read()
        if values.global_step == 8:
            os.kill(os.getpid(), signal.SIGTERM)

    def due_in(self, step: int) -> int:
        return 2 - step % 2


def test_a_run_without_an_end_leaves_its_last_export_when_it_is_stopped(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ends = Ends()
    trainer = kdist.Trainer(models.mlp, run_dir=run_dir, hooks=[Export(every_steps=3), ends])
    with pytest.raises(SystemExit):
        trainer.fit(toy_batches())
    assert trainer.result.global_step == 8
    printed = capsys.readouterr().out
    assert [step for step in range(9) if f"save  | step      {step} | {run_dir.name}/saved_model\n" in printed] == [
        3,
        6,
    ]
    served = keras.layers.TFSMLayer(run_dir / "saved_model", call_endpoint="serve")
    model = models.mlp()
    model.set_weights(
        [ends.kept[f"parameters/{name}"] for name in ("dense/kernel", "dense/bias", "dense_1/kernel", "dense_1/bias")]
    )
    x, _ = toy_data(8)
    np.testing.assert_allclose(served(x), model(x), rtol=1e-5, atol=1e-6)
    assert not (run_dir / ".unfinished-export").exists()


def test_an_export_that_cannot_be_written_costs_a_warning(run_dir: Path) -> None:
    run_dir.mkdir()
    (run_dir / "saved_model").write_text("a file is in the way")
    trainer = kdist.Trainer(models.mlp, run_dir=run_dir, hooks=[Export(every_steps=3), Ends()])
    with (
        pytest.warns(UserWarning, match="kdist: Export: Not a directory; training continues"),
        pytest.raises(SystemExit),
    ):
        trainer.fit(toy_batches(), verbose=0)
    assert trainer.result.global_step == 8


@pytest.mark.parametrize("arguments", [{"every_steps": 0}, {"every_secs": 0}, {"every_secs": -1.0}])
def test_wrong_times_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"^Export\.{next(iter(arguments))}="):
        Export(**arguments)
