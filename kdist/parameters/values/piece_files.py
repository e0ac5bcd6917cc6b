"""`PieceFiles`: each task checks, writes and reads the pieces of values that it holds, a few at a time."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import tensorflow as tf

from kdist.parameters.values.named_values import Piece, assign_rows


class PieceFiles:
    """The files of pieces, one for each group of pieces of a device.

    A task writes or reads one group at once, and may need memory for it beside the values themselves.

    Args:
        pieces: those of one variable come in its order.
        piece_bytes: the size of the largest pieces, and of a group.
        chief: the device of this process.

    Attributes:
        through_chief: whether this process reads and writes the files, because other tasks do not see them; must not
            change once `prepare` was called.
    """

    def __init__(self, pieces: Sequence[Piece], piece_bytes: int, chief: str) -> None:
        self.through_chief = False
        self._chief = chief
        self._piece_bytes = piece_bytes
        self._groups: dict[str, list[list[Piece]]] = defaultdict(list)
        for piece in pieces:
            of_device = self._groups[piece.variable.device]
            size = sum(other.num_bytes for other in of_device[-1]) if of_device else 0
            if not of_device or size + piece.num_bytes > piece_bytes:
                of_device.append([])
            of_device[-1].append(piece)
        self._functions: dict[str, tf.types.experimental.ConcreteFunction] = {}

    @property
    def hosts(self) -> list[str]:
        """The CPUs of the tasks that hold pieces."""
        return list(dict.fromkeys(map(_host_of, self._groups)))

    @property
    def variables(self) -> list[tf.Variable]:
        """The variables that hold pieces."""
        return list({id(piece.variable): piece.variable for piece in self._pieces}.values())

    @property
    def names(self) -> list[str]:
        """The names of the files."""
        return [f"{d}-{g}" for d, groups in enumerate(self._groups.values()) for g in range(len(groups))]

    def of_copies(self, copies: Mapping[int, tf.Variable]) -> PieceFiles:
        """The files of the same pieces in copies of their variables.

        Args:
            copies: by the `id` of each variable.
        """
        pieces = [replace(piece, variable=copies[id(piece.variable)]) for piece in self._pieces]
        other = PieceFiles(pieces, self._piece_bytes, self._chief)
        other.through_chief = self.through_chief
        return other

    def prepare(self) -> None:
        """Traces what `not_finite` and `save` call, so that another thread may call them."""
        self._traced("check", self._check)
        self._traced("save", self._save, tf.TensorSpec([], tf.string))

    def not_finite(self) -> list[str]:
        """The names of the values that contain NaN or infinity."""
        flags = [flag for of_device in self._traced("check", self._check)() for flag in of_device.numpy()]
        keys = [key for of_device in self._floats().values() for key in of_device]
        broken = {key for key, is_finite in zip(keys, flags) if not is_finite}
        suspects = [piece for piece in self._pieces if id(piece.variable) in broken]
        return list(dict.fromkeys(piece.name for piece in suspects if not is_finite(read_pieces([piece])[0].numpy())))

    def save(self, folder: str) -> None:
        """Writes all files into a folder; nothing may change the values meanwhile."""
        self._traced("save", self._save, tf.TensorSpec([], tf.string))(tf.constant(folder))

    def restore(self, path: str) -> None:
        """Reads all pieces from a checkpoint."""
        self._traced("restore", self._restore, tf.TensorSpec([], tf.string))(tf.constant(path))

    @property
    def _pieces(self) -> list[Piece]:
        return [piece for groups in self._groups.values() for group in groups for piece in group]

    def _traced(
        self, kind: str, function: Callable[..., object], *specs: tf.TensorSpec
    ) -> tf.types.experimental.ConcreteFunction:
        if kind not in self._functions:
            self._functions[kind] = tf.function(function, autograph=False).get_concrete_function(*specs)
        return self._functions[kind]

    def _writer_of(self, device: str) -> str:
        """Who reads and writes the files of what a device holds."""
        return self._chief if self.through_chief else _host_of(device)

    def _floats(self) -> dict[str, dict[int, tf.Variable]]:
        """The variables of each device that may hold NaN or infinity, by their `id`."""
        floats: dict[str, dict[int, tf.Variable]] = defaultdict(dict)
        for piece in self._pieces:
            if piece.variable.dtype.is_floating:
                floats[piece.variable.device][id(piece.variable)] = piece.variable
        return floats

    def _check(self) -> list[tf.Tensor]:
        return [_are_finite(device, list(variables.values())) for device, variables in self._floats().items()]

    def _save(self, folder: tf.Tensor) -> tf.Tensor:
        names, last = iter(self.names), list[tf.Operation]()
        for device, groups in self._groups.items():
            before: list[tf.Operation] = []
            for group in groups:
                # One after the other: what one group needs is free before the next one is read.
                with tf.control_dependencies(before):
                    with tf.device(device):
                        tensors = [tensor for run in _runs(group) for tensor in read_pieces(run)]
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
                with tf.control_dependencies(before), tf.device(self._writer_of(device)):
                    tensors = tf.raw_ops.RestoreV2(
                        prefix=path,
                        tensor_names=[piece.name for piece in group],
                        shape_and_slices=[piece.slice_spec for piece in group],
                        dtypes=[piece.variable.dtype for piece in group],
                    )
                given = iter(tensors)
                with tf.device(device):
                    before = [_assign(run, [next(given) for _ in run]) for run in _runs(group)]


def is_finite(value: np.ndarray) -> bool:
    """Whether no element is NaN or infinity."""
    # numpy does not count bfloat16 as a float; everything but integers and bools is checked.
    return value.dtype.kind in "iub" or bool(np.isfinite(value.astype(np.float32)).all())


def _runs(group: Sequence[Piece]) -> list[list[Piece]]:
    """The pieces of each variable, which are next to each other."""
    return [list(run) for _, run in itertools.groupby(group, key=lambda piece: id(piece.variable))]


def read_pieces(run: Sequence[Piece]) -> list[tf.Tensor]:
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
    parts = [tf.reshape(value, [-1, *variable.shape[1:]]) for value in values]
    joined = tf.concat(parts, 0) if len(run) > 1 else parts[0]
    if _cover(places, variable):
        return variable.assign(tf.reshape(joined, variable.shape), read_value=False)
    return assign_rows(variable, places[0].start, places[-1].stop, joined)


def _cover(places: Sequence[slice], whole: tf.Tensor | tf.Variable) -> bool:
    """Whether places that are next to each other are all of a variable, or of its value."""
    return whole.shape.rank == 0 or places[-1].stop - places[0].start == whole.shape[0]


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
