"""`ValueFiles`: saves and restores stored values as TensorFlow checkpoints, each task the rows that it holds."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import tensorflow as tf

from kdist._compat.tensorflow import UninitializedVariable
from kdist.errors import NonFiniteError
from kdist.log import warn
from kdist.model.names import FOLLOWS
from kdist.parameters.placement.blocks import StoredShard
from kdist.parameters.tables.changed_rows import DeltaBase
from kdist.parameters.tensorflow_paths import literal_path, open_checkpoint
from kdist.parameters.values.delta_files import DeltaFiles
from kdist.parameters.values.dynamic_values import DynamicValues
from kdist.parameters.values.named_values import NamedValues, Piece
from kdist.parameters.values.piece_files import PieceFiles, is_finite
from kdist.parameters.values.row_files import Saving, chief_device

_TASK = re.compile(r"/job:(\w+)/replica:\d+/task:(\d+)")


class ValueFiles:
    """Saves and restores all named values without bringing them to the chief.

    To save, every task writes its rows to files of its own, and the chief merges their indices
    (`tf.raw_ops.MergeV2Checkpoints`, as `tf.train.Checkpoint` does for sharded variables): the result is one checkpoint
    in which each value is one tensor. To restore, every task reads the rows that it holds now. Tasks that do not see
    the files of the chief can do neither; then the pieces travel through the chief, one group after the other.

    Values that are small together travel at once, which is faster.

    Args:
        values: what is saved.
        dynamic: rows that are saved, too.
        deltas: which rows have changed.
    """

    def __init__(
        self, values: NamedValues, dynamic: DynamicValues | None = None, deltas: DeltaFiles | None = None
    ) -> None:
        self._values = values
        self._dynamic = DynamicValues([]) if dynamic is None else dynamic
        self._deltas = DeltaFiles([], [], None) if deltas is None else deltas
        self._chief = chief_device()
        # What is in one variable comes in its order, so that a group has a run of its elements.
        number = {id(variable): i for i, variable in enumerate(values.variables)}
        pieces = sorted(values.pieces(), key=lambda piece: (number[id(piece.variable)], piece.offset))
        self._present = self._files_of(pieces)
        # What several variables hold is written to all of them by the chief.
        self._restored = self._files_of([piece for piece in pieces if piece.name not in values.copies])
        #: What a delta has as a whole.
        of_deltas = [piece for piece in pieces if piece.name not in self._deltas.names]
        self._whole = self._files_of(of_deltas)
        self._whole_restored = self._files_of([piece for piece in of_deltas if piece.name not in values.copies])
        #: Whether it is known which tasks see the files of the chief.
        self._has_looked = False

    def save(self, prefix: Path, others: Mapping[str, np.ndarray], since: DeltaBase | None = None) -> None:
        """Writes a checkpoint; nothing may change the values meanwhile.

        Args:
            prefix: of its files.
            others: values to add to it, by name.
            since: only rows that have changed since then are written, and all other values: a delta.

        Raises:
            NonFiniteError: values contain NaN or infinity; nothing is written.
            tf.errors.OpError, OSError: it cannot be written.
        """
        if since is not None:
            self._begin_delta(prefix, others, since, self._whole)()
            return
        if self._are_small:
            self._write_small(prefix, self._values.read(), others)
            return
        _refuse(self._present.not_finite() + self._dynamic.not_finite())
        folder = self._make_folder(prefix, others)
        self._write_large(prefix, folder, self._present, self._dynamic.saving(str(folder)))

    def begin_save(
        self, prefix: Path, others: Mapping[str, np.ndarray], since: DeltaBase | None = None
    ) -> Callable[[], None]:
        """Copies the values where they are; until the copies are written, tasks need memory for both.

        Returns:
            Writes the copies as `save` writes the values; to be called once, in any thread, before anything else is
            copied.
        """
        if since is not None:
            copied, copy, release = self._copies_of_whole
            copy()
            return self._begin_delta(prefix, others, since, copied, release)
        if self._are_small:
            return partial(self._write_small, prefix, self._values.read(), others)
        folder = self._make_folder(prefix, others)
        copied, copy, release = self._copies
        copy()
        self._dynamic.copy()
        # Here, because another thread may not trace functions.
        not_finite, rows = self._dynamic.not_finite(of_copy=True), self._dynamic.saving_of_copy(str(folder))
        return partial(self._write_copies, prefix, folder, copied, rows, not_finite, [release, self._dynamic.release])

    def _begin_delta(
        self,
        prefix: Path,
        others: Mapping[str, np.ndarray],
        since: DeltaBase,
        whole: PieceFiles,
        release: Callable[[], object] = lambda: None,
    ) -> Callable[[], None]:
        """Copies the changed rows; returns what writes them, with values of which a delta has all.

        Args:
            release: gives the memory of `whole` back.
        """
        folder = self._make_folder(prefix, {**others, FOLLOWS: np.array(since.step, np.int64)})
        self._deltas.copy(since.interval)
        not_finite, rows = self._deltas.not_finite(), self._deltas.saving(str(folder))
        return partial(self._write_copies, prefix, folder, whole, rows, not_finite, [release, self._deltas.release])

    def _write_copies(
        self,
        prefix: Path,
        folder: Path,
        values: PieceFiles,
        rows: Saving,
        not_finite: Sequence[str],
        releases: Sequence[Callable[[], object]],
    ) -> None:
        """Writes values and copied rows, of which some are known not to be finite, and gives their memory back."""
        try:
            _refuse(values.not_finite() + list(not_finite))
            self._write_large(prefix, folder, values, rows)
        finally:
            # If the tasks are gone, so are the copies.
            with suppress(tf.errors.OpError):
                for release in releases:
                    release()

    def restore(self, path: Path) -> None:
        """Reads all values from a checkpoint but those that several variables hold.

        Raises:
            tf.errors.OpError: it is damaged; some values may have been read all the same.
        """
        if self._are_small:
            reader = open_checkpoint(path)
            names = self._values.shapes.keys() - self._values.copies.keys()
            self._values.write({name: reader.get_tensor(name) for name in names})
            return
        path = literal_path(path)
        self._look_for(Path(f"{path}.index"))
        self._restored.restore(str(path))
        self._dynamic.restore(str(path))

    def restore_delta(self, path: Path) -> None:
        """Reads a delta of what was restored last but what several variables hold; raises what `restore` raises."""
        path = literal_path(path)
        self._look_for(Path(f"{path}.index"))
        self._whole_restored.restore(str(path))
        self._deltas.restore(str(path))

    @property
    def _are_small(self) -> bool:
        sizes = (variable.shape.num_elements() * variable.dtype.size for variable in self._values.variables)
        return not self._dynamic and sum(sizes) <= 2 * StoredShard.slice_bytes

    def _files_of(self, pieces: Sequence[Piece]) -> PieceFiles:
        return PieceFiles(pieces, StoredShard.slice_bytes, self._chief)

    @cached_property
    def _copies(self) -> tuple[PieceFiles, Callable[[], object], Callable[[], object]]:
        """Copies of all variables, empty; what fills and what empties them."""
        return self._copied(self._present)

    @cached_property
    def _copies_of_whole(self) -> tuple[PieceFiles, Callable[[], object], Callable[[], object]]:
        """The same of what a delta has as a whole."""
        return self._copied(self._whole)

    def _copied(self, files: PieceFiles) -> tuple[PieceFiles, Callable[[], object], Callable[[], object]]:
        variables = files.variables
        copies: dict[int, tf.Variable] = {}
        for variable in variables:
            with tf.device(variable.device):
                copies[id(variable)] = UninitializedVariable(False, shape=variable.shape, dtype=variable.dtype)

        def copy() -> None:
            for variable in variables:
                with tf.device(variable.device):
                    # What is read shares its memory with the variable.
                    value = tf.raw_ops.DeepCopy(x=variable.read_value_no_copy())
                    tf.raw_ops.AssignVariableOp(resource=copies[id(variable)].handle, value=value)

        def release() -> None:
            for variable in copies.values():
                with tf.device(variable.device):
                    # Of a shape that TensorFlow cannot compare with the variable's.
                    nothing = tf.compat.v1.placeholder_with_default(tf.zeros([0], variable.dtype), None)
                    tf.raw_ops.AssignVariableOp(resource=variable.handle, value=nothing)

        copied = files.of_copies(copies)
        copied.prepare()
        functions = [tf.function(f, autograph=False).get_concrete_function() for f in (copy, release)]
        return copied, *functions

    def _write_small(self, prefix: Path, values: Mapping[str, np.ndarray], others: Mapping[str, np.ndarray]) -> None:
        """Writes values that have travelled to the chief."""
        _refuse([name for name, value in values.items() if not is_finite(value)])
        self._write(prefix, {**values, **others})

    def _make_folder(self, prefix: Path, others: Mapping[str, np.ndarray]) -> Path:
        """Makes a folder for the files of a checkpoint, with `others` in it."""
        # A name of its own: a task that could not finish may still be writing when the next attempt begins.
        folder = literal_path(prefix.with_name(f"{prefix.name}-{uuid.uuid4().hex[:8]}"))
        folder.mkdir()
        self._write(folder / "others", others)
        self._look_for(folder / "others.index")
        return folder

    def _write_large(self, prefix: Path, folder: Path, files: PieceFiles, rows: Saving) -> None:
        """Lets every task write what it holds, and makes one checkpoint of it."""
        files.save(str(folder))
        for call in rows.calls:
            call()
        with tf.device(self._chief):
            tf.raw_ops.MergeV2Checkpoints(
                checkpoint_prefixes=[str(folder / name) for name in (*files.names, *rows.files, "others")],
                destination_prefix=str(literal_path(prefix)),
                delete_old_dirs=True,
            )

    def _write(self, prefix: Path, values: Mapping[str, np.ndarray]) -> None:
        with tf.device(self._chief):
            tf.raw_ops.SaveV2(
                prefix=str(literal_path(prefix)),
                tensor_names=list(values),
                shape_and_slices=[""] * len(values),
                tensors=[tf.constant(value) for value in values.values()],
            )

    def _look_for(self, path: Path) -> None:
        """Finds out whether all tasks see a file of the chief, and warns if they do not."""
        if self._has_looked:
            return
        content, blind = path.read_bytes(), []
        for host in dict.fromkeys([*self._present.hosts, *self._dynamic.devices]):
            try:
                with tf.device(host):
                    found = tf.io.read_file(str(path)).numpy()
            except (tf.errors.NotFoundError, tf.errors.PermissionDeniedError, tf.errors.FailedPreconditionError):
                found = None
            if found != content:
                blind.append(":".join(_TASK.search(host).groups()))  # type: ignore[union-attr]
        self._has_looked = True
        for files in (self._present, self._restored, self._whole, self._whole_restored):
            files.through_chief = bool(blind)
        self._dynamic.travel_through_chief(bool(blind))
        self._deltas.travel_through_chief(bool(blind))
        if blind:
            verb = "does" if len(blind) == 1 else "do"
            warn(f"{', '.join(blind)} {verb} not see {path.parent}: checkpoints travel through the chief")


def _refuse(not_finite: Sequence[str]) -> None:
    if not_finite:
        verb = "is" if len(not_finite) == 1 else "are"
        raise NonFiniteError(f"{', '.join(not_finite[:5])} {verb} not finite")
