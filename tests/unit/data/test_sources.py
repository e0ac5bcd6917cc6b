from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from kdist.recipes.mnist import load_data

from kdist.data.base import DataContext, Readers, TrainingData, make_dataset, worker_dataset
from kdist.data.sources import split_validation, training_data
from kdist.errors import ConfigError


def batches(
    data: Any, num_workers: int, worker: int, count: int, seed: int = 0, first_step: int = 0, first_batch: int = 0
) -> list[Any]:
    make = worker_dataset(data, num_workers=num_workers, batch_size=4, num_seeds=2, seed=seed)
    data.trace_transfer(num_workers)
    dataset = make_dataset(make, data, worker, num_workers, first_step, first_batch)
    return [tf.nest.map_structure(lambda t: t.numpy(), element) for element in dataset.take(count)]


def numbers(n: int) -> np.ndarray:
    return np.arange(n, dtype=np.float32)


def test_workers_read_different_parts_of_arrays_and_together_all_of_it() -> None:
    data = training_data(numbers(32), numbers(32), batch_size=4)
    seen = [np.concatenate([x for (x, _), _ in batches(data, 2, worker, 4)]) for worker in (0, 1)]
    assert sorted(np.concatenate(seen)) == list(range(32))
    assert set(seen[0]).isdisjoint(seen[1])


def test_parts_of_shuffled_arrays_are_random() -> None:
    """Each part has the classes of the whole, in whatever order the data came."""
    data = training_data(numbers(400), np.arange(400) % 2, batch_size=4)
    for worker in (0, 1):
        classes = np.concatenate([y for (_, y), _ in batches(data, 2, worker, 50)])
        assert 60 < classes.sum() < 140


@pytest.mark.parametrize("shuffle", [False, True])
def test_x_and_y_stay_together_and_the_last_batch_of_a_pass_has_what_is_left(shuffle: bool) -> None:
    data = training_data(numbers(30), -numbers(30), batch_size=4, shuffle=shuffle)
    assert data.batches_per_pass(1) == 8
    read = batches(data, 1, 0, 16)
    assert [len(x) for (x, _), _ in read] == [*[4] * 7, 2] * 2
    for (x, y), _ in read:
        np.testing.assert_array_equal(x, -y)
    for one_pass in read[:8], read[8:]:
        assert sorted(np.concatenate([x for (x, _), _ in one_pass])) == list(range(30))


@pytest.mark.parametrize(
    ("num_examples", "sizes"),
    [(30, [[4, 4, 4, 3]] * 2), (17, [[4, 4, 1], [4, 3, 1]]), (16, [[4, 4]] * 2), (3, [[2], [1]])],
)
def test_all_workers_have_as_many_batches_and_together_each_example_once(
    num_examples: int, sizes: list[list[int]]
) -> None:
    data = training_data(numbers(num_examples), batch_size=4)
    number = len(sizes[0])
    assert data.batches_per_pass(2) == 2 * number
    read = [[x for x, _ in batches(data, 2, worker, number)] for worker in (0, 1)]
    assert [[len(x) for x in of_worker] for of_worker in read] == sizes
    assert sorted(np.concatenate([*read[0], *read[1]])) == list(range(num_examples))


def test_a_worker_without_an_example_for_its_last_batch_of_one_has_one_twice() -> None:
    data = training_data(numbers(3), batch_size=1, shuffle=False)
    assert [[list(x) for x, _ in batches(data, 2, worker, 2)] for worker in (0, 1)] == [[[0], [2]], [[1], [1]]]


def test_batches_have_a_static_size_if_all_are_full() -> None:
    for num_examples, size in ((32, 4), (30, None)):
        data = training_data(numbers(num_examples), batch_size=4)
        spec = worker_dataset(data, num_workers=2, batch_size=4, num_seeds=0, seed=0).structured_outputs.element_spec
        assert spec[0].shape == [size]


def test_without_a_batch_size_arrays_are_read_in_the_steps_of_an_epoch() -> None:
    for replicas, size in ((1, 6), (2, 3)):
        readers = Readers(replicas=replicas)
        data = training_data(numbers(30), steps_per_epoch=5, shuffle=False, readers=readers)
        assert len(batches(data, 1, 0, 1)[0][0]) == size
        optional = training_data({"a": None, "b": numbers(30)}, steps_per_epoch=5, readers=readers)
        assert optional.batches_per_pass(1) == 5 * replicas
        ragged = tf.RaggedTensor.from_uniform_row_length(numbers(60), 2)
        assert training_data(ragged, steps_per_epoch=5, readers=readers).batches_per_pass(1) == 5 * replicas


def test_shuffle_differs_each_pass_and_repeats_with_a_seed() -> None:
    data = training_data(numbers(16), batch_size=4, seed=3)
    once = [x for x, _ in batches(data, 1, 0, 8)]
    assert sorted(np.concatenate(once[:4])) == list(range(16))
    assert not np.array_equal(np.concatenate(once[:4]), np.concatenate(once[4:]))
    # Whatever seeds the process has.
    for seed in (0, 1):
        keras.utils.set_random_seed(seed)
        again = [x for x, _ in batches(training_data(numbers(16), batch_size=4, seed=3), 1, 0, 8)]
        np.testing.assert_array_equal(once, again)


