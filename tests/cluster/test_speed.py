"""The structure that makes training fast: what travels, where updates run, what is traced, what waits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import models
import numpy as np
import pytest
import tensorflow as tf
from helpers import in_short, toy_data

import kdist

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("tasks_prepared")]


class Watch(kdist.hooks.Hook):
    """Notes at every run how far the servers are, how many calls are in flight, and how many functions there are."""

    def __init__(self, *, only_looks: bool) -> None:
        self._only_looks = only_looks
        self.steps_ahead: list[int] = []
        self.in_flight: list[int] = []
        self.functions: list[int] = []

    def after_run(self, context: kdist.hooks.RunContext, values: kdist.hooks.RunValues) -> None:
        strategy: Any = context.session.strategy
        self.in_flight.append(strategy._in_flight.total())
        self.functions.append(len(strategy._calls._functions))
        self.steps_ahead.append(strategy._store.counters.global_step() - values.global_step)

    def due_in(self, step: int) -> int | None:
        return 10 - step % 10

    def idle_in(self, step: int) -> int | None:
        return None if self._only_looks else 0


@pytest.mark.long
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


@pytest.mark.long
def test_updates_run_beside_their_variables(run_dir: Path) -> None:
    x, y = toy_data()
    trainer = kdist.Trainer(models.mlp, "2ps1w", run_dir=run_dir, steps_per_call=1)
    with trainer.session(x, y, batch_size=8, steps=2, verbose=0) as session:
        session.run()
        graph = session.strategy._calls.function(1).graph  # type: ignore[attr-defined]
        variables = {id(tensor): variable.device for variable, tensor in _captured(graph)}
        updates = [op for op in graph.get_operations() if op.type.startswith(("Assign", "Resource"))]
        # Adam, in one operation each.
        assert "ResourceApplyAdam" in {op.type for op in updates}
        for op in updates:
            assert (
                tf.DeviceSpec.from_string(op.device).task == tf.DeviceSpec.from_string(variables[id(op.inputs[0])]).task
            )
            assert "/job:ps" in op.device


@pytest.mark.parametrize("wire_dtype", [pytest.param(None, marks=pytest.mark.long), "bfloat16"])
def test_in_a_synchronous_step_one_tensor_travels_each_way(wire_dtype: str | None, run_dir: Path) -> None:
    x, y = toy_data()
    trainer = kdist.Trainer(
        models.mlp,
        "2ps2w",
        "sync_replicas",
        run_dir=run_dir,
        steps_per_call=1,
        wire_dtype=wire_dtype,
        placement="round_robin",
    )
    with trainer.session(x, y, batch_size=8, steps=2, verbose=0) as session:
        session.run()
        graph = session.strategy._lockstep.function(1).graph  # type: ignore[attr-defined]
        crossing = _crossing(graph, "chief", tf.bfloat16 if wire_dtype else tf.float32)
        # Down from each of two servers to each of two workers, and up again.
        assert len(crossing) == 8
        assert not wire_dtype or not _crossing(graph, "chief", tf.float32)
        assert not [op for op in graph.get_operations() if _job(op.device) is None and op.type.startswith("Assign")]


@pytest.mark.long
@pytest.mark.parametrize("options", in_short([{}, {"wire_dtype": "bfloat16"}, {"local_steps": 3}], [{}]), ids=str)
def test_in_an_asynchronous_step_one_tensor_travels_each_way(options: dict[str, Any], run_dir: Path) -> None:
    x, y = toy_data()
    trainer = kdist.Trainer(
        lambda: models.batch_normalized(keras.optimizers.Adam(0.01)),
        "2ps1w",
        "parameter_server",
        run_dir=run_dir,
        steps_per_call=4,
        placement="round_robin",
        **options,
    )
    with trainer.session(x, y, batch_size=8, steps=4, verbose=0) as session:
        session.run()
        graph = session.strategy._calls.function(4).graph  # type: ignore[attr-defined]
        # In each of four steps down from each of two servers, and up again.
        assert len(_crossing(graph, "worker", tf.bfloat16 if "wire_dtype" in options else tf.float32)) == 4 * 2 * 2
        assert "wire_dtype" not in options or not _crossing(graph, "worker", tf.float32)
        # Staleness, once in a call.
        assert len(_crossing(graph, "worker", tf.int64)) == 1


# A call of one step of `parameter_server` reports the error of its operations, which are its own.
@pytest.mark.parametrize(
    ("strategy", "sizes", "num_callers"), [("parameter_server", (2, 4), 1), ("sync_replicas", (1, 2, 4), 2)]
)
def test_a_step_is_one_function_of_all_steps_and_workers(
    strategy: str, sizes: Sequence[int], num_callers: int, run_dir: Path
) -> None:
    x, y = toy_data()
    trainer = kdist.Trainer(models.mlp, "1ps2w", strategy, run_dir=run_dir, steps_per_call=4)
    with trainer.session(x, y, batch_size=8, steps=9, verbose=0) as session:
        session.run()
        in_use: Any = session.strategy
        calls = in_use._calls if strategy == "parameter_server" else in_use._lockstep
        graphs = [calls.function(num_steps).graph for num_steps in sizes]
    steps = [op for graph in graphs for op in graph.get_operations() if op.type == "PartitionedCall"]
    assert len(steps) == sum(sizes) * num_callers
    assert len({op.get_attr("f").name for op in steps}) == 1
    # With a constant among its inputs, TensorFlow makes another function of each of these calls, and prepares them all.
    assert not [tensor for op in steps for tensor in op.inputs if tensor.op.type == "Const"]


@pytest.mark.parametrize(
    "kinds", [["narrow"], pytest.param(["narrow", "wide", "plain"], marks=pytest.mark.long)], ids="-".join
)
def test_what_travels_does_not_grow_with_the_number_of_tables(kinds: list[str], run_dir: Path) -> None:
    def build(num_tables: int) -> keras.Model:
        ids = keras.layers.Input((num_tables,), dtype="int32")
        made = []
        for i in range(num_tables):
            kind = kinds[i % len(kinds)]
            layer = keras.layers.Embedding if kind == "plain" else kdist.layers.Embedding
            made.append(layer(50, 8 if kind == "wide" else 4)(ids[:, i]))
        model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Concatenate()(made)))
        model.compile("adagrad", "mse")
        return model

    found = {}
    for num_tables in (5, 20):
        x = np.random.default_rng(0).integers(0, 50, (64, num_tables))
        run_dir_of = run_dir / str(num_tables)
        trainer = kdist.Trainer(
            lambda n=num_tables: build(n), "2ps1w", "parameter_server", run_dir=run_dir_of, steps_per_call=1
        )
        with trainer.session(x, x[:, 0], batch_size=8, steps=1, verbose=0) as session:
            session.run()
            graph = session.strategy._calls.function(1).graph  # type: ignore[attr-defined]
            floats, numbers = (_crossing(graph, "worker", dtype) for dtype in (tf.float32, tf.int64))
            found[num_tables] = {
                "values and rows": sum(here == "worker" for _, here, _ in floats),
                "gradients": sum(here == "ps" for _, here, _ in floats),
                "requests": sum(here == "ps" for _, here, _ in numbers),
                "all": sum(len(_crossing(graph, "worker", dtype)) for dtype in _DTYPES),
                "operations on servers": sum(_job(op.device) == "ps" for op in graph.get_operations()),
            }
    if "plain" in kinds:
        # Each is a variable by itself, which the server reads and updates.
        for of_number in found.values():
            of_number.pop("operations on servers")
    assert found[5] == found[20]
    # From and to each of two servers, of which one has all that is not in tables; and the staleness of the call.
    assert (found[5]["values and rows"], found[5]["gradients"], found[5]["requests"]) == (3, 2, 2)
    assert found[5]["all"] == 8


#: All that may travel.
_DTYPES = (tf.float32, tf.float64, tf.int32, tf.int64, tf.bool, tf.uint32, tf.string)


def _captured(graph: Any) -> list[tuple[Any, Any]]:
    return list(graph.captures)


def _crossing(graph: Any, caller: str, dtype: tf.DType) -> set[tuple[str, Any, Any]]:
    """Tensors that go from a server to somewhere else or the other way, by where they go.

    Args:
        caller: the job that runs the function, and ops that are nowhere in particular.
    """
    crossing = set()
    for op in graph.get_operations():
        for source in op.inputs:
            here, there = _job(op.device) or caller, _job(source.op.device) or caller
            # A variable is read where it is, whatever device its read asks for.
            is_read = source.op.type in ("Placeholder", "ReadVariableOp")
            if source.dtype == dtype and (here == "ps") != (there == "ps") and not is_read:
                crossing.add((source.name, here, tf.DeviceSpec.from_string(op.device).task))
    return crossing


def _job(device: str) -> str | None:
    return tf.DeviceSpec.from_string(device).job if device else None
