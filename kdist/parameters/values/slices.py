"""Slices: the rows of named values, as every checkpoint has them: whole, as a delta, and of a snapshot.

Servers write rows of named columns as slices of tensors, a few at a time, and read theirs in the same way, so that the
number of servers does not matter. The rows of `ChosenSlices` are chosen at run time: first the chief asks every server
how many rows of each table there are. `FixedSlices` are the case where the choice is constant.
"""

from __future__ import annotations

import abc
import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from kdist._compat.tensorflow import UninitializedVariable
from kdist.errors import NonFiniteError
from kdist.parameters.placement.blocks import StoredShard
from kdist.parameters.placement.messages import cut
from kdist.parameters.tables.dynamic_table import IDS, TABLES, DynamicTable, EvictedRows
from kdist.parameters.tables.rows import replace_rows, resizable_variable
from kdist.parameters.tables.table import Table
from kdist.parameters.values.named_values import Slice, assign_rows, spec_of_rows, write_whole
from kdist.storage.tensorflow_paths import open_checkpoint

#: The interval before all others: all rows have changed since.
_FIRST = -1


@dataclass(frozen=True)
class WritePlan:
    """Files that are to be written, and may be by another thread.

    Attributes:
        checks: each names values that are not finite.
        calls: each writes some of the files.
    """

    files: Sequence[str] = ()
    checks: Sequence[Callable[[], list[str]]] = ()
    calls: Sequence[Callable[[], object]] = ()

    def __add__(self, other: WritePlan) -> WritePlan:
        return WritePlan([*self.files, *other.files], [*self.checks, *other.checks], [*self.calls, *other.calls])

    def check(self) -> None:
        """Refuses, with a `NonFiniteError`, values that contain NaN or infinity."""
        refuse([name for check in self.checks for name in check()])

    def write(self) -> None:
        for call in self.calls:
            call()


class Slices(abc.ABC):
    """Values that servers write to a checkpoint and read from it.

    Attributes:
        through_chief: whether this process reads and writes the files, because the servers do not see them; must not
            change once `plan` or `copy` was called.
        hosts: the CPUs of the tasks that have them.
    """

    def __init__(self, devices: Iterable[str]) -> None:
        self.through_chief = False
        self.hosts = list(dict.fromkeys(map(host_of, devices)))
        with tf.device("CPU:0"):
            # By its full name, since each task has a CPU.
            self._chief = tf.zeros([]).device
        self._functions: dict[Any, Callable[..., Any]] = {}

    @abc.abstractmethod
    def plan(self, folder: str, label: str) -> WritePlan:
        """Plans to write them into files of a folder; traces its functions. Nothing may change them meanwhile."""

    @abc.abstractmethod
    def restore(self, path: str) -> None:
        """Reads them from a checkpoint, each server its own."""

    @abc.abstractmethod
    def _make_copies(self) -> tuple[Slices, Callable[[tf.Tensor], None], Callable[[], None]]:
        """The same slices of copies, empty at first; functions that fill them, as `copy`, and that empty them."""

    def copy(self, since: int | None = None) -> Slices:
        """Makes a snapshot where they are, until `release`; it must be written before the next one is made.

        Args:
            since: of tables only rows that have changed after this interval are copied; all rows if None.
        """
        copies, fill, _ = self._snapshot
        fill(tf.constant(_FIRST if since is None else since, tf.int32))
        return copies

    def release(self) -> None:
        """Gives the memory of copies back; does nothing without."""
        if "_snapshot" in self.__dict__:
            self._snapshot[-1]()

    @cached_property
    def _snapshot(self) -> tuple[Slices, Callable[..., object], Callable[..., object]]:
        copies, fill, release = self._make_copies()
        copies.through_chief = self.through_chief
        since = tf.TensorSpec([], tf.int32)
        return copies, self.traced("fill", fill, since), self.traced("release", release)

    def traced(self, key: Any, function: Callable[..., Any], *specs: tf.TensorSpec) -> Callable[..., Any]:
        """A function, traced when it is first asked for."""
        if key not in self._functions:
            self._functions[key] = tf.function(function, autograph=False).get_concrete_function(*specs)
        return self._functions[key]

    def _writer_of(self, device: str) -> str:
        """The task that reads and writes the files of the values of a device."""
        return self._chief if self.through_chief else host_of(device)


