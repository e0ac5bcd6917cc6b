"""Writes what hosts need for a network of their own: encrypted, and closed to everybody without a key.

    python deploy/wireguard/make_configs.py h1=192.0.2.1 h2=192.0.2.2 --to wireguard

writes `wireguard/h1.conf` and `wireguard/h2.conf`, as `wg-quick` takes them, and `kdist.nft`. Each config has the
private key of its host: copy it there as `/etc/wireguard/kdist0.conf`, with `kdist.nft` beside it, delete it here, and
run `wg-quick up kdist0` there. In that network h1 is 10.99.0.1 and h2 is 10.99.0.2: the addresses to give to kdist.

TensorFlow's servers listen on every interface. `kdist.nft`, loaded with the tunnel, drops what comes from elsewhere to
the ports of tasks, `--ports`, by default 2222-2299. Give tasks and `cluster.chief_port` ports of that range.
"""

from __future__ import annotations

import argparse
import os
import subprocess
from pathlib import Path

INTERFACE = "kdist0"
_UDP_PORT = 51820
_FIREWALL = """\
table inet kdist
delete table inet kdist
table inet kdist {{
  chain input {{
    type filter hook input priority 0; policy accept;
    iifname != {{ "lo", "{interface}" }} tcp dport {ports} drop
  }}
}}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hosts", nargs="+", metavar="NAME=ADDRESS", help="a host, and where the others reach it")
    parser.add_argument("--to", type=Path, required=True, help="the folder for the files; must not exist")
    parser.add_argument("--ports", default="2222-2299", help="of the tasks")
    given = parser.parse_args()
    hosts = dict(entry.split("=", 1) for entry in given.hosts)
    given.to.mkdir(mode=0o700)
    for name, text in configs(hosts).items():
        with open(given.to / f"{name}.conf", "w", opener=_private) as file:
            file.write(text)
    (given.to / "kdist.nft").write_text(firewall(given.ports))


def configs(hosts: dict[str, str]) -> dict[str, str]:
    """The config of each host, by its name; `hosts` are the addresses at which they reach each other."""
    inside = {name: f"10.99.0.{index}" for index, name in enumerate(hosts, 1)}
    private = {name: _wg("genkey") for name in hosts}
    peers = {
        name: f"[Peer]\n# {name}\nPublicKey = {_wg('pubkey', private[name])}\nAllowedIPs = {inside[name]}/32\n"
        f"Endpoint = {_in_brackets(address)}:{_UDP_PORT}\n"
        for name, address in hosts.items()
    }
    return {
        name: f"[Interface]\n# {name}\nAddress = {inside[name]}/24\nPrivateKey = {private[name]}\n"
        f"ListenPort = {_UDP_PORT}\nPostUp = nft -f /etc/wireguard/kdist.nft\n"
        "PostDown = nft delete table inet kdist\n\n" + "\n".join(peers[other] for other in hosts if other != name)
        for name in hosts
    }


def firewall(ports: str) -> str:
    """Rules for `nft -f`: only this host and the tunnel reach these ports."""
    return _FIREWALL.format(interface=INTERFACE, ports=ports)


def _wg(command: str, text: str = "") -> str:
    done = subprocess.run(["wg", command], input=text, capture_output=True, text=True, check=True, timeout=20)
    return done.stdout.strip()


def _in_brackets(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_EXCL, 0o600)


if __name__ == "__main__":
    main()
