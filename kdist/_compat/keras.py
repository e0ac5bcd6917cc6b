"""Private names of Keras; read in 3.12 to 3.15."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import h5py
import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.backend.common.symbolic_scope import in_symbolic_scope
from keras.src.backend.common.variables import Variable as BaseVariable
from keras.src.losses import loss as loss_module
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.random.seed_generator import global_seed_generator
from keras.src.utils import is_default

from kdist._compat.replaced import replaced
from kdist._compat.tensorflow import outside_of_functions


def global_seed() -> keras.Variable:
    """The state that `keras.random` draws from without a seed; a pure step must put its own in that place."""
    return global_seed_generator().state


def acts_on(callback: keras.callbacks.Callback, event: str) -> bool:
    """Tells whether a callback does anything at an event: only then must a batch return to the chief."""
    return not is_default(getattr(callback, event)) and not _idles_at(callback, event)


def _idles_at(callback: keras.callbacks.Callback, event: str) -> bool:
    """Tells whether a callback's arguments let the method of its class do nothing."""
    owner = next((c for c in type(callback).__mro__ if event in vars(c)), None)
    if event in vars(callback):
        return False
    if owner is keras.callbacks.ModelCheckpoint:
        return callback.save_freq == "epoch"
    if owner is keras.callbacks.TensorBoard:
        profiles = callback._should_trace and "test" not in event
        return callback.update_freq == "epoch" and not profiles
    # MLflow's.
    return getattr(owner, "__module__", "").startswith("mlflow.") and getattr(callback, "log_every_epoch", None) is True


def call(model: keras.Model, x: Any, *, training: bool) -> Any:
    """Calls the model as Keras's trainers do; `training` is passed only to a `call` that takes it."""
    return model(x, training=training) if model._call_has_training_arg else model(x)


def compute_loss(model: keras.Model, x: Any, y: Any, y_pred: Any, sample_weight: Any, *, training: bool) -> Any:
    """The loss as Keras's trainers compute it: for an overridden `compute_loss` with or without `training`."""
    return model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training)


@dataclass(frozen=True)
class Reduction:
    """The reduction of the values of a batch to one number, by a loss.

    Attributes:
        index: of the loss among the compiled ones.
        value: the number, or the values if they are not reduced.
        is_number: whether the loss was one before, so that only its function knows how.
        is_sum: whether the gradient belongs to the sum of the values.
        divisor: of their sum, if it depends on more than the shape of the batch.
    """

    index: int
    value: tf.Tensor
    is_number: bool
    is_sum: bool
    divisor: tf.Tensor | None


@contextmanager
def record_reductions(
    model: keras.Model,
    factors: Sequence[float] = (),
    added_factors: Sequence[float] = (),
    count: Callable[[Reduction, Any], Any] | None = None,
) -> Iterator[list[Reduction]]:
    """In this context, the reductions of compiled losses are recorded.

    Args:
        model: whose losses they are.
        factors: of each compiled loss; none for 1.
        added_factors: of each loss of `model.losses`; none for 1.
        count: the weight with which the metric of each compiled loss counts a batch, from Keras's own; None for that.
    """
    original, found = loss_module.reduce_weighted_values, list[Reduction]()

    def reduce(
        values: Any, sample_weight: Any = None, mask: Any = None, reduction: str = "mean", dtype: Any = None
    ) -> Any:
        divisor = None
        if reduction == "mean_with_sample_weight" and (sample_weight is not None or mask is not None):
            weights = loss_module.apply_mask(sample_weight, mask, dtype=values.dtype, reduction=reduction)
            divisor = tf.reduce_sum(tf.cast(weights, tf.float32))
        elif reduction in ("mean", "sum_over_batch_size") and mask is not None:
            divisor = tf.reduce_sum(tf.cast(mask, tf.float32))
        is_sum = reduction in ("sum", "none", None)
        value = original(values, sample_weight, mask, reduction, dtype)
        found.append(Reduction(len(found), value, not tf.convert_to_tensor(values).shape.rank, is_sum, divisor))
        return value * factors[found[-1].index] if factors else value

    def count_loss(update: Callable[..., Any], values: Any, sample_weight: Any = None) -> Any:
        return update(values, sample_weight if count is None else count(found[-1], sample_weight))

    compiled: Any = getattr(model, "_compile_loss", None) if count is not None else None

    def count_losses() -> None:
        for metric in compiled.metrics:
            inside.enter_context(replaced(metric, update_state=partial(count_loss, metric.update_state)))

    def build(*arguments: Any) -> None:
        type(compiled).build(compiled, *arguments)
        count_losses()

    aggregate = model._aggregate_additional_loss
    of_added = iter(added_factors)

    def add(loss: Any) -> Any:
        value = aggregate(loss)
        return value * next(of_added) if added_factors else value

    with ExitStack() as inside:
        inside.enter_context(replaced(loss_module, reduce_weighted_values=reduce))
        inside.enter_context(replaced(model, _aggregate_additional_loss=add))
        if compiled is not None and compiled.built:
            count_losses()
        elif compiled is not None:
            inside.enter_context(replaced(compiled, build=build))
        yield found


