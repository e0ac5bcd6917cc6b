"""`python -m kdist.launch`, with an sshd on each host."""

from __future__ import annotations

import os
import re
import shlex
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from clusters import MINE, Hosts
from helpers import REPO, result_of, wait_until
from network import Network
from sshd import Launcher, Ssh, why_no_ssh

pytestmark = [pytest.mark.cluster, pytest.mark.long]

_SCRIPT = """
import os, sys
import kdist, user_code

trainer = kdist.Trainer(user_code.build, cluster="1ps2w", run_dir="D")
trainer.fit(**user_code.data(), steps=200)
print("argument", sys.argv[1], os.environ["SHARED"])
"""


class Lab:
    """Hosts with an sshd each, and a launcher on the first of them."""

    def __init__(self, network: Network, folder: Path) -> None:
        self.network = network
        self.ssh = Ssh(network, folder / "ssh")

    def launch(self, slots: str, *arguments: str, client: Path | None = None) -> Launcher:
        return self.ssh.launch(self.network.hosts[0], "-H", slots, *arguments, cwd=self.network.disk, client=client)

    def train(self, *overrides: str, slots: str = "host0:2,host1:2", options: tuple[str, ...] = ()) -> Launcher:
        return self.launch(slots, *options, "--", *MINE, "cluster=2ps2w", *overrides)

    def is_empty(self) -> bool:
        """Whether no session is left, and with it no task."""
        return not self.ssh.sessions()


@pytest.fixture
def lab(hosts: Hosts, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Lab]:
    if reason := why_no_ssh():
        pytest.skip(reason)
    network = hosts.network(**{"num_hosts": 2, **getattr(request, "param", {})})
    found = Lab(network, tmp_path)
    try:
        found.ssh.serve(*network.hosts)
        yield found
    finally:
        found.ssh.close()


def test_tasks_on_two_hosts_train_and_end(lab: Lab) -> None:
    launcher = lab.train("train.steps=400", "run.log_format=text")
    assert launcher.code() == 0, launcher.said
    assert "kdist.launch | 2ps2w | host0: worker:0 worker:1 | host1: ps:0 ps:1\n" in launcher.said
    assert re.search(r"^worker:0 \| done  \| step +400/400", launcher.said, re.MULTILINE), launcher.said
    for task in ("worker:1", "ps:0", "ps:1"):
        ended = rf"^{task} +\| done  \| {task} \| the chief has finished"
        assert re.search(ended, launcher.said, re.MULTILINE), launcher.said
    assert result_of(lab.network.disk / "D")["cluster"] == "2ps2w"
    wait_until(lab.is_empty, 10, lambda: f"no process is left: {lab.ssh.sessions()}")


@pytest.mark.parametrize("lab", [{"num_hosts": 3}], indirect=True)
def test_tasks_of_another_host_join_a_run_and_leave_it_at_a_signal(lab: Lab) -> None:
    run = lab.train("train.steps=1000000", slots="host0:2,host1:2")
    wait_until(lambda: run.step >= 300, 120, lambda: run.said)
    joined = lab.launch("host2:2", "--join", str(lab.network.disk / "D"), "--", *MINE)
    wait_until(lambda: "2ps2w -> 2ps4w" in run.said or "2ps3w -> 2ps4w" in run.said, 120, lambda: run.said)
    assert "| join host0:" in joined.said
    joined.send_signal(signal.SIGTERM)
    assert joined.code() == 0, joined.said
    wait_until(lambda: "-> 2ps2w" in run.said, 60, lambda: run.said)
    run.send_signal(signal.SIGTERM)
    assert run.code() == 143, run.said
    assert result_of(lab.network.disk / "D")["restarts"] == {"worker": 0, "cluster": 0}


