from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kdist.cli.main import run
from kdist.cluster.spec import ClusterShape, Task
from kdist.errors import ConfigError
from kdist.extras.ssh.command import request_of
from kdist.extras.ssh.hosts import Host
from kdist.extras.ssh.launcher import variables_to_send


def test_overrides_run_kdist_here_and_there() -> None:
    request = request_of(["-H", "h1:2,h2:2", "--", "+recipe=mnist", "cluster=2ps2w", "run.grace_secs=7"])
    assert request.hosts == (Host("h1", None, 2), Host("h2", None, 2))
    assert request.shape == ClusterShape(2, 2)
    assert request.command == ("-m", "kdist", "+recipe=mnist", "cluster=2ps2w", "run.grace_secs=7")
    assert (request.python, request.folder, request.ssh) == (sys.executable, str(Path.cwd()), ("ssh",))
    assert request.grace_secs == 17


def test_a_script_runs_with_its_arguments() -> None:
    given = ["--python", "/opt/py", "--workdir", "/data", "--ssh", "ssh -p 2222", "--port", "3000"]
    request = request_of(["-H", "h1:3", "--cluster", "1ps2w", *given, "--", "train.py", "--", "-m", "x"])
    assert request.command == ("train.py", "--", "-m", "x")
    assert (request.python, request.folder, request.ssh) == ("/opt/py", "/data", ("ssh", "-p", "2222"))
    assert (request.shape, request.port) == (ClusterShape(1, 2), 3000)


def test_tasks_join_a_cluster_as_workers_unless_something_else_is_said(tmp_path: Path) -> None:
    (tmp_path / ".resize").mkdir()
    (tmp_path / ".resize" / "chief").write_text("h1:4000")
    request = request_of(["-H", "h3:2,h4", "--join", str(tmp_path), "--", "+recipe=mnist"])
    assert (request.shape, request.joined_chief) == (ClusterShape(0, 3), "h1:4000")
    assert request.name_of(Task("worker", 1)) == "worker+2"
    request = request_of(["-H", "h3:2", "--join", "h1:5000", "--cluster", "1ps0w", "--", "+recipe=mnist"])
    assert (request.shape, request.joined_chief) == (ClusterShape(1, 0), "h1:5000")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("-- cluster=2ps2w", "the following arguments are required: -H/--hosts; --help shows"),
        ("-H h1:4", "nothing to start: after --, give overrides"),
        ("-H h1:4 cluster=2ps2w", "unrecognized arguments: cluster=2ps2w"),
        ("-H h1:4 -- +recipe=mnist", "no cluster= after --; give one, for example cluster=2ps2w"),
        ("-H h1:4 -- cluster=two", "cluster=two: not the form NpsMw"),
        ("-H h1:4 -- cluster=local", "cluster=local: is one process, which needs no launcher"),
        ("-H h1:4 -- cluster=2ps2w mnist", "mnist: is neither an override, as key=value, nor a script"),
        ("-H h1:4 -- -m cluster=2ps2w", "-m: a sweep starts one cluster after another"),
        ("-H h1:4 -- train.py", "--cluster is not given: say how many tasks the script has"),
        ("-H h1:4 --cluster 2ps2w -- +recipe=mnist", "--cluster 2ps2w: is for scripts"),
        ("-H h1:4 --join nowhere -- +recipe=mnist", "--join nowhere: nothing trains there whose tasks others start"),
        ("-H h1:4 --join h1:5000 -- cluster=2w", "cluster=2w: the cluster that tasks join has its shape; leave it out"),
        ("-H h1:4 --join h1:5000 -- train.py", "train.py: --join is for overrides; a script says it itself, by "),
        ("-H h1:4 --join h1:5000 --cluster 2x -- +recipe=mnist", "--cluster 2x: say which tasks join, as 1ps1w, 2w or"),
        ("-H h1:4 --port 0 -- cluster=2ps2w", "--port=0: must be a port, from 1 to 65535"),
        ("-H h1:4 --patience 0 -- cluster=2ps2w", "--patience=0: must be more than 0"),
        ("-H h1:4 --connect-timeout nan -- cluster=2ps2w", "--connect-timeout=nan: must be more than 0"),
        ("-H h1:4 --patience soon -- cluster=2ps2w", "invalid float value: 'soon'"),
    ],
)
def test_what_cannot_be_started_is_refused(arguments: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        request_of(arguments.split())
    assert message in str(raised.value)


def test_an_error_is_one_line_and_an_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["launch", "-H", "h1:1", "--", "cluster=1ps1w"]) == 2
    assert capsys.readouterr().err == "kdist: error: -H has 1 slots, and cluster=1ps1w has 2 tasks: worker:0, ps:0\n"


def test_variables_of_this_machine_and_of_other_launchers_stay_here() -> None:
    kept = {"PATH": "/bin", "PYTHONPATH": "src", "CUDA_VISIBLE_DEVICES": "0", "AWS_SECRET_ACCESS_KEY": "secret"}
    left = {"HOME": "/home/me", "TF_CONFIG": "{}", "SSH_AUTH_SOCK": "/tmp/x", "SLURM_JOB_ID": "7", "PMI_SIZE": "2"}
    assert variables_to_send({**kept, **left}) == kept
