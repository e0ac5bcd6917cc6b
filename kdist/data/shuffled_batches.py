"""`ShuffledBatches`: a `PyDataset` whose batches come in another order in each pass."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np


class ShuffledBatches(keras.utils.PyDataset):
    """The batches of another data set. The seed and the pass determine their order, so that any process finds it.

    Args:
        dataset: of known length.
        seed: None keeps their order.
    """

    def __init__(self, dataset: keras.utils.PyDataset, seed: int | None) -> None:
        super().__init__(dataset.workers, dataset.use_multiprocessing, dataset.max_queue_size)
        self._dataset = dataset
        self._seed = seed
        self.enter(0)

    def enter(self, pass_number: int, first: int = 0) -> None:
        """From now on the batches are those of a pass, without those before the number `first`."""
        order = np.arange(self._dataset.num_batches)
        if self._seed is not None:
            np.random.default_rng([self._seed, pass_number]).shuffle(order)
        self._order = order[first:]

    def index_of(self, number: int) -> int:
        """The index in the other data set of one of these batches."""
        return int(self._order[number])

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> Any:
        return self.at(self.index_of(index))

    def at(self, index: int) -> Any:
        """The batch with an index in the other data set."""
        return self._dataset[index]

    def on_epoch_begin(self) -> None:
        self._dataset.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self._dataset.on_epoch_end()