def test_the_command_of_the_docs_trains(lab: Lab) -> None:
    page = (REPO / "docs/howto/machines.md").read_text()
    (command,) = re.findall(r"^kdist launch (.*cluster=.*)$", page, re.MULTILINE)
    words = [word.replace("h1", "host0").replace("h2", "host1") for word in shlex.split(command)]
    part = f"data.path={REPO / 'recipes' / 'mnist_part.npz'}"
    host = lab.network.hosts[0]
    launcher = lab.ssh.launch(host, *words, "train.steps=60", part, "run.dir=D", cwd=lab.network.disk)
    assert launcher.code() == 0, launcher.said
    assert result_of(lab.network.disk / "D")["global_step"] == 60


@pytest.mark.parametrize("lab", [{"ipv6": True}], indirect=True)
def test_hosts_may_be_ipv6_addresses(lab: Lab) -> None:
    first, second = (host.address for host in lab.network.hosts)
    launcher = lab.train("train.steps=200", slots=f"[{first}]:3,root@[{second}]:1", options=("--port", "2300"))
    assert launcher.code() == 0, launcher.said
    assert "worker:1 | kdist" in launcher.said
    assert f"worker:1 of 2ps2w | at [{first}]:2301, chief worker:0 at [{first}]:2300" in launcher.said


def test_a_script_trains_with_its_arguments_folder_and_environment(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARED", "with all")
    (lab.network.disk / "train.py").write_text(_SCRIPT)
    launcher = lab.launch("host1:1,host0:2", "--cluster", "1ps2w", "--", "train.py", "mine")
    assert launcher.code() == 0, launcher.said
    for task in ("worker:0", "worker:1", "ps:0"):
        assert re.search(rf"^{task} +\| argument mine with all$", launcher.said, re.MULTILINE), launcher.said


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 143), (signal.SIGHUP, 143)]
)
def test_signals_are_forwarded_and_the_step_is_saved(lab: Lab, number: signal.Signals, code: int) -> None:
    launcher = lab.train("train.steps=1000000")
    wait_until(lambda: launcher.step >= 300, 120, lambda: launcher.said)
    launcher.send_signal(number)
    signalled = time.monotonic()
    assert launcher.code(45) == code, launcher.said
    assert time.monotonic() - signalled < 25, launcher.said
    result = result_of(lab.network.disk / "D")
    assert result["status"] == "preempted"
    assert (lab.network.disk / "D/checkpoints" / f"ckpt-{result['global_step']}.index").exists()
    wait_until(lab.is_empty, 10, lambda: f"no process is left: {lab.ssh.sessions()}")


def test_a_signal_before_training_ends_all(lab: Lab) -> None:
    launcher = lab.train("train.steps=1000000")
    launcher.wait_for(r"^kdist\.launch")
    launcher.send_signal(signal.SIGTERM)
    assert launcher.code(45) in (143, 75), launcher.said
    wait_until(lab.is_empty, 10, lambda: f"no process is left: {lab.ssh.sessions()}")


def test_nothing_is_left_of_a_launcher_that_was_killed(lab: Lab) -> None:
    launcher = lab.train("train.steps=1000000")
    wait_until(lambda: launcher.step >= 100, 120, lambda: launcher.said)
    assert len(lab.ssh.tasks()) == 4
    launcher.kill()
    wait_until(lab.is_empty, 10, lambda: f"no process is left: {lab.ssh.sessions()}")


def test_all_end_when_one_task_is_killed(lab: Lab) -> None:
    launcher = lab.train("train.steps=1000000")
    wait_until(lambda: launcher.step >= 100, 120, lambda: launcher.said)
    os.kill(lab.ssh.tasks()["ps:1"], signal.SIGKILL)
    assert launcher.code(60) == 75, launcher.said
    assert "kdist: ps:1 on host1 failed (signal 9, SIGKILL); ending the other tasks\n" in launcher.said
    wait_until(lab.is_empty, 10, lambda: f"no process is left: {lab.ssh.sessions()}")


