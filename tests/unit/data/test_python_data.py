"""Data that lives in this process: the same numbers and calls as in Keras, and one message for what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import models
import numpy as np
import pytest
import python_data
from helpers import in_short, result_of, tags_of
from python_data import BATCH, Batches, X, Y, batch

import kdist
from kdist.data.base import Readers
from kdist.data.batch_source import BatchSource
from kdist.data.sources import training_data
from kdist.errors import ConfigError, TaskError


def fit(x: Any, run_dir: Path, model: Any = models.mlp, **arguments: Any) -> tuple[kdist.Trainer, Any]:
    trainer = kdist.Trainer(model, run_dir=run_dir, seed=1)
    return trainer, trainer.fit(x, **{"verbose": 0, "shuffle": False, **arguments})


def sparse_model() -> keras.Model:
    model = keras.Sequential([keras.layers.Input((6,), sparse=True), keras.layers.Dense(3, activation="softmax")])
    model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def torch_loader() -> Any:
    torch = pytest.importorskip("torch")
    data = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
    return torch.utils.data.DataLoader(data, batch_size=BATCH)


def grain_data(kind: str) -> Callable[[], Any]:
    def make() -> Any:
        grain = pytest.importorskip("grain")
        rows = grain.MapDataset.source(list(zip(X, Y)))
        if kind == "DataLoader":
            sampler = grain.samplers.SequentialSampler(len(X))
            return grain.DataLoader(
                data_source=list(zip(X, Y)), sampler=sampler, operations=[grain.transforms.Batch(8)]
            )
        batches = rows.batch(BATCH)
        return batches if kind == "MapDataset" else batches.to_iter_dataset()

    return make


CASES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "PyDataset": (Batches, {"epochs": 3}),
    "PyDataset with threads": (lambda: Batches(workers=2, max_queue_size=2), {"epochs": 2}),
    "PyDataset and class weights": (Batches, {"epochs": 2, "class_weight": {0: 2.0, 1: 0.5}}),
    "PyDataset and fewer steps": (Batches, {"epochs": 2, "steps_per_epoch": 3}),
    "generator": (python_data.generator, {}),
    "generator with weights": (lambda: python_data.weighted(2), {"epochs": 2, "steps_per_epoch": 7}),
    "generator and steps": (lambda: python_data.generator(10), {"epochs": 3, "steps_per_epoch": 5}),
    "DataLoader": (torch_loader, {"epochs": 2}),
    "Grain MapDataset": (grain_data("MapDataset"), {"epochs": 2}),
    "Grain IterDataset": (grain_data("IterDataset"), {"epochs": 2}),
    "Grain DataLoader": (grain_data("DataLoader"), {"epochs": 2}),
    "filtered dataset": (python_data.filtered, {"epochs": 3}),
    "dataset with a Python function": (python_data.with_python_function, {"epochs": 2}),
    "dataset from a generator": (python_data.from_generator, {"epochs": 2}),
}


#: Others take the ways of these.
IN_SHORT = {"PyDataset", "filtered dataset"}


@pytest.mark.parametrize("name", in_short(CASES, IN_SHORT))
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_the_same_numbers_as_keras(name: str, run_dir: Path) -> None:
    make, arguments = CASES[name]
    keras.utils.set_random_seed(3)
    ours = models.mlp("sgd")
    theirs = models.mlp("sgd")
    theirs.set_weights(ours.get_weights())
    validation = {"validation_data": (X[:16], Y[:16])}
    expected = theirs.fit(make(), verbose=0, shuffle=False, **validation, **arguments)
    trainer, history = fit(make(), run_dir, lambda: ours, **validation, **arguments)
    assert history.epoch == expected.epoch
    assert history.history.keys() == expected.history.keys()
    for key, values in expected.history.items():
        np.testing.assert_allclose(history.history[key], values, rtol=1e-4, err_msg=key)
    for value, wanted in zip(trainer.model.get_weights(), theirs.get_weights()):
        np.testing.assert_allclose(value, wanted, rtol=1e-4, atol=1e-6)


def test_a_sparse_matrix_gives_the_same_numbers_as_in_keras(run_dir: Path) -> None:
    ours, theirs = sparse_model(), sparse_model()
    theirs.set_weights(ours.get_weights())
    matrix = python_data.sparse_matrix()
    arguments = {"batch_size": BATCH, "epochs": 2, "validation_split": 0.2}
    # Keras 3.15 cannot split a sparse matrix.
    expected = theirs.fit(
        matrix[:40], Y[:40], verbose=0, shuffle=False, batch_size=BATCH, epochs=2, validation_data=(matrix[40:], Y[40:])
    )
    trainer, history = fit(matrix, run_dir, lambda: ours, y=Y, **arguments)
    for key, values in expected.history.items():
        np.testing.assert_allclose(history.history[key], values, rtol=1e-4, err_msg=key)
    np.testing.assert_allclose(trainer.model.get_weights()[0], theirs.get_weights()[0], rtol=1e-4, atol=1e-6)


def test_a_py_dataset_is_called_as_keras_calls_it(run_dir: Path) -> None:
    ours, theirs = Batches(), Batches()
    model = models.mlp("sgd")
    model.fit(theirs, epochs=2, verbose=0, shuffle=False)
    fit(ours, run_dir, epochs=2)
    # Keras looks at the first batches, too, and at one more to build the model.
    first = ours.calls.index("begin")
    assert ours.calls[first:] == ["begin", *range(7), "end"] * 2
    assert theirs.calls[-len(ours.calls[first:]) :] == ours.calls[first:]


def test_validation_data_of_the_same_kinds(run_dir: Path) -> None:
    trainer, history = fit(Batches(), run_dir, epochs=2, validation_data=Batches(3))
    expected = trainer.model.evaluate(X[:24], Y[:24], verbose=0, return_dict=True)
    assert history.history["val_loss"][-1] == pytest.approx(expected["loss"], rel=1e-4)
    assert trainer.evaluate(Batches(3), return_dict=True)["loss"] == pytest.approx(expected["loss"], rel=1e-4)
    assert trainer.predict(Batches(3)).shape == (24, 3)


@pytest.mark.long
def test_a_generator_that_ends_too_early_ends_training_with_a_warning(run_dir: Path) -> None:
    with pytest.warns(UserWarning, match=r"can be read once, and ended in epoch 2 of 3 at step 7"):
        trainer, history = fit(python_data.generator(), run_dir, epochs=3, steps_per_epoch=5)
    assert (trainer.result.global_step, trainer.result.status) == (7, "done")
    assert history.epoch == [0, 1]
    with pytest.warns(UserWarning, match=r"can be read once, and ended in epoch 1 of 3 at step 7"):
        trainer, history = fit(python_data.generator(), run_dir / "other", epochs=3)
    assert (trainer.result.global_step, history.epoch) == (7, [0])


def test_an_error_in_the_users_code_names_the_data_and_the_place(run_dir: Path) -> None:
    where = r"batch 4 of the PyDataset Batches \(.*python_data.py:\d+, in __getitem__\)"
    with pytest.raises(TaskError, match=rf"^chief: {where}: LookupError: no such file") as raised:
        fit(Batches(fails_at=4), run_dir)
    assert isinstance(raised.value.__cause__, LookupError)
    assert result_of(run_dir)["error"] == str(raised.value)


@pytest.mark.parametrize("make", in_short([Batches, python_data.filtered], {Batches}))
def test_histograms_of_gradients_take_no_batch_away(make: Any, run_dir: Path) -> None:
    hook = kdist.hooks.HistogramSaver(every_steps=1)
    trainer = kdist.Trainer(models.mlp, run_dir=run_dir, hooks=[hook])
    trainer.fit(make(), epochs=2, verbose=0)
    num_examples = sum(len(y) for _, y in (make() if make is python_data.filtered else python_data.generator()))
    assert trainer.result.examples == 2 * num_examples
    assert "gradients/dense/kernel" in "".join(tags_of(run_dir / "tb" / "train"))


@pytest.mark.parametrize("make", [Batches, python_data.filtered])
def test_a_histogram_holds_no_batch_of_a_worker_that_is_away(make: Any) -> None:
    data = training_data(make(), readers=Readers(number=2, by_passes=True), shuffle=False)
    assert data.splits is not None
    data.splits.look()
    session: Any = SimpleNamespace(spec=SimpleNamespace(data=data, batch_size=None, seed=0), global_step=0)
    x, _ = kdist.hooks.HistogramSaver(every_steps=1)._next_batch(session)
    assert x.shape == (BATCH, 6)
    assert data.splits.split_of(0) is None
    assert data.splits.assign(1).name in ("batch 0 of the PyDataset Batches", "part 1 of 2")
    data.splits.close()


def changing() -> Iterator[Any]:
    for number in range(5):
        x, y = batch(number)
        yield (x[:, :4] if number == 3 else x), y


def other_parts() -> Iterator[Any]:
    for number in range(5):
        x, y = batch(number)
        yield ({"x": x}, y) if number == 3 else (x, y)


def nothing() -> Iterator[Any]:
    yield from ()


def not_a_tuple() -> Iterator[Any]:
    yield X


class Endless(Batches):
    num_batches = None


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (changing, r"^batch 3 of the generator changing is \('float32\[8, 4\]', .*; the first ones are \('float32\["),
        (other_parts, r"^batch 3 of the generator other_parts is \(\{'x'"),
        (nothing, r"^the generator nothing: .*at least one batch"),
        (not_a_tuple, r"^the generator not_a_tuple: .*must return a tuple"),
        (lambda: Batches(0), r"^the PyDataset Batches: The PyDataset has length 0"),
        (
            Endless,
            r"^the PyDataset Endless has no length and never ends; give steps \(train.steps\) or",
        ),
        (lambda: iter([batch(0)]), r"^x is a list_iterator; give arrays"),
    ],
)
def test_bad_data_is_one_message(data: Any, message: str, run_dir: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        fit(data(), run_dir)


def test_labels_beside_batches_are_refused(run_dir: Path) -> None:
    with pytest.raises(ValueError, match="y and sample_weight are part of its elements"):
        fit(Batches(), run_dir, y=Y)


def test_how_an_epoch_of_unknown_length_ends_is_said(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(python_data.generator(), run_dir, verbose=2)
    assert "the length of the data is not known: an epoch ends where the data does" in capsys.readouterr().out


@pytest.mark.parametrize(
    "make", in_short([python_data.filtered, Batches, python_data.from_generator], {python_data.filtered})
)
def test_a_resumed_run_continues_in_the_middle_of_a_pass(make: Any, run_dir: Path) -> None:
    straight, _ = fit(make(), run_dir / "straight", epochs=2)
    kdist.Trainer(models.mlp, run_dir=run_dir / "cut", hooks=[kdist.hooks.StopAtStep(last_step=3)]).fit(
        make(), epochs=2, verbose=0
    )
    again, history = fit(make(), run_dir / "cut", epochs=2)
    assert again.result.global_step == straight.result.global_step
    assert history.epoch == [0, 1]


@pytest.mark.parametrize("options", [{}, {"workers": 2}, {"workers": 2, "use_multiprocessing": True}])
def test_a_shuffled_py_dataset_continues_with_the_batches_that_are_left(options: Any) -> None:
    data = Batches(**options)
    source = BatchSource(data, shuffle=True, seed=3)
    source.reset()
    whole = [tensors[0].numpy()[0, 0] for _, tensors in source.one_pass(1) if tensors]
    assert sorted(whole) == sorted(X[::BATCH, 0])
    assert whole != list(X[::BATCH, 0])
    rest = [(number, tensors[0].numpy()[0, 0]) for number, tensors in source.one_pass(1, 4) if tensors]
    assert rest == list(enumerate(whole))[4:]
    assert [tensors[0].numpy()[0, 0] for _, tensors in source.one_pass(0) if tensors] != whole