def losses_of_outputs(model: keras.Model) -> list[keras.metrics.Metric]:
    """The metrics that count each of several compiled losses."""
    return [] if model._compile_loss is None else list(model._compile_loss.metrics)


def num_compiled_losses(model: keras.Model) -> int:
    """The number of losses that a model, which is built, was compiled with."""
    return 0 if model._compile_loss is None else len(model._compile_loss._flat_losses or ())


def has_own_compute_loss(model: keras.Model) -> bool:
    return type(model).compute_loss is not keras.Model.compute_loss


def in_order(model: keras.Model, logs: dict[str, Any]) -> Any:
    """Loss and metrics as `evaluate` returns them: a list in the order of the model's metrics; a number if alone."""
    return model._flatten_metrics_in_order(logs)


def stored_dtype(variable: keras.Variable) -> str:
    """The dtype of a variable's values; a layer of mixed precision sees another one while it is called."""
    return variable._dtype


def is_being_built(layer: keras.layers.Layer, variable: keras.Variable) -> bool:
    """Tells whether a layer has made a variable in a `build` that has not ended."""
    own = () if layer.built else (*layer._trainable_variables, *layer._non_trainable_variables)
    return any(variable is one for one in own)


def finds_shapes() -> bool:
    """Tells whether a model is called only to find the shapes of its outputs, which may build it."""
    return in_symbolic_scope()


@contextmanager
def outside_of_scopes() -> Iterator[None]:
    """In this context, variables are made, read and written as themselves, also while a function is traced."""
    scope = global_state.get_global_attribute("stateless_scope")
    global_state.set_global_attribute("stateless_scope", None)
    try:
        with outside_of_functions():
            yield
    finally:
        global_state.set_global_attribute("stateless_scope", scope)


@contextmanager
def make_variables_at_once() -> Iterator[dict[int, keras.Variable]]:
    """In this context, a new variable gets its values when it is made, also while a function is traced; by their `id`.

    Keras would wait for the end of the outermost scope, and TensorFlow would trace the function twice.
    """
    original, made = BaseVariable.__init__, dict[int, keras.Variable]()

    def init(variable: keras.Variable, *arguments: Any, **options: Any) -> None:
        made[id(variable)] = variable
        with outside_of_scopes():
            original(variable, *arguments, **options)

    with replaced(BaseVariable, __init__=init):
        yield made


def strategy_of(model: keras.Model) -> tf.distribute.Strategy | None:
    """The strategy of TensorFlow in whose scope a model was made; None if it was made in none."""
    return model._distribute_strategy


def loss_tracker(model: keras.Model) -> keras.metrics.Mean:
    """The metric that `fit` shows as `loss`; its variables are the total and the count."""
    return model._loss_tracker


def metrics_are_built(model: keras.Model) -> bool:
    """Tells whether the model was compiled and its compiled metrics have their variables."""
    metrics = model._compile_metrics
    return model._loss_tracker is not None and (metrics is None or metrics.built)


def compile_arguments(model: keras.Model) -> dict[str, Any]:
    """The arguments of `compile`, as objects; `get_compile_config` gives serialized copies."""
    config = getattr(model, "_compile_config", None)
    return dict(config.config) if model.compiled and config is not None else {}


def better_is(metric: Any) -> str | None:
    """The direction in which a metric improves, `up` or `down`; None if the metric does not say."""
    return getattr(metric, "_direction", None)


def layers_of(model: keras.Model, *, include_self: bool = True) -> list[keras.layers.Layer]:
    """Every layer of a model, also inside other layers; `Model.layers` has only the outermost."""
    return list(model._flatten_layers(include_self=include_self))


