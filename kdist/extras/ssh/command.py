"""`kdist launch`: the tasks to start, and their hosts, from the command line."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Sequence
from typing import NoReturn

from kdist.cluster.resolve import chief_at
from kdist.cluster.spec import ClusterShape
from kdist.config.checks import check_more_than_zero, check_port
from kdist.config.scheduler import GRACE_SECS
from kdist.errors import ConfigError
from kdist.extras.ssh.hosts import Host, Request, parse_hosts
from kdist.extras.ssh.launcher import run as run_tasks

_DESCRIPTION = """\
Starts the tasks of a cluster on machines that ssh reaches, and ends them together.

  kdist launch -H h1:2,h2:2 -- +recipe=mnist cluster=2ps2w
  kdist launch -H h1:2,h2:2 --cluster 2ps2w -- train.py --my-option
  kdist launch -H h3:2 --join runs/mnist -- +recipe=mnist

Slots are filled in order: worker 0, which is the chief as well, the other workers, then parameter servers. The hosts
have the same folders and the same interpreter as this machine, unless options name others.
With --join, tasks join a cluster that trains: workers in all slots, or those of --cluster, as 1ps0w. They leave it
after SIGTERM, and it continues.
"""
_EPILOG = """\
ssh must log in without a password. Environment variables go along, over the encrypted connection, but not those of
this machine (HOME, USER, TMPDIR, ...), of this session (SSH_*, XDG_*, ...) and of other launchers (SLURM_*, ...).
Signals are forwarded: after Ctrl-C, SIGTERM or SIGUSR1 the chief saves and all tasks end; a second one ends them at
once. If a task fails, the others get SIGTERM. If this command or a connection ends, so do the tasks.
Exit codes: that of the task that failed first; 75 if it was killed, or if a host does not answer; 2 if something given
is wrong.
"""
#: Tasks that save after another one has failed take no longer than `run.grace_secs`, and some seconds to exit.
_EXIT_SECS = 10.0


class _Parser(argparse.ArgumentParser):
    """Raises a ConfigError instead of printing usage."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; --help shows what this command takes")


def run(arguments: Sequence[str]) -> int:
    return run_tasks(request_of(arguments))


def request_of(arguments: Sequence[str]) -> Request:
    """Reads the command line.

    Raises:
        ConfigError: something is missing, or cannot be read.
    """
    own, program = _split(arguments)
    given = _parser().parse_args(own)
    if not program:
        raise ConfigError("nothing to start: after --, give overrides, as +recipe=mnist cluster=2ps2w, or a script")
    check_more_than_zero("--connect-timeout", given.connect_timeout)
    check_more_than_zero("--patience", given.patience)
    check_port("--port", given.port)
    is_script = program[0].endswith(".py")
    hosts = parse_hosts(given.hosts)
    if given.join is None:
        shape = _shape(given.cluster, None if is_script else program)
    else:
        shape = _joining(given.cluster, program, hosts)
    return Request(
        hosts=hosts,
        shape=shape,
        joined_chief=None if given.join is None else chief_at(given.join, "--join "),
        command=tuple(program) if is_script else ("-m", "kdist", *program),
        python=given.python,
        folder=os.path.abspath(given.workdir),
        ssh=tuple(shlex.split(given.ssh)) or ("ssh",),
        port=given.port,
        connect_timeout=given.connect_timeout,
        patience=given.patience,
        grace_secs=_grace_secs(program) + _EXIT_SECS,
    )


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    place = list(arguments).index("--") if "--" in arguments else len(arguments)
    return list(arguments[:place]), list(arguments[place + 1 :])


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        "kdist launch",
        usage="kdist launch -H HOSTS [options] -- OVERRIDES | SCRIPT.py ARGUMENTS",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-H", "--hosts", required=True, metavar="HOSTS", help="h1:2,user@h2:2,[fd00::3]:1: hosts with their slots")
    add("--cluster", metavar="SHAPE", help="how many tasks a script has, as 2ps2w; overrides say it by cluster=2ps2w")
    add("--join", metavar="RUN_DIR", help="the run whose cluster the tasks join, or host:port of its chief")
    add("--python", default=sys.executable, metavar="PATH", help="the interpreter on the hosts [%(default)s]")
    add("--workdir", default=".", metavar="FOLDER", help="the folder on the hosts [the present one]")
    add("--ssh", default="ssh", metavar="COMMAND", help="with options, as 'ssh -p 2222 -i key' [ssh]")
    add("--port", type=int, metavar="N", help="the tasks of a host listen at N, N+1, ... [any free ports]")
    add("--connect-timeout", type=float, default=30.0, metavar="SECS", help="for all hosts to be ready [30]")
    add("--patience", type=float, default=30.0, metavar="SECS", help="of silence, then a connection is lost [30]")
    return parser


def _shape(given: str | None, overrides: Sequence[str] | None) -> ClusterShape:
    """The shape of the cluster, from `--cluster` for a script, else from the overrides."""
    if overrides is None:
        if given is None:
            raise ConfigError("--cluster is not given: say how many tasks the script has, as --cluster 2ps2w")
        text = given
    else:
        if given is not None:
            raise ConfigError(f"--cluster {given}: is for scripts; behind --, write cluster={given}")
        _check_overrides(overrides)
        shapes = [text.partition("=")[2] for text in overrides if text.startswith("cluster=")]
        if not shapes:
            raise ConfigError("no cluster= after --; give one, for example cluster=2ps2w")
        text = shapes[-1]
    shape = ClusterShape.parse(text)
    if shape.is_local:
        raise ConfigError(f"cluster={text}: is one process, which needs no launcher")
    return shape


def _joining(given: str | None, program: Sequence[str], hosts: Sequence[Host]) -> ClusterShape:
    """The number of tasks that join: workers in all slots, or those of `--cluster`."""
    if program[0].endswith(".py"):
        raise ConfigError(
            f"{program[0]}: --join is for overrides; a script says it itself, by "
            'kdist.ClusterConfig("hosts", job="worker", join=...)'
        )
    _check_overrides(program)
    if shapes := [text for text in program if text.startswith("cluster=")]:
        raise ConfigError(f"{shapes[-1]}: the cluster that tasks join has its shape; leave it out")
    if given is None:
        return ClusterShape(0, sum(host.slots for host in hosts))
    shape = ClusterShape.of_text(given)
    if not shape.tasks or shape.has_evaluator:
        raise ConfigError(f"--cluster {given}: say which tasks join, as 1ps1w, 2w or 1ps0w")
    return shape


def _check_overrides(program: Sequence[str]) -> None:
    if wrong := [text for text in program if "=" not in text and not text.startswith(("-", "~"))]:
        raise ConfigError(f"{wrong[0]}: is neither an override, as key=value, nor a script, as train.py")
    if {"-m", "--multirun"} & set(program):
        raise ConfigError("-m: a sweep starts one cluster after another; run the launcher once for each trial")


def _grace_secs(program: Sequence[str]) -> float:
    """`run.grace_secs` of the overrides; the tasks do not know of a scheduler that has started this process."""
    found = [match[1] for text in program if (match := re.fullmatch(r"run\.grace_secs=(\d+(?:\.\d*)?)", text))]
    return float(found[-1]) if found else GRACE_SECS