@pytest.mark.parametrize(
    ("num_examples", "num_workers"),
    [(30, 2), (3, 1), *(pytest.param(*given, marks=pytest.mark.long) for given in [(30, 1), (4, 1)])],
)
@pytest.mark.parametrize("shuffle", [False, True])
def test_arrays_go_on_at_any_batch_as_if_they_had_been_read_from_the_beginning(
    num_examples: int, num_workers: int, shuffle: bool
) -> None:
    data = training_data(numbers(num_examples), batch_size=4, shuffle=shuffle)
    worker = num_workers - 1
    read = [x for x, _ in batches(data, num_workers, worker, 20)]
    for first in (1, 7, 8, 15):
        resumed = [x for x, _ in batches(data, num_workers, worker, 5, first_batch=first)]
        assert [list(x) for x in resumed] == [list(x) for x in read[first : first + 5]]


def test_datasets_go_on_at_their_place_in_a_pass() -> None:
    def function(context: DataContext) -> tf.data.Dataset:
        return tf.data.Dataset.range(20).shard(context.num_workers, context.worker_index).batch(2)

    for x in (tf.data.Dataset.range(20).batch(2), function):
        data = training_data(x)
        for worker in (0, 1):
            read = [x for x, _ in batches(data, 2, worker, 20)]
            for first in (1, 6, 13):
                resumed = [x for x, _ in batches(data, 2, worker, 5, first_batch=first)]
                np.testing.assert_array_equal(resumed, read[first : first + 5])


def test_a_dataset_of_unknown_length_begins_anew() -> None:
    data = training_data(tf.data.Dataset.range(9).filter(lambda i: i < 8).batch(2))
    assert list(batches(data, 1, 0, 1, first_batch=3)[0][0]) == [0, 1]


def test_without_shuffle_arrays_come_in_order() -> None:
    data = training_data(numbers(8), batch_size=4, shuffle=False)
    assert [list(x) for x, _ in batches(data, 1, 0, 3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]


def test_without_shuffle_workers_take_turns() -> None:
    data = training_data(numbers(16), batch_size=4, shuffle=False)
    parts = [list(x) for worker in (0, 1) for x, _ in batches(data, 2, worker, 1)]
    assert parts == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_fewer_examples_than_workers_still_feed_every_worker() -> None:
    data = training_data(numbers(2), batch_size=4)
    assert all(len(batches(data, 5, worker, 2)) == 2 for worker in range(5))


def test_seeds_differ_between_workers_and_steps_and_runs() -> None:
    data = training_data(numbers(8), batch_size=4)
    seeds = [
        tuple(element[1].flatten())
        for worker, first_step in ((0, 0), (1, 0), (0, 100))
        for element in batches(data, 2, worker, 5, first_step=first_step)
    ]
    assert len(set(seeds)) == len(seeds)


def test_a_dataset_object_travels_and_is_shared_out() -> None:
    dataset = tf.data.Dataset.range(12).map(lambda i: (i, -i)).batch(2)
    data = training_data(dataset)
    assert data.batches_per_pass(2) == 6
    seen = [np.concatenate([x for (x, _), _ in batches(data, 2, worker, 3)]) for worker in (0, 1)]
    assert sorted(np.concatenate(seen)) == list(range(12))


def test_a_dataset_that_cannot_travel_is_refused_where_it_must_with_the_reason() -> None:
    readers = Readers(run_the_program=True)
    python = tf.data.Dataset.range(4).map(lambda i: tf.py_function(lambda v: v, [i], tf.int64)).batch(2)
    with pytest.raises(ConfigError, match=r"cannot travel.*Python function.*\(context\)"):
        training_data(python, readers=readers)
    generator = tf.data.Dataset.from_generator(lambda: iter([1]), output_signature=tf.TensorSpec([], tf.int64)).batch(1)
    with pytest.raises(ConfigError, match=r"cannot travel.*Python (generator|function)"):
        training_data(generator, readers=readers)
    variable = tf.Variable(2)
    with pytest.raises(ConfigError, match="cannot travel"):
        training_data(tf.data.Dataset.range(4).map(lambda i: i * tf.cast(variable, tf.int64)).batch(2), readers=readers)


def is_read_here(data: TrainingData) -> bool:
    return data.splits is not None and data.splits.pass_through_chief


@pytest.mark.parametrize("method", ["cache", "snapshot"])
def test_one_process_reads_what_several_would_write_to_one_file(method: str, tmp_path: Path) -> None:
    plain = tf.data.Dataset.from_tensor_slices((numbers(8), numbers(8))).batch(2)
    dataset = getattr(plain, method)(str(tmp_path / "file"))
    two = Readers(number=2, serve=True)
    assert not is_read_here(training_data(dataset, readers=Readers(serve=True)))
    assert not is_read_here(training_data(plain.cache(), readers=two))
    assert is_read_here(training_data(dataset, readers=two))
    assert is_read_here(training_data(lambda context: getattr(plain, method)(str(tmp_path / "f")), readers=two))
    assert is_read_here(training_data(dataset, readers=Readers(at_once=2)))
    with pytest.raises(
        ConfigError, match=rf"the dataset uses {method}\('.*file'\), and 2 workers cannot write the same"
    ):
        training_data(dataset, readers=Readers(number=2, run_the_program=True))


def test_a_file_of_each_worker_is_its_own(tmp_path: Path) -> None:
    def function(context: DataContext) -> tf.data.Dataset:
        name = tf.strings.join([f"{tmp_path}/cache-", tf.strings.as_string(context.worker_index)])
        return tf.data.Dataset.from_tensor_slices((numbers(8), numbers(8))).batch(2).cache(name)

    data = training_data(function, readers=Readers(number=2, serve=True))
    assert not is_read_here(data)
    assert not data.is_untried


def test_a_function_that_uses_what_is_in_this_process_is_read_here_or_tried_first() -> None:
    made = tf.data.Dataset.from_tensor_slices((numbers(8), numbers(8))).batch(2)
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(np.arange(2), np.arange(2)), 0)
    signature = (tf.TensorSpec([2]), tf.TensorSpec([2]))
    pairs = [(numbers(2), numbers(2))]
    served = Readers(serve=True)
    assert is_read_here(training_data(lambda context: made, readers=served))
    assert is_read_here(
        training_data(
            lambda _: tf.data.Dataset.from_generator(lambda: pairs, output_signature=signature), readers=served
        )
    )

    def looked_up(context: DataContext) -> tf.data.Dataset:
        slices = tf.data.Dataset.from_tensor_slices((numbers(8), numbers(8))).batch(2)
        return slices.map(lambda x, y: (table.lookup(tf.cast(x, tf.int64)), y))

    data = training_data(looked_up, readers=served)
    assert not is_read_here(data)
    assert data.is_untried
    assert not training_data(looked_up).is_untried