@dataclass(frozen=True)
class ModelDetails:
    """The names and settings of a model that a copy made from its config may lack.

    In a copy, the layers of a class of the user's are new, and the path of a variable may lack the part of the model
    that its layer belongs to.

    Attributes:
        layers: the name and the settings of each layer.
        paths: of the variables.
    """

    layers: Sequence[tuple[str, dict[str, Any]]]
    paths: Sequence[str]

    @classmethod
    def of(cls, model: keras.Model) -> ModelDetails:
        layers = [(layer.name, layer_settings(layer)) for layer in layers_of(model)]
        return cls(layers, [variable.path for variable in model.variables])

    def fit(self, copy: keras.Model) -> bool:
        """Tells whether a copy has as many layers and, unless it is not built, as many variables as the model."""
        return len(layers_of(copy)) == len(self.layers) and len(copy.variables) in (len(self.paths), 0)

    def give_to(self, copy: keras.Model) -> None:
        """Makes layers, variables and the slots of the optimizer of a copy that they fit agree with the model."""
        layers, variables = layers_of(copy), copy.variables
        for layer, (name, settings) in zip(layers, self.layers):
            # The layers inside of one come after it.
            for key, value in {"name": name, **settings}.items():
                if getattr(layer, key) != value:
                    setattr(layer, key, value)
        prefixes = {_slot_prefix(v.path): _slot_prefix(path) for v, path in zip(variables, self.paths)}
        for variable, path in zip(variables, self.paths):
            set_path(variable, path)
        for slot in copy.optimizer.variables if copy.optimizer is not None else ():
            before = max((prefix for prefix in prefixes if slot.name.startswith(prefix)), key=len, default="")
            slot._name = prefixes.get(before, "") + slot.name.removeprefix(before)


def _slot_prefix(path: str) -> str:
    """The beginning of the names of a variable's slots."""
    return path.replace("/", "_") + "_"


def layer_settings(layer: keras.layers.Layer) -> dict[str, Any]:
    """`trainable`, and the plain attributes of a layer that are arguments of its class: a rate of Dropout, a rank of
    LoRA."""
    names = inspect.signature(type(layer).__init__).parameters.keys() & vars(layer).keys()
    values = {name: vars(layer)[name] for name in names}
    plain = {name: value for name, value in values.items() if value is None or isinstance(value, (int, float, str))}
    return {**plain, "trainable": layer.trainable}


def custom_objects_of(model: keras.Model) -> dict[str, Any]:
    """The classes and functions of a model that are not Keras's, by the names under which Keras looks for them."""
    found = {}
    for item in _parts_of(model):
        custom = item if isinstance(item, FunctionType) else type(item)
        if hasattr(item, "get_config") or custom is item:
            found[keras.saving.get_registered_name(custom)] = custom
    return {name: item for name, item in found.items() if not (item.__module__ or "").startswith("keras.")}


@contextmanager
def name_functions_apart(model: keras.Model) -> Iterator[dict[str, Any]]:
    """Gives each function of a model a unique name while the model is saved, and yields them by these names.

    Several may have the same name, as the closures of one function, and Keras saves the code of a lambda without
    what it reads.
    """
    functions = {id(part): part for part in _parts_of(model) if isinstance(part, FunctionType)}
    own = [f for f in functions.values() if not (f.__module__ or "").startswith("keras.")]
    names = {f"{function.__name__.strip('<>')}_{i}_of_kdist": function for i, function in enumerate(own)}
    before = [(function, function.__name__) for function in own]
    try:
        for name, function in names.items():
            function.__name__ = name
        yield names
    finally:
        for function, name in before:
            function.__name__ = name


def _parts_of(model: keras.Model) -> list[Any]:
    """The layers of a model, its `compile` arguments, and the parts of both that Keras saves."""
    found: dict[int, Any] = {}
    waiting = [*layers_of(model), *_items(compile_arguments(model))]
    while waiting:
        item = waiting.pop()
        if id(item) in found:
            continue
        found[id(item)] = item
        if hasattr(item, "get_config") and hasattr(item, "__dict__"):
            # Keras wraps methods of layers in functions that hold the layer.
            values = (v for key, v in vars(item).items() if not callable(getattr(type(item), key, None)))
            waiting.extend(part for value in values for part in _items(value))
    return list(found.values())


def _items(value: Any) -> Iterator[Any]:
    """Flattens nested lists, tuples and dicts."""
    if not isinstance(value, (list, tuple, dict)):
        yield value
        return
    for item in value.values() if isinstance(value, dict) else value:
        yield from _items(item)


def table_of(layer: keras.layers.Embedding) -> keras.Variable:
    """The table itself; `Embedding.embeddings` is a sum where LoRA is enabled."""
    return layer._embeddings


