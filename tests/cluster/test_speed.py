"""What makes training fast, as structure: what travels, where updates run, what is traced, what waits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models
import pytest
import tensorflow as tf
from helpers import toy_data

import kdist

pytestmark = pytest.mark.cluster


class Watch(kdist.hooks.Hook):
    """Notes at every run how far the servers are, how many calls are in flight, and how many functions there are."""

    def __init__(self, *, only_looks: bool) -> None:
        self._only_looks = only_looks
        self.steps_ahead: list[int] = []
        self.in_flight: list[int] = []
        self.functions: list[int] = []

    def after_run(self, context: kdist.hooks.RunContext, values: kdist.hooks.RunValues) -> None:
        strategy: Any = context.session.strategy
        self.in_flight.append(len(strategy._in_flight))
        self.functions.append(len(strategy._calls._functions))
        self.steps_ahead.append(strategy._store.global_step() - values.global_step)

    def due_in(self, step: int) -> int | None:
        return 10 - step % 10

    def idle_in(self, step: int) -> int | None:
        return None if self._only_looks else super().idle_in(step)


def test_workers_wait_for_a_hook_unless_it_only_looks(run_dir: Path) -> None:
    x, y = toy_data()
    seen = {}
    for only_looks in (True, False):
        hook = Watch(only_looks=only_looks)
        trainer = kdist.Trainer(
            models.mlp, "1ps2w", run_dir=run_dir / str(only_looks), hooks=[hook], steps_per_call=4, resume="never"
        )
        trainer.fit(x, y, batch_size=8, steps=200, verbose=0)
        assert trainer.result.global_step == 200
        assert trainer.result.gradients.applied == 200
        assert trainer.result.examples == 200 * 8
        seen[only_looks] = hook
    assert set(seen[False].in_flight) == {0}
    assert set(seen[False].steps_ahead) == {0}
    # Two calls for each of two workers, never more; and at the last step nothing.
    assert 0 < max(seen[True].in_flight) <= 4
    assert max(seen[True].steps_ahead) > 0
    assert (seen[True].in_flight[-1], seen[True].steps_ahead[-1]) == (0, 0)
    # Calls of 4 steps and single ones for what remains: both are traced in the first runs, and nothing after them.
    assert seen[True].functions[-1] == seen[True].functions[len(seen[True].functions) // 2] <= 2


def test_updates_run_beside_their_variables(run_dir: Path) -> None:
    x, y = toy_data()
    trainer = kdist.Trainer(models.mlp, "2ps1w", run_dir=run_dir, steps_per_call=1)
    with trainer.session(x, y, batch_size=8, steps=2, verbose=0) as session:
        session.run()
        graph = session.strategy._calls.function(1).graph  # type: ignore[attr-defined]
        variables = {id(tensor): variable.device for variable, tensor in _captured(graph)}
        updates = [op for op in graph.get_operations() if op.type.startswith(("Assign", "Resource"))]
        assert updates
        for op in updates:
            assert (
                tf.DeviceSpec.from_string(op.device).task == tf.DeviceSpec.from_string(variables[id(op.inputs[0])]).task
            )
            assert "/job:ps" in op.device


def test_in_a_synchronous_step_one_tensor_travels_each_way(run_dir: Path) -> None:
    x, y = toy_data()
    trainer = kdist.Trainer(models.mlp, "2ps2w", "sync_replicas", run_dir=run_dir, steps_per_call=1)
    with trainer.session(x, y, batch_size=8, steps=2, verbose=0) as session:
        session.run()
        graph = session.strategy._lockstep.function(1).graph  # type: ignore[attr-defined]
        crossing = [
            source
            for op in graph.get_operations()
            for source in op.inputs
            if source.dtype == tf.float32 and _job(source.op.device) != _job(op.device)
            # A variable is read where it is, whatever device its read asks for.
            if source.op.type not in ("Placeholder", "ReadVariableOp") and _job(source.op.device) and _job(op.device)
        ]
        # Down from each of two servers to each of two workers, and up again.
        assert len(crossing) == 8
        assert not [op for op in graph.get_operations() if _job(op.device) is None and op.type.startswith("Assign")]


def _captured(graph: Any) -> list[tuple[Any, Any]]:
    return list(graph.captures)


def _job(device: str) -> str | None:
    return tf.DeviceSpec.from_string(device).job if device else None
