"""Each private name of Keras means what kdist takes it for."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from kdist._compat import keras as compat

BATCH = (np.ones((4, 3), np.float32), np.ones((4, 1), np.float32))


def model(**options: Any) -> keras.Model:
    built = keras.Sequential([keras.layers.Dense(2), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
    built.compile(optimizer=keras.optimizers.Adam(0.1, **options), loss="mse", metrics=["mae"])
    return built


def built_model(**options: Any) -> keras.Model:
    made = model(**options)
    made.train_on_batch(*BATCH)
    return made


def test_the_metrics_of_a_model_are_built_by_its_first_step() -> None:
    assert not compat.metrics_are_built(model())
    assert compat.metrics_are_built(built_model())


def test_the_optimizers_of_a_model_are_found_in_its_attributes() -> None:
    made = model()
    made.others = [keras.optimizers.SGD(), {"critic": keras.optimizers.Adam()}]
    made.same, made.inner = made.optimizer, keras.Sequential()
    made.inner.compile("rmsprop")
    found = {name: type(optimizer).__name__ for name, optimizer in compat.optimizers_of(made).items()}
    assert found == {"": "Adam", "others": "SGD", "others_1": "Adam", "inner.optimizer": "RMSprop"}


def test_the_variables_that_an_optimizer_was_built_for_are_known() -> None:
    assert compat.built_variables(model().optimizer) == []
    made = built_model()
    assert [v.path for v in compat.built_variables(made.optimizer)] == [v.path for v in made.trainable_variables]


def test_the_seed_of_keras_random_is_its_state() -> None:
    keras.utils.set_random_seed(1)
    state = compat.global_seed()
    before = state.numpy().copy()
    keras.random.normal([1])
    assert (compat.global_seed().numpy() != before).any()
    keras.utils.set_random_seed(1)


def test_methods_of_a_callback_that_are_overridden_are_found() -> None:
    class Mine(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None: ...

    assert compat.acts_on(Mine(), "on_train_batch_end")
    assert not compat.acts_on(Mine(), "on_train_batch_begin")


@pytest.mark.parametrize("training", [True, False])
def test_a_model_is_called_with_training_if_it_takes_it(training: bool) -> None:
    x = np.ones((64, 3), np.float32)
    made = built_model()
    outputs = [np.asarray(compat.call(made, x, training=training)) for _ in range(2)]
    assert np.allclose(*outputs) is not training

    class Without(keras.Model):
        def call(self, inputs: Any) -> Any:
            return inputs

    assert np.allclose(compat.call(Without(), x, training=training), x)


def test_the_loss_is_that_of_fit_and_is_tracked() -> None:
    made = built_model()
    x, y = BATCH
    y_pred = compat.call(made, x, training=False)
    loss = compat.compute_loss(made, x, y, y_pred, None, training=False)
    assert float(loss) == pytest.approx(made.evaluate(x, y, verbose=0)[0], rel=1e-5)
    made.reset_metrics()
    compat.loss_tracker(made).update_state(loss, sample_weight=4)
    total, count = compat.loss_tracker(made).variables
    assert float(total.numpy()) == pytest.approx(4 * float(loss), rel=1e-5)
    assert float(count.numpy()) == 4
    assert float(made.get_metrics_result()["loss"]) == pytest.approx(float(loss), rel=1e-5)


def test_what_a_model_was_compiled_with_is_there_as_objects() -> None:
    made = model()
    arguments = compat.compile_arguments(made)
    assert arguments["optimizer"] is made.optimizer
    assert arguments["loss"] == "mse"
    assert compat.compile_arguments(keras.Sequential([keras.layers.Dense(1)])) == {}


def test_a_metric_says_which_values_are_better() -> None:
    assert compat.better_is(keras.metrics.SparseCategoricalAccuracy()) == "up"
    assert compat.better_is(keras.metrics.MeanSquaredError()) == "down"
    assert compat.better_is(object()) is None


def test_layers_inside_of_layers_are_found() -> None:
    inner = keras.Sequential([keras.layers.Dense(2, name="inside")], name="inner")
    outer = keras.Sequential([inner, keras.layers.Dense(1, name="last")], name="outer")
    assert {layer.name for layer in compat.layers_of(outer)} == {"outer", "inner", "inside", "last"}
    assert "outer" not in {layer.name for layer in compat.layers_of(outer, include_self=False)}


def test_the_table_of_an_embedding_is_its_trainable_variable() -> None:
    layer = keras.layers.Embedding(4, 2)
    layer.build()
    assert compat.table_of(layer) is layer.trainable_variables[0]


def test_the_step_counter_is_what_schedules_follow() -> None:
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([5], [1.0, 0.5])
    optimizer = keras.optimizers.SGD(schedule)
    with keras.StatelessScope([(compat.step_counter(optimizer), tf.constant(7))]):
        assert float(optimizer.learning_rate) == 0.5
    assert compat.learning_rate_variable(optimizer) is None
    variable = compat.learning_rate_variable(keras.optimizers.SGD(0.25))
    assert variable is not None
    assert float(variable.numpy()) == 0.25


def test_exclusions_from_weight_decay_are_read_and_copied() -> None:
    made = built_model(weight_decay=0.1)
    kernel, bias = made.trainable_variables[:2]
    other = type(made.optimizer).from_config(made.optimizer.get_config())
    made.optimizer.built = False
    made.optimizer.exclude_from_weight_decay(var_names=["bias"])
    assert compat.decays(made.optimizer, kernel)
    assert not compat.decays(made.optimizer, bias)
    compat.copy_decay_exclusions(made.optimizer, other)
    assert not compat.decays(other, bias)
    assert compat.decays(keras.optimizers.SGD(), bias)


def test_a_stand_in_has_the_path_of_another_variable_and_any_number_of_rows() -> None:
    stand_in = keras.Variable(np.zeros((1, 2), np.float32))
    compat.set_path(stand_in, "table/embeddings")
    compat.open_rows(stand_in)
    assert stand_in.path == "table/embeddings"
    assert tuple(stand_in.shape) == (None, 2)


def test_updates_can_be_collected_by_a_scope() -> None:
    class Pure(compat.PureUpdates, keras.optimizers.SGD):  # type: ignore[misc]
        pass

    optimizer = Pure(0.5)
    variable = keras.Variable(np.array([1.0], np.float32))
    optimizer.build([variable])
    with keras.StatelessScope() as scope:
        optimizer.apply([tf.constant([1.0])], [variable])
    assert float(variable.numpy()[0]) == 1.0
    assert float(np.asarray(scope.get_current_value(variable))[0]) == 0.5


def test_a_copy_of_an_optimizer_has_its_settings_and_none_of_its_variables() -> None:
    made = built_model(beta_1=0.7, weight_decay=0.01)
    made.fit(*BATCH, verbose=0)
    copy = compat.unbuilt_copy(made.optimizer, keras.optimizers.Adam)
    assert (copy.beta_1, copy.weight_decay, copy.name) == (0.7, 0.01, made.optimizer.name)
    assert not copy.built
    assert [variable.name for variable in copy.variables] == ["iteration", "learning_rate"]
    assert int(copy.iterations) == 0
    copy.build(made.trainable_variables)
    assert [v.path for v in copy.variables] == [v.path for v in made.optimizer.variables]
    assert compat.missing_variables(copy, made.optimizer) == []


def test_custom_objects_are_found_by_the_names_that_keras_looks_for() -> None:
    class Own(keras.layers.Layer):
        pass

    def own_loss(y_true: Any, y_pred: Any) -> Any:
        return keras.ops.mean(y_pred - y_true)

    made = keras.Sequential([Own(), keras.layers.Dense(1, kernel_initializer=own_loss)])
    made.compile("sgd", own_loss, metrics=["mae"])
    assert compat.custom_objects_of(made) == {"Own": Own, "own_loss": own_loss}


def test_methods_that_keras_wraps_are_no_functions_of_a_model() -> None:
    class Scale(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.factor = self.add_weight(shape=())

    own = keras.layers.Lambda(lambda values: values + 1)
    model = keras.Sequential([keras.layers.Input((2,)), Scale(), own])
    model.compile("sgd", "mse")
    with compat.name_functions_apart(model) as functions:
        assert list(functions.values()) == [own.function]