def optimizers_of(model: keras.Model) -> dict[str, keras.optimizers.Optimizer]:
    """The optimizers of a model by name: the attribute that holds it; empty for the compiled one."""
    found: dict[str, Any] = {"": main_optimizer(model)}
    scaling = loss_scaling(model)
    for key, value in vars(model).items():
        found |= {f"{key}_{i}" if i else key: item for i, item in enumerate(_items(value)) if item is not scaling}
        if isinstance(value, keras.Model) and value is not model:
            found[f"{key}.optimizer"] = getattr(value, "optimizer", None)
    named: dict[int, tuple[str, keras.optimizers.Optimizer]] = {}
    for name, item in found.items():
        if isinstance(item, keras.optimizers.Optimizer):
            named.setdefault(id(item), (name, item))
    return dict(named.values())


def loss_scaling(model: keras.Model) -> keras.optimizers.LossScaleOptimizer | None:
    """The `LossScaleOptimizer` of a compiled model; None if it has none."""
    optimizer = model.optimizer
    return optimizer if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) else None


def main_optimizer(model: keras.Model) -> keras.optimizers.Optimizer:
    """The optimizer that a model was compiled with, without a `LossScaleOptimizer` around it."""
    scaling = loss_scaling(model)
    return model.optimizer if scaling is None else scaling.inner_optimizer


def is_multi_optimizer(optimizer: keras.optimizers.Optimizer) -> bool:
    """Tells whether an optimizer hands each variable to one of several others."""
    return isinstance(optimizer, getattr(keras.optimizers, "MultiOptimizer", ()))


def parts_of(
    optimizer: Any, variables: Sequence[keras.Variable]
) -> list[tuple[keras.optimizers.Optimizer, tuple[int, ...]]]:
    """The optimizers to which a built `MultiOptimizer` hands these variables, with their indices; none of others."""
    if not is_multi_optimizer(optimizer):
        return []
    part_of = [optimizer._var_to_optimizer_idx[optimizer._var_key(variable)] for variable in variables]
    indices = (tuple(i for i, part in enumerate(part_of) if part == p) for p in range(len(optimizer.optimizers)))
    return [(part, own) for part, own in zip(optimizer.optimizers, indices) if own]


