"""Checkpoints: TensorFlow's own format, complete or absent, the newest readable one restored.

Every value is one named tensor, whatever strategy and however many servers wrote it, so that
`tf.train.load_checkpoint(path).get_tensor("parameters/dense/kernel")` reads it without kdist.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import tensorflow as tf

from kdist.errors import CheckpointError, NonFiniteError

_INDEX = re.compile(r"ckpt-(\d+)\.index")
# What TensorFlow raises for damaged files, depending on the byte that is wrong.
_DAMAGE_ERRORS = (tf.errors.OpError, ValueError, IndexError, UnicodeDecodeError, RuntimeError)


class Checkpoints:
    """The checkpoints of one run, `<folder>/ckpt-<global step>`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def steps(self) -> list[int]:
        """Global steps of the complete checkpoints, oldest first."""
        if not self.folder.is_dir():
            return []
        return sorted(int(match[1]) for path in self.folder.iterdir() if (match := _INDEX.fullmatch(path.name)))

    def path(self, step: int) -> Path:
        """The checkpoint of `step`, as TensorFlow names it: a prefix of its files."""
        return self.folder / f"ckpt-{step}"

    def newest(self) -> Path | None:
        """The newest complete checkpoint."""
        steps = self.steps()
        return self.path(steps[-1]) if steps else None

    def save(self, step: int, values: Mapping[str, np.ndarray], *, keep: int) -> Path:
        """Writes a checkpoint and deletes all but the newest `keep`.

        It is written under another name and moved into place, the index last: without its index it is not there.

        Raises:
            NonFiniteError: a value is NaN or infinite; nothing is written.
            CheckpointError: it cannot be written; what was there before is untouched.
        """
        broken = [name for name, value in values.items() if not _is_finite(value)]
        if broken:
            raise NonFiniteError(
                f"step {step} is not saved: {', '.join(broken[:5])} {'is' if len(broken) == 1 else 'are'} not finite\n"
                f"  last good checkpoint, which is kept: {self.newest() or 'none was saved'}"
            )
        target = self.path(step)
        unfinished = self.folder / f"unfinished-{step}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tf.device("CPU:0"):
                tf.raw_ops.SaveV2(
                    prefix=str(unfinished),
                    tensor_names=list(values),
                    shape_and_slices=[""] * len(values),
                    tensors=[tf.constant(value) for value in values.values()],
                )
            # A checkpoint of the same step is deleted whole, before its data and index could be of different saves.
            self._delete(step)
            for suffix in (".data-00000-of-00001", ".index"):
                Path(f"{unfinished}{suffix}").replace(f"{target}{suffix}")
            kept = self.steps()[-keep:]
            for old in self.steps()[:-keep]:
                self._delete(old)
            self._write_state([self.path(old).name for old in kept])
        except (tf.errors.OpError, OSError) as error:
            reason = getattr(error, "message", None) or error
            raise CheckpointError(f"step {step} could not be saved to {self.folder}: {reason}") from error
        return target

    def restore(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Path, dict[str, np.ndarray]] | None:
        """Reads the newest checkpoint that is not damaged; each damaged one costs a warning.

        Args:
            shapes: what the model holds, by name.

        Returns:
            The checkpoint and its values; None if there is no checkpoint at all.

        Raises:
            CheckpointError: every checkpoint is damaged, or the newest good one is of another model.
        """
        steps = self.steps()
        for step in reversed(steps):
            path = self.path(step)
            try:
                reader = tf.train.load_checkpoint(str(path))
                values = {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}
            except _DAMAGE_ERRORS as error:
                warnings.warn(f"kdist: {path} is damaged and left out ({type(error).__name__})", stacklevel=2)
                continue
            _check_fits(path, values, shapes)
            return path, values
        if steps:
            raise CheckpointError(
                f"every checkpoint in {self.folder} is damaged; move the folder away or set run.resume=never to start "
                "anew"
            )
        return None

    def set_aside(self) -> None:
        """Renames the folder, so that a run can start anew and nothing is lost."""
        if self.steps():
            number = 1
            while (aside := self.folder.with_name(f"{self.folder.name}-before-{number}")).exists():
                number += 1
            self.folder.rename(aside)

    def _write_state(self, kept: list[str]) -> None:
        """Writes the `checkpoint` file, in which TensorFlow's own tools look for the newest; kdist does not need it."""
        lines = [f"model_checkpoint_path: {json.dumps(kept[-1])}"]
        lines += [f"all_model_checkpoint_paths: {json.dumps(name)}" for name in kept]
        unfinished = self.folder / ".checkpoint"
        unfinished.write_text("\n".join(lines) + "\n")
        unfinished.replace(self.folder / "checkpoint")

    def _delete(self, step: int) -> None:
        # The index goes first: what is half deleted is no checkpoint any more.
        for suffix in (".index", ".data-00000-of-00001"):
            Path(f"{self.path(step)}{suffix}").unlink(missing_ok=True)


def _is_finite(value: np.ndarray) -> bool:
    # bfloat16 is no float to numpy; everything that is not an integer or a bool is checked.
    return value.dtype.kind in "iub" or bool(np.isfinite(value.astype(np.float32)).all())


def _check_fits(path: Path, values: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]]) -> None:
    missing = sorted(set(shapes) - set(values))
    unexpected = sorted(set(values) - set(shapes))
    other_shape = [
        f"{name} {values[name].shape} (the model has {shapes[name]})"
        for name in sorted(set(shapes) & set(values))
        if values[name].shape != tuple(shapes[name])
    ]
    parts = (("missing", missing), ("unexpected", unexpected), ("of another shape", other_shape))
    lines = [f"  {what}: {', '.join(names)}" for what, names in parts if names]
    if lines:
        raise CheckpointError(
            "\n".join([f"{path} is of another model or optimizer:", *lines])
            + "\n  use another run.dir, or run.resume=never to start anew"
        )
