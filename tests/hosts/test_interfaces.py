"""`cluster.bind` on hosts with two networks: tasks are reached by one of them only."""

from __future__ import annotations

import signal

import pytest
from clusters import CHIEF_PORT, MINE, PORT, Hosts, four, try_to_connect
from commands import Command
from helpers import wait_until
from network import Network

pytestmark = [pytest.mark.cluster, pytest.mark.long]

INSIDE = "eth1"


def with_second_network(network: Network) -> dict[str, str]:
    """Gives all hosts but the last a second interface, whose address their names stand for; returns the first ones.

    The last one sends what is for the second addresses to the first interfaces.
    """
    *inside, stranger = network.hosts
    first = {host.name: host.address for host in network.hosts}
    for number, host in enumerate(inside, 1):
        # Both are on one bridge: each is to answer for its own address only.
        host.do("sh", "-c", "echo 1 > /proc/sys/net/ipv4/conf/all/arp_ignore")
        hardware = host.do("ip", "-o", "link", "show", "eth0").split("link/ether ")[1].split()[0]
        host.do("ip", "link", "add", "link", "eth0", "name", INSIDE, "type", "macvlan", "mode", "bridge")
        host.address = f"10.78.0.{number}"
        host.do("ip", "address", "add", f"{host.address}/24", "dev", INSIDE)
        host.do("ip", "link", "set", INSIDE, "up")
        network.rename(host, host.name)
        stranger.do("ip", "route", "add", host.address, "dev", "eth0")
        stranger.do("ip", "neigh", "replace", host.address, "lladdr", hardware, "dev", "eth0", "nud", "permanent")
    return first


@pytest.mark.parametrize("without_servers", [False, True])
def test_tasks_are_reached_by_the_interface_that_they_are_bound_to(hosts: Hosts, without_servers: bool) -> None:
    network = hosts.network(5)
    *inside, stranger = network.hosts
    outside = with_second_network(network)
    tasks = {"worker:0": inside[0], "worker:1": inside[1]} if without_servers else four(network)
    cluster = hosts.cluster(network, tasks, "train.steps=1000000", f"cluster.bind={INSIDE}", "run.health_port=2250")
    cluster.start()
    cluster.wait_for_step(100)
    chief, other = inside[0], inside[1]
    # Without servers, the chief's process serves at the port of worker 0.
    ports = [(chief, PORT), (other, PORT), (other, 2250), *([] if without_servers else [(chief, CHIEF_PORT)])]
    for host, port in ports:
        assert try_to_connect(inside[1] if host is chief else chief, host.address, port) == "connected", port
        assert try_to_connect(host, host.address, port) == "connected", "from the host itself"
        assert try_to_connect(stranger, outside[host.name], port) == "TimeoutError", port
        assert try_to_connect(stranger, host.address, port) == "TimeoutError", (
            "the second address, by the first network"
        )
    cluster.signal_all(signal.SIGTERM)
    ended = cluster.end()
    assert ended.codes == {**dict.fromkeys(tasks, 0), "worker:0": 143}, cluster.all_said()
    assert "network   TensorFlow's servers listen on eth1 and lo, " in ended.console


@pytest.mark.parametrize("cluster", ["1ps1w", "2w"])
@pytest.mark.parametrize("bind", ["auto", "null"])
def test_a_run_on_one_host_is_closed_to_others_unless_it_is_opened(hosts: Hosts, bind: str, cluster: str) -> None:
    network = hosts.network(2)
    here, stranger = network.hosts
    console = here.disk / "console"
    console.touch()
    arguments = [*MINE, f"cluster={cluster}", f"cluster.bind={bind}", "train.steps=1000000", "run.dir=D"]
    run = Command(*arguments, cwd=here.disk, stdout=console, host=here.pid)
    try:
        wait_until(lambda: "train | step" in console.read_text(), 60, console.read_text)
        ports = {int(line.split()[3].rpartition(":")[2]) for line in here.do("ss", "-ltnH").splitlines()}
        assert len(ports) >= 2
        expected = "TimeoutError" if bind == "auto" else "connected"
        for port in ports:
            assert try_to_connect(stranger, here.address, port) == expected, port
            assert try_to_connect(here, "127.0.0.1", port) == "connected", port
    finally:
        run.send_signal(signal.SIGTERM)
        assert run.wait(30) == 143
    network_line = next(line for line in console.read_text().splitlines() if line.startswith("network "))
    assert ("closed to other machines" in network_line) is (bind == "auto")


def test_an_interface_that_a_host_has_not_is_refused_at_once(hosts: Hosts) -> None:
    network = hosts.network(4)
    cluster = hosts.cluster(network, four(network), "cluster.bind=eth7", "cluster.start_timeout=30")
    cluster.start()
    ended = cluster.end()
    assert ended.codes == dict.fromkeys(four(network), 2)
    assert "cluster.bind=eth7: there is no such interface; this machine has lo, eth0" in ended.console