def test_a_config_that_is_wrong_ends_all_with_its_code(lab: Lab) -> None:
    launcher = lab.train("train.batch_size=0")
    assert launcher.code(60) == 2, launcher.said
    # Every task reads the config: whichever is first says it, and ends the others.
    assert re.search(r"^\S+ +\| kdist: error: train\.batch_size=0: must be", launcher.said, re.MULTILINE), launcher.said


def test_an_error_of_the_run_ends_all_with_its_code(lab: Lab) -> None:
    launcher = lab.train("train.steps=1000000", "+data.scale=1e30")
    assert launcher.code(90) == 1, launcher.said
    assert re.search(r"^worker:0 \| kdist: error: NanTensor: the loss became", launcher.said, re.MULTILINE), (
        launcher.said
    )
    wait_until(lab.is_empty, 10, lambda: f"no process is left: {lab.ssh.sessions()}")


def test_a_connection_that_is_lost_ends_all_on_both_sides(lab: Lab) -> None:
    launcher = lab.train("train.steps=1000000", options=("--patience", "6"))
    wait_until(lambda: launcher.step >= 100, 120, lambda: launcher.said)
    tasks = lab.ssh.tasks()
    cut = time.monotonic()
    lab.network.cut(lab.network.hosts[1])
    wait_until(lambda: not {"ps:0", "ps:1"} & lab.ssh.tasks().keys(), 15, "tasks of the host that was cut off end")
    assert time.monotonic() - cut < 12, tasks
    assert launcher.code(60) == 75, launcher.said
    assert re.search(r"kdist: ps:0, ps:1: the connection with host1 was lost: ", launcher.said), launcher.said
    wait_until(lambda: not lab.ssh.tasks(), 10, lambda: f"no task is left: {lab.ssh.tasks()}")


def test_hosts_that_cannot_be_used_are_named(hosts: Hosts, tmp_path: Path) -> None:
    if reason := why_no_ssh():
        pytest.skip(reason)
    network = hosts.network(4)
    lab = Lab(network, tmp_path)
    (tmp_path / "ssh/empty").touch()
    stranger, unknown = (lab.ssh.write_client_config(*given) for given in (("stranger",), ("client", "empty")))
    try:
        lab.ssh.serve(network.hosts[0], network.hosts[3])
        network.cut(network.hosts[3])
        overrides = ("--", *MINE, "cluster=1ps1w")
        cases = [
            ("host0:1,nowhere:1", (), None, 2, "nowhere: its name cannot be resolved"),
            ("host0:1,host1:1", (), None, 75, "host1: no sshd answers there"),
            (
                "host0:1,host3:1",
                ("--connect-timeout", "4"),
                None,
                75,
                "host3: (it does not answer|not ready after 4 s)",
            ),
            ("host0:2", (), stranger, 2, "host0: ssh cannot log in without a password; `ssh-copy-id host0`"),
            ("me@host0:2", (), stranger, 2, "host0: ssh cannot log in without a password; `ssh-copy-id me@host0`"),
            ("host0:2", (), unknown, 2, "host0: ssh does not know its host key; connect once by hand, `ssh host0`"),
            ("host0:2", ("--python", "/no/python"), None, 2, "host0: cannot run /no/python"),
            ("host0:2", ("--workdir", "/no/folder"), None, 2, "host0: /no/folder: No such file or directory"),
            ("host0:2", ("--port", "22"), None, 2, "host0: port 22: Address already in use"),
        ]
        for slots, options, client, code, message in cases:
            launcher = lab.launch(slots, *options, *overrides, client=client)
            assert launcher.code(20) == code, launcher.said
            assert re.match(f"kdist: error: {message}", launcher.said), launcher.said
            assert launcher.seconds < 10, launcher.said
            assert "Traceback" not in launcher.said
            wait_until(lab.is_empty, 10, lambda: f"no process is left: {lab.ssh.sessions()}")
    finally:
        lab.ssh.close()
