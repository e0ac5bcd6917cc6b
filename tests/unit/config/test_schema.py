"""The config keys and their defaults, frozen, so that a change of the command line is seen in review."""

from dataclasses import fields

import pytest
from omegaconf import OmegaConf

from kdist.cli.help import _walk
from kdist.config.schema import (
    OPTIONS_OF,
    ClusterConfig,
    Config,
    StrategyConfig,
    foreign_options,
    options_of,
    strategy_config,
)
from kdist.errors import ConfigError

KEYS = """\
cluster.shape = local
cluster.started_by = auto
cluster.start_timeout = 120.0
cluster.step_timeout = 300.0
cluster.max_worker_restarts = 3
cluster.min_workers = 1
cluster.scaler = auto
cluster.patience_for_workers = 600.0
cluster.patience = 15.0
cluster.wait_for_next_chief = False
cluster.chief_port = null
cluster.ps = []
cluster.worker = []
cluster.chief = null
cluster.join = null
cluster.job = null
cluster.task = null
cluster.devices.ps = null
cluster.devices.worker = null
cluster.devices.chief = null
cluster.bind = auto
cluster.isolate = never
cluster.allow_unprotected_network = False
cluster.stay = False
strategy.name = auto
strategy.placement = auto
strategy.partition_min_bytes = 262144
strategy.wire_dtype = null
strategy.local_steps = 1
strategy.prefetch = auto
strategy.replicas_to_aggregate = null
strategy.backup_workers = 0
strategy.token_mode = strict
strategy.on_lost_worker = lower
strategy.worker_timeout = 60.0
strategy.devices = null
strategy._target_ = null
strategy.arguments = {}
model = null
data = null
optimizer.name = null
optimizer.learning_rate = null
optimizer.momentum = null
optimizer.nesterov = null
optimizer.beta_1 = null
optimizer.beta_2 = null
optimizer.rho = null
optimizer.epsilon = null
optimizer.weight_decay = null
optimizer.use_ema = null
optimizer.ema_momentum = null
optimizer.clipnorm = null
optimizer.global_clipnorm = null
optimizer.clipvalue = null
loss = null
metrics = null
hooks = {}
callbacks = {}
drill = null
train.steps = null
train.epochs = null
train.more_steps = null
train.more_epochs = null
train.batch_size = 32
train.steps_per_call = auto
train.steps_per_epoch = null
train.validation_every_steps = null
train.max_restarts = 3
train.validate_with_ema = False
sweep.metric = null
sweep.mode = null
run.name = ${kdist.run_name:}
run.dir = runs/${run.name}/${kdist.run_folder:${now:%Y-%m-%d_%H-%M-%S}}
run.seed = null
run.plan_only = False
run.log_device_placement = False
run.soft_device_placement = True
run.export_max_bytes = 2147483648
run.grace_secs = null
run.stop_signals = [SIGTERM,SIGUSR1,SIGUSR2]
run.storage_timeout = 60.0
run.start_from = null
run.resume = auto
run.verbose = auto
run.log_format = text
run.metrics_port = null
run.metrics_host = 127.0.0.1
run.health_port = null
run.hparams = []
run.trust = []
"""


def test_the_keys_and_their_defaults_are_those_that_were_agreed_on() -> None:
    assert "".join(f"{key} = {default}\n" for key, default, _ in _walk(Config) if default) == KEYS


def test_the_earlier_name_of_a_key_sets_the_present_one() -> None:
    given = OmegaConf.merge(OmegaConf.structured(ClusterConfig), {"shape": "1ps1w", "stay": True})
    config = OmegaConf.to_object(given)
    assert isinstance(config, ClusterConfig)
    assert config.wait_for_next_chief
    assert not ClusterConfig("1ps1w").wait_for_next_chief


def test_a_strategy_takes_its_own_options() -> None:
    config = StrategyConfig("sync_replicas", backup_workers=1, placement="greedy")
    options = options_of(config, "sync_replicas")
    assert (options.backup_workers, options.placement) == (1, "greedy")
    assert {item.name for item in fields(options)} == {item.name for item in fields(OPTIONS_OF["sync_replicas"])}
    assert options_of(config, "single") is None


def test_options_of_other_strategies_are_named() -> None:
    assert foreign_options(StrategyConfig(backup_workers=1, local_steps=1), "parameter_server") == {"backup_workers": 1}
    # Where variables live matters to no result.
    assert foreign_options(StrategyConfig(placement="greedy"), "single") == {}


@pytest.mark.parametrize("options", [{"step_timeout": 0}, {"patience": 0.5}, {"isolate": "maybe"}, {"chief_port": 0}])
def test_a_value_out_of_range_is_refused_by_its_key(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=rf"cluster\.{next(iter(options))}="):
        ClusterConfig(**options)  # type: ignore[arg-type]


def test_an_unknown_option_is_refused_with_all_options_in_the_order_of_the_schema() -> None:
    with pytest.raises(
        ConfigError, match=r"Trainer\(speed=\.\.\.\): .* take placement, partition_min_bytes, wire_dtype, "
    ):
        strategy_config("parameter_server", {"speed": 2})
