"""The lines of the console, whole: a changed format is a decision, and programs that read them notice."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kdist.cluster.spec import Task
from kdist.config.schema import ServerOptions
from kdist.console import lines
from kdist.log import Line
from kdist.parameters.placement.plan import Variable, place
from kdist.strategies.gradient_counts import GradientCounts
from kdist.version import __version__

LOGS = {"loss": 0.42134, "accuracy": 0.875}
CKPT = Path("runs/mine/checkpoints/ckpt-500")
DONE = lines.done_line(500, 2000, LOGS, "over 100 steps", "stopped by NanTensor", 6.12)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (
            lines.start_line("mnist", "parameter_server", "2ps2w"),
            f"kdist {__version__} | mnist | parameter_server on 2ps2w",
        ),
        (lines.run_dir_line("runs/a/b", Path("runs/a/b")), "run dir   runs/a/b      tensorboard --logdir runs"),
        (
            lines.train_line(200, 2000, LOGS, 100, 412.34),
            "train | step    200/2000 | loss 0.4213 | accuracy 0.8750 | over 100 steps |  412.3 steps/s | ETA 4s",
        ),
        (lines.train_line(1, None, LOGS, 1, None), "train | step      1 | loss 0.4213 | accuracy 0.8750 | over 1 step"),
        (lines.epoch_line(2, 4, 200, LOGS), "epoch 2/4 | loss 0.4213 | accuracy 0.8750"),
        (lines.epoch_line(2, None, 200, LOGS), "epoch 2 | loss 0.4213 | accuracy 0.8750"),
        (lines.validation_line(500, 2000, LOGS), "valid | step    500/2000 | loss 0.4213 | accuracy 0.8750"),
        (lines.evaluation_line(500, None, LOGS), "eval  | step    500 | loss 0.4213 | accuracy 0.8750"),
        (lines.save_line(500, 2000, CKPT), "save  | step    500      | checkpoints/ckpt-500"),
        (lines.resume_line(500, None, CKPT), "load  | step    500 | checkpoints/ckpt-500"),
        (lines.best_line(1000, 2000, 600), "best  | step   1000      | restored step 600, which validated best"),
        (
            lines.wait_line(500, 2000, "in/*.csv", 3600.0),
            "wait  | step    500/2000 | in/*.csv: all data read; waiting up to 3600 s for more",
        ),
        (
            lines.stays_line(5 << 30, 2 << 30),
            "model | 5.0 GiB, more than run.export_max_bytes (2.0 GiB): its values are in the checkpoints only",
        ),
        (lines.reached_line(2000, "runs/a"), "done  | step   2000 | runs/a is already finished; nothing to do"),
        (lines.no_epoch_line(2000, 2, 2), "done  | step   2000 | nothing to train: epochs=2, initial_epoch=2"),
        (
            lines.done_line(2000, 2000, LOGS, "of validation", "steps=2000 done", 6.12),
            "done  | step   2000/2000 | loss 0.4213 | accuracy 0.8750 | of validation | steps=2000 done | 6.1s",
        ),
        (lines.done_line(20, None, {}, "", "stopped by me", 61.0), "done  | step     20 | stopped by me | 61.0s"),
        (lines.event_line("speed", 100, 2000, "412.3 examples/s"), "speed | step    100/2000 | 412.3 examples/s"),
    ],
    ids=lambda value: str(value)[:12] if isinstance(value, Line) else "",
)
def test_a_line_is_as_people_know_it(line: Line, text: str) -> None:
    assert line == text


@pytest.mark.parametrize(
    ("shown", "texts"),
    [
        (
            lines.task_lines([("ps:0", 47, Path("runs/a/logs/ps-0.log")), ("worker:10", 123456, Path("l/w.log"))]),
            ["task  | ps:0     | pid     47 | logs/ps-0.log", "task  | worker:10 | pid 123456 | l/w.log"],
        ),
        (
            lines.member_lines({Task("ps", 0): "h1:1", Task("worker", 0): "h2:2"}, "worker:0"),
            ["task  | ps:0     | h1:1", "task  | worker:0 | h2:2 | also the chief"],
        ),
        (
            lines.last_lines({"worker:0": GradientCounts(300, 12, 12)}, {"worker": 1, "cluster": 0}, 12, 3, DONE),
            [
                "sync  | worker:0 | accepted    300 | dropped     12 | stale     12",
                "lost  | worker restarts 1 | cluster restarts 0 | extra steps 12",
                "scale | overflowed steps 3 (dropped)",
                DONE,
            ],
        ),
        (lines.last_lines({}, {"worker": 0, "cluster": 0}, 0, None, DONE), [DONE]),
    ],
    ids=["tasks", "members", "last", "nothing lost"],
)
def test_lines_that_come_together_are_aligned(shown: Sequence[Line], texts: Sequence[str]) -> None:
    assert list(shown) == list(texts)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0.0000"), (12.34567, "12.3457"), (2.5e7, "2.500e+07"), ([0.5, 1.0], "[0.5000 1.0000]"),
     ([0.0] * 6, "[0.0000 0.0000 0.0000 0.0000 0.0000 ...]"), (float("nan"), "nan")],
)  # fmt: skip
def test_a_metric_has_the_digits_that_fit_a_column(value: object, text: str) -> None:
    assert lines.validation_line(1, None, {"m": value}) == f"valid | step      1 | m {text}"


@pytest.mark.parametrize(("secs", "text"), [(3, "3s"), (63, "1m03s"), (3723, "1h02m")])
def test_the_remaining_time_has_two_units(secs: int, text: str) -> None:
    assert lines.train_line(0, secs, {}, 1, 1.0).endswith(f"| ETA {text}")


def test_programs_get_the_values_of_a_line_and_not_its_format() -> None:
    line = lines.event_line("speed", 100, 2000, "412.3 examples/s", values={"examples_per_second": 412.34})
    assert json.loads(line.to_json()) == {
        "event": "speed",
        "step": 100,
        "values": {"examples_per_second": 412.34},
        "message": "speed | step    100/2000 | 412.3 examples/s",
    }


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (999_600, "1 MB"),
        (1.2e12, "1.2 TB"),
        (25_376_199_680, "25.4 GB"),
        (2.5e15, "2.5 PB"),
    ],
)
def test_sizes_are_those_of_disks_and_networks(num_bytes: float, text: str) -> None:
    assert lines._size(num_bytes) == text


def test_a_plan_tells_what_servers_need_and_a_step_moves() -> None:
    dense = Variable("dense", (1000, 1000), 8_000_000, 4_000_000)
    table = Variable("table", (10**9, 64), 512 * 10**9, 256 * 10**9, always_cut=True, travels=False, ids_per_example=26)
    plan = place([dense, table], 20, ServerOptions(), num_workers=64, batch_size=4096)
    assert [str(line) for line in lines.plan_lines(plan)] == [
        "plan  | 512 GB on 20 servers, slots included | the fullest needs about 26.4 GB of memory",
        "plan  | step of a worker | gets 31.3 MB, sends 33 MB at most | 4096 examples",
        "plan  | 64 workers | for 1 step/s of each, the busiest server sends 343 MB/s and gets 349 MB/s",
    ]
    unknown = place([replace(table, ids_per_example=None)], 1, ServerOptions(), batch_size=4096)
    assert [str(line) for line in lines.plan_lines(unknown)] == [
        "plan  | 512 GB on 1 server, slots included | the fullest needs about 512 GB of memory",
        "plan  | step of a worker | the number of ids of a batch that are looked up in table is not known",
    ]