class FixedSlices(Slices):
    """Slices of values that are always the same; one file for each group of slices of a device.

    A task writes or reads one group at once, and may need memory for it beside the values themselves.

    Args:
        slices: in any order.
        not_restored: the names of values that are not read.
    """

    def __init__(self, slices: Sequence[Slice], not_restored: Collection[str] = ()) -> None:
        super().__init__(each.variable.device for each in slices)
        self._slices, self._not_restored = list(slices), not_restored
        self._variables = list({id(each.variable): each.variable for each in slices}.values())
        #: Those of each device that may hold NaN or infinity.
        self._floats: dict[str, list[tf.Variable]] = defaultdict(list)
        for variable in self._variables:
            if variable.dtype.is_floating:
                self._floats[variable.device].append(variable)
        # Slices of one variable come in its order, so that a group has a run of its elements.
        number = {id(variable): i for i, variable in enumerate(self._variables)}
        of_devices: dict[str, list[Slice]] = defaultdict(list)
        for each in sorted(slices, key=lambda each: (number[id(each.variable)], each.offset)):
            of_devices[each.variable.device].append(each)
        self._groups = {
            device: cut(own, lambda each: prod(each.own_shape) * each.variable.dtype.size, StoredShard.slice_bytes)
            for device, own in of_devices.items()
        }

    def plan(self, folder: str, label: str) -> WritePlan:
        check = self.traced("check", lambda: [_are_finite(*of_device) for of_device in self._floats.items()])
        save = self.traced("save", self._save, tf.TensorSpec([], tf.string), tf.TensorSpec([], tf.string))
        return WritePlan(
            [f"{label}-{d}-{g}" for d, groups in enumerate(self._groups.values()) for g in range(len(groups))],
            [lambda: self._not_finite(check())],
            [lambda: save(tf.constant(folder), tf.constant(label))],
        )

    def restore(self, path: str) -> None:
        self.traced("restore", self._restore, tf.TensorSpec([], tf.string))(tf.constant(path))

    def _make_copies(self) -> tuple[Slices, Callable[[tf.Tensor], None], Callable[[], None]]:
        copies: dict[int, tf.Variable] = {}
        for variable in self._variables:
            with tf.device(variable.device):
                copies[id(variable)] = UninitializedVariable(False, shape=variable.shape, dtype=variable.dtype)

        def fill(_since: tf.Tensor) -> None:
            for variable in self._variables:
                with tf.device(variable.device):
                    # A value shares its memory with the variable.
                    value = tf.raw_ops.DeepCopy(x=variable.read_value_no_copy())
                    tf.raw_ops.AssignVariableOp(resource=copies[id(variable)].handle, value=value)

        def release() -> None:
            for variable in copies.values():
                with tf.device(variable.device):
                    replace_rows(variable, tf.zeros([0], variable.dtype))

        return FixedSlices([replace(each, variable=copies[id(each.variable)]) for each in self._slices]), fill, release

    def _not_finite(self, are_finite: Sequence[tf.Tensor]) -> list[str]:
        """The names of the values that contain NaN or infinity, from the answers to `_are_finite`."""
        floats = itertools.chain.from_iterable(self._floats.values())
        flags = itertools.chain.from_iterable(of_device.numpy() for of_device in are_finite)
        broken = {id(variable) for variable, is_good in zip(floats, flags) if not is_good}
        suspects = [each for each in self._slices if id(each.variable) in broken]
        return [each.name for each in suspects if not is_finite(read_run([each])[0].numpy())]

    def _one_by_one(self, each: Callable[[str, list[Slice], str], tf.Operation]) -> list[tf.Operation]:
        """Traces an operation for each group, by its device and number; returns the last one of each device.

        The memory of one group is free before the next one of its device takes any.
        """
        last = list[tf.Operation]()
        for d, (device, groups) in enumerate(self._groups.items()):
            before: list[tf.Operation] = []
            for g, group in enumerate(groups):
                with tf.control_dependencies(before):
                    before = [each(device, group, f"{d}-{g}")]
            last += before
        return last

    def _save(self, folder: tf.Tensor, label: tf.Tensor) -> tf.Tensor:
        def save(device: str, group: list[Slice], number: str) -> tf.Operation:
            with tf.device(device):
                tensors = [tensor for run in _runs(group) for tensor in read_run(run)]
            with tf.device(self._writer_of(device)):
                return tf.raw_ops.SaveV2(
                    prefix=tf.strings.join([folder, "/", label, "-", number]),
                    tensor_names=[each.name for each in group],
                    shape_and_slices=[each.slice_spec for each in group],
                    tensors=tensors,
                )

        saved = self._one_by_one(save)
        # A function runs the operations that its output needs.
        with tf.control_dependencies(saved), tf.device(self._chief):
            return tf.constant(len(saved))

    def _restore(self, path: tf.Tensor) -> None:
        def restore(device: str, group: list[Slice], _number: str) -> tf.Operation:
            # The chief writes values with copies to all of them.
            if not (read := [each for each in group if each.name not in self._not_restored]):
                return tf.no_op()
            with tf.device(self._writer_of(device)):
                tensors = tf.raw_ops.RestoreV2(
                    prefix=path,
                    tensor_names=[each.name for each in read],
                    shape_and_slices=[each.slice_spec for each in read],
                    dtypes=[each.variable.dtype for each in read],
                )
            given = iter(tensors)
            with tf.device(device):
                return tf.group([assign_run(run, [next(given) for _ in run]) for run in _runs(read)])

        self._one_by_one(restore)


