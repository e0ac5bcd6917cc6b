import numpy as np
import pytest

from kdist.errors import ConfigError
from kdist.parameters.placement import Variable, place


def variables(*sizes: int) -> list[Variable]:
    return [Variable(f"v{i}", (size,), size) for i, size in enumerate(sizes)]


def test_round_robin_is_tensorflows_order() -> None:
    plan = place(variables(1, 2, 3, 4, 5), 2, "round_robin")
    assert [shard.server for shard in plan.shards] == [0, 1, 0, 1, 0]


def test_greedy_puts_the_largest_on_the_least_loaded() -> None:
    plan = place(variables(10, 1, 9, 1, 1), 2, "greedy")
    assert sorted(plan.bytes_by_server) == [11, 11]


def test_greedy_is_never_worse_than_round_robin_by_a_variable() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        sizes = rng.integers(1, 10_000, rng.integers(1, 40))
        servers = int(rng.integers(1, 6))
        greedy, robin = (place(variables(*map(int, sizes)), servers, p) for p in ("greedy", "round_robin"))
        assert max(greedy.bytes_by_server) < max(robin.bytes_by_server) + sizes.max()


def test_every_variable_has_one_server_and_bytes_are_kept() -> None:
    plan = place(variables(5, 6, 7), 5, "round_robin")
    assert sum(plan.bytes_by_server) == 18
    assert len(plan.shards) == 3


def test_table_names_variables_servers_and_totals() -> None:
    table = place([Variable("dense/kernel", (6, 8), 384)], 2, "round_robin").table()
    assert "dense/kernel" in table
    assert "6x8" in table
    assert "imbalance 2.00" in table


def test_unknown_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"strategy\.placement=best.*round_robin, greedy"):
        place(variables(1), 1, "best")
