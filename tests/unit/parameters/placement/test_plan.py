import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageDraw

from kdist.config.schema import PLACEMENT_POLICIES, ServerOptions
from kdist.errors import ConfigError
from kdist.parameters.placement.plan import PlacementPlan, Variable, _shortened, servers_for
from kdist.parameters.placement.plan import place as place_by

SHAPES = st.lists(st.lists(st.integers(1, 300), min_size=0, max_size=3).map(tuple), min_size=1, max_size=25)


def place(
    variables: list[Variable], num_servers: int, policy: str, partition_min_bytes: int = 1 << 18
) -> PlacementPlan:
    return place_by(variables, num_servers, ServerOptions(placement=policy, partition_min_bytes=partition_min_bytes))


def variable(name: str, shape: tuple[int, ...], *, can_be_cut: bool = True) -> Variable:
    """A float32 variable with one slot."""
    num_bytes = 4 * math.prod(shape)
    return Variable(name, shape, 2 * num_bytes, num_bytes, can_be_cut=can_be_cut)


def variables(*sizes: int) -> list[Variable]:
    return [Variable(f"v{i}", (size,), size) for i, size in enumerate(sizes)]


def test_round_robin_is_tensorflows_order() -> None:
    plan = place(variables(1, 2, 3, 4, 5), 2, "round_robin")
    assert [shard.server for shard in plan.shards] == [0, 1, 0, 1, 0]


def test_greedy_puts_the_largest_on_the_least_loaded() -> None:
    plan = place(variables(10, 1, 9, 1, 1), 2, "greedy")
    assert sorted(plan.bytes_by_server) == [11, 11]


@settings(max_examples=300, deadline=None)
@given(SHAPES, st.integers(1, 6))
def test_greedy_is_never_less_even_than_round_robin(shapes: list[tuple[int, ...]], num_servers: int) -> None:
    given_variables = [variable(f"v{i}", shape) for i, shape in enumerate(shapes)]
    greedy, in_turn = (place(given_variables, num_servers, policy) for policy in ("greedy", "round_robin"))
    assert greedy.imbalance <= in_turn.imbalance


@settings(max_examples=200, deadline=None)
@given(st.integers(2_000, 200_000), st.integers(8, 64), SHAPES, st.integers(2, 6))
def test_partitioned_is_within_five_percent_of_even_where_a_table_dominates(
    rows: int, dim: int, shapes: list[tuple[int, ...]], num_servers: int
) -> None:
    table = variable("table", (rows, dim))
    others = [variable(f"v{i}", shape) for i, shape in enumerate(shapes)]
    # All others together are less than a twentieth of a server's share of the table.
    others = [v for v in others if v.num_bytes * len(others) * num_servers * 20 < table.num_bytes]
    plan = place([table, *others], num_servers, "partitioned", partition_min_bytes=1 << 10)
    assert plan.imbalance <= 1.05


@settings(max_examples=200, deadline=None)
@given(SHAPES, st.integers(1, 6), st.sampled_from(PLACEMENT_POLICIES), st.integers(1, 10_000))
def test_every_row_of_every_variable_is_on_one_server(
    shapes: list[tuple[int, ...]], num_servers: int, policy: str, partition_min_bytes: int
) -> None:
    given_variables = [variable(f"v{i}", shape, can_be_cut=i % 3 > 0) for i, shape in enumerate(shapes)]
    plan = place(given_variables, num_servers, policy, partition_min_bytes)
    for i, whole in enumerate(given_variables):
        shards = [shard for shard in plan.shards if shard.variable == i]
        bounds = [(shard.start, shard.stop) for shard in shards]
        assert [row for start, stop in bounds for row in range(start, stop)] == list(range(whole.num_rows))
        assert all(0 <= shard.server < num_servers for shard in shards)
        options = ServerOptions(placement=policy, partition_min_bytes=partition_min_bytes)
        splits = options.placement in ("partitioned", "auto")
        is_large = splits and whole.can_be_cut and whole.value_bytes > partition_min_bytes
        num_used, _ = servers_for(given_variables, num_servers, options)
        assert len(shards) == (min(num_used, whole.num_rows) if is_large else 1)


