"""A Slurm system on the hosts of a `Network`: Debian's slurmctld, slurmd and munged, each host a node of its own.

The first host has the controller, and commands are run there; the others are nodes, with 16 CPUs, 64 GB and a GPU each,
whatever the machine has. All processes of a node are in a PID namespace, so that jobs end with its slurmd, however that
ends.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from helpers import environment, wait_until
from network import Host, Network
from network import why_not as why_no_network

_START_SECS = 60.0
_COMMAND_SECS = 60.0
_STOP_SECS = 10.0
_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY")
_CGROUPS = "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\nCgroupMountpoint={folder}/cgroup\n"
_CONFIG = """\
ClusterName=kdist
SlurmctldHost={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,batch_sched_delay=0,sched_min_interval=100000
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/spool-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
StateSaveLocation={folder}/state
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=none
{ports}
KillWait=30
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
GresTypes=gpu
NodeName={nodes} CPUs=16 RealMemory=65536 Gres=gpu:1
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE
PartitionName=high Nodes=ALL PriorityTier=2 PreemptMode=OFF
"""


@functools.cache
def why_not() -> str | None:
    """The reason why this machine cannot have a Slurm system; None if it can."""
    for tool, package in {"slurmctld": "slurm-wlm", "slurmd": "slurm-wlm", "munged": "munge"}.items():
        if shutil.which(tool, path=_path()) is None:
            return f"{tool} is not installed (Debian's package {package}; make slurm installs it)"
    return why_no_network()


class SlurmSystem:
    """Slurm on the hosts of `network`, started; all nodes are idle. Use as a context manager.

    Args:
        network: its first host is the controller's.
        folder: for what Slurm writes.
        reserves_ports: whether steps get ports of their own.
    """

    def __init__(self, network: Network, folder: Path, *, reserves_ports: bool = False) -> None:
        self.controller, *self.nodes = network.hosts
        self._disk = network.disk
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        for name in ("munge", "state", "cgroup", *(f"spool-{node.name}" for node in self.nodes)):
            (folder / name).mkdir(parents=True)
        (folder / "cgroup.conf").write_text(_CGROUPS.format(folder=folder))
        # Slurm counts files of devices, whatever they are.
        (folder / "gres.conf").write_text("Name=gpu File=/dev/null\n")
        self._config = folder / "slurm.conf"
        self._config.write_text(
            _CONFIG.format(
                controller=self.controller.name,
                folder=folder,
                nodes=",".join(node.name for node in self.nodes),
                ports="MpiParams=ports=12000-12999" if reserves_ports else "",
            )
        )
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def run(self, *command: str, variables: Mapping[str, str] | None = None, timeout: float = _COMMAND_SECS) -> str:
        """Runs a command on the controller's host to its end; returns what it printed.

        Raises:
            subprocess.CalledProcessError: it failed.
        """
        done = self.attempt(*command, variables=variables, timeout=timeout)
        done.check_returncode()
        return done.stdout

    def attempt(
        self, *command: str, variables: Mapping[str, str] | None = None, timeout: float = _COMMAND_SECS
    ) -> subprocess.CompletedProcess[str]:
        """The same for a command that may fail; standard error is in what it printed."""
        return subprocess.run(
            self.controller.inside(*command, cwd=self._disk),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            check=False,
            env={**self._environment(), **(variables or {})},
        )

    def submit(self, *arguments: str, variables: Mapping[str, str] | None = None) -> Job:
        """Submits a batch job by `sbatch` and its arguments, from the folder that all hosts share."""
        said = self.run("sbatch", *arguments, variables=variables)
        return Job(self, int(re.findall(r"Submitted batch job (\d+)", said)[0]), self._disk)

    def close(self) -> None:
        """Kills all jobs, and stops what was started."""
        # Nodes before their controller: it would write about them.
        for process in reversed(self._processes):
            process.kill()
            process.wait(_STOP_SECS)

    def __enter__(self) -> SlurmSystem:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        munge = self._folder / "munge"
        munge.chmod(0o755)
        (munge / "key").write_bytes(os.urandom(128))
        (munge / "key").chmod(0o600)
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        # One serves all hosts, which share the files of the machine.
        self._spawn(
            [
                "munged",
                "--foreground",
                "--force",
                "--num-threads=10",
                *(f"--{k}={munge / v}" for k, v in files.items()),
            ],
            munge / "out",
        )
        wait_until((munge / "socket").exists, _START_SECS, lambda: f"munged serves: {(munge / 'out').read_text()}")
        config = str(self._config)
        self._spawn(self.controller.inside("slurmctld", "-D", "-f", config), self._folder / "slurmctld.out")
        for node in self.nodes:
            self._spawn(
                _of_its_own(node, "slurmd", "-D", "-N", node.name, "-f", config), self._folder / f"{node.name}.out"
            )
        wait_until(self._all_idle, _START_SECS, lambda: f"all nodes are idle: {self.attempt('sinfo', '-l').stdout}")

    def _all_idle(self) -> bool:
        return self.attempt("sinfo", "-h", "-p", "low", "-o", "%D %T").stdout.split() == [str(len(self.nodes)), "idle"]

    def _spawn(self, command: Sequence[str], log: Path) -> None:
        with log.open("wb") as file:
            self._processes.append(
                subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=self._environment()
                )
            )

    def _environment(self) -> dict[str, str]:
        # `python` in a batch script is the one of this test.
        given = {name: value for name, value in environment().items() if not name.startswith(("SLURM", "PYTEST"))}
        return {**given, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{_path()}", "SLURM_CONF": str(self._config)}


class Job:
    """A batch job.

    Args:
        system: that it was submitted to.
        number: its id.
        folder: that it was submitted from.
    """

    def __init__(self, system: SlurmSystem, number: int, folder: Path) -> None:
        self._system = system
        self.number = number
        self._folder = folder

    @property
    def output(self) -> str:
        """The text that it has printed so far, in all its starts."""
        path = self._folder / f"slurm-{self.number}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def run_dir(self, name: str) -> Path:
        """The default run dir of its first step."""
        return self._folder / "runs" / name / f"slurm-{self.number}"

    def wait_for(self, pattern: str, timeout: float) -> str:
        """Waits until it has printed what matches `pattern`; returns the newest match."""
        found: list[str] = []

        def is_there() -> bool:
            found[:] = re.findall(pattern, self.output, re.MULTILINE)
            state = self.state
            assert found or state not in _ENDED, f"job {self.number} is {state} without {pattern!r}:\n{self.output}"
            return bool(found)

        wait_until(is_there, timeout, lambda: f"{pattern!r} in the output of job {self.number}:\n{self.output}")
        return found[-1]

    def wait_for_step(self, step: int, timeout: float) -> int:
        """Waits until training has reached `step`; returns the newest step that was printed."""
        newest = 0

        def is_there() -> bool:
            nonlocal newest
            newest = max(map(int, re.findall(r"^train \| step +(\d+)", self.output, re.MULTILINE)), default=0)
            return newest >= step

        wait_until(is_there, timeout, lambda: f"step {step} in the output of job {self.number}:\n{self.output}")
        return newest

    def kill(self, rank: int) -> None:
        """Kills kdist in one task of its first step, as a kernel that runs out of memory does."""
        wanted = {f"SLURM_JOB_ID={self.number}", "SLURM_STEP_ID=0", f"SLURM_PROCID={rank}"}
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdecimal() and (entry / "comm").read_text().startswith("python"):
                    variables = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
                    if wanted <= set(variables):
                        os.kill(int(entry.name), signal.SIGKILL)

    @property
    def state(self) -> str:
        """`PENDING`, `RUNNING`, `COMPLETED`, `CANCELLED`, ..."""
        return self._shown("JobState")

    @property
    def restarts(self) -> int:
        """The number of times that it was requeued."""
        return int(self._shown("Restarts"))

    def end(self, timeout: float) -> str:
        """Waits until it has ended; returns its state."""
        wait_until(lambda: self.state in _ENDED, timeout, lambda: f"job {self.number} ends:\n{self.output}")
        return self.state

    def _shown(self, name: str) -> str:
        shown = self._system.run("scontrol", "show", "job", str(self.number))
        return re.findall(rf"\b{name}=(\S+)", shown)[0]


def _of_its_own(host: Host, *command: str) -> list[str]:
    """A command on a host with processes of its own, all of which end with it."""
    # A shell is the first of these processes, and asks how they ended.
    alone = ["unshare", "--pid", "--mount-proc", "--fork", "--kill-child", "sh", "-c", '"$@" & wait', "sh"]
    return host.inside(*alone, *command)


def _path() -> str:
    return f"{os.environ.get('PATH', '')}{os.pathsep}/usr/sbin{os.pathsep}/sbin"
