"""`HistogramSaver`: the distributions of weights and gradients. After `histogram_freq` of Keras's callback."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from kdist.hooks.base import Session
from kdist.hooks.timer import TimedHook
from kdist.model.names import variable_names


class HistogramSaver(TimedHook):
    """Writes histograms of each trainable variable to TensorBoard: `weights/<name>` and `gradients/<name>`.

    Servers count the weights that they hold. Workers push gradients past the chief, so the chief computes gradients of
    one training batch from the present weights, without clipping; for an embedding, of the rows in the batch. A model
    that is too large for the chief (`run.export_max_bytes`) has no histograms of gradients.

    Args:
        every_steps: steps between two histograms; 500 if neither is given, because with `gradients` all values are sent
            to the chief.
        every_secs: seconds between two histograms.
        gradients: whether to compute gradients as well.
    """

    _owner = "HistogramSaver"
    _default_steps = 500

    def __init__(
        self, every_steps: int | None = None, every_secs: float | None = None, *, gradients: bool = True
    ) -> None:
        super().__init__(every_steps, every_secs)
        self._gradients = gradients
        self.close()

    def after_create_session(self, session: Session) -> None:
        super().after_create_session(session)
        self.close()

    def idle_in(self, step: int) -> int | None:
        # Needs the values of exactly that step.
        return self.due_in(step)

    def close(self) -> None:
        self._make: Any = None
        self._batches: Iterator[Any] | None = None

    def _act(self, session: Session) -> None:
        from kdist.model.state import write_to_model

        for name, buckets in session.strategy.values.histograms().items():
            tag = name.replace("parameters/", "weights/", 1)
            session.summaries.buckets("train", tag, buckets, session.global_step)
        if self._gradients and not session.spec.stays_on_servers():
            session.read_into(partial(write_to_model, session.spec.model))
            for name, gradient in self._gradients_of_a_batch(session).items():
                session.summaries.histogram("train", f"gradients/{name}", gradient, session.global_step)

    def _gradients_of_a_batch(self, session: Session) -> dict[str, np.ndarray]:
        # `--help`, which lists the hooks, needs no TensorFlow.
        import keras
        import tensorflow as tf

        from kdist.data.splits import NothingToRead
        from kdist.model.forward import forward
        from kdist.model.state import variables_of

        try:
            batch = self._next_batch(session)
        except (NothingToRead, StopIteration):
            # A pass, or what has arrived, is read to its end.
            self._batches = None
            return {}
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
        model = session.spec.model
        # What else a step would change (statistics, seeds) stays as it is.
        trainable, others = variables_of(model)
        variables = [*trainable, *others]
        mapping = [(variable, tf.convert_to_tensor(variable.value)) for variable in variables]
        values = [value for _, value in mapping[: len(trainable)]]
        with tf.GradientTape() as tape, keras.StatelessScope(mapping, collect_losses=True):
            tape.watch(values)
            _, loss = forward(model, x, y, sample_weight, training=True)
        gradients = tape.gradient(loss, values)
        names = variable_names(model, variables)
        return {
            name: (gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient).numpy()
            for name, gradient in zip(names, gradients)
            if gradient is not None
        }

    def _next_batch(self, session: Session) -> Any:
        """A batch that a worker reads, too."""
        from kdist.data.base import make_dataset, worker_dataset

        data, splits = session.spec.data, session.spec.data.splits
        if self._make is None:
            self._make = worker_dataset(
                data, num_workers=1, batch_size=session.spec.batch_size, num_seeds=0, seed=session.spec.seed
            )
            data.trace_transfer(1)
        if self._batches is None:
            is_of_worker = splits is None or splits.split_of(0) is not None
            made = make_dataset(self._make, data, 0, 1, session.global_step)
            if splits is not None and not is_of_worker:
                splits.give_back(0)
            if isinstance(made, tuple):
                return made[0]
            self._batches = iter(made)
        return next(self._batches)[0]
