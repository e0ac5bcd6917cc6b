"""The network of `deploy/wireguard`: what it lets through, what it keeps out, and what it costs."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from clusters import PORT, Ended, Hosts, four, try_to_connect
from helpers import REPO
from network import Host, Network, why_no_loss

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.alone]

NUM_PAIRS = 3
#: Steps are so short that latency is what counts; and steps of which each moves 2 MB to the servers and back.
MODELS = {
    "84 bytes a step": ("train.steps=4000",),
    "4 MB a step": ("model._target_=user_code.build_large", "+model.megabytes=2", "train.steps=400"),
}


def why_no_wireguard() -> str | None:
    if reason := why_no_loss():
        return reason
    missing = [tool for tool in ("wg", "wg-quick", "wireguard-go") if shutil.which(tool) is None]
    return f"{', '.join(missing)} not installed (Debian's wireguard-tools and wireguard-go)" if missing else None


class Tunnels:
    """WireGuard on hosts, by the files that `make_configs.py` writes, in user space: it needs no kernel module."""

    def __init__(self, hosts: Sequence[Host], folder: Path) -> None:
        self.outside = {host.name: host.address for host in hosts}
        self._hosts = hosts
        named = [f"{host.name}={host.address}" for host in hosts]
        script = REPO / "deploy/wireguard/make_configs.py"
        subprocess.run([sys.executable, str(script), *named, "--to", str(folder)], check=True, timeout=60)
        for host in hosts:
            for place in ("/etc/wireguard", "/run"):
                host.do("mkdir", "-p", place)
                host.do("mount", "-t", "tmpfs", "tmpfs", place)
            host.do("cp", str(folder / f"{host.name}.conf"), "/etc/wireguard/kdist0.conf")
            host.do("cp", str(folder / "kdist.nft"), "/etc/wireguard/kdist.nft")

    def up(self, network: Network) -> None:
        """Starts them; from now on the names of the hosts stand for addresses inside."""
        for index, host in enumerate(self._hosts, 1):
            host.do("env", "WG_QUICK_USERSPACE_IMPLEMENTATION=wireguard-go", "LOG_LEVEL=silent",
                    "sh", "-c", "wg-quick up kdist0 >/dev/null 2>&1")  # fmt: skip
            host.address = f"10.99.0.{index}"
            network.rename(host, host.name)

    def down(self, network: Network) -> None:
        """Ends the processes, which belong to no host; the names stand for addresses outside again."""
        for host in self._hosts:
            with suppress(OSError):
                host.do("sh", "-c", "wg-quick down kdist0 >/dev/null 2>&1")
            host.address = self.outside[host.name]
            network.rename(host, host.name)


def test_tasks_meet_inside_and_nobody_reaches_them_from_outside(hosts: Hosts, tmp_path: Path) -> None:
    if reason := why_no_wireguard():
        pytest.skip(reason)
    network = hosts.network(5)
    *inside, stranger = network.hosts
    tunnels = Tunnels(inside, tmp_path / "wireguard")
    try:
        tunnels.up(network)
        cluster = hosts.cluster(network, four(network), "train.steps=6000", "cluster.bind=kdist0")
        cluster.start()
        cluster.wait_for_step(100)
        server = inside[2]

        def tried(host: Host, address: str) -> str:
            return try_to_connect(host, address, PORT)

        assert tried(inside[0], server.address) == "connected"
        # Not even those who are inside.
        outside = tunnels.outside[server.name]
        assert [tried(host, outside) for host in (inside[0], stranger)] == ["TimeoutError", "TimeoutError"]
        assert tried(stranger, server.address) != "connected"
        ended = cluster.end()
    finally:
        tunnels.down(network)
    assert ended.codes == dict.fromkeys(four(network), 0), cluster.all_said()


def test_what_the_tunnel_costs(hosts: Hosts, tmp_path: Path) -> None:
    """Pairs of runs, with the tunnel and without it; the medians of their ratios."""
    if reason := why_no_wireguard():
        pytest.skip(reason)
    network = hosts.network(4)
    tunnels = Tunnels(network.hosts, tmp_path / "wireguard")
    ratios: dict[str, list[float]] = {name: [] for name in MODELS}

    def rate(arguments: Sequence[str]) -> float:
        cluster = hosts.cluster(network, four(network), *arguments)
        cluster.start()
        nonlocal ended
        ended = cluster.end()
        assert ended.codes == dict.fromkeys(four(network), 0), cluster.all_said()
        shutil.rmtree(cluster.run_dir)
        return float(ended.result["steps_per_second"])

    ended: Ended
    for _ in range(NUM_PAIRS):
        without = {name: rate(arguments) for name, arguments in MODELS.items()}
        try:
            tunnels.up(network)
            for name, arguments in MODELS.items():
                ratios[name].append(rate(arguments) / without[name])
        finally:
            tunnels.down(network)
    found = ", ".join(f"{name} {statistics.median(of_model):.2f}" for name, of_model in ratios.items())
    hosts.report(53, "WireGuard in user space", f"times the rate without, medians of {NUM_PAIRS} pairs: {found}", ended)


def test_private_keys_are_for_their_owner_alone(tmp_path: Path) -> None:
    if reason := why_no_wireguard():
        pytest.skip(reason)
    script = REPO / "deploy/wireguard/make_configs.py"
    command = [sys.executable, str(script), "a=10.0.0.1", "b=fd00::2", "--to", str(tmp_path / "w")]
    subprocess.run(command, check=True, timeout=60)
    for name in ("a", "b"):
        assert os.stat(tmp_path / "w" / f"{name}.conf").st_mode & 0o777 == 0o600
    assert "Endpoint = [fd00::2]:51820" in (tmp_path / "w/a.conf").read_text()
