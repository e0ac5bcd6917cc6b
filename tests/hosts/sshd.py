"""An sshd on every host of a network, and the launcher that starts tasks through them."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from helpers import descendants, environment, wait_until
from network import Host, Network

_SSHD = shutil.which("sshd") or "/usr/sbin/sshd"


def why_no_ssh() -> str | None:
    """The reason why sshd cannot run; None if it can."""
    missing = [tool for tool in ("ssh", "ssh-keygen") if shutil.which(tool) is None]
    if not Path(_SSHD).exists():
        missing.append("sshd")
    return f"{' and '.join(missing)} is not installed (Debian's package openssh-server)" if missing else None


class Ssh:
    """Servers on all hosts, which let the owner of one key in, and the config of a client that has it.

    Args:
        network: whose hosts they are on.
        folder: for keys, configs and logs.
    """

    def __init__(self, network: Network, folder: Path) -> None:
        self._folder = folder
        self._servers: dict[Host, subprocess.Popen[bytes]] = {}
        self._launchers: list[Launcher] = []
        folder.mkdir(mode=0o700)
        for name in ("client", "server", "stranger"):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True, timeout=20
            )
        key = " ".join((folder / "server.pub").read_text().split()[:2])
        names = [name for host in network.hosts for name in (host.name, host.address)]
        (folder / "known_hosts").write_text("".join(f"{name} {key}\n" for name in names))
        self.client = self.write_client_config("client")
        for host in network.hosts:
            host.do("mount", "-t", "tmpfs", "tmpfs", "/run")
            host.do("mkdir", "/run/sshd")

    def write_client_config(self, key: str, known_hosts: str = "known_hosts", more: str = "") -> Path:
        """Writes the config of a client with that key, as `ssh -F` takes it."""
        path = self._folder / f"config-{key}-{known_hosts}"
        path.write_text(
            f"IdentityFile {self._folder / key}\nIdentitiesOnly yes\nIdentityAgent none\nUser root\n"
            f"UserKnownHostsFile {self._folder / known_hosts}\nGlobalKnownHostsFile /dev/null\n{more}"
        )
        return path

    def serve(self, *hosts: Host) -> None:
        """Starts the servers of hosts."""
        config = self._folder / "sshd_config"
        config.write_text(
            f"HostKey {self._folder / 'server'}\nAuthorizedKeysFile {self._folder / 'client.pub'}\nUsePAM no\n"
            "StrictModes no\nPermitRootLogin yes\nPasswordAuthentication yes\nPidFile none\nPrintMotd no\n"
        )
        for host in hosts:
            self._servers[host] = subprocess.Popen(
                host.inside(_SSHD, "-D", "-f", str(config), "-E", str(self._folder / f"{host.name}.log"))
            )
            wait_until(lambda host=host: ":22 " in host.do("ss", "-Htln"), 20, f"sshd on {host.name}")

    def launch(self, host: Host, *arguments: str, cwd: Path, client: Path | None = None) -> Launcher:
        """Starts `python -m kdist.launch` on a host."""
        launcher = Launcher(
            host, ["--ssh", f"ssh -F {client or self.client}", *arguments], cwd, self._folder, len(self._launchers)
        )
        self._launchers.append(launcher)
        return launcher

    def sessions(self) -> list[int]:
        """The processes of all sessions."""
        return [pid for server in self._servers.values() for pid in descendants(server.pid)]

    def tasks(self) -> dict[str, int]:
        """Process ids of tasks that run, by their names."""
        found = {}
        for pid in self.sessions():
            with suppress(OSError):
                variables = Path(f"/proc/{pid}/environ").read_bytes()
                # Processes that a task has started have its variables, too.
                if match := re.search(rb'"type": "(\w+)", "index": (\d+)', variables):
                    found.setdefault(f"{match[1].decode()}:{match[2].decode()}", pid)
        return found

    def close(self) -> None:
        for launcher in self._launchers:
            launcher.kill()
        for server in self._servers.values():
            _kill([*descendants(server.pid), server.pid])
            server.wait(10)


class Launcher:
    """One `python -m kdist.launch`."""

    def __init__(self, host: Host, arguments: Iterable[str], cwd: Path, folder: Path, number: int) -> None:
        self._output = folder / f"launcher-{number}.txt"
        self._started = time.monotonic()
        # A launcher that ignores SIGHUP when it starts, as under nohup, goes on doing so; the tests may be under nohup.
        command = ["env", "--default-signal=HUP", sys.executable, "-m", "kdist.launch", *arguments]
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                host.inside(*command, cwd=cwd),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment(),
            )

    @property
    def said(self) -> str:
        return self._output.read_text()

    @property
    def step(self) -> int:
        """The newest step that the chief has said."""
        steps = re.findall(r"^worker:0 \| train \| step +(\d+)", self.said, re.MULTILINE)
        return int(steps[-1]) if steps else 0

    @property
    def seconds(self) -> float:
        """Since it was started."""
        return time.monotonic() - self._started

    def wait_for(self, pattern: str, timeout: float = 120) -> None:
        wait_until(
            lambda: re.search(pattern, self.said, re.MULTILINE) or self._process.poll() is not None,
            timeout,
            lambda: f"{pattern!r} in:\n{self.said}",
        )
        assert re.search(pattern, self.said, re.MULTILINE), self.said

    def send_signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def code(self, timeout: float = 120) -> int:
        """Its exit code, once there is one."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it runs after {timeout} s:\n{self.said}") from None

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait(10)


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
