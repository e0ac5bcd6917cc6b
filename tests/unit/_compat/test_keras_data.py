"""Keras's adapters of data of Python, as kdist uses them."""

from __future__ import annotations

import numpy as np
import pytest
import python_data
import tensorflow as tf
from python_data import BATCH, Batches

from kdist._compat.keras_data import as_tensor, get_data_adapter, is_scipy_sparse, is_torch_dataloader


def test_the_batches_of_a_pass_and_their_types() -> None:
    data = Batches(3)
    adapter = get_data_adapter(data, shuffle=False)
    x, y = adapter.get_tf_dataset().element_spec
    assert (x.shape.as_list(), x.dtype, y.shape.as_list(), y.dtype) == ([None, 6], tf.float32, [None], tf.int64)
    assert adapter.num_batches == 3
    adapter.on_epoch_begin()
    assert [len(y) for _, y in adapter.get_numpy_iterator()] == [BATCH] * 3
    adapter.on_epoch_end()
    assert (data.calls[0], data.calls[-1]) == (0, "end")


def test_threads_of_a_pass_that_is_not_read_to_its_end_are_ended() -> None:
    adapter = get_data_adapter(Batches(7, workers=2), shuffle=False)
    adapter.get_tf_dataset()
    adapter.on_epoch_begin()
    next(iter(adapter.get_numpy_iterator()))
    adapter.enqueuer.stop()


def test_sparse_matrices_become_sparse_tensors() -> None:
    matrix = python_data.sparse_matrix()
    assert is_scipy_sparse(matrix)
    assert not is_scipy_sparse(matrix.toarray())
    tensor = as_tensor(matrix, tf.SparseTensorSpec([None, 6], tf.float32))
    np.testing.assert_array_equal(tf.sparse.to_dense(tensor), matrix.toarray())


def test_a_data_loader_is_known_by_its_class() -> None:
    assert not is_torch_dataloader(Batches())
    torch = pytest.importorskip("torch")
    assert is_torch_dataloader(torch.utils.data.DataLoader([1, 2]))
