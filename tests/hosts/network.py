"""Several hosts on one machine: network namespaces with names and addresses of their own, on one bridge.

Each host has its own network, host name, `/etc/hosts`, boot id and, if asked for, its own disk; all share processes and
CPUs. Links can be cut, packets dropped, delayed or limited, and ports closed. Nothing of it is in the machine's own
namespaces: every namespace is held by one process, and is gone when that is, however this process ends.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

_BRIDGE, _DEVICE = "switch", "eth0"
_SWITCH = Path(__file__).with_name("slow_switch.py")
_TIMEOUT_SECS = 20.0


@functools.cache
def why_not() -> str | None:
    """The reason why this machine cannot have several hosts; None if it can."""
    if sys.platform != "linux":
        return "only Linux has network namespaces"
    for tool in ("unshare", "nsenter", "setpriv", "ip", "mount"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    try:
        with Network(1):
            return None
    except OSError as error:
        return f"network namespaces are not permitted: {error}"


def why_no_loss() -> str | None:
    """The reason why packets cannot be dropped and ports cannot be closed; None if they can."""
    return why_not() or (None if shutil.which("nft") else "nft is not installed (Debian's package nftables)")


@functools.cache
def why_no_limit() -> str | None:
    """The reason why the bandwidth cannot be limited; None if it can."""
    if (reason := why_not()) or (reason := None if shutil.which("tc") else "tc is not installed"):
        return reason
    try:
        with Network(1) as network:
            network.limit(100)
    except OSError as error:
        return f"this kernel has no tbf: {error}"
    return None


class Host:
    """One of the hosts of a `Network`.

    Attributes:
        name: its host name, which the others know.
        link: the name of its port of the bridge.
        address: its IP address.
        disk: the folder that its tasks see as `Network.disk`.
    """

    def __init__(self, name: str, address: str, disk: Path) -> None:
        self.name = self.link = name
        self.address = address
        self.disk = disk
        self._holder = _hold("--net", "--mount", "--uts", "--propagation", "private")

    @property
    def pid(self) -> int:
        """The process whose namespaces are this host's."""
        return self._holder.pid

    def inside(self, *command: str, cwd: Path = Path("/")) -> list[str]:
        """A command that runs `command` on this host, as the process that it starts; it ends with its parent."""
        enter = ["nsenter", "--target", str(self.pid), "--net", "--mount", "--uts"]
        return [*enter, "setpriv", "--pdeathsig", "KILL", "sh", "-c", 'cd "$0" && exec "$@"', str(cwd), *command]

    def do(self, *command: str, text: str = "") -> str:
        """Runs a command on this host to its end; returns what it printed.

        Raises:
            OSError: it failed.
        """
        return _do(self.inside(*command), text)

    def close(self) -> None:
        _release(self._holder)


