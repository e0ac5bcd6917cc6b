"""The classes of Keras with which kdist trains as Keras does; `test_compatibility` proves it.

    python tests/oracle/compatibility.py

writes docs/compatibility.md from the same tables; `make docs` runs it, and a test fails while the page differs.
"""

from __future__ import annotations

import enum
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
from compatible_layers import BATCH, FAMILIES, STEPS
from keras import callbacks, layers, losses, metrics, optimizers
from keras.optimizers import schedules
from keras_suite import results as keras_suite
from programs import results

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
_EXAMPLES = BATCH * STEPS
_random = np.random.default_rng(6)


class Result(enum.Enum):
    """The outcome for a class."""

    EQUAL = "equal"
    DRAWS = "own draws"
    REFUSED = "refused"
    KERAS_FAILS = "fails in Keras"
    NO_TRAINING = "not trained with"


@dataclass(frozen=True)
class Entry:
    """The place of a class; a note says why it is not equal."""

    result: Result
    note: str = ""


EQUAL, DRAWS = Entry(Result.EQUAL), Entry(Result.DRAWS)
BASE = Entry(Result.NO_TRAINING, "a base class")


def _refused(note: str) -> Entry:
    return Entry(Result.REFUSED, note)


def _keras_fails(note: str) -> Entry:
    return Entry(Result.KERAS_FAILS, note)


# Optimizers ----------------------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[], optimizers.Optimizer]] = {
    "Adadelta": lambda: optimizers.Adadelta(1.0),
    "Adafactor": lambda: optimizers.Adafactor(0.1),
    "Adagrad": lambda: optimizers.Adagrad(0.1),
    "Adam": lambda: optimizers.Adam(0.01),
    "AdamW": lambda: optimizers.AdamW(0.01, weight_decay=0.1),
    "Adamax": lambda: optimizers.Adamax(0.01),
    "Ftrl": lambda: optimizers.Ftrl(0.1),
    "Lamb": lambda: optimizers.Lamb(0.01),
    "Lion": lambda: optimizers.Lion(0.001),
    "LossScaleOptimizer": lambda: optimizers.LossScaleOptimizer(optimizers.Adam(0.01), dynamic_growth_steps=2),
    "MultiOptimizer": lambda: _multi_optimizer(),
    "Muon": lambda: optimizers.Muon(0.01),
    "Nadam": lambda: optimizers.Nadam(0.01),
    "RMSprop": lambda: optimizers.RMSprop(0.01, momentum=0.5, centered=True),
    "SGD": lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "ScheduleFreeAdamW": lambda: optimizers.ScheduleFreeAdamW(0.01),
}

SCHEDULES: dict[str, Callable[[], schedules.LearningRateSchedule]] = {
    "CosineDecay": lambda: schedules.CosineDecay(0.0, 8, alpha=0.1, warmup_target=0.5, warmup_steps=4),
    "CosineDecayRestarts": lambda: schedules.CosineDecayRestarts(0.5, 4),
    "ExponentialDecay": lambda: schedules.ExponentialDecay(0.5, 3, 0.5, staircase=True),
    "InverseTimeDecay": lambda: schedules.InverseTimeDecay(0.5, 3, 0.5),
    "PiecewiseConstantDecay": lambda: schedules.PiecewiseConstantDecay([3, 6], [0.5, 0.1, 0.2]),
    "PolynomialDecay": lambda: schedules.PolynomialDecay(0.5, 4, cycle=True),
}


def _multi_optimizer() -> optimizers.MultiOptimizer:
    of_kernels, of_biases = optimizers.Adam(0.01), optimizers.SGD(0.1, momentum=0.9)
    return optimizers.MultiOptimizer(lambda variable: of_kernels if "kernel" in variable.path else of_biases)


