"""Rows of dynamic tables in checkpoints, in this process."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from kdist.parameters.tables.dynamic_table import IDS, TABLES
from kdist.parameters.values.slices import ChosenSlices, CopiedRows

WIDTH = 3


def rows_of(tables: np.ndarray) -> CopiedRows:
    """Rows of these tables, -1 for those that are free; the ids count from 100, and vectors repeat them."""
    ids = 100 + np.arange(len(tables))
    values = {
        IDS: ids,
        TABLES: tables.astype(np.int32),
        "vectors": np.repeat(ids[:, None], WIDTH, 1).astype(np.float32),
        "counts": ids.astype(np.int32),
    }
    return CopiedRows(
        "/CPU:0", {name: tf.Variable(of) for name, of in values.items()}, tf.Variable(len(tables), dtype=tf.int64)
    )


def slices_of(num_tables: int, servers: list[CopiedRows]) -> ChosenSlices:
    names = [{column: f"{table}/{column}" for column in (IDS, "vectors", "counts")} for table in range(num_tables)]
    return ChosenSlices(names, servers, servers)


@pytest.mark.parametrize("slice_rows", [7, 1000])
def test_each_table_has_the_rows_of_all_servers(slice_rows: int, tmp_path: Path) -> None:
    tables = [np.random.default_rng(seed).integers(-1, 3, 50) for seed in (1, 2)]
    tables[1][tables[1] == 2] = 1
    slices = slices_of(5, list(map(rows_of, tables)))
    slices.slice_rows = slice_rows

    plan = slices.plan(str(tmp_path), "part")
    plan.check()
    plan.write()
    merged = str(tmp_path / "whole")
    tf.raw_ops.MergeV2Checkpoints(
        checkpoint_prefixes=[str(tmp_path / name) for name in plan.files], destination_prefix=merged
    )

    reader = tf.train.load_checkpoint(merged)
    for table in range(5):
        ids = np.concatenate([100 + np.flatnonzero(of_server == table) for of_server in tables])
        saved = {column: reader.get_tensor(f"{table}/{column}") for column in (IDS, "vectors", "counts")}
        np.testing.assert_array_equal(saved[IDS], ids)
        np.testing.assert_array_equal(saved["counts"], ids)
        np.testing.assert_array_equal(saved["vectors"], np.repeat(ids[:, None], WIDTH, 1))


def test_a_function_that_saves_has_one_operation_for_each_column_of_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With more, the first save of a model with 26 tables waits for seconds until they are traced."""
    sizes: list[int] = []
    traced = ChosenSlices.traced

    def look(self: ChosenSlices, key: Any, *arguments: Any) -> Any:
        function: Any = traced(self, key, *arguments)
        if key[0] == "save":
            sizes.append(len(function.graph.get_operations()))
        return function

    monkeypatch.setattr(ChosenSlices, "traced", look)
    for num_tables in (10, 20):
        slices_of(num_tables, [rows_of(np.arange(num_tables))]).plan(str(tmp_path), "part")

    few, many = sizes
    assert many - few == 10 * 3
