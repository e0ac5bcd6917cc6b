"""`ValueFiles`: saves and restores stored values as TensorFlow checkpoints, each task the rows that it holds."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import tensorflow as tf

from kdist.errors import NonFiniteError
from kdist.log import warn
from kdist.model.names import CHANGED_IDS, EVICTED, FOLLOWS, dynamic_names
from kdist.parameters.placement.blocks import StoredShard
from kdist.parameters.tables.changed_rows import DeltaBase
from kdist.parameters.tables.dynamic_table import IDS, TABLES, DynamicTable, EvictedRows
from kdist.parameters.tables.table import Table
from kdist.parameters.values.dynamic_values import DynamicValues
from kdist.parameters.values.named_values import NamedValues, write_whole
from kdist.parameters.values.slices import ChosenSlices, FixedSlices, Slices, WritePlan, is_finite, refuse
from kdist.storage.tensorflow_paths import literal_path, open_checkpoint


class ValueFiles:
    """Saves and restores all named values without bringing them to the chief.

    To save, every task writes its rows to other files, and the chief merges their indices
    (`tf.raw_ops.MergeV2Checkpoints`, as `tf.train.Checkpoint` does for sharded variables): the result is one checkpoint
    in which each value is one tensor. To restore, every task reads the rows that it holds now. Tasks that do not see
    the files of the chief can do neither; then the slices travel through the chief, one group after the other.

    A delta has, of tables, only the rows that have changed since a save; the servers copy them first, so that training
    may go on while they are written.

    Values that are small together travel at once: for them, the first save is ten times as fast.

    Args:
        dynamic: rows that are saved, too.
        groups: for each group that is updated by rows, the names of its tables without `parameters/`, and its tables on
            the servers.
        intervals: on each server the present one between saves; none if deltas are only read.

    Attributes:
        by_rows: the names of values of which a delta has only some rows.
    """

    def __init__(
        self,
        values: NamedValues,
        dynamic: DynamicValues | None = None,
        groups: Sequence[tuple[Sequence[str], Sequence[Table]]] = (),
        intervals: Sequence[tf.Variable] = (),
    ) -> None:
        self._values, self._intervals = values, intervals
        self._dynamic = DynamicValues([]) if dynamic is None else dynamic
        changed: list[ChosenSlices] = []
        by_rows = set[str]()
        self._evicted: list[EvictedRows] = []
        for names, tables in groups:
            # First: an id that was evicted may have come again.
            if evicted := [table.evicted for table in tables if isinstance(table, DynamicTable)]:
                self._evicted += evicted
                changed.append(ChosenSlices([{IDS: f"{EVICTED}{name}"} for name in names], evicted))
            columns = [name for name in tables[0].stored if name not in (IDS, TABLES)]
            # As in a checkpoint, but with changed rows only, and their ids.
            by_column = [{IDS: f"{CHANGED_IDS}{name}", **dynamic_names(name, columns)} for name in names]
            by_rows.update(*(of_table.values() for of_table in by_column))
            changed.append(ChosenSlices(by_column, tables))
        self.by_rows = frozenset(by_rows)
        slices = list(values.slices())
        #: The content of a checkpoint, and of a delta. The chief writes values with copies to all of them.
        self._whole: list[Slices] = [FixedSlices(slices, values.copies), *self._dynamic.slices]
        of_delta = [each for each in slices if each.name not in self.by_rows]
        self._delta: list[Slices] = [FixedSlices(of_delta, values.copies), *changed]
        #: True once it is known which tasks see the files of the chief.
        self._has_looked = False

    def next_interval(self, since: int | None) -> int | None:
        """Begins another interval; nothing may change rows meanwhile.

        Args:
            since: the interval after which rows have changed that the next delta has; None if there is none.

        Returns:
            The interval that it ends; None if there are none.
        """
        if not self._intervals:
            return None
        ended = int(self._intervals[0].numpy())
        for interval in self._intervals:
            interval.assign(ended + 1)
        self._forget(tf.constant(ended if since is None else since, tf.int32))
        return ended

    def begin_save(
        self, prefix: Path, others: Mapping[str, np.ndarray], since: DeltaBase | None = None, *, copies: bool = True
    ) -> Callable[[], None]:
        """Prepares a checkpoint.

        Args:
            others: values to add to it, by name.
            since: only rows that have changed since then are written, and all other values: a delta.
            copies: whether tasks copy the values where they are, so that they may change while they are written; until
                then, tasks need memory for both.

        Returns:
            Writes the checkpoint; to be called once, in any thread, before anything else is copied. It raises

            NonFiniteError: values contain NaN or infinity; nothing is written.
            tf.errors.OpError, OSError: it cannot be written.
        """
        if since is None and self._are_small:
            return partial(self._write_small, prefix, self._values.read(), others)
        parts = self._whole if since is None else self._delta
        # The rows of a delta are chosen when they are copied.
        copied = parts if copies else self._delta[1:] if since is not None else []
        # Another name each time: a task that could not finish may still be writing when the next attempt begins.
        folder = literal_path(prefix.with_name(f"{prefix.name}-{uuid.uuid4().hex[:8]}"))
        folder.mkdir()
        follows = {} if since is None else {FOLLOWS: np.array(since.step, np.int64)}
        write_whole(str(folder / "others"), {**others, **follows})
        self._look_for(folder / "others.index")
        # Functions are traced here, because another thread may not trace any.
        plan = WritePlan()
        for number, part in enumerate(parts):
            source = part.copy(None if since is None else since.interval) if part in copied else part
            plan += source.plan(str(folder), f"{number}")
        return partial(self._write_parts, prefix, folder, plan + WritePlan(["others"]), copied)

    def restore(self, path: Path, deltas: Sequence[Path] = ()) -> None:
        """Reads all values from a checkpoint and its deltas, except values with copies.

        Raises:
            tf.errors.OpError: it is damaged; some values may have been read all the same.
        """
        if self._are_small:
            reader = open_checkpoint(path)
            names = self._values.shapes.keys() - self._values.copies.keys()
            self._values.write({name: reader.get_tensor(name) for name in names})
        else:
            self._restore(path, self._whole[:1])
            self._dynamic.clear()
            self._restore(path, self._whole[1:])
        for delta in deltas:
            self._restore(delta, self._delta)

    @property
    def _are_small(self) -> bool:
        sizes = (variable.shape.num_elements() * variable.dtype.size for variable in self._values.variables)
        return not self._dynamic and sum(sizes) <= 2 * StoredShard.slice_bytes

    @cached_property
    def _forget(self) -> Callable[[tf.Tensor], object]:
        def forget(up_to: tf.Tensor) -> None:
            for rows in self._evicted:
                rows.forget(up_to)

        return tf.function(forget, autograph=False).get_concrete_function(tf.TensorSpec([], tf.int32))

    def _write_parts(self, prefix: Path, folder: Path, plan: WritePlan, copied: Collection[Slices]) -> None:
        """Lets every task write its values, makes one checkpoint of them, and gives the memory of snapshots back."""
        try:
            try:
                plan.check()
            except NonFiniteError:
                shutil.rmtree(folder, ignore_errors=True)
                raise
            plan.write()
            with tf.device("CPU:0"):
                tf.raw_ops.MergeV2Checkpoints(
                    checkpoint_prefixes=[str(folder / name) for name in plan.files],
                    destination_prefix=str(literal_path(prefix)),
                    delete_old_dirs=True,
                )
        finally:
            # If the tasks are gone, so are the copies.
            with suppress(tf.errors.OpError):
                for part in copied:
                    part.release()

    def _restore(self, path: Path, parts: Sequence[Slices]) -> None:
        path = literal_path(path)
        self._look_for(Path(f"{path}.index"))
        for part in parts:
            part.restore(str(path))

    def _write_small(self, prefix: Path, values: Mapping[str, np.ndarray], others: Mapping[str, np.ndarray]) -> None:
        """Writes values that have travelled to the chief."""
        refuse([name for name, value in values.items() if not is_finite(value)])
        write_whole(str(literal_path(prefix)), {**values, **others})

    def _look_for(self, path: Path) -> None:
        """Finds out whether all tasks see a file of the chief, and warns if they do not."""
        if self._has_looked:
            return
        content, blind = path.read_bytes(), []
        for host in dict.fromkeys(host for part in self._whole for host in part.hosts):
            try:
                with tf.device(host):
                    found = tf.io.read_file(str(path)).numpy()
            except (tf.errors.NotFoundError, tf.errors.PermissionDeniedError, tf.errors.FailedPreconditionError):
                found = None
            if found != content:
                task = tf.DeviceSpec.from_string(host)
                blind.append(f"{task.job}:{task.task}")
        self._has_looked = True
        for part in [*self._whole, *self._delta]:
            part.through_chief = bool(blind)
        if blind:
            verb = "does" if len(blind) == 1 else "do"
            warn(f"{', '.join(blind)} {verb} not see {path.parent}: checkpoints travel through the chief")