# Losses and metrics, by their arguments ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """Losses and metrics for one kind of target.

    Args:
        targets: `(examples, ...)`.
        units: how many outputs the model has for it.
        activation: of these outputs.
    """

    targets: np.ndarray
    units: int
    activation: Any
    losses: dict[str, Callable[[], losses.Loss]]
    metrics: dict[str, Callable[[], metrics.Metric]]


class _OfPredictions:
    """A metric of values, given predictions, as a `train_step` may."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        return super().update_state(y_pred)  # type: ignore[misc]


class _Mean(_OfPredictions, metrics.Mean):
    pass


class _Sum(_OfPredictions, metrics.Sum):
    pass


def _unit_length(values: Any) -> Any:
    return keras.ops.normalize(values, axis=-1)


_labels = _random.integers(0, 3, _EXAMPLES)
COMPARISONS: dict[str, Comparison] = {
    "binary": Comparison(
        _random.integers(0, 2, (_EXAMPLES, 1)).astype(np.float32),
        1,
        "sigmoid",
        {
            "BinaryCrossentropy": lambda: losses.BinaryCrossentropy(label_smoothing=0.1),
            "BinaryFocalCrossentropy": lambda: losses.BinaryFocalCrossentropy(apply_class_balancing=True),
            "Dice": lambda: losses.Dice(),
            "Tversky": lambda: losses.Tversky(0.3, 0.7),
        },
        {
            "AUC": lambda: metrics.AUC(num_thresholds=20),
            "BinaryAccuracy": lambda: metrics.BinaryAccuracy(),
            "BinaryCrossentropy": lambda: metrics.BinaryCrossentropy(),
            "BinaryIoU": lambda: metrics.BinaryIoU(),
            "FalseNegatives": lambda: metrics.FalseNegatives(),
            "FalsePositives": lambda: metrics.FalsePositives([0.3, 0.6]),
            "Mean": lambda: _Mean(),
            "MeanMetricWrapper": lambda: metrics.MeanMetricWrapper(losses.binary_crossentropy, "wrapped"),
            "Precision": lambda: metrics.Precision(),
            "PrecisionAtRecall": lambda: metrics.PrecisionAtRecall(0.5, num_thresholds=20),
            "Recall": lambda: metrics.Recall([0.4, 0.6]),
            "RecallAtPrecision": lambda: metrics.RecallAtPrecision(0.5, num_thresholds=20),
            "SensitivityAtSpecificity": lambda: metrics.SensitivityAtSpecificity(0.5, num_thresholds=20),
            "SpecificityAtSensitivity": lambda: metrics.SpecificityAtSensitivity(0.5, num_thresholds=20),
            "Sum": lambda: _Sum(),
            "TrueNegatives": lambda: metrics.TrueNegatives(),
            "TruePositives": lambda: metrics.TruePositives(),
        },
    ),
    "categories": Comparison(
        np.eye(3, dtype=np.float32)[_labels],
        3,
        "softmax",
        {
            "CategoricalCrossentropy": lambda: losses.CategoricalCrossentropy(),
            "CategoricalFocalCrossentropy": lambda: losses.CategoricalFocalCrossentropy(),
            "CategoricalHinge": lambda: losses.CategoricalHinge(),
            "KLDivergence": lambda: losses.KLDivergence(),
        },
        {
            "CategoricalAccuracy": lambda: metrics.CategoricalAccuracy(),
            "CategoricalCrossentropy": lambda: metrics.CategoricalCrossentropy(),
            "CategoricalHinge": lambda: metrics.CategoricalHinge(),
            "F1Score": lambda: metrics.F1Score(),
            "FBetaScore": lambda: metrics.FBetaScore("macro", 2.0, 0.4),
            "KLDivergence": lambda: metrics.KLDivergence(),
            "OneHotIoU": lambda: metrics.OneHotIoU(3, [0, 2]),
            "OneHotMeanIoU": lambda: metrics.OneHotMeanIoU(3),
            "TopKCategoricalAccuracy": lambda: metrics.TopKCategoricalAccuracy(2),
        },
    ),
    "labels": Comparison(
        _labels,
        3,
        "softmax",
        {
            "CategoricalGeneralizedCrossEntropy": lambda: losses.CategoricalGeneralizedCrossEntropy(),
            "SparseCategoricalCrossentropy": lambda: losses.SparseCategoricalCrossentropy(),
        },
        {
            "IoU": lambda: metrics.IoU(3, [0, 1], sparse_y_pred=False),
            "MeanIoU": lambda: metrics.MeanIoU(3, sparse_y_pred=False),
            "SparseCategoricalAccuracy": lambda: metrics.SparseCategoricalAccuracy(),
            "SparseCategoricalCrossentropy": lambda: metrics.SparseCategoricalCrossentropy(),
            "SparseTopKCategoricalAccuracy": lambda: metrics.SparseTopKCategoricalAccuracy(2),
        },
    ),
    "embeddings": Comparison(_labels, 4, _unit_length, {"Circle": lambda: losses.Circle(gamma=2.0)}, {}),
    "signs": Comparison(
        np.where(_random.normal(size=(_EXAMPLES, 1)) > 0, 1, -1).astype(np.float32),
        1,
        None,
        {"Hinge": lambda: losses.Hinge(), "SquaredHinge": lambda: losses.SquaredHinge()},
        {
            "Accuracy": lambda: metrics.Accuracy(),
            "Hinge": lambda: metrics.Hinge(),
            "SquaredHinge": lambda: metrics.SquaredHinge(),
        },
    ),
    "numbers": Comparison(
        _random.uniform(0.5, 2.0, (_EXAMPLES, 2)).astype(np.float32),
        2,
        "softplus",
        {
            "CosineSimilarity": lambda: losses.CosineSimilarity(),
            "Huber": lambda: losses.Huber(0.5),
            "LogCosh": lambda: losses.LogCosh(),
            "MeanAbsoluteError": lambda: losses.MeanAbsoluteError(),
            "MeanAbsolutePercentageError": lambda: losses.MeanAbsolutePercentageError(),
            "MeanSquaredError": lambda: losses.MeanSquaredError(),
            "MeanSquaredLogarithmicError": lambda: losses.MeanSquaredLogarithmicError(),
            "Poisson": lambda: losses.Poisson(),
        },
        {
            "ConcordanceCorrelation": lambda: metrics.ConcordanceCorrelation(),
            "CosineSimilarity": lambda: metrics.CosineSimilarity(),
            "LogCoshError": lambda: metrics.LogCoshError(),
            "MeanAbsoluteError": lambda: metrics.MeanAbsoluteError(),
            "MeanAbsolutePercentageError": lambda: metrics.MeanAbsolutePercentageError(),
            "MeanSquaredError": lambda: metrics.MeanSquaredError(),
            "MeanSquaredLogarithmicError": lambda: metrics.MeanSquaredLogarithmicError(),
            "PearsonCorrelation": lambda: metrics.PearsonCorrelation(),
            "Poisson": lambda: metrics.Poisson(),
            "R2Score": lambda: metrics.R2Score(class_aggregation=None),
            "RootMeanSquaredError": lambda: metrics.RootMeanSquaredError(),
        },
    ),
    "transcripts": Comparison(
        _random.integers(1, 4, (_EXAMPLES, 2)).astype(np.int32),
        20,
        layers.Reshape((5, 4)),
        {"CTC": lambda: losses.CTC()},
        {},
    ),
}
X = _random.normal(size=(_EXAMPLES, 6)).astype(np.float32)


