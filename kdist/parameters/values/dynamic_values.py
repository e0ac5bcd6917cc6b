"""`DynamicValues`: the rows of all dynamic tables, beside the `NamedValues` of everything else."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np

from kdist.parameters.tables.dynamic_table import DynamicTable
from kdist.parameters.values.dynamic_files import DynamicFiles
from kdist.parameters.values.initial_values import on_servers
from kdist.parameters.values.row_files import Copies, Rows, Saving, chief_device


class DynamicValues:
    """The rows of all dynamic tables.

    Args:
        groups: for each group the names of its vectors, without `parameters/`, and its tables on the servers.

    Attributes:
        shapes: of the columns of all tables, by their names in checkpoints; None for the number of rows.
    """

    def __init__(self, groups: Sequence[tuple[Sequence[str], Sequence[DynamicTable]]]) -> None:
        self._groups = [DynamicFiles(tables, names, chief_device()) for names, tables in groups]
        self.shapes = {name: shape for group in self._groups for name, shape in group.shapes.items()}
        self._copies: list[Copies] = []

    def __bool__(self) -> bool:
        return bool(self._groups)

    @property
    def devices(self) -> list[str]:
        """Of the servers."""
        return [table.device for group in self._groups for table in group.tables]

    def travel_through_chief(self, whether: bool) -> None:
        """Lets this process read and write files, because the servers do not see them."""
        for group in self._groups:
            group.files.through_chief = whether

    def saving(self, folder: str) -> Saving:
        """What writes the present rows; nothing may change them meanwhile."""
        return self._saving(folder, [group.rows for group in self._groups])

    def copy(self) -> None:
        """Copies all rows on their servers."""
        self._copies = self._copies or [Copies(group.tables) for group in self._groups]
        for copies in self._copies:
            copies.fill()

    def saving_of_copy(self, folder: str) -> Saving:
        """What writes the copies."""
        return self._saving(folder, [copies.rows for copies in self._copies])

    def release(self) -> None:
        """Gives the memory of the copies back."""
        for copies in self._copies:
            copies.release()

    def not_finite(self, *, of_copy: bool = False) -> list[str]:
        """The names of what contains NaN or infinity."""
        all_rows = [copies.rows for copies in self._copies] if of_copy else [group.rows for group in self._groups]
        return [name for group, rows in zip(self._groups, all_rows) for name in group.files.not_finite(rows)]

    def restore(self, path: str) -> None:
        """Replaces all rows by those of a checkpoint."""
        for group in self._groups:
            group.restore(path)

    def fill(self, step: int) -> None:
        """Gives rows to the ids that the layers of the model have, as new ones in that step."""
        for group in self._groups:
            group.fill(step)

    def hand_over(self) -> None:
        """From now on the layers of the model do not look up rows of their own."""
        for group in self._groups:
            for layer in group.tables[0].table.layers:
                layer.hand_over(on_servers(layer.path))

    def read(self, wanted: Collection[str] | None = None) -> Iterator[dict[str, np.ndarray]]:
        """Columns by their names in checkpoints, table by table; all if None."""
        for group in self._groups:
            yield from group.read(self.shapes if wanted is None else wanted)

    def count(self) -> None:
        """Tells the layers how many rows they have; those of a group, how many they have on average."""
        for group in self._groups:
            total = sum(int(server.table.num_live().numpy()) for server in group.tables)
            for layer in group.tables[0].table.layers:
                layer.num_rows = -(-total // len(group.names))

    def _saving(self, folder: str, rows: Sequence[Sequence[Rows]]) -> Saving:
        return Saving.all_of(
            [
                group.files.saving(folder, f"rows-{number}", of_group)
                for number, (group, of_group) in enumerate(zip(self._groups, rows))
            ]
        )
