"""Places variables on servers: a pure function from variables, servers and options to a plan."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, pairwise
from math import prod
from pathlib import Path

from kdist.config.schema import ServerOptions
from kdist.model.lookup_rounds import WRONG_ID

# The bytes that a server must send in a step of all workers to be worth its while. Over loopback a tensor costs about
# half a millisecond of CPU whatever its size, and so does half a megabyte of it.
_WORTH_A_SERVER = 1 << 20

_ID_BYTES = 8
# Of memory, as measured by `benchmarks.sizing`: of a server of TensorFlow, of one with tables in addition; and the
# copies of its dense values, whatever the number of workers, and of those on their way to and from one of them.
_SERVER_BYTES, _TABLES_BYTES, _COPIES, _COPIES_IN_TRANSIT = 300e6, 80e6, 5.0, 1.6
#: Bytes of an element of floating-point variables.
_SIZES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}

_WRONG_ID = re.compile(re.escape(WRONG_ID) + r"\] \[(\d+)\] \[(-?\d+)\]")


# Of the picture, in pixels; there are enough of them to zoom in. White letters can be read on each color.
_COLORS = ("#4c78a8", "#b85c00", "#3f7f3c", "#c0392b", "#3b7c78", "#8e5a84", "#7a6520", "#7b5a44")
_FONT_SIZE, _LINE, _GAP = 24, 32, 60
_BAR_WIDTHS, _BAR_HEIGHTS, _ALL_BARS = (420, 1000), (900, 2600), 8000


@dataclass(frozen=True)
class Variable:
    """The properties of a variable that matter for placement.

    Attributes:
        name: its name in checkpoints.
        num_bytes, value_bytes: its size with and without optimizer slots.
        can_be_cut: whether its rows may be on different servers.
        always_cut: whether they are under every policy: the table of a `kdist.layers.Embedding`.
        travels: whether its value goes to workers in every step; of a table that is looked up, rows do.
        is_dynamic: whether it is a table that has no rows at first, and every server some later.
        num_pulls, num_pushes: the numbers of times that a step gets it, and sends a change of it.
        ids_per_example: the ids of an example that are looked up in it, if it is a table of which rows travel; None if
            examples differ.
        dtype: of its elements.
        note: a remark in the plan, for example why a table is not looked up by rows.
    """

    name: str
    shape: tuple[int, ...]
    num_bytes: int
    value_bytes: int = 0
    can_be_cut: bool = False
    always_cut: bool = False
    travels: bool = True
    is_dynamic: bool = False
    num_pulls: int = 1
    num_pushes: int = 1
    ids_per_example: int | None = 0
    dtype: str = "float32"
    note: str = ""

    @property
    def num_rows(self) -> int:
        """Its first dimension; a scalar is one row."""
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        """Bytes of a row without slots, of a table."""
        return prod(self.shape[1:]) * _SIZES.get(self.dtype, 4)


@dataclass(frozen=True)
class Shard:
    """Rows `start` to `stop` of a variable, on one server.

    Attributes:
        variable, server: their indices in the plan.
        start, stop: the rows, `stop` excluded; all rows of a variable that is not split.
    """

    variable: int
    server: int
    start: int
    stop: int


@dataclass(frozen=True)
class PlacementPlan:
    """The server of every variable; some servers may hold nothing.

    Attributes:
        shards: the parts of every variable, in the order of `variables` and of rows.
        reason: why these servers were chosen; empty if they were asked for.
        tasks: the index of each server's task, if some have left.
        num_workers: workers that pull and push in every step.
        batch_size: examples of a step of each of them; None if it is not known.
        wire_dtype: of larger floating-point values in transit; None if they travel as they are.
    """

    variables: tuple[Variable, ...]
    shards: tuple[Shard, ...]
    num_servers: int
    reason: str = ""
    tasks: tuple[int, ...] = ()
    num_workers: int = 1
    batch_size: int | None = None
    wire_dtype: str | None = None

    def task(self, server: int) -> str:
        """The name of a server's task, `ps:1`."""
        return f"ps:{self.tasks[server] if self.tasks else server}"

    def num_bytes(self, shard: Shard) -> int:
        """Bytes of a shard, slots included."""
        variable = self.variables[shard.variable]
        return variable.num_bytes * (shard.stop - shard.start) // max(1, variable.num_rows)

    def name(self, shard: Shard) -> str:
        """The variable's name, with the rows if the shard is only a part of it: `embedding/embeddings[0:500]`."""
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
        """Bytes of the fullest server divided by the mean; 1.0 is even."""
        mean = sum(self.bytes_by_server) / self.num_servers
        return max(self.bytes_by_server) / mean if mean else 1.0

    @property
    def memory_by_server(self) -> list[float]:
        """Bytes of memory that each server needs, about; dynamic tables are empty."""
        totals = [_SERVER_BYTES + held for held in self.bytes_by_server]
        for shard in self.shards:
            if (variable := self.variables[shard.variable]).travels:
                copies = _COPIES + _COPIES_IN_TRANSIT * self.num_workers
                totals[shard.server] += copies * variable.value_bytes * self._part(shard)
        for server in {shard.server for shard in self.shards if not self.variables[shard.variable].travels}:
            totals[server] += _TABLES_BYTES
        return totals

    def step_bytes(self, num_ids: Callable[[Variable], float] | None = None) -> list[tuple[float, float]]:
        """Bytes that each server sends to a worker in a step, and gets from it, protocols not counted.

        Args:
            num_ids: the number of different ids of a batch that are looked up in a table; by default, all ids differ.

        Raises:
            ValueError: the number of ids is not known; names the table.
        """
        num_ids = num_ids or self._most_ids
        totals = [[0.0, 0.0] for _ in range(self.num_servers)]
        num_parts = Counter(shard.variable for shard in self.shards)
        for shard in self.shards:
            variable, total = self.variables[shard.variable], totals[shard.server]
            part = 1 / num_parts[shard.variable] if variable.is_dynamic else self._part(shard)
            if variable.travels:
                values = self._in_transit(variable, variable.value_bytes) * part
                total[0] += values * variable.num_pulls
                total[1] += values * variable.num_pushes
            else:
                ids = num_ids(variable) * part
                rows = self._in_transit(variable, variable.row_bytes) * ids
                total[0] += rows
                # The ids of a request, and those of the gradient.
                total[1] += _ID_BYTES * ids + (rows + _ID_BYTES * ids) * variable.num_pushes
        return [(sent, received) for sent, received in totals]

    def _part(self, shard: Shard) -> float:
        """The part of the rows of its variable that a shard has."""
        return (shard.stop - shard.start) / max(1, self.variables[shard.variable].num_rows)

    def _most_ids(self, table: Variable) -> float:
        if table.ids_per_example is None or self.batch_size is None:
            raise ValueError(f"the number of ids of a batch that are looked up in {table.name} is not known")
        number = table.ids_per_example * self.batch_size
        return number if table.is_dynamic else min(number, table.num_rows)

    def _in_transit(self, variable: Variable, num_bytes: float) -> float:
        size, kind = _SIZES.get(variable.dtype, 0), _SIZES.get(self.wire_dtype or "", 0)
        return num_bytes * kind / size if 0 < kind < size else num_bytes

    def table(self) -> str:
        """The plan as aligned text: one line per shard, the totals, then the remarks."""
        rows = [("variable", "shape", "bytes", "server")]
        for shard in self.shards:
            variable = self.variables[shard.variable]
            num_rows = "any" if variable.is_dynamic else shard.stop - shard.start
            shown = "x".join(map(str, (num_rows, *variable.shape[1:]) if variable.shape else ())) or "scalar"
            rows.append((self.name(shard), shown, f"{self.num_bytes(shard):,}", self.task(shard.server)))
        rows += [("total", "", f"{total:,}", self.task(server)) for server, total in enumerate(self.bytes_by_server)]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = [
            f"{name:<{widths[0]}}  {shape:>{widths[1]}}  {size:>{widths[2]}}  {server}"
            for name, shape, size, server in rows
        ]
        lines.append(f"bytes include optimizer slots; imbalance {self.imbalance:.2f} (1.00 is even)")
        lines += [self.reason] if self.reason else []
        lines += [f"{variable.name}: {variable.note}" for variable in self.variables if variable.note]
        return "\n".join([*lines, ""])

    def draw(self, path: Path) -> None:
        """Draws a PNG: a bar for each server, with its variables stacked by their bytes, all on the same scale.

        A variable has its name if its part of the bar is high enough for it; the others are on top, and counted.
        Dynamic tables have no rows yet, and are counted in the title.
        """
        # Only a chief needs it.
        from PIL import Image, ImageDraw, ImageFont

        font = ImageFont.load_default(_FONT_SIZE)
        drawn = sorted((shard for shard in self.shards if self.num_bytes(shard)), key=self.num_bytes, reverse=True)
        totals, largest = self.bytes_by_server, max(1, *self.bytes_by_server)
        title = [f"bytes by server, optimizer slots included; imbalance {self.imbalance:.2f}"]
        if num_dynamic := sum(variable.is_dynamic for variable in self.variables):
            title.append(f"not drawn: {num_dynamic} dynamic tables, which get rows on every server as ids appear")
        # Each name fits, if there is room, and has a line, if the shards of a server have about the same size.
        longest = max((font.getlength(self.name(shard)) for shard in drawn), default=0) + _LINE
        most = max(_BAR_WIDTHS[0], min(_BAR_WIDTHS[1], _ALL_BARS // self.num_servers))
        width = int(min(max(longest, _BAR_WIDTHS[0]), most))
        num_shards = max(Counter(shard.server for shard in drawn).values(), default=1)
        height = min(max(_BAR_HEIGHTS[0], num_shards * 3 * _LINE // 2), _BAR_HEIGHTS[1])
        floor = _GAP + (len(title) + 2) * _LINE + height
        room = max(self.num_servers * (width + _GAP), *(int(font.getlength(line)) + _GAP for line in title)) + _GAP
        image = Image.new("RGB", (room, floor + 2 * _LINE + _GAP), "white")
        draw = ImageDraw.Draw(image)
        draw.text((_GAP, _GAP // 2), "\n".join(title), fill="black", font=font)
        for server, total in enumerate(totals):
            left, bottom, unnamed = _GAP + server * (width + _GAP), float(floor), 0
            for shard in (shard for shard in drawn if shard.server == server):
                top = bottom - self.num_bytes(shard) * height / largest
                box, middle = (left, top, left + width, bottom), (left + width / 2, (top + bottom) / 2)
                draw.rectangle(box, _COLORS[shard.variable % len(_COLORS)], "white" if bottom - top > 4 else None)
                if bottom - top >= _LINE - 1:
                    name = self.name(shard)
                    name = _shortened(name, (width - _LINE / 2) / font.getlength(name))
                    draw.text(middle, name, fill="white", font=font, anchor="mm")
                else:
                    unnamed += 1
                bottom = top
            if unnamed:
                text = f"{unnamed} small one{'s' * (unnamed > 1)} on top"
                draw.text((left + width / 2, bottom - 6), text, fill="black", font=font, anchor="mb")
            draw.line((left, floor, left + width, floor), fill="black", width=3)
            text = f"{self.task(server)}\n{total:,} bytes"
            draw.text((left + width / 2, floor + 10), text, fill="black", font=font, anchor="ma", align="center")
        image.save(path)


def _shortened(name: str, part: float) -> str:
    """The name without its middle, if only a part of it fits; its end has the rows."""
    half = int(len(name) * part) // 2 - 1
    return name if part >= 1 else f"{name[:half]}…{name[-half:]}"


def wrong_id(message: str, plan: PlacementPlan) -> str | None:
    """Names the id and the table that does not have it, if an error of TensorFlow is about that."""
    if (found := _WRONG_ID.search(message)) is None:
        return None
    table = plan.variables[int(found[1])]
    return f"id {found[2]} is not in table {table.name}, which has the rows 0 to {table.num_rows - 1}"


def servers_for(
    variables: Sequence[Variable], num_servers: int, options: ServerOptions, num_workers: int = 1
) -> tuple[int, str]:
    """The number of servers for variables that travel as a whole in every step, and the reason."""
    if options.placement != "auto":
        return num_servers, ""
    num_bytes = sum(variable.value_bytes for variable in variables if variable.travels)
    wanted = -(-num_bytes * num_workers // _WORTH_A_SERVER)
    number = min(max(1, wanted), num_servers)
    why = f"auto: {num_bytes / 1e6:,.2f} MB for each of {num_workers} workers in every step: "
    if number < num_servers:
        return number, why + f"on {number} of {num_servers} servers, because one more would cost more than it saves"
    return number, why + f"on all {num_servers} servers, large variables in parts"


def place(
    variables: Sequence[Variable],
    num_servers: int,
    options: ServerOptions,
    num_workers: int = 1,
    max_bytes: int | None = None,
    batch_size: int | None = None,
) -> PlacementPlan:
    """Places `variables` on `num_servers` servers.

    Args:
        options: `round_robin` is TensorFlow's own order (server i holds variables i, i + n, ...). `greedy` assigns the
            largest variable first to the server with the fewest bytes (Graham's LPT rule, 1969), or keeps the
            round-robin order where that is more even. `partitioned` also splits variables larger than
            `partition_min_bytes`, slots not counted, by rows over all servers. `auto` does so too, but what travels as
            a whole in every step goes to as few servers as its bytes and the number of workers need, the first ones.
        num_workers: workers that pull and push in every step.
        max_bytes: of a shard that travels, slots not counted; any size if None.
        batch_size: examples of a worker in a step, if that is known.
    """

    num_used, reason = servers_for(variables, num_servers, options, num_workers)

    def servers_of(variable: Variable) -> range:
        return range(num_used if variable.travels and not variable.always_cut else num_servers)

    def num_parts(variable: Variable) -> int:
        if variable.is_dynamic:
            return num_servers
        is_large = variable.can_be_cut and variable.value_bytes > options.partition_min_bytes
        is_spread = variable.always_cut or (is_large and options.placement in ("partitioned", "auto"))
        wanted = len(servers_of(variable)) if is_spread else 1
        if max_bytes is not None and variable.can_be_cut and variable.travels:
            wanted = max(wanted, -(-variable.value_bytes // max_bytes))
        return min(wanted, max(1, variable.num_rows))

    def plan(choose: Callable[[int, Sequence[int]], int], order: Sequence[int]) -> PlacementPlan:
        load = [0] * num_servers
        placed: dict[int, list[Shard]] = {}
        for i, variable in enumerate(variables):
            if (parts := num_parts(variable)) > 1:
                emptiest_first = sorted(servers_of(variable), key=load.__getitem__)
                bounds = pairwise(variable.num_rows * part // parts for part in range(parts + 1))
                placed[i] = [Shard(i, server, *rows) for server, rows in zip(cycle(emptiest_first), bounds)]
                for shard in placed[i]:
                    load[shard.server] += variable.num_bytes * (shard.stop - shard.start) // max(1, variable.num_rows)
        for position, i in enumerate(i for i in order if num_parts(variables[i]) == 1):
            server = choose(position, load[: len(servers_of(variables[i]))])
            placed[i] = [Shard(i, server, 0, variables[i].num_rows)]
            load[server] += variables[i].num_bytes
        shards = tuple(shard for i in range(len(variables)) for shard in placed[i])
        return PlacementPlan(
            tuple(variables),
            shards,
            num_servers,
            reason,
            num_workers=num_workers,
            batch_size=batch_size,
            wire_dtype=options.wire_dtype,
        )

    in_turn = plan(lambda position, load: position % len(load), range(len(variables)))
    if options.placement == "round_robin":
        return in_turn
    largest_first = sorted(range(len(variables)), key=lambda i: -variables[i].num_bytes)
    emptiest = plan(lambda _position, load: load.index(min(load)), largest_first)
    return min(emptiest, in_turn, key=lambda candidate: max(candidate.bytes_by_server))