def compared() -> keras.Model:
    """A model with an output for each loss; the first of each kind of target has all the metrics of the kind."""
    # Keras numbers the names of metrics per process.
    keras.utils.clear_session()
    keras.utils.set_random_seed(4)
    inputs = layers.Input((6,))
    outputs, of_losses, of_metrics = {}, {}, {}
    for comparison in COMPARISONS.values():
        present = {name: make for name, make in comparison.losses.items() if hasattr(losses, name)}
        for number, (name, make) in enumerate(present.items()):
            values = layers.Dense(comparison.units, name=f"for_{name}")(inputs)
            outputs[name] = layers.Activation(comparison.activation)(values) if comparison.activation else values
            of_losses[name] = make()
            if number == 0 and comparison.metrics:
                of_metrics[name] = [make() for n, make in comparison.metrics.items() if hasattr(metrics, n)]
    model = keras.Model(inputs, outputs)
    model.compile(optimizers.SGD(0.05), of_losses, metrics=of_metrics)
    return model


def targets() -> dict[str, np.ndarray]:
    """For each output of `compared`."""
    given = ((name, comparison.targets) for comparison in COMPARISONS.values() for name in comparison.losses)
    return {name: values for name, values in given if hasattr(losses, name)}


# Callbacks -----------------------------------------------------------------------------------------------------------

