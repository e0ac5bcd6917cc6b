"""Which server holds which variable: a pure function from variables, servers and policy to a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from kdist.errors import ConfigError

POLICIES = ("round_robin", "greedy", "partitioned")

#: Variables of more bytes are cut under `partitioned`; TensorFlow's `MinSizePartitioner` begins at 256 KiB, too.
PARTITION_MIN_BYTES = 256 << 10


@dataclass(frozen=True)
class Variable:
    """A variable as placement sees it.

    Attributes:
        name: its name in checkpoints.
        shape: its shape.
        num_bytes: its size in bytes with its optimizer slots, which live beside it.
        value_bytes: its size in bytes alone.
        can_be_cut: whether its rows may live on different servers.
        always_cut: whether they do under every policy: the table of a `kdist.layers.Embedding`.
        note: a remark for the plan, for example why a table is not looked up by rows.
    """

    name: str
    shape: tuple[int, ...]
    num_bytes: int
    value_bytes: int = 0
    can_be_cut: bool = False
    always_cut: bool = False
    note: str = ""

    @property
    def num_rows(self) -> int:
        """Its first dimension; a scalar is one row."""
        return self.shape[0] if self.shape else 1


@dataclass(frozen=True)
class Shard:
    """Rows `start` to `stop` of a variable, on one server.

    Attributes:
        variable: index of the variable in the plan.
        server: index of the server.
        start, stop: the rows, `stop` not included; of a whole variable all of them.
    """

    variable: int
    server: int
    start: int
    stop: int


@dataclass(frozen=True)
class Plan:
    """Where every variable lives.

    Attributes:
        variables: the variables, in the model's order.
        shards: the parts of every variable, in the order of variables and rows; a whole variable is one.
        num_servers: how many servers there are; some may hold nothing.
    """

    variables: tuple[Variable, ...]
    shards: tuple[Shard, ...]
    num_servers: int

    def num_bytes(self, shard: Shard) -> int:
        """Bytes of a shard, slots included."""
        variable = self.variables[shard.variable]
        if not variable.num_rows:
            return 0
        return variable.num_bytes * (shard.stop - shard.start) // variable.num_rows

    def name(self, shard: Shard) -> str:
        """The variable's name, with the rows if the shard is a part of it: `embedding/embeddings[0:500]`."""
        variable = self.variables[shard.variable]
        is_whole = shard.stop - shard.start == variable.num_rows
        return variable.name if is_whole else f"{variable.name}[{shard.start}:{shard.stop}]"

    @property
    def bytes_by_server(self) -> list[int]:
        """Bytes on each server, slots included."""
        totals = [0] * self.num_servers
        for shard in self.shards:
            totals[shard.server] += self.num_bytes(shard)
        return totals

    @property
    def imbalance(self) -> float:
        """Bytes of the fullest server over the mean; 1.0 is even."""
        totals = self.bytes_by_server
        mean = sum(totals) / len(totals)
        return max(totals) / mean if mean else 1.0

    def table(self) -> str:
        """The plan as aligned text: one line a shard, the totals, then the remarks."""
        rows = [("variable", "shape", "bytes", "server")]
        for shard in self.shards:
            shape = self.variables[shard.variable].shape
            shown = "x".join(map(str, (shard.stop - shard.start, *shape[1:]) if shape else ())) or "scalar"
            rows.append((self.name(shard), shown, f"{self.num_bytes(shard):,}", f"ps:{shard.server}"))
        for server, num_bytes in enumerate(self.bytes_by_server):
            rows.append(("total", "", f"{num_bytes:,}", f"ps:{server}"))
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = [
            f"{name:<{widths[0]}}  {shape:>{widths[1]}}  {size:>{widths[2]}}  {server}"
            for name, shape, size, server in rows
        ]
        lines.append(f"bytes include optimizer slots; imbalance {self.imbalance:.2f} (1.00 is even)")
        lines += [f"{variable.name}: {variable.note}" for variable in self.variables if variable.note]
        return "\n".join([*lines, ""])


def place(
    variables: Sequence[Variable], num_servers: int, policy: str, partition_min_bytes: int = PARTITION_MIN_BYTES
) -> Plan:
    """Places `variables` on `num_servers` servers.

    Args:
        policy: `round_robin`, TensorFlow's own order (server i holds variables i, i + n, ...); `greedy`, the largest
            first to the least loaded server by bytes (Graham's LPT rule, 1969), or round-robin's order where that
            happens to be more even; `partitioned`, which besides cuts large variables by rows over all servers.
        partition_min_bytes: variables of more bytes, slots not counted, are large.

    Raises:
        ConfigError: an unknown policy.
    """
    if policy not in POLICIES:
        raise ConfigError(f"strategy.placement={policy}: choose one of {', '.join(POLICIES)}")

    def is_cut(variable: Variable) -> bool:
        is_large = policy == "partitioned" and variable.can_be_cut and variable.value_bytes > partition_min_bytes
        return num_servers > 1 and variable.num_rows > 1 and (variable.always_cut or is_large)

    def plan(choose: Callable[[int, list[int]], int], order: Sequence[int]) -> Plan:
        load = [0] * num_servers
        placed: dict[int, list[Shard]] = {}
        for i, variable in enumerate(variables):
            if is_cut(variable):
                emptiest_first = sorted(range(num_servers), key=load.__getitem__)
                placed[i] = [
                    Shard(i, server, *rows)
                    for server, rows in zip(emptiest_first, _even_rows(variable.num_rows, num_servers))
                ]
                for shard in placed[i]:
                    load[shard.server] += variable.num_bytes * (shard.stop - shard.start) // variable.num_rows
        for position, i in enumerate(i for i in order if not is_cut(variables[i])):
            server = choose(position, load)
            placed[i] = [Shard(i, server, 0, variables[i].num_rows)]
            load[server] += variables[i].num_bytes
        shards = tuple(shard for i in range(len(variables)) for shard in placed[i])
        return Plan(tuple(variables), shards, num_servers)

    in_turn = plan(lambda position, _load: position % num_servers, range(len(variables)))
    if policy == "round_robin":
        return in_turn
    largest_first = sorted(range(len(variables)), key=lambda i: -variables[i].num_bytes)
    emptiest = plan(lambda _position, load: load.index(min(load)), largest_first)
    return min(emptiest, in_turn, key=lambda candidate: max(candidate.bytes_by_server))


def _even_rows(num_rows: int, num_parts: int) -> list[tuple[int, int]]:
    """Cuts rows into at most `num_parts` parts whose lengths differ by one at most."""
    num_parts = min(num_parts, num_rows)
    bounds = [num_rows * part // num_parts for part in range(num_parts + 1)]
    return list(pairwise(bounds))
