"""The strategy that a config means on a cluster, and the number of gradients that make an update of sync_replicas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers import REPO

from kdist.cluster.spec import ClusterShape
from kdist.config.schema import StrategyConfig
from kdist.errors import ConfigError
from kdist.strategies.registry import NAMES, resolve
from kdist.strategies.sync_replicas import Quorum


def resolved(cluster: str, **options: Any) -> str:
    return resolve(StrategyConfig(**options), ClusterShape.parse(cluster))


@pytest.mark.parametrize(
    ("cluster", "options", "picked"),
    [
        ("2ps2w", {}, "parameter_server"),
        ("1ps1w", {}, "parameter_server"),
        ("4w", {}, "multi_worker_mirrored"),
        ("2w", {}, "multi_worker_mirrored"),
        ("1w", {}, "single"),
        ("local", {}, "single"),
        ("local", {"devices": 2}, "mirrored"),
        ("1w", {"devices": 2}, "mirrored"),
    ],
    ids=str,
)
def test_auto_picks_by_the_cluster_and_the_devices(cluster: str, options: dict[str, Any], picked: str) -> None:
    assert resolved(cluster, **options) == picked


@pytest.mark.parametrize(
    ("cluster", "options"),
    [
        ("2ps2w", {"name": "parameter_server"}),
        ("2ps2w", {"name": "parameter_server", "placement": "partitioned", "partition_min_bytes": 1}),
        ("2ps2w", {"name": "parameter_server", "local_steps": 4, "wire_dtype": "bfloat16"}),
        ("2ps2w", {"name": "sync_replicas", "wire_dtype": "bfloat16"}),
        ("2ps2w", {"name": "sync_replicas"}),
        ("2ps2w", {"name": "sync_replicas", "backup_workers": 1}),
        ("2ps2w", {"name": "sync_replicas", "token_mode": "tf1", "replicas_to_aggregate": 1}),
        ("2ps2w", {"name": "sync_replicas", "replicas_to_aggregate": 5}),
        ("2ps4w", {"name": "sync_replicas", "replicas_to_aggregate": 3, "backup_workers": 1}),
        ("4w", {"name": "multi_worker_mirrored"}),
        ("1w", {"name": "multi_worker_mirrored"}),
        ("local", {"name": "mirrored"}),
        ("local", {"name": "mirrored", "devices": 2}),
        ("local", {"name": "single"}),
        # One command for several clusters: what it says of servers is nothing to a cluster without any.
        ("local", {"name": "single", "placement": "greedy"}),
    ],
    ids=str,
)
def test_a_named_strategy_is_that_strategy(cluster: str, options: dict[str, Any]) -> None:
    assert resolved(cluster, **options) == options["name"]


@pytest.mark.parametrize(
    ("cluster", "options", "said"),
    [
        ("4w", {"name": "parameter_server"}, ["strategy=parameter_server", "cluster=4w", "use NpsMw"]),
        ("local", {"name": "parameter_server"}, ["strategy=parameter_server", "cluster=local", "use NpsMw"]),
        ("local", {"name": "sync_replicas"}, ["strategy=sync_replicas", "cluster=local", "use NpsMw"]),
        ("4w", {"name": "sync_replicas"}, ["strategy=sync_replicas", "cluster=4w", "use NpsMw"]),
        ("2ps2w", {"name": "multi_worker_mirrored"}, ["strategy=multi_worker_mirrored", "cluster=2ps2w", "use Mw"]),
        ("local", {"name": "multi_worker_mirrored"}, ["strategy=multi_worker_mirrored", "cluster=local", "use Mw"]),
        ("1ps1w", {"name": "mirrored"}, ["strategy=mirrored", "cluster=1ps1w", "use cluster=local"]),
        ("4w", {"name": "mirrored"}, ["strategy=mirrored", "cluster=4w", "use cluster=local"]),
        ("2ps2w", {"name": "single"}, ["strategy=single", "cluster=2ps2w", "use cluster=local"]),
        ("4w", {"name": "single"}, ["strategy=single", "cluster=4w", "use cluster=local"]),
        ("local", {"name": "mirrored", "devices": 1}, ["strategy.devices=1", "at least 2", "strategy=single"]),
        ("local", {"name": "warp"}, ["strategy=warp", ", ".join(NAMES)]),
        ("local", {"name": ""}, ["strategy=:", ", ".join(NAMES)]),
    ],
    ids=str,
)
def test_a_strategy_is_refused_on_a_cluster_it_cannot_use(
    cluster: str, options: dict[str, Any], said: list[str]
) -> None:
    assert_refused(cluster, options, said)


@pytest.mark.parametrize(
    ("cluster", "options", "said"),
    [
        ("2ps2w", {"backup_workers": 2}, ["strategy.backup_workers=2", "less than", "2 on cluster=2ps2w"]),
        ("2ps2w", {"backup_workers": 7}, ["strategy.backup_workers=7", "less than", "2 on cluster=2ps2w"]),
        ("1ps1w", {"backup_workers": 1}, ["strategy.backup_workers=1", "less than", "1 on cluster=1ps1w"]),
        (
            "2ps4w",
            {"replicas_to_aggregate": 4, "backup_workers": 1},
            ["strategy.replicas_to_aggregate=4", "strategy.backup_workers=1", "3 of the 4 workers of cluster=2ps4w"],
        ),
        (
            "2ps2w",
            {"replicas_to_aggregate": 2, "backup_workers": 1},
            ["strategy.replicas_to_aggregate=2", "strategy.backup_workers=1", "1 of the 2 workers of cluster=2ps2w"],
        ),
    ],
    ids=str,
)
def test_a_quorum_that_can_never_be_reached_is_refused(cluster: str, options: dict[str, Any], said: list[str]) -> None:
    assert_refused(cluster, {"name": "sync_replicas", **options}, said)


@pytest.mark.parametrize(
    ("cluster", "options", "said"),
    [
        ("2ps2w", {"name": "parameter_server", "backup_workers": 1}, ["strategy.backup_workers=1", "sync_replicas"]),
        ("2ps2w", {"backup_workers": 1}, ["strategy.backup_workers=1", "parameter_server", "sync_replicas"]),
        (
            "2ps2w",
            {"name": "parameter_server", "replicas_to_aggregate": 2},
            ["strategy.replicas_to_aggregate=2", "sync_replicas"],
        ),
        ("2ps2w", {"name": "parameter_server", "token_mode": "tf1"}, ["strategy.token_mode=tf1", "sync_replicas"]),
        ("local", {"token_mode": "tf1"}, ["strategy.token_mode=tf1", "single", "sync_replicas"]),
        ("4w", {"backup_workers": 1}, ["strategy.backup_workers=1", "multi_worker_mirrored", "sync_replicas"]),
        ("2ps2w", {"name": "parameter_server", "devices": 2}, ["strategy.devices=2", "mirrored"]),
        ("2ps2w", {"name": "sync_replicas", "devices": 2}, ["strategy.devices=2", "mirrored"]),
        ("4w", {"devices": 2}, ["strategy.devices=2", "multi_worker_mirrored", "but of mirrored"]),
        ("local", {"name": "single", "devices": 2}, ["strategy.devices=2", "single", "mirrored"]),
        ("local", {"name": "mirrored", "backup_workers": 1}, ["strategy.backup_workers=1", "sync_replicas"]),
        ("2ps2w", {"name": "sync_replicas", "local_steps": 2}, ["strategy.local_steps=2", "but of parameter_server"]),
        (
            "4w",
            {"wire_dtype": "bfloat16"},
            ["strategy.wire_dtype=bfloat16", "multi_worker_mirrored", "but of parameter_server and sync_replicas"],
        ),
    ],
    ids=str,
)
def test_an_option_of_one_strategy_is_refused_by_others(cluster: str, options: dict[str, Any], said: list[str]) -> None:
    assert_refused(cluster, options, said)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"placement": "best"}, ["strategy.placement=best", "auto, round_robin, greedy, partitioned"]),
        ({"token_mode": "loose"}, ["strategy.token_mode=loose", "strict, tf1"]),
        ({"partition_min_bytes": 0}, ["strategy.partition_min_bytes=0", "at least 1"]),
        ({"partition_min_bytes": 1.5}, ["strategy.partition_min_bytes=1.5", "whole number"]),
        ({"replicas_to_aggregate": 0}, ["strategy.replicas_to_aggregate=0", "at least 1"]),
        ({"replicas_to_aggregate": True}, ["strategy.replicas_to_aggregate=True", "whole number"]),
        ({"backup_workers": -1}, ["strategy.backup_workers=-1", "at least 0"]),
        ({"devices": 0}, ["strategy.devices=0", "at least"]),
        ({"local_steps": 0}, ["strategy.local_steps=0", "at least 1"]),
        ({"wire_dtype": "int8"}, ["strategy.wire_dtype=int8", "bfloat16"]),
    ],
    ids=str,
)
def test_a_value_that_no_strategy_takes_is_refused(options: dict[str, Any], said: list[str]) -> None:
    assert_refused("2ps2w", options, said)


def assert_refused(cluster: str, options: dict[str, Any], said: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        resolved(cluster, **options)
    message = str(error.value)
    assert "\n" not in message
    for words in said:
        assert words in message


def test_every_strategy_has_a_config() -> None:
    assert {Path(file).stem for file in (REPO / "conf" / "strategy").glob("*.yaml")} == set(NAMES)


@pytest.mark.parametrize(
    ("replicas", "workers", "shares"),
    [
        (1, 4, [1, 1, 1, 1]),
        (3, 4, [1, 1, 1, 1]),
        (4, 4, [1, 1, 1, 1]),
        (5, 4, [2, 1, 1, 1]),
        (7, 3, [3, 2, 2]),
        (8, 3, [3, 3, 2]),
        (9, 3, [3, 3, 3]),
        (5, 1, [5]),
        (1, 1, [1]),
    ],
)
def test_each_worker_has_its_share_of_a_step(replicas: int, workers: int, shares: list[int]) -> None:
    quorum = Quorum(replicas, workers)
    assert [quorum.share(worker) for worker in range(workers)] == shares
    # Enough for an update, and nothing left over unless some workers are there for others.
    assert sum(shares) == max(replicas, workers)


@pytest.mark.parametrize(("replicas", "workers", "tokens"), [(1, 4, 4), (4, 4, 4), (5, 4, 5), (9, 3, 9)])
def test_tokens_are_as_many_as_workers_or_gradients(replicas: int, workers: int, tokens: int) -> None:
    assert Quorum(replicas, workers, shared_tokens=True).tokens == tokens
