import pytest

from kdist.cluster.local import share_of_machine
from kdist.cluster.spec import CHIEF, ClusterShape, ClusterSpec, Task
from kdist.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "num_ps", "num_workers"),
    [("2ps2w", 2, 2), ("1ps4w", 1, 4), ("12ps30w", 12, 30), ("4w", 0, 4), ("local", 0, 0)],
)
def test_shape_is_read_and_written(text: str, num_ps: int, num_workers: int) -> None:
    shape = ClusterShape.parse(text)
    assert (shape.num_ps, shape.num_workers) == (num_ps, num_workers)
    assert str(shape) == text


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("0ps2w", "no parameter server"),
        ("2ps0w", "no worker"),
        ("banana", "not the form"),
        ("2ps", "not the form"),
        ("", "not"),
    ],
)
def test_wrong_shape_is_refused_with_the_form(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as error:
        ClusterShape.parse(text)
    assert "NpsMw" in str(error.value)


def test_only_the_chief_is_chief() -> None:
    assert CHIEF.is_chief
    assert str(CHIEF) == "chief"
    assert not any(task.is_chief for task in ClusterShape(2, 2).tasks)


def test_tasks_have_roles_addresses_and_devices() -> None:
    spec = ClusterSpec(ps=("a:1", "a:2"), worker=("b:3",))
    assert [str(task) for task in spec.shape.tasks] == ["ps:0", "ps:1", "worker:0"]
    assert spec.address(Task("ps", 1)) == "a:2"
    assert spec.jobs == {"ps": ["a:1", "a:2"], "worker": ["b:3"]}
    assert Task("worker", 0).device == "/job:worker/replica:0/task:0/device:CPU:0"
    with pytest.raises(ConfigError, match=r"no task worker:1; it has ps:0, ps:1, worker:0"):
        spec.address(Task("worker", 1))


@pytest.mark.parametrize(("num_workers", "cores", "intra_op"), [(2, 2, 1), (4, 2, 1), (2, 8, 4), (1, 16, 16)])
def test_workers_share_the_cores(num_workers: int, cores: int, intra_op: int) -> None:
    shape = ClusterShape(1, num_workers)
    assert share_of_machine(Task("worker", 0), shape, range(cores))[0] == intra_op
    # A single inter-op thread could wait for itself.
    assert all(share_of_machine(Task(job, 0), shape, range(cores))[1] >= 2 for job in ("ps", "worker"))


def test_tasks_keep_to_a_core_where_workers_have_no_more_than_one_each() -> None:
    shape = ClusterShape(2, 2)
    tasks = [Task("ps", 0), Task("ps", 1), Task("worker", 0), Task("worker", 1)]
    assert [share_of_machine(task, shape, [4, 7])[2] for task in tasks] == [[4], [7], [4], [7]]
    assert [share_of_machine(task, shape, [4])[2] for task in tasks] == [[4]] * 4
    # With a core to spare the system does better.
    assert [share_of_machine(task, shape, [4, 7, 9])[2] for task in tasks] == [None] * 4
