"""`DynamicValues`: the rows of all dynamic tables, beside the `NamedValues` of everything else."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np
import tensorflow as tf

from kdist.parameters.dynamic_files import DynamicFiles, Rows, Saving
from kdist.parameters.dynamic_table import DynamicTable


class DynamicValues:
    """The rows of all dynamic tables.

    Args:
        groups: for each group its tables on the servers, and the names of their vectors, without `parameters/`.

    Attributes:
        shapes: of the columns of all tables, by their names in checkpoints; None for the number of rows.
    """

    def __init__(self, groups: Sequence[tuple[Sequence[DynamicTable], Sequence[str]]]) -> None:
        with tf.device("CPU:0"):
            # Its full name: each task has a CPU.
            chief = tf.zeros([]).device
        self._groups = [DynamicFiles(tables, names, chief) for tables, names in groups]
        self.shapes = {name: shape for group in self._groups for name, shape in group.shapes.items()}
        self._copied: tuple[list[list[Rows]], Callable[[], object], Callable[[], object]] | None = None

    def __bool__(self) -> bool:
        return bool(self._groups)

    @property
    def devices(self) -> list[str]:
        """Of the servers."""
        return [table.device for group in self._groups for table in group.tables]

    def travel_through_chief(self, whether: bool) -> None:
        """Lets this process read and write files, because the servers do not see them."""
        for group in self._groups:
            group.through_chief = whether

    def saving(self, folder: str) -> Saving:
        """What writes the present rows; nothing may change them meanwhile."""
        return self._saving(folder, [group.rows for group in self._groups])

    def copy(self) -> None:
        """Copies all rows on their servers."""
        if self._copied is None:
            made = [[rows.copied() for rows in group.rows] for group in self._groups]
            fills, releases = (
                [which for of_group in made for _, *both in of_group for which in [both[i]]] for i in (0, 1)
            )
            copies = [[rows for rows, _, _ in of_group] for of_group in made]
            self._copied = copies, _all(fills), _all(releases)
        self._copied[1]()

    def saving_of_copy(self, folder: str) -> Saving:
        """What writes the copies."""
        assert self._copied is not None
        return self._saving(folder, self._copied[0])

    def release(self) -> None:
        """Gives the memory of the copies back."""
        assert self._copied is not None
        self._copied[2]()

    def not_finite(self, *, of_copy: bool = False) -> list[str]:
        """The names of what contains NaN or infinity."""
        if of_copy:
            assert self._copied is not None
            return [n for group, rows in zip(self._groups, self._copied[0]) for n in group.not_finite(rows)]
        return [name for group in self._groups for name in group.not_finite(group.rows)]

    def restore(self, path: str) -> None:
        """Replaces all rows by those of a checkpoint."""
        for group in self._groups:
            group.restore(path)

    def fill(self, step: int) -> None:
        """Gives rows to the ids that the layers of the model have, as new ones in that step."""
        for group in self._groups:
            group.fill(step)

    def read(self, wanted: Collection[str] | None = None) -> Iterator[dict[str, np.ndarray]]:
        """Columns by their names in checkpoints, table by table; all if None."""
        for group in self._groups:
            yield from group.read(self.shapes if wanted is None else wanted)

    def count(self) -> None:
        """Tells the layers how many rows they have; those of a group, how many they have on average."""
        for group in self._groups:
            total = sum(int(table.num_live().numpy()) for table in group.tables)
            for layer in group.tables[0].layers:
                layer.num_rows = -(-total // len(group.names))

    def _saving(self, folder: str, rows: Sequence[Sequence[Rows]]) -> Saving:
        savings = [
            group.saving(folder, f"rows-{number}", of_group)
            for number, (group, of_group) in enumerate(zip(self._groups, rows))
        ]
        return Saving([f for s in savings for f in s.files], [call for s in savings for call in s.calls])


def _all(functions: Sequence[Callable[[], None]]) -> Callable[[], object]:
    def run() -> None:
        for function in functions:
            function()

    return tf.function(run, autograph=False).get_concrete_function()