class Network:
    """Hosts on one bridge. Use as a context manager.

    Args:
        num_hosts: how many; they are called `host0`, `host1`, ...
        folder: where hosts keep their files; tasks see `folder / "disk"`. None if nothing runs there.
        ipv6: whether names stand for IPv6 addresses alone.
        shared_disk: whether all hosts see the same files.
        delay_secs: how long each packet travels; 0 for a bridge of the kernel's.
        routed: whether a host that is away is as silent as one behind a router: nobody says that there is no route.

    Raises:
        OSError: the system does not permit it.
    """

    def __init__(
        self,
        num_hosts: int,
        folder: Path | None = None,
        *,
        ipv6: bool = False,
        shared_disk: bool = True,
        delay_secs: float = 0.0,
        routed: bool = False,
    ) -> None:
        self.hosts: list[Host] = []
        self._folder = folder
        self._ipv6 = ipv6
        self._shared_disk = shared_disk
        self._num_addresses = 0
        self._holder = _hold("--net")
        self._slow_switch: subprocess.Popen[bytes] | None = None
        try:
            if not delay_secs:
                self._do("ip", "link", "add", _BRIDGE, "type", "bridge", "mcast_snooping", "0")
                self._do("ip", "link", "set", _BRIDGE, "up")
            for index in range(num_hosts):
                self._add(f"host{index}", connect=not delay_secs)
            self._write_names()
            if routed:
                self._know_neighbours()
            if delay_secs:
                self._start_slow_switch(delay_secs)
        except BaseException:
            self.close()
            raise

    @property
    def disk(self) -> Path:
        """The folder that tasks work in, under one path on every host."""
        assert self._folder is not None
        return self._folder / "disk"

    def cut(self, *hosts: Host) -> None:
        """Lets hosts fall silent: no packet reaches them or leaves them, and nobody is told."""
        for host in hosts:
            self._do("ip", "link", "set", host.link, "down")

    def mend(self, *hosts: Host) -> None:
        """Undoes `cut`."""
        for host in hosts:
            self._do("ip", "link", "set", host.link, "up")

    def drop(self, percent: int) -> None:
        """Drops that many percent of all packets."""
        for host in self.hosts:
            _filter(host, [f'iifname "{_DEVICE}" numgen random mod 100 < {percent} drop'])

    def open_only(self, host: Host, ports: Collection[int]) -> None:
        """Drops what comes to other ports of a host, but for answers to what it asked itself."""
        _filter(
            host,
            [
                'iifname "lo" accept',
                "ct state established,related accept",
                "meta l4proto { icmp, ipv6-icmp } accept",
                f"tcp dport {{ {', '.join(map(str, sorted(ports)))} }} accept",
                "drop",
            ],
        )

    def limit(self, mbit: int) -> None:
        """Limits what each host sends."""
        for host in self.hosts:
            host.do("tc", "qdisc", "add", "dev", _DEVICE, "root", "tbf", "rate", f"{mbit}mbit",
                    "burst", "128kb", "latency", "50ms")  # fmt: skip

    def rename(self, host: Host, name: str) -> None:
        """Gives a host another name, as when a pod is started there."""
        host.name = name
        host.do("hostname", name)
        self._write_names()

    def move(self, host: Host, to: Host) -> None:
        """Gives the name of one host to another one, as when a pod is started on another machine."""
        host.name, to.name = f"{host.name}-before", host.name
        to.do("hostname", to.name)
        self._write_names()

    def close(self) -> None:
        """Removes all hosts; processes on them have to be ended before."""
        if self._slow_switch is not None:
            _release(self._slow_switch)
        for host in self.hosts:
            host.close()
        _release(self._holder)

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _add(self, name: str, *, connect: bool) -> Host:
        index = self._num_addresses = self._num_addresses + 1
        address = f"fd77::{index}" if self._ipv6 else f"10.77.0.{index}"
        disk = self._folder / (name if not self._shared_disk else "disk") if self._folder else Path("/")
        host = Host(name, address, disk)
        self.hosts.append(host)
        host.do("hostname", name)
        host.do("ip", "link", "set", "lo", "up")
        if connect:
            self._do("ip", "link", "add", name, "type", "veth", "peer", "name", _DEVICE, "netns", str(host.pid))
            self._do("ip", "link", "set", name, "master", _BRIDGE, "up")
            _give_address(host, address)
        if self._folder is not None:
            self._prepare_files(host, self._folder)
        return host

    def _prepare_files(self, host: Host, folder: Path) -> None:
        for path in (self.disk, host.disk):
            path.mkdir(parents=True, exist_ok=True)
        own = folder / "etc" / host.name
        own.mkdir(parents=True)
        (own / "boot_id").write_text(f"{uuid.uuid4()}\n")
        (own / "hosts").touch()
        (own / "resolv.conf").touch()
        host.do("mount", "--bind", str(own / "boot_id"), "/proc/sys/kernel/random/boot_id")
        for name in ("hosts", "resolv.conf"):
            host.do("mount", "--bind", str(own / name), f"/etc/{name}")
        if not self._shared_disk:
            host.do("mount", "--bind", str(host.disk), str(self.disk))

    def _write_names(self) -> None:
        if self._folder is None:
            return
        lines = ["127.0.0.1 localhost", "::1 localhost", *(f"{host.address} {host.name}" for host in self.hosts)]
        for host in self.hosts:
            # In place: the file is mounted.
            (self._folder / "etc" / host.link / "hosts").write_text("\n".join(lines) + "\n")

    def _know_neighbours(self) -> None:
        hardware = {
            h.address: h.do("ip", "-o", "link", "show", _DEVICE).split("link/ether ")[1].split()[0] for h in self.hosts
        }
        for host in self.hosts:
            for address, link in hardware.items():
                if address != host.address:
                    host.do("ip", "neigh", "replace", address, "lladdr", link, "dev", _DEVICE, "nud", "permanent")

    def _start_slow_switch(self, delay_secs: float) -> None:
        namespaces = [str(host.pid) for host in self.hosts]
        addresses = [host.address for host in self.hosts]
        self._slow_switch = subprocess.Popen(
            [sys.executable, "-S", str(_SWITCH), _DEVICE, str(delay_secs), ",".join(namespaces), ",".join(addresses)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._slow_switch.stdout is not None
        if not self._slow_switch.stdout.readline():
            raise OSError("/dev/net/tun cannot be used")
        for host in self.hosts:
            # Jumbo frames, so that the switch, which is a program, has fewer packets to pass on.
            host.do("ip", "link", "set", _DEVICE, "mtu", "9000")
            _give_address(host, host.address)

    def _do(self, *command: str) -> None:
        _do(["nsenter", "--target", str(self._holder.pid), "--net", *command])


def _give_address(host: Host, address: str) -> None:
    no_detection = ["nodad"] if ":" in address else []
    length = 64 if ":" in address else 24
    host.do("ip", "address", "add", f"{address}/{length}", "dev", _DEVICE, *no_detection)
    host.do("ip", "link", "set", _DEVICE, "up")


def _filter(host: Host, rules: Iterable[str]) -> None:
    chain = "\n".join(["type filter hook input priority 0; policy accept;", *rules])
    old = "table inet faults {}\ndelete table inet faults"
    host.do("nft", "-f", "-", text=f"{old}\ntable inet faults {{\nchain input {{\n{chain}\n}}\n}}\n")


def _hold(*namespaces: str) -> subprocess.Popen[bytes]:
    """A process in new namespaces, which ends when its standard input closes."""
    command = ["unshare", *namespaces, "sh", "-c", "echo; exec cat >/dev/null"]
    holder = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    assert holder.stdout is not None
    assert holder.stderr is not None
    if not holder.stdout.readline():
        said = holder.stderr.read().decode().strip()
        _release(holder)
        raise OSError(said or "unshare failed")
    return holder


def _release(holder: subprocess.Popen[bytes]) -> None:
    holder.kill()
    holder.wait(_TIMEOUT_SECS)
    for pipe in (holder.stdin, holder.stdout, holder.stderr):
        if pipe is not None:
            pipe.close()


def _do(command: Sequence[str], text: str = "") -> str:
    environment = {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"}
    done = subprocess.run(
        command, input=text, capture_output=True, text=True, timeout=_TIMEOUT_SECS, check=False, env=environment
    )
    if done.returncode:
        raise OSError(f"{' '.join(command[-6:])}: {done.stderr.strip()}")
    return done.stdout
