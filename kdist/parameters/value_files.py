"""`ValueFiles`: saves and restores stored values as TensorFlow checkpoints, each task the rows that it holds."""

from __future__ import annotations

import itertools
import re
import uuid
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import tensorflow as tf

from kdist.console.warn import warn
from kdist.errors import NonFiniteError
from kdist.parameters.named_values import NamedValues, Piece, assign_rows

#: How many pieces a task reads or writes at once; it may need memory for them beside the values themselves.
_PIECES_AT_ONCE = 2
_TASK = re.compile(r"/job:(\w+)/replica:\d+/task:(\d+)")
_PATH = tf.TensorSpec([], tf.string)


class ValueFiles:
    """Saves and restores all named values without bringing them to the chief.

    To save, every task writes its rows to files of its own, and the chief merges their indices
    (`tf.raw_ops.MergeV2Checkpoints`, as `tf.train.Checkpoint` does for sharded variables): the result is one checkpoint
    in which each value is one tensor. To restore, every task reads the rows that it holds now. Tasks that do not see
    the files of the chief can do neither; then the pieces travel through the chief, one group after the other.

    Values that are small together travel at once, which is faster.

    Args:
        values: what is saved.
    """

    def __init__(self, values: NamedValues) -> None:
        self._values = values
        with tf.device("CPU:0"):
            # Its full name: each task has a CPU.
            self._chief = tf.zeros([]).device
        #: What each device holds, in groups.
        self._groups: dict[str, list[list[Piece]]] = defaultdict(list)
        at_once = _PIECES_AT_ONCE * values.piece_bytes
        # What is in one variable comes in its order, so that a group has a run of its elements.
        number = {id(variable): i for i, variable in enumerate(values.variables)}
        for piece in sorted(values.pieces(), key=lambda piece: (number[id(piece.variable)], piece.offset)):
            of_device = self._groups[piece.variable.device]
            if not of_device or sum(p.num_bytes for p in of_device[-1]) + piece.num_bytes > at_once:
                of_device.append([])
            of_device[-1].append(piece)
        #: Whether all tasks see the files of the chief; None: not known yet.
        self._are_seen: bool | None = None
        self._functions: dict[str, tf.types.experimental.ConcreteFunction] = {}

    @property
    def _are_small(self) -> bool:
        sizes = (variable.shape.num_elements() * variable.dtype.size for variable in self._values.variables)
        return sum(sizes) <= self._values.piece_bytes

    def _not_finite(self) -> list[str]:
        """The names of the values that contain NaN or infinity."""
        floats: dict[str, dict[int, tf.Variable]] = defaultdict(dict)
        for device, groups in self._groups.items():
            variables = [piece.variable for group in groups for piece in group]
            floats[device] |= {id(v): v for v in variables if v.dtype.is_floating}
        check = self._traced("check", lambda: [_are_finite(d, list(v.values())) for d, v in floats.items() if v])
        flags = [flag for of_device in check() for flag in of_device.numpy()]
        broken = {key for key, is_finite in zip((key for v in floats.values() for key in v), flags) if not is_finite}
        pieces = (piece for groups in self._groups.values() for group in groups for piece in group)
        suspects = [piece for piece in pieces if id(piece.variable) in broken]
        return list(dict.fromkeys(piece.name for piece in suspects if not _is_finite(_read([piece])[0].numpy())))

    def save(self, prefix: Path, others: Mapping[str, np.ndarray]) -> None:
        """Writes a checkpoint; nothing may change the values meanwhile.

        Args:
            prefix: of its files.
            others: values to add to it, by name.

        Raises:
            NonFiniteError: values contain NaN or infinity; nothing is written.
            tf.errors.OpError, OSError: it cannot be written.
        """
        values = self._values.read() if self._are_small else {}
        if broken := [name for name, v in values.items() if not _is_finite(v)] if values else self._not_finite():
            raise NonFiniteError(f"{', '.join(broken[:5])} {'is' if len(broken) == 1 else 'are'} not finite")
        if values:
            self._write(prefix, {**values, **others})
            return
        # A name of its own: a task that could not finish may still be writing when the next attempt begins.
        folder = prefix.with_name(f"{prefix.name}-{uuid.uuid4().hex[:8]}").absolute()
        folder.mkdir()
        self._write(folder / "others", others)
        self._look_for(folder / "others.index")
        self._traced("save", self._save, _PATH)(tf.constant(str(folder)))
        with tf.device(self._chief):
            tf.raw_ops.MergeV2Checkpoints(
                checkpoint_prefixes=[str(folder / name) for name in (*self._file_names(), "others")],
                destination_prefix=str(prefix),
                delete_old_dirs=True,
            )

    def restore(self, path: Path) -> None:
        """Reads all values from a checkpoint but those that several variables hold.

        Raises:
            tf.errors.OpError: it is damaged; some values may have been read all the same.
        """
        if self._are_small:
            reader = tf.train.load_checkpoint(str(path))
            names = self._values.shapes.keys() - self._values.copies.keys()
            self._values.write({name: reader.get_tensor(name) for name in names})
            return
        self._look_for(Path(f"{path}.index"))
        self._traced("restore", self._restore, _PATH)(tf.constant(str(path.absolute())))

    def _write(self, prefix: Path, values: Mapping[str, np.ndarray]) -> None:
        with tf.device(self._chief):
            tf.raw_ops.SaveV2(
                prefix=str(prefix),
                tensor_names=list(values),
                shape_and_slices=[""] * len(values),
                tensors=[tf.constant(value) for value in values.values()],
            )

    def _look_for(self, path: Path) -> None:
        """Finds out whether all tasks see a file of the chief, and warns if they do not."""
        if self._are_seen is not None:
            return
        content, blind = path.read_bytes(), []
        for host in dict.fromkeys(map(_host_of, self._groups)):
            try:
                with tf.device(host):
                    found = tf.io.read_file(str(path.absolute())).numpy()
            except (tf.errors.NotFoundError, tf.errors.PermissionDeniedError, tf.errors.FailedPreconditionError):
                found = None
            if found != content:
                blind.append(":".join(_TASK.search(host).groups()))  # type: ignore[union-attr]
        self._are_seen = not blind
        if blind:
            verb = "does" if len(blind) == 1 else "do"
            warn(f"{', '.join(blind)} {verb} not see {path.parent}: checkpoints travel through the chief")

    def _traced(
        self, kind: str, function: Callable[..., object], *specs: tf.TensorSpec
    ) -> tf.types.experimental.ConcreteFunction:
        if kind not in self._functions:
            self._functions[kind] = tf.function(function, autograph=False).get_concrete_function(*specs)
        return self._functions[kind]

    def _file_names(self) -> list[str]:
        return [f"{d}-{g}" for d, groups in enumerate(self._groups.values()) for g in range(len(groups))]

    def _writer_of(self, device: str) -> str:
        """Who reads and writes the files of what a device holds."""
        return _host_of(device) if self._are_seen else self._chief

    def _save(self, folder: tf.Tensor) -> tf.Tensor:
        names, last = iter(self._file_names()), list[tf.Operation]()
        for device, groups in self._groups.items():
            before: list[tf.Operation] = []
            for group in groups:
                # One after the other: what one group needs is free before the next one is read.
                with tf.control_dependencies(before):
                    with tf.device(device):
                        tensors = [tensor for run in _runs(group) for tensor in _read(run)]
                    with tf.device(self._writer_of(device)):
                        saved = tf.raw_ops.SaveV2(
                            prefix=tf.strings.join([folder, "/", next(names)]),
                            tensor_names=[piece.name for piece in group],
                            shape_and_slices=[piece.slice_spec for piece in group],
                            tensors=tensors,
                        )
                before = [saved]
            last += before
        # A function runs what its output needs.
        with tf.control_dependencies(last), tf.device(self._chief):
            return tf.constant(len(last))

    def _restore(self, path: tf.Tensor) -> None:
        for device, groups in self._groups.items():
            before: list[tf.Operation] = []
            for group in groups:
                wanted = [piece for piece in group if piece.name not in self._values.copies]
                if not wanted:
                    continue
                with tf.control_dependencies(before), tf.device(self._writer_of(device)):
                    tensors = tf.raw_ops.RestoreV2(
                        prefix=path,
                        tensor_names=[piece.name for piece in wanted],
                        shape_and_slices=[piece.slice_spec for piece in wanted],
                        dtypes=[piece.variable.dtype for piece in wanted],
                    )
                given = iter(tensors)
                with tf.device(device):
                    before = [_assign(run, [next(given) for _ in run]) for run in _runs(wanted)]