def own_variables(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """The variables of an optimizer, without its parts' variables."""
    return list(optimizer._variables)


def built_variables(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """The variables that an optimizer was built for; none before that."""
    return list(getattr(optimizer, "_trainable_variables", None) or ())


def step_counter(optimizer: keras.optimizers.Optimizer) -> keras.Variable:
    """The variable behind `iterations`, for scopes to map: the property may return another tensor."""
    return optimizer._iterations


def learning_rate_variable(optimizer: keras.optimizers.Optimizer) -> keras.Variable | None:
    """The variable of a learning rate that follows no schedule; `learning_rate` is its value."""
    variable = getattr(optimizer, "_learning_rate", None)
    return variable if isinstance(variable, keras.Variable) else None


def decays(optimizer: keras.optimizers.Optimizer, variable: keras.Variable) -> bool:
    """Tells whether weight decay applies to a variable; the exclusions cannot be read otherwise."""
    # Keras's TensorFlow optimizer looks up exclusions by the underlying tf.Variable.
    return optimizer.weight_decay is None or optimizer._use_weight_decay(variable.value)


def copy_decay_exclusions(source: keras.optimizers.Optimizer, target: keras.optimizers.Optimizer) -> None:
    """Copies the exclusions of `exclude_from_weight_decay`, which are not part of an optimizer's config."""
    kept = {key: value for key, value in vars(source).items() if key.startswith("_exclude_from_weight_decay")}
    vars(target).update({**kept, "_exclude_from_weight_decay_cache": {}})


def apply_as_given(optimizer: keras.optimizers.Optimizer) -> None:
    """Spares an optimizer the all-reduce before each update, which in one process returns what it gets.

    Its gradient is one of its own, and TensorFlow keeps those of all traces, with the whole graph of each.
    """
    vars(optimizer)["_all_reduce_sum_gradients"] = lambda grads_and_vars: grads_and_vars


class NadamBySteps(keras.optimizers.Nadam):
    """Nadam whose product of momenta follows from the step.

    Keras multiplies it in every update, and several workers that update a server at the same time would lose factors.
    """

    #: From here on a factor of the product rounds to `beta_1`.
    _NUM_FACTORS = 512

    def _backend_update_step(self, grads: Any, trainable_variables: Any, learning_rate: Any) -> None:
        dtype = self._u_product.dtype
        step = tf.cast(self.iterations + 1, dtype)
        numbers = tf.range(1, self._NUM_FACTORS, dtype=dtype)
        factors = tf.where(numbers <= step, 1 - 0.5 * 0.96**numbers, 1)
        product = self.beta_1**step * tf.reduce_prod(factors)
        with replaced(self, _u_product=product):
            super(keras.optimizers.Nadam, self)._backend_update_step(grads, trainable_variables, learning_rate)
        self._u_product.assign(product)


class Accumulating:
    """Gives an optimizer for TensorFlow gradient accumulation that several workers can use at the same time.

    Keras writes what it has read and added to; of two workers that do so at once, one would lose its gradient.
    """

    def _backend_apply_gradients(
        self: Any, grads: Sequence[Any], trainable_variables: Sequence[keras.Variable]
    ) -> None:
        num_steps = self.gradient_accumulation_steps
        of_variables = [self._accumulated_gradients[self._get_variable_index(v)] for v in trainable_variables]
        sums = [a.value.assign_add(g).read_value() for a, g in zip(of_variables, grads)]

        def update() -> None:
            means = self._clip_gradients([total / num_steps for total in sums])
            self._apply_weight_decay(trainable_variables)
            self._backend_update_step(means, trainable_variables, self.learning_rate)
            for accumulated, total in zip(of_variables, sums):
                # What another worker has added meanwhile stays.
                accumulated.value.assign_sub(total)

        tf.cond((self._iterations + 1) % num_steps == 0, update, lambda: None)
        if self.use_ema:
            self._update_model_variables_moving_average(self._trainable_variables)


def parallel_variables(optimizer: keras.optimizers.Optimizer) -> dict[int, tuple[int, str]]:
    """The slots that an optimizer keeps in lists parallel to its variables: by id, the index and the list's name.

    Adafactor names its slots by nothing that tells variables apart.
    """
    lists = {key: value for key, value in vars(optimizer).items() if isinstance(value, list)}
    lists = {key: value for key, value in lists.items() if len(value) == len(optimizer._trainable_variables)}
    return {
        id(item): (index, key.strip("_"))
        for key, value in lists.items()
        for index, item in enumerate(value)
        if key != "_trainable_variables" and isinstance(item, keras.Variable)
    }


def unbuilt_copy(
    optimizer: keras.optimizers.Optimizer, kind: type[keras.optimizers.Optimizer]
) -> keras.optimizers.Optimizer:
    """An optimizer of class `kind` with the settings of another one, but none of its variables.

    Takes the attributes as they are, since a config need not exist: schedules and callables may have none, and neither
    may a custom optimizer.
    """
    rate = learning_rate_variable(optimizer)
    copy: Any = object.__new__(kind)
    keras.optimizers.Optimizer.__init__(
        copy, optimizer._learning_rate if rate is None else float(rate.numpy()), name=optimizer.name
    )
    for key, value in vars(optimizer).items():
        is_setting = isinstance(value, (type(None), bool, int, float, str)) and key not in ("built", "_lock")
        is_own = key not in vars(copy) and not key.startswith(("_self_", "_exclude_from_weight_decay"))
        if is_setting or (is_own and not _holds_variables(value)):
            vars(copy)[key] = value
    return copy


def missing_variables(copy: keras.optimizers.Optimizer, optimizer: keras.optimizers.Optimizer) -> list[str]:
    """The attributes with variables that a built copy lacks, because `build` does not create them."""
    return [key for key, value in vars(optimizer).items() if _holds_variables(value) and key not in vars(copy)]


def _holds_variables(value: Any) -> bool:
    return any(isinstance(item, keras.Variable) for item in _items(value))


def set_path(variable: keras.Variable, path: str) -> None:
    """Names a variable that stands for another one; optimizers name slots, and exclude variables, by the path."""
    variable._path = path


def open_rows(variable: keras.Variable) -> None:
    """Leaves the number of rows of a stand-in open: in a pure step it maps to as many rows as a batch looks up."""
    variable._shape = (None, *variable.shape[1:])


def set_value(variable: keras.Variable, value: tf.Variable) -> None:
    """Lets a variable be stored in another one of TensorFlow, whose number of rows may be another, and may change."""
    variable._value = value


class PureUpdates:
    """Gives an optimizer for TensorFlow the updates that all backends share, which a `StatelessScope` collects."""

    assign = BaseOptimizer.assign
    assign_add = BaseOptimizer.assign_add
    assign_sub = BaseOptimizer.assign_sub
    _var_key = BaseOptimizer._var_key
    _apply_weight_decay = BaseOptimizer._apply_weight_decay
    _backend_update_step = BaseOptimizer._backend_update_step
    _overwrite_model_variables_with_average_value = BaseOptimizer._overwrite_model_variables_with_average_value


@contextmanager
def hdf5_without_locks() -> Iterator[None]:
    """Lets Keras write HDF5 files where the file system has no locks; HDF5 would refuse to, and Keras hides why."""

    class Unlocked(h5py.File):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs, locking=False)

    with replaced(h5py, File=Unlocked):
        yield
