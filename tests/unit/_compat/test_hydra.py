"""Each private name of Hydra means what kdist takes it for."""

from hydra.core.utils import setup_globals
from omegaconf import DictConfig

from kdist._compat.hydra import CheckedLoader, parse_command_line
from kdist.cli.hydra_plugins import register


def test_options_and_overrides_are_told_apart() -> None:
    parsed = parse_command_line(["+recipe=mnist", "train.steps=1", "-m", "--cfg", "job"])
    assert parsed.multirun
    assert parsed.cfg == "job"
    assert parsed.overrides == ["+recipe=mnist", "train.steps=1"]
    assert parsed.config_dir is parsed.config_name is parsed.config_path is None


def test_a_config_is_composed_with_hydras_own_part() -> None:
    register()
    setup_globals()
    parsed = parse_command_line(["+recipe=mnist", "cluster=2ps2w", "hydra.sweep.dir=here"])
    checked: list[DictConfig] = []
    loader = CheckedLoader(parsed, checked.append, lambda searchpath: None)
    config = loader.load("config")
    assert checked == [config]
    assert config.cluster.shape == "2ps2w"
    assert config.hydra.sweep.dir == "here"
    assert config.hydra.runtime.choices.recipe == "mnist"