CALLBACKS: dict[str, Callable[[Path], list[callbacks.Callback]]] = {
    "CSVLogger": lambda folder: [callbacks.CSVLogger(folder / "log.csv")],
    "EarlyStopping": lambda folder: [callbacks.EarlyStopping("loss", patience=1, min_delta=0.4)],
    "LambdaCallback": lambda folder: [callbacks.LambdaCallback(on_train_batch_begin=lambda batch, logs: None)],
    "LearningRateScheduler": lambda folder: [callbacks.LearningRateScheduler(lambda epoch, rate: rate / (1 + epoch))],
    "ModelCheckpoint": lambda folder: [callbacks.ModelCheckpoint(folder / "{epoch}.keras")],
    "ReduceLROnPlateau": lambda folder: [callbacks.ReduceLROnPlateau("val_loss", 0.3, 1, min_delta=0.2, cooldown=1)],
    "RemoteMonitor": lambda folder: [callbacks.RemoteMonitor("http://127.0.0.1:9", send_as_json=True)],
    "TensorBoard": lambda folder: [callbacks.TensorBoard(folder, histogram_freq=2)],
    "TerminateOnNaN": lambda folder: [callbacks.TerminateOnNaN()],
}

# Classes without a table above ---------------------------------------------------------------------------------------

PLACED: dict[str, dict[str, Entry]] = {
    "optimizers": dict.fromkeys(OPTIMIZERS, EQUAL)
    | {
        "Optimizer": BASE,
        "OptimizerMap": Entry(Result.NO_TRAINING, "a part of MultiOptimizer"),
    },
    "optimizers.schedules": {**dict.fromkeys(SCHEDULES, EQUAL), "LearningRateSchedule": BASE},
    "layers": {name: DRAWS if family.draws else EQUAL for family in FAMILIES.values() for name in family.layers}
    | {
        "FlaxLayer": _keras_fails("needs JAX and Flax; not tried with them"),
        "InputSpec": Entry(Result.NO_TRAINING, "describes inputs"),
        "JaxLayer": _keras_fails("needs JAX; not tried with it"),
        "Layer": BASE,
        "TorchModuleWrapper": _keras_fails("works on Keras's PyTorch backend alone"),
        "Wrapper": BASE,
    },
    "losses": {
        **dict.fromkeys((name for comparison in COMPARISONS.values() for name in comparison.losses), EQUAL),
        "Loss": BASE,
    },
    "metrics": {
        **dict.fromkeys((name for comparison in COMPARISONS.values() for name in comparison.metrics), EQUAL),
        "Metric": BASE,
    },
    "callbacks": dict.fromkeys(CALLBACKS, EQUAL)
    | {
        "BackupAndRestore": _refused("the run directory has the backup, and training resumes from it"),
        "Callback": BASE,
        "CallbackList": Entry(Result.NO_TRAINING, "the container of callbacks in `fit`"),
        "History": Entry(Result.EQUAL, "`fit` returns it"),
        "OrbaxCheckpoint": _keras_fails("needs JAX and Orbax; not tried with them"),
        "ProgbarLogger": Entry(Result.NO_TRAINING, "`verbose=1` shows kdist's own progress in its place"),
        "SwapEMAWeights": EQUAL,
    },
}