@pytest.mark.parametrize(
    ("kilobytes", "num_workers", "num_used"), [(300, 2, 1), (300, 4, 2), (1000, 2, 2), (1000, 8, 4), (60_000, 2, 4)]
)
def test_auto_uses_as_few_servers_as_bytes_and_workers_need(kilobytes: int, num_workers: int, num_used: int) -> None:
    given_variables = [variable("kernel", (250 * kilobytes // 2,)), variable("other", (250 * kilobytes // 2,))]
    plan = place_by(given_variables, 4, ServerOptions(placement="auto", partition_min_bytes=1 << 10), num_workers)
    assert [num_bytes > 0 for num_bytes in plan.bytes_by_server] == [server < num_used for server in range(4)]
    assert f"{kilobytes / 1000:,.2f} MB for each of {num_workers} workers in every step" in plan.table()
    assert (f"on {num_used} of 4 servers" if num_used < 4 else "on all 4 servers") in plan.table()


def test_auto_leaves_tables_on_all_servers() -> None:
    always = Variable("always", (40, 4), 1280, 640, can_be_cut=True, always_cut=True, travels=False)
    looked_up = Variable("looked up", (2000, 4), 64000, 32000, can_be_cut=True, travels=False)
    dynamic = Variable("dynamic", (0, 4), 0, travels=False, is_dynamic=True)
    plan = place([always, looked_up, dynamic, *variables(5, 5)], 3, "auto", 1 << 10)
    servers = [{shard.server for shard in plan.shards if shard.variable == i} for i in range(5)]
    assert servers == [{0, 1, 2}, {0, 1, 2}, {0, 1, 2}, {0}, {0}]


def test_a_table_that_is_always_cut_is_cut_under_every_policy() -> None:
    table = Variable("table", (10, 2), 160, 80, can_be_cut=True, always_cut=True)
    for policy in PLACEMENT_POLICIES:
        plan = place([table, *variables(5, 5)], 3, policy)
        assert [(s.server, s.start, s.stop) for s in plan.shards[:3]] == [(0, 0, 3), (1, 3, 6), (2, 6, 10)]


def test_what_travels_is_cut_into_parts_that_can_be_sent() -> None:
    policy = ServerOptions(placement="round_robin", partition_min_bytes=1 << 18)
    kernel, small, table = (variable(name, (1000, 250)) for name in ("kernel", "small", "table"))
    whole = variable("whole", (1000, 250), can_be_cut=False)
    small, table = replace(small, shape=(10, 250), value_bytes=10_000), replace(table, travels=False)
    plan = place_by([kernel, small, whole, table], 2, policy, max_bytes=300_000)
    parts = [shard for shard in plan.shards if shard.variable == 0]
    assert [(shard.server, shard.start, shard.stop) for shard in parts] == [
        (0, 0, 250),
        (1, 250, 500),
        (0, 500, 750),
        (1, 750, 1000),
    ]
    assert [shard.variable for shard in plan.shards if shard.variable] == [1, 2, 3]


def test_table_names_shards_servers_totals_and_notes() -> None:
    table = Variable("users/embeddings", (6, 8), 384, 192, can_be_cut=True, note="looked up by rows")
    text = place([table, Variable("dense/kernel", (6, 8), 384)], 2, "partitioned", partition_min_bytes=1).table()
    assert "users/embeddings[0:3]" in text
    assert "users/embeddings[3:6]" in text
    assert "3x8" in text
    assert "dense/kernel" in text
    assert "imbalance 1.50" in text
    assert "users/embeddings: looked up by rows" in text


def test_unknown_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"strategy\.placement=best.*auto, round_robin, greedy, partitioned"):
        ServerOptions(placement="best")


@pytest.mark.parametrize("num_servers", [1, 2, 12])
def test_the_picture_names_each_large_variable_and_no_text_covers_another(
    num_servers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    boxes: dict[str, tuple[float, ...]] = {}
    write = ImageDraw.ImageDraw.text

    def noted(draw: ImageDraw.ImageDraw, at: Any, text: str, *positional: Any, **named: Any) -> None:
        # Some versions of Pillow call it for each line.
        if "font" in named:
            boxes[f"{text} {at}"] = draw.textbbox(at, text, named["font"], named.get("anchor"))
        write(draw, at, text, *positional, **named)

    monkeypatch.setattr(ImageDraw.ImageDraw, "text", noted)
    name = "a_table_with_a_long_name_{:02d}_{}/embeddings"
    tables = [variable(name.format(i, "fixed"), (1000 + i, 8)) for i in range(26)]
    small = [variable(f"bias_{i}", (i + 1,), can_be_cut=False) for i in range(5)]
    dynamic = [Variable(name.format(i, "dynamic"), (0, 8), 0, is_dynamic=True) for i in range(26)]
    plan = place([*tables, *small, *dynamic], num_servers, "greedy")
    plan.draw(tmp_path / "placement.png")
    assert {table.name for table in tables} <= {text.partition(" (")[0] for text in boxes}
    assert any("26 dynamic tables" in text for text in boxes)
    with Image.open(tmp_path / "placement.png") as picture:
        width, height = picture.size
    assert all(0 <= b[0] < b[2] <= width and 0 <= b[1] < b[3] <= height for b in boxes.values())
    for one, other in itertools.combinations(boxes.values(), 2):
        assert one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]


def test_a_name_that_is_too_long_loses_its_middle() -> None:
    assert _shortened("dense/kernel", 1.5) == "dense/kernel"
    assert _shortened("a_long_name_of_a_table/embeddings[0:50]", 0.5) == "a_long_n…gs[0:50]"


def test_a_step_moves_what_travels_and_the_rows_of_a_batch() -> None:
    found = [
        replace(variable("dense", (10, 10)), name="dense"),
        replace(variable("frozen", (10,)), num_pulls=2, num_pushes=0),
        replace(variable("table", (1000, 4)), always_cut=True, travels=False, ids_per_example=3),
        replace(variable("few", (5, 4)), always_cut=True, travels=False, ids_per_example=1),
        replace(variable("new", (0, 4)), is_dynamic=True, travels=False, ids_per_example=2),
    ]
    plan = place_by(found, 2, ServerOptions(), num_workers=3, batch_size=8)
    # Dense values are on the first server; 24, 5 and 16 rows of 16 bytes come from both.
    rows = 16 * (24 + 5 + 16)
    ids = 8 * (24 + 5 + 16)
    sent, received = (sum(way) for way in zip(*plan.step_bytes()))
    assert sent == 400 + 2 * 40 + rows
    # The ids of the requests, and gradients with theirs.
    assert received == 400 + ids + rows + ids
    (first, _), (second, _) = plan.step_bytes()
    assert first - second == pytest.approx(480 - 16)
    assert place_by(found[:1], 1, ServerOptions(wire_dtype="bfloat16")).step_bytes() == [(200, 200)]
    assert plan.step_bytes(lambda _: 0) == [(480, 400), (0, 0)]


@pytest.mark.parametrize(("ids", "batch_size"), [(None, 8), (3, None)])
def test_it_says_of_which_table_the_ids_of_a_batch_are_not_known(ids: int | None, batch_size: int | None) -> None:
    table = replace(variable("table", (1000, 4)), travels=False, ids_per_example=ids)
    plan = place_by([table], 2, ServerOptions(), batch_size=batch_size)
    with pytest.raises(ValueError, match="ids of a batch that are looked up in table is not known"):
        plan.step_bytes()


def test_a_server_needs_memory_for_what_it_holds_and_for_what_is_on_its_way() -> None:
    dense, table = variable("dense", (1000, 1000)), replace(variable("table", (10**8, 1)), travels=False)
    few, many = (
        place_by([dense, table], 1, ServerOptions(), num_workers=number).memory_by_server[0] for number in (1, 5)
    )
    assert few > dense.num_bytes + table.num_bytes
    # Each worker has its own copies of dense values, and none of the table.
    assert 4 * dense.value_bytes < many - few < 20 * dense.value_bytes
    # A server has them as they are before and after they are rounded.
    rounded = place_by([dense, table], 1, ServerOptions(wire_dtype="bfloat16"), num_workers=5)
    assert rounded.memory_by_server == [many]
