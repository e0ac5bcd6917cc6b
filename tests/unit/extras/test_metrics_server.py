"""The values that Prometheus reads of a run, by a strict parser of its text format."""

from __future__ import annotations

import http.client
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
from fakes import CountingStrategy, make_session, run_all
from helpers import free_ports, toy_data

import kdist
from kdist.errors import ConfigError
from kdist.hooks import Hook, MetricsServer, StopAtStep
from kdist.strategies.gradient_counts import GradientCounts

_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\\\|\\"|\\n)*"'
_SAMPLE = re.compile(rf"({_NAME})(\{{{_LABEL}(?:,{_LABEL})*\}})? (NaN|[+-]Inf|[-+]?[0-9.]+(?:e[-+]?[0-9]+)?)")


def parse(text: str) -> dict[str, float]:
    """The samples of a text in version 0.0.4 of the format; a metric has HELP and TYPE, once and before its samples."""
    assert text.endswith("\n")
    samples: dict[str, float] = {}
    described: list[str] = []
    lines = iter(text[:-1].split("\n"))
    for line in lines:
        if helped := re.fullmatch(rf"# HELP ({_NAME}) [^\n]+", line):
            assert helped[1] not in described
            described.append(helped[1])
            typed = re.fullmatch(rf"# TYPE ({_NAME}) (counter|gauge)", next(lines))
            assert typed is not None
            assert typed[1] == helped[1]
            assert (typed[2] == "counter") == typed[1].endswith("_total")
            continue
        sample = _SAMPLE.fullmatch(line)
        assert sample is not None, line
        assert sample[1] == described[-1]
        assert sample[1] + (sample[2] or "") not in samples
        samples[sample[1] + (sample[2] or "")] = float(sample[3])
    return samples


def scrape(port: int, path: str = "/metrics") -> tuple[int, str, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", path)
    answer = connection.getresponse()
    return answer.status, answer.getheader("Content-Type", ""), answer.read().decode()


class Scrapes(Hook):
    """Reads the metrics at a step, as Prometheus may at any time."""

    def __init__(self, port: int, at_step: int) -> None:
        self.port, self.at_step = port, at_step
        self.samples: dict[str, float] = {}

    def after_run(self, context: Any, values: Any) -> None:
        if values.global_step == self.at_step:
            status, kind, text = scrape(self.port)
            assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
            self.samples = parse(text)

    def due_in(self, step: int) -> int | None:
        return self.at_step - step if step < self.at_step else None


@pytest.fixture
def port() -> Iterator[int]:
    (port,) = free_ports(1)
    yield port
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0, "the port is closed at the end"


def test_a_run_is_read_while_it_trains(run_dir: Path, port: int) -> None:
    x, y = toy_data(64)
    scrapes = Scrapes(port, 12)
    trainer = kdist.Trainer(models.mlp, run_dir=run_dir, hooks=[MetricsServer(port), scrapes])
    trainer.fit(x, y, batch_size=8, epochs=2, validation_data=(x, y), verbose=0)
    samples = scrapes.samples
    assert samples.pop('kdist_resident_memory_bytes{task="chief"}') > 10 << 20
    for name in ("kdist_steps_per_second", "kdist_examples_per_second"):
        # Of the first steps, in which functions are traced, there is none.
        assert samples.pop(name, 1.0) > 0
    numbers = {name: value for name, value in samples.items() if "metric=" not in name}
    assert numbers == {
        "kdist_global_step": 12,
        "kdist_last_step": 16,
        "kdist_dropped_gradients_total": 0,
        "kdist_lost_workers_total": 0,
        'kdist_restarts_total{kind="worker"}': 0,
        'kdist_restarts_total{kind="cluster"}': 0,
    }
    assert set(samples) - set(numbers) == {
        f'kdist_{kind}{{metric="{name}"}}' for kind in ("training", "validation") for name in ("loss", "accuracy")
    }


class Busy(CountingStrategy):
    """Asynchronous, with steps of staleness 3, a gradient dropped in each run, and a worker that was lost twice."""

    is_asynchronous = True
    worker_losses = 2

    def run(self, *args: Any, **options: Any) -> Any:
        logs = super().run(*args, **options)
        if logs is not None:
            vars(logs)["staleness"] = np.full(logs.num_steps, 3)
            vars(logs)["gradient_counts"] = [{0: GradientCounts(accepted=logs.num_steps, dropped=1, stale=1)}]
        return logs


def test_staleness_dropped_gradients_and_lost_workers_are_counted(port: int) -> None:
    scrapes = Scrapes(port, 20)
    run_all(make_session([MetricsServer(port), scrapes, StopAtStep(last_step=30)], Busy()))
    samples = scrapes.samples
    assert (samples["kdist_staleness_mean"], samples["kdist_staleness_max"]) == (3, 3)
    assert samples["kdist_dropped_gradients_total"] >= 1
    assert samples["kdist_lost_workers_total"] == 2


def test_only_the_metrics_are_served(port: int) -> None:
    class Looks(Hook):
        def after_create_session(self, session: Any) -> None:
            assert scrape(port, "/")[0] == 404
            assert parse(scrape(port, "/metrics?x=1")[2])["kdist_global_step"] == 0

    run_all(make_session([MetricsServer(port), Looks(), StopAtStep(last_step=3)]))


def test_a_port_that_is_taken_is_an_error_of_the_config() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        session = make_session([MetricsServer(port), StopAtStep(last_step=3)])
        with pytest.raises(
            ConfigError, match=rf"run\.metrics_port={port}: 127\.0\.0\.1:{port} cannot be used: .*in use"
        ):
            run_all(session)
        assert session.strategy.runs == []


def test_labels_are_escaped() -> None:
    from kdist.extras.monitoring import _labels

    (name,) = parse("# HELP a b\n# TYPE a gauge\na" + _labels(metric='a"b\\c\nd') + " 1\n")
    assert name == r'a{metric="a\"b\\c\nd"}'