def classes_of(kind: str) -> dict[str, type]:
    """The classes of `keras.<kind>`, each once, by the name that it has there."""
    module: Any = keras
    for part in kind.split("."):
        module = getattr(module, part)
    named = {name: one for name in dir(module) if inspect.isclass(one := getattr(module, name))}
    # Conv2D is Convolution2D, too.
    names = {one: one.__name__ if one.__name__ in named else name for name, one in named.items()}
    return {name: one for one, name in names.items()}


def page() -> str:
    """docs/compatibility.md."""
    return "".join(_page())


def _page() -> Iterator[str]:
    yield HEAD
    for kind, entries in PLACED.items():
        yield f"\n## keras.{kind}\n\n| result | classes | note |\n| --- | --- | --- |\n"
        groups: dict[tuple[str, str], list[str]] = defaultdict(list)
        for name, entry in entries.items():
            groups[entry.result.value, entry.note].append(f"`{name}`")
        order = [result.value for result in Result]
        for (result, note), names in sorted(groups.items(), key=lambda item: (order.index(item[0][0]), item[0][1])):
            yield f"| {result} | {', '.join(sorted(names))} | {note} |\n"
    yield PROGRAMS
    yield from (f"{line}\n" for line in results.table(results.recorded()))
    yield KERAS_SUITE
    yield from (f"{line}\n" for line in keras_suite.table(keras_suite.recorded()))


HEAD = """\
# Keras compatibility

<!-- Written by tests/oracle/compatibility.py; change its tables instead. -->

Every class of `keras.optimizers`, `keras.layers`, `keras.losses`, `keras.metrics` and `keras.callbacks` is held against
plain Keras: the same initial weights, the same batches, and then the weights, the state of the optimizer and the
history of both. The tests do that in one process (`cluster=local`) and with a worker and two parameter servers
(`cluster=2ps1w`); other tests compare several replicas with one process on their joined batch. A class that a new
version of Keras adds fails the tests until it has its place here.

- **equal**: kdist trains as Keras does, up to the order in which floating-point numbers are added.
- **own draws**: it draws random numbers. Every worker draws its own, so no two runs are alike; it trains.
- **refused**: kdist says so, with a way out, before training starts.
- **fails in Keras**: Keras itself cannot train with it on TensorFlow alone.
- **not trained with**: nothing that a model is trained with by itself.
"""


PROGRAMS = """
## Programs

Small programs in the manner of keras.io, keras-rs and keras-hub, on made-up data (`tests/programs`). Only `fit` of a
`Trainer` replaces `model.fit`. The table has the last value of the history of each: with plain Keras, and with kdist in
one process, on parameter servers with one and with two workers, with `strategy=sync_replicas` (`sync`, on 2ps2w), and
with all-reduce between two workers. Where two replicas share a step, each gets half of a batch, or a whole one if the
loss compares the examples of a batch.

`make long` trains all of them again, and fails if

- `local` or `1ps1w` has other numbers than Keras in any epoch, except for programs that draw random numbers while they
  train (\\*): no two runs of these are alike;
- one of the others ends far above Keras, or with a number that is not finite. The losses of a GAN are checked for
  nothing else;
- a queue of embeddings, a ring buffer or a probability has a value that no worker has computed.

The tokenizer of GPT-2 keeps a table in this process that changes, which `2w` refuses; give it tokenized data. Where a
step returns plain values, the table has their mean over the epoch, for Keras as well. Programs with keras-hub and
keras-rs need kdist's extra `programs`. `make programs` trains all programs, and writes this table.

"""

KERAS_SUITE = """
## Keras's own tests

The tests of Keras's trainers, callbacks and models that call `fit`, `evaluate` or `predict`, with the methods of a
`Trainer` in their place (`tests/keras_suite`): in one process, on a parameter server with one worker, with
`strategy=sync_replicas` (`sync`), and with one all-reduce worker. Where there is a cluster, only tests that call `fit`
count. `make keras-suite` runs them, and writes this table.

"""


if __name__ == "__main__":
    PAGE.write_text(page())
