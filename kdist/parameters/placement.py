"""Which server holds which variable: a pure function from variables, servers and policy to a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kdist.errors import ConfigError

POLICIES = ("round_robin", "greedy")


@dataclass(frozen=True)
class Variable:
    """A variable as placement sees it.

    Attributes:
        name: its name in checkpoints.
        shape: its shape.
        num_bytes: its size in bytes with its optimizer slots, which live beside it.
    """

    name: str
    shape: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True)
class Plan:
    """Where every variable lives.

    Attributes:
        variables: the variables, in the model's order.
        servers: for each variable the index of its server.
        num_servers: how many servers there are; some may hold nothing.
    """

    variables: tuple[Variable, ...]
    servers: tuple[int, ...]
    num_servers: int

    @property
    def bytes_by_server(self) -> list[int]:
        """Bytes on each server, slots included."""
        totals = [0] * self.num_servers
        for variable, server in zip(self.variables, self.servers):
            totals[server] += variable.num_bytes
        return totals

    @property
    def imbalance(self) -> float:
        """Bytes of the fullest server over the mean; 1.0 is even."""
        totals = self.bytes_by_server
        mean = sum(totals) / len(totals)
        return max(totals) / mean if mean else 1.0

    def table(self) -> str:
        """The plan as aligned text: one line a variable, then the totals."""
        rows = [("variable", "shape", "bytes", "server")]
        for variable, server in zip(self.variables, self.servers):
            shape = "x".join(map(str, variable.shape)) or "scalar"
            rows.append((variable.name, shape, f"{variable.num_bytes:,}", f"ps:{server}"))
        for server, num_bytes in enumerate(self.bytes_by_server):
            rows.append(("total", "", f"{num_bytes:,}", f"ps:{server}"))
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = [
            f"{name:<{widths[0]}}  {shape:>{widths[1]}}  {size:>{widths[2]}}  {server}"
            for name, shape, size, server in rows
        ]
        return "\n".join([*lines, f"bytes include optimizer slots; imbalance {self.imbalance:.2f} (1.00 is even)", ""])


def place(variables: Sequence[Variable], num_servers: int, policy: str) -> Plan:
    """Places `variables` on `num_servers` servers.

    Args:
        policy: `round_robin`, TensorFlow's own order (server i holds variables i, i + n, ...), or `greedy`, the largest
            first to the least loaded server (Graham's LPT rule, 1969), which never loads a server more than
            round-robin does by as much as one variable.

    Raises:
        ConfigError: an unknown policy.
    """
    if policy == "round_robin":
        servers = [i % num_servers for i in range(len(variables))]
    elif policy == "greedy":
        servers = [0] * len(variables)
        load = [0] * num_servers
        for i in sorted(range(len(variables)), key=lambda i: -variables[i].num_bytes):
            servers[i] = load.index(min(load))
            load[servers[i]] += variables[i].num_bytes
    else:
        raise ConfigError(f"strategy.placement={policy}: choose one of {', '.join(POLICIES)}")
    return Plan(tuple(variables), tuple(servers), num_servers)
