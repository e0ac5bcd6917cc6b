import keras
import pytest

from kdist.config.build import build_model
from kdist.config.schema import Config, OptimizerConfig, RunConfig


def test_an_override_changes_only_what_it_names() -> None:
    config = Config(
        model={"_target_": "user_code.build_decayed"},
        data={"_target_": "user_code.data"},
        optimizer=OptimizerConfig(learning_rate=0.05),
        run=RunConfig(trust=["user_code"]),
    )
    model = build_model(config)
    model.optimizer.build(model.trainable_variables)
    assert float(model.optimizer.learning_rate) == pytest.approx(0.05)
    assert isinstance(model.optimizer, keras.optimizers.AdamW)
    assert model.optimizer.weight_decay == 0.5
    assert [model.optimizer._use_weight_decay(v) for v in model.trainable_variables] == [True, False]