def test_a_dataset_function_is_told_worker_count_and_batch_size() -> None:
    def function(context: DataContext) -> tf.data.Dataset:
        assert (context.num_workers, context.batch_size) == (3, 4)
        return tf.data.Dataset.range(9).shard(context.num_workers, context.worker_index).batch(3)

    data = training_data(function)
    assert data.batches_per_pass(1) is None
    assert [list(batches(data, 3, worker, 1)[0][0]) for worker in range(3)] == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]


def test_what_cannot_be_data_is_refused() -> None:
    with pytest.raises(ConfigError, match="must take one argument, the context"):
        training_data(lambda: None)
    with pytest.raises(ValueError, match="differ in their number of examples"):
        training_data(numbers(3), numbers(4))
    with pytest.raises(ValueError, match="no example"):
        training_data(numbers(0))
    with pytest.raises(ValueError, match="empty"):
        training_data(tf.data.Dataset.range(0))
    with pytest.raises(ConfigError, match="generator"):
        training_data(i for i in range(3))
    with pytest.raises(TypeError, match="must return a tf.data.Dataset"):
        batches(training_data(lambda context: 3), 1, 0, 1)


@pytest.mark.parametrize("arguments", [{"sample_weight": np.ones(4)}, {"y": {"a": np.ones(4), "b": np.ones(4)}}])
def test_class_weight_beside_other_weights_or_for_several_outputs_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"class_weight: needs labels in a single y, and no sample_weight beside it"):
        training_data(**{"x": np.ones(4), "y": np.ones(4), "class_weight": {0: 2.0}, **arguments}, batch_size=2, seed=0)


def test_validation_split_takes_the_end_as_keras_does() -> None:
    (x, y, weight), (x_val, y_val, _) = split_validation(numbers(10), -numbers(10), None, 0.2)
    assert list(x_val) == [8, 9]
    assert list(y_val) == [-8, -9]
    assert len(x) == len(y) == 8
    assert weight is None
    optional, _ = split_validation({"a": None, "b": numbers(10)}, numbers(10), None, 0.2)
    assert optional[0]["a"] is None
    assert len(optional[0]["b"]) == 8


def test_shipped_mnist_is_real_and_small() -> None:
    path = Path(__file__).parents[3] / "recipes" / "mnist_part.npz"
    data = load_data(str(path))
    assert path.stat().st_size < 3_000_000
    assert data["x"].shape == (10_000, 28, 28)
    assert data["validation_data"][0].shape == (2_000, 28, 28)
    assert set(np.unique(data["y"])) == set(range(10))
    assert 0.1 < data["x"].mean() < 0.2


@pytest.mark.parametrize(
    "content",
    [None, b"no npz", {"x_train": np.zeros(3)}, {k: np.zeros(3) for k in ("x_train", "y_train", "x_test", "y_test")}],
)
def test_a_wrong_data_path_is_refused(tmp_path: Path, content: Any) -> None:
    path = tmp_path / "data.npz"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        np.savez(path, **content)
    with pytest.raises(ConfigError, match=r"(?s)data\.path=.*expected an npz file with x_train"):
        load_data(str(path))
