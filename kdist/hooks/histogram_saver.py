"""`HistogramSaver`: how weights and gradients are distributed. After `histogram_freq` of Keras's callback."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from kdist.hooks.base import Hook, RunContext, RunValues
from kdist.hooks.timer import SecondOrStepTimer
from kdist.parameters.names import variable_names

if TYPE_CHECKING:
    from kdist.session import TrainSession

_PARAMETERS = "parameters/"


class HistogramSaver(Hook):
    """Writes histograms of each trainable variable to TensorBoard: `weights/<name>` and `gradients/<name>`.

    Workers push gradients to the servers, and none passes the chief. So the chief computes those of one training batch
    from the present weights by itself, not clipped. Of an embedding, they are the gradients of the rows in the batch.

    Args:
        every_steps: steps between two histograms; 500 if neither is given, because all values come to the chief.
        every_secs: seconds between two histograms.
        gradients: whether to compute gradients as well.
    """

    def __init__(
        self, every_steps: int | None = None, every_secs: float | None = None, *, gradients: bool = True
    ) -> None:
        if every_steps is None and every_secs is None:
            every_steps = 500
        self._timer = SecondOrStepTimer(every_steps=every_steps, every_secs=every_secs, owner="HistogramSaver")
        self._gradients = gradients
        self._batches: Iterator[Any] | None = None

    def after_create_session(self, session: TrainSession) -> None:
        self._timer.start(session.global_step)
        self._batches = None

    def after_run(self, context: RunContext, values: RunValues) -> None:
        if self._timer.due(values.global_step):
            self._timer.restart(values.global_step)
            self._write(context.session)

    def due_in(self, step: int) -> int | None:
        return self._timer.due_in(step)

    def close(self) -> None:
        self._batches = None

    def _write(self, session: TrainSession) -> None:
        from kdist.parameters.local import write_to_model

        values = session.read()
        for name, value in values.items():
            if name.startswith(_PARAMETERS):
                session.summaries.histogram(
                    "train", f"weights/{name.removeprefix(_PARAMETERS)}", value, session.global_step
                )
        if self._gradients:
            write_to_model(session.program.model, values)
            for name, gradient in self._gradients_of_a_batch(session).items():
                session.summaries.histogram("train", f"gradients/{name}", gradient, session.global_step)

    def _gradients_of_a_batch(self, session: TrainSession) -> dict[str, np.ndarray]:
        # What lists the hooks, as --help does, needs no TensorFlow.
        import keras
        import tensorflow as tf

        from kdist.worker_data import worker_arguments, worker_dataset

        program = session.program
        if self._batches is None:
            make = worker_dataset(
                program.data, num_workers=1, batch_size=program.batch_size, num_seeds=0, seed=program.seed
            )
            self._batches = iter(make(*worker_arguments(program.data, 0, 1, session.global_step)))
        batch, _ = next(self._batches)
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
        model = program.model
        # What a step would change beside gradients (statistics, seeds) stays as it is.
        variables = model.trainable_variables
        mapping = [(v, tf.convert_to_tensor(v.value)) for v in [*variables, *model.non_trainable_variables]]
        values = [value for _, value in mapping[: len(variables)]]
        with tf.GradientTape() as tape, keras.StatelessScope(mapping, collect_losses=True):
            tape.watch(values)
            y_pred = model(x, training=True)
            loss = model.compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True)
        gradients = tape.gradient(loss, values)
        names = variable_names(model, [*variables, *model.non_trainable_variables])
        found: dict[str, np.ndarray] = {}
        for name, gradient in zip(names, gradients):
            if gradient is not None:
                found[name] = (gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient).numpy()
        return found
