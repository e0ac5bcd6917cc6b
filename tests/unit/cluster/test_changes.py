"""Changes of a cluster that trains, as they are typed, and what they make of its tasks."""

import pytest

from kdist.cluster.scaler import CommandScaler, LocalScaler, SayingScaler, scaler_of
from kdist.cluster.spec import ClusterChange, ClusterShape, ClusterSpec, Task
from kdist.errors import ClusterError, ConfigError

SPEC = ClusterSpec(("a:1", "a:2"), ("b:1", "b:2", "b:3"))


@pytest.mark.parametrize(
    ("words", "after"),
    [
        (["workers=4"], "2ps4w"),
        (["ps=3", "workers=1"], "3ps1w"),
        (["3ps4w"], "3ps4w"),
        (["1w"], "2ps1w"),
        (["move=ps:0"], "2ps3w"),
        (["leave=worker:1"], "2ps2w"),
        (["leave=ps:1"], "1ps3w"),
    ],
)
def test_a_change_gives_another_shape(words: list[str], after: str) -> None:
    assert str(ClusterChange.parse(words).applied_to(SPEC)) == after


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nothing to change is given; give workers=4, ps=3, move=ps:0"),
        (["worker=4"], "worker=4: cannot be read"),
        (["workers=-1"], "workers=-1: cannot be read"),
        (["workers=4.5"], "workers=4.5: cannot be read"),
        (["move=worker:0"], "move=worker:0: cannot be read"),
        (["0ps2w"], "no parameter server"),
        (["leave=ps:0", "workers=2"], "give leave alone"),
    ],
)
def test_what_is_no_change_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ClusterChange.parse(words)


@pytest.mark.parametrize(
    ("words", "spec", "message"),
    [
        (["workers=0"], SPEC, "workers=0: must be at least 1"),
        (["ps=0"], SPEC, "ps=0: must be at least 1"),
        (["move=ps:2"], SPEC, "move=ps:2: there is no such task; there are ps:0, ps:1, worker:0, worker:1, worker:2"),
        (["leave=worker:3"], SPEC, "leave=worker:3: there is no such task"),
        (["leave=ps:0"], ClusterSpec(("a:1",), ("b:1",)), "no other server can take its values; give move=ps:0"),
        (["ps=2"], ClusterSpec((), ("b:1",)), "1w has no parameter servers, and none can join"),
    ],
)
def test_a_change_that_a_cluster_cannot_make_is_refused(words: list[str], spec: ClusterSpec, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ClusterChange.parse(words).applied_to(spec)


def test_tasks_take_the_places_of_those_that_have_left_first() -> None:
    spec = SPEC.without([Task("worker", 0), Task("ps", 1)])

    assert list(map(str, spec.tasks)) == ["ps:0", "worker:1", "worker:2"]
    assert str(spec.shape) == "1ps2w"
    assert spec.jobs == SPEC.jobs
    assert spec.addresses.keys() == set(spec.tasks)
    assert spec.free_places("worker", 2) == [Task("worker", 0), Task("worker", 3)]
    joined = spec.with_tasks({Task("worker", 0): "c:1", Task("worker", 3): "c:2"})
    assert joined.worker == ("c:1", "b:2", "b:3", "c:2")
    assert str(joined.shape) == "1ps4w"


def test_a_shape_without_workers_can_be_written_and_read() -> None:
    assert str(ClusterShape(2, 0)) == "2ps0w"
    assert ClusterShape.of_text("2ps0w") == ClusterShape(2, 0)
    assert ClusterShape.of_text("3w") == ClusterShape(0, 3)
    assert ClusterShape.of_text("local") == ClusterShape()


def test_a_scaler_resizes_says_or_runs_a_command(tmp_path: object) -> None:
    calls: list[object] = []
    shape = ClusterShape(2, 3)

    scaler_of("auto", lambda **given: calls.append(given), calls.append, starts_tasks=True).scale(shape, "why")
    scaler_of("auto", lambda **given: calls.append(given), calls.append, starts_tasks=False).scale(shape, "why")

    assert calls == [{"workers": 3, "ps": 2, "why": "why"}, "scale | 2ps3w would be better: why"]
    assert isinstance(scaler_of("local", print, print, starts_tasks=False), LocalScaler)
    assert isinstance(scaler_of("none", print, print, starts_tasks=True), SayingScaler)
    command = f"{'touch'} {tmp_path}/{{workers}}-{{ps}}"
    scaler = scaler_of(command, print, print, starts_tasks=False)
    assert isinstance(scaler, CommandScaler)
    scaler.scale(shape, "why")
    with pytest.raises(ClusterError, match=r"cluster.scaler: false: exit code 1"):
        CommandScaler("false").scale(shape, "why")
    with pytest.raises(ClusterError, match="cluster.scaler: no-such-command 3: "):
        CommandScaler("no-such-command {workers}").scale(shape, "why")


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("kubectl scale --replicas={worker}", "{worker} is not known; give local"),
        ("kubectl 'scale", "No closing quotation; give local"),
        ("awk {", "Single '{' encountered in format string; give local"),
        ("scale {workers.x}", "'int' object has no attribute 'x'; give local"),
        ("", "is empty; give local, none, auto, or a command with {workers} and {ps}, and {{ and }} for other braces"),
    ],
)
def test_a_command_that_cannot_be_read_is_refused_before_it_is_needed(command: str, why: str) -> None:
    with pytest.raises(ConfigError) as raised:
        CommandScaler(command)
    assert str(raised.value).startswith(f"cluster.scaler={command}: {why}")