@dataclass(frozen=True)
class CopiedRows:
    """The copies of some rows of a table, on its server.

    Attributes:
        stored: variables by column, each `[capacity, ...]`, `ids` and `tables` among them.
        num_rows: int64: rows with values.
    """

    device: str
    stored: Mapping[str, tf.Variable]
    num_rows: tf.Variable


#: Rows that can be written.
ServerRows: TypeAlias = DynamicTable | CopiedRows


class ChosenSlices(Slices):
    """Slices of tensors whose length only the servers know: each table of a group has a row for each id.

    Args:
        names: for each table of the group the tensors of its columns, by column; `ids` is one of them.
        tables: of the servers.
        rows: of each server, to be written; without, only snapshots are.

    Attributes:
        columns: the specs of the columns.
        slice_rows: the number of rows that a server writes or reads at once.
    """

    def __init__(
        self, names: Sequence[Mapping[str, str]], tables: Sequence[Table | EvictedRows], rows: Sequence[ServerRows] = ()
    ) -> None:
        super().__init__(table.device for table in tables)
        self.names, self.tables, self.rows = names, tables, rows
        specs = {name: tf.TensorSpec([None, *of.shape[1:]], of.dtype) for name, of in tables[0].stored.items()}
        self.columns = {IDS: tf.TensorSpec([None], tf.int64), **specs}
        row_bytes = sum(prod(column.shape[1:]) * column.dtype.size for column in self.columns.values())
        self.slice_rows = max(1, StoredShard.slice_bytes // row_bytes)

    def plan(self, folder: str, label: str) -> WritePlan:
        counts = [self._counts(rows) for rows in self.rows]
        totals = sum(of_server.sum(0) for of_server in counts)
        files, calls = list[str](), list[Callable[[], object]]()
        end = np.zeros(len(self.names), np.int64)
        for server, (rows, of_server) in enumerate(zip(self.rows, counts)):
            for number, of_slice in enumerate(of_server):
                present = tuple(np.flatnonzero(of_slice).tolist())
                if not present:
                    continue
                given = tf.TensorSpec([], tf.string), tf.TensorSpec([], tf.int64), tf.TensorSpec([None], tf.string)
                function = self.traced(("save", server, present), partial(self._save, rows, present), *given)
                files.append(f"{label}-{server}-{number}")
                specs = [
                    self._spec_of(column, totals[table], end[table], of_slice[table])
                    for table in present
                    for column in self.names[table]
                ]
                arguments = f"{folder}/{files[-1]}", np.int64(number * self.slice_rows), specs
                calls.append(partial(function, *map(tf.constant, arguments)))
                end = end + of_slice
        empty = [table for table, total in enumerate(np.broadcast_to(totals, [len(self.names)])) if not total]
        if empty:
            files.append(f"{label}-empty")
            named = [(self.columns[column], name) for table in empty for column, name in self.names[table].items()]
            tensors = {n: np.zeros([0, *column.shape[1:]], column.dtype.as_numpy_dtype) for column, n in named}
            calls.append(partial(write_whole, f"{folder}/{files[-1]}", tensors))
        floats = [name for name in self.columns if self.columns[name].dtype.is_floating]
        checks = [
            partial(self._not_finite, floats, self.traced(("check", server), partial(self._are_finite, rows, floats)))
            for server, rows in enumerate(self.rows if floats else [])
        ]
        return WritePlan(files, checks, calls)

    def _make_copies(self) -> tuple[Slices, Callable[[tf.Tensor], None], Callable[[], None]]:
        copies = []
        for table in self.tables:
            specs = {name: (column.shape[1:], column.dtype) for name, column in table.stored.items()}
            specs = {IDS: ((), tf.int64), TABLES: ((), tf.int32), **specs}
            with tf.device(table.device):
                columns = {name: resizable_variable(*spec) for name, spec in specs.items()}
                copies.append(CopiedRows(table.device, columns, tf.Variable(tf.zeros([], tf.int64), trainable=False)))

        def fill(since: tf.Tensor) -> None:
            for table, copy in zip(self.tables, copies):
                with tf.device(table.device):
                    values = table.changed(since)
                    for name, value in values.items():
                        replace_rows(copy.stored[name], value)
                    copy.num_rows.assign(tf.size(values[IDS], tf.int64))

        def release() -> None:
            for copy in copies:
                with tf.device(copy.device):
                    for column in copy.stored.values():
                        replace_rows(column, tf.zeros([0, *column.shape[1:]], column.dtype))

        return ChosenSlices(self.names, self.tables, copies), fill, release

    def restore(self, path: str) -> None:
        """Lets every server take its rows from a checkpoint, in the place of the rows that their ids have."""
        shapes = open_checkpoint(Path(path)).get_variable_to_shape_map()
        columns = list(self.names[0])
        texts = tf.TensorSpec([len(columns)], tf.string)
        load = self.traced("load", self._load, tf.TensorSpec([], tf.string), texts, tf.TensorSpec([], tf.int32), texts)
        for table, names in enumerate(self.names):
            if names[IDS] not in shapes:
                raise tf.errors.NotFoundError(None, None, f"{path} has no {names[IDS]}")
            total = shapes[names[IDS]][0]
            for start in range(0, total, self.slice_rows):
                specs = [self._spec_of(c, total, start, min(self.slice_rows, total - start)) for c in columns]
                load(*map(tf.constant, (path, [names[column] for column in columns], np.int32(table), specs)))

    def _spec_of(self, column: str, total: int, start: int, count: int) -> str:
        """The place of rows of a table in the tensor of a column that has `total` rows."""
        return spec_of_rows((total, *self.columns[column].shape[1:]), start, count)

    def _not_finite(self, floats: Sequence[str], check: Callable[[], tf.Tensor]) -> list[str]:
        """The names of floating-point columns that have NaN or infinity; of a group with many tables, of all."""
        broken = {name for name, is_good in zip(floats, check().numpy()) if not is_good}
        return [name for names in self.names for column, name in names.items() if column in broken]

    def rows_of(self, rows: ServerRows, start: tf.Tensor, table: tf.Tensor) -> tf.Tensor:
        """The rows of a table in a slice of all rows, int64 `[n]`; traced."""
        of_slice, tables = self._slice_at(rows, start)
        return tf.boolean_mask(of_slice, tf.equal(tables, table))

    def _slice_at(self, rows: ServerRows, start: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """The rows of a slice, int64 `[n]`, and the table of each, int32 `[n]`, -1 if it is free; traced."""
        of_slice = tf.range(start, tf.minimum(start + self.slice_rows, rows.num_rows.read_value()))
        return of_slice, rows.stored[TABLES].sparse_read(of_slice)

    def _counts(self, rows: ServerRows) -> np.ndarray:
        """The number of rows of each table in each slice: int64 `[slices, tables]`."""
        num_tables = len(self.names)

        def count() -> tf.Tensor:
            with tf.device(rows.device):
                used = tf.range(rows.num_rows.read_value())
                tables = tf.cast(rows.stored[TABLES].sparse_read(used), tf.int64)
                where = tf.boolean_mask(used // self.slice_rows * num_tables + tables, tables >= 0)
                num_slices = (tf.size(used, tf.int64) + self.slice_rows - 1) // self.slice_rows
                return tf.math.bincount(tf.cast(where, tf.int32), minlength=tf.cast(num_slices, tf.int32) * num_tables)

        return self.traced(("count", id(rows.num_rows)), count)().numpy().reshape(-1, num_tables)

    def _save(
        self, rows: ServerRows, present: Sequence[int], prefix: tf.Tensor, start: tf.Tensor, specs: tf.Tensor
    ) -> tf.Tensor:
        """Writes a slice; `specs` are the places of its columns of the tables that are `present`, one after the other.

        All that the chief knows is no part of the function: with many tables, its trace would take seconds.
        """
        with tf.device(rows.device):
            of_slice, tables = self._slice_at(rows, start)
            # The first part are rows that are free.
            _, *of_tables = tf.dynamic_partition(of_slice, tables + 1, len(self.names) + 1)
            tensors = [rows.stored[column].sparse_read(of_tables[t]) for t in present for column in self.names[t]]
        names = [name for table in present for name in self.names[table].values()]
        with tf.device(self._writer_of(rows.device)):
            saved = tf.raw_ops.SaveV2(prefix=prefix, tensor_names=names, shape_and_slices=specs, tensors=tensors)
        with tf.control_dependencies([saved]), tf.device(self._chief):
            return tf.constant(True)

    def _load(self, path: tf.Tensor, names: tf.Tensor, table: tf.Tensor, specs: tf.Tensor) -> None:
        """Lets every server read a slice of a table, and take the rows of its ids; names and places by column."""
        columns = self.columns
        dtypes = {column: columns[column].dtype for column in self.names[0]}
        ids_at = list(dtypes).index(IDS)
        for holder in self.tables:
            with tf.device(self._writer_of(holder.device)):
                (ids,) = tf.raw_ops.RestoreV2(
                    prefix=path,
                    tensor_names=names[ids_at : ids_at + 1],
                    shape_and_slices=specs[ids_at : ids_at + 1],
                    dtypes=[tf.int64],
                )
                ids = tf.ensure_shape(ids, [None])

            def load(holder: Table | EvictedRows = holder) -> tf.Tensor:
                with tf.device(self._writer_of(holder.device)):
                    read = tf.raw_ops.RestoreV2(
                        prefix=path,
                        tensor_names=names,
                        shape_and_slices=specs,
                        dtypes=list(dtypes.values()),
                    )
                    values = {
                        column: tf.ensure_shape(of_column, [None, *columns[column].shape[1:]])
                        for column, of_column in zip(dtypes, read)
                    }
                take_own(holder, table, values)
                return tf.constant(True)

            if self.through_chief:
                load()
                continue
            with tf.device(holder.device):
                tf.cond(tf.reduce_any(holder.keys_here(ids, table)), load, lambda: False)

    def _are_finite(self, rows: ServerRows, columns: Sequence[str]) -> tf.Tensor:
        def check(start: tf.Tensor, flags: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            stop = tf.minimum(start + self.slice_rows, num_rows)
            values = [rows.stored[column].sparse_read(tf.range(start, stop)) for column in columns]
            return stop, flags & tf.stack([tf.reduce_all(tf.math.is_finite(value)) for value in values])

        with tf.device(rows.device):
            num_rows = rows.num_rows.read_value()
            initial = [tf.zeros([], tf.int64), tf.ones([len(columns)], tf.bool)]
            return tf.while_loop(lambda start, _: start < num_rows, check, initial, parallel_iterations=1)[1]


def take_own(holder: Table | EvictedRows, table: tf.Tensor, values: Mapping[str, tf.Tensor]) -> None:
    """Lets a holder take those of rows of a table, by column, that belong there; traced."""
    with tf.device(holder.device):
        is_own = holder.keys_here(values[IDS], table)
        holder.take(table, {column: tf.boolean_mask(of_column, is_own) for column, of_column in values.items()})


def is_finite(value: np.ndarray) -> bool:
    """True if no element is NaN or infinity."""
    # numpy does not count bfloat16 as a float; everything but integers and bools is checked.
    return value.dtype.kind in "iub" or bool(np.isfinite(value.astype(np.float32)).all())


def _runs(group: Sequence[Slice]) -> list[list[Slice]]:
    """The slices of each variable."""
    return [list(run) for _, run in itertools.groupby(group, key=lambda each: id(each.variable))]


def read_run(run: Sequence[Slice]) -> list[tf.Tensor]:
    """The values of slices that are next to each other, on the device of their variable.

    They are views of the variable where TensorFlow can make them, so nothing may change it meanwhile.
    """
    value = run[0].variable.read_value_no_copy()
    places = [each.place_in(value.shape) for each in run]
    if not _cover(places, value):
        value = value[places[0].start : places[-1].stop]
    parts = tf.split(value, [place.stop - place.start for place in places]) if len(run) > 1 else [value]
    return [tf.reshape(part, each.own_shape) for part, each in zip(parts, run)]


def assign_run(run: Sequence[Slice], values: Sequence[tf.Tensor]) -> tf.Operation:
    """Sets slices that are next to each other, in place."""
    variable = run[0].variable
    places = [each.place_in(variable.shape) for each in run]
    joined = tf.concat([tf.reshape(value, [-1, *variable.shape[1:]]) for value in values], 0)
    if _cover(places, variable):
        return variable.assign(tf.reshape(joined, variable.shape), read_value=False)
    return assign_rows(variable, places[0].start, places[-1].stop, joined)


def _cover(places: Sequence[slice], whole: tf.Tensor | tf.Variable) -> bool:
    """True if places that are next to each other are all of a variable, or of its value."""
    return whole.shape.rank == 0 or places[-1].stop - places[0].start == whole.shape[0]


def _are_finite(device: str, variables: Sequence[tf.Variable]) -> tf.Tensor:
    """True for variables of a device whose elements are all finite: bool `[n]`."""

    def is_finite(variable: tf.Variable) -> tf.Tensor:
        value = variable.read_value_no_copy()
        # A sum needs no memory, and is finite only if all its terms are; but it may overflow, too.
        total = tf.math.is_finite(tf.reduce_sum(value))
        return tf.cond(total, lambda: True, lambda: tf.reduce_all(tf.math.is_finite(value)))

    with tf.device(device):
        return tf.stack([is_finite(variable) for variable in variables])


def host_of(device: str) -> str:
    """The CPU of the task that has a device."""
    return tf.DeviceSpec.from_string(device).replace(device_type="CPU", device_index=0).to_string()


def refuse(not_finite: Sequence[str]) -> None:
    """Refuses, with a `NonFiniteError`, to save values with these names."""
    if names := list(dict.fromkeys(not_finite)):
        verb = "is" if len(names) == 1 else "are"
        raise NonFiniteError(f"{', '.join(names[:5])} {verb} not finite")