def _runs(group: Sequence[Piece]) -> list[list[Piece]]:
    """The pieces of each variable, which are next to each other."""
    return [list(run) for _, run in itertools.groupby(group, key=lambda piece: id(piece.variable))]


def _read(run: Sequence[Piece]) -> list[tf.Tensor]:
    """The values of pieces that are next to each other, on the device of their variable.

    They are views of the variable where TensorFlow can make them, so nothing may change it meanwhile.
    """
    value = run[0].variable.read_value_no_copy()
    places = [piece.place_in(value.shape) for piece in run]
    if not _cover(places, value):
        value = value[places[0].start : places[-1].stop]
    parts = tf.split(value, [place.stop - place.start for place in places]) if len(run) > 1 else [value]
    return [tf.reshape(part, piece.own_shape) for part, piece in zip(parts, run)]


def _assign(run: Sequence[Piece], values: Sequence[tf.Tensor]) -> tf.Operation:
    """Sets pieces that are next to each other, in place."""
    variable = run[0].variable
    places = [piece.place_in(variable.shape) for piece in run]
    parts = [tf.reshape(value, [-1, *variable.shape[1:]]) for value in values] if len(run) > 1 else values
    joined = tf.concat(parts, 0) if len(run) > 1 else parts[0]
    if _cover(places, variable):
        return variable.assign(tf.reshape(joined, variable.shape), read_value=False)
    return assign_rows(variable, places[0].start, places[-1].stop, joined)


def _cover(places: Sequence[slice], whole: tf.Tensor | tf.Variable) -> bool:
    """Whether places that are next to each other are all of a variable, or of its value."""
    return whole.shape.rank == 0 or places[-1].stop - places[0].start == whole.shape[0]


def _is_finite(value: np.ndarray) -> bool:
    # numpy does not count bfloat16 as a float; everything but integers and bools is checked.
    return value.dtype.kind in "iub" or bool(np.isfinite(value.astype(np.float32)).all())


def _are_finite(device: str, variables: Sequence[tf.Variable]) -> tf.Tensor:
    """For each variable of a device whether all its elements are finite: bool `[n]`."""

    def is_finite(variable: tf.Variable) -> tf.Tensor:
        value = variable.read_value_no_copy()
        # A sum needs no memory, and is finite only if all its terms are; but it may overflow, too.
        total = tf.math.is_finite(tf.reduce_sum(value))
        return tf.cond(total, lambda: True, lambda: tf.reduce_all(tf.math.is_finite(value)))

    with tf.device(device):
        return tf.stack([is_finite(variable) for variable in variables])


def _host_of(device: str) -> str:
    """The CPU of the task that has a device."""
    return tf.DeviceSpec.from_string(device).replace(device_type="CPU", device_index=0).to_string()
