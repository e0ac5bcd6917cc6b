"""Each private name of Hydra means what kdist takes it for."""

from pathlib import Path
from typing import ClassVar

import pytest
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus, setup_globals
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from kdist._compat.hydra import CheckedLoader, parse_command_line, run
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


class Ends(Callback):
    """Notes how jobs ended."""

    seen: ClassVar[list[JobStatus]] = []

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **_: object) -> None:
        self.seen.append(job_return.status)


def test_the_error_of_a_job_is_returned_and_hydra_knows_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    register()
    setup_globals()
    callback = f"+hydra.callbacks.ends._target_={__name__}.Ends"
    parsed = parse_command_line(["+recipe=mnist", f"hydra.run.dir={tmp_path}", callback])
    loader = CheckedLoader(parsed, lambda config: None, lambda searchpath: None)
    config = loader.load("config")
    HydraConfig.instance().set_config(config)
    failed = ValueError("it failed")

    def fail(_: DictConfig) -> None:
        raise failed

    assert run(config, loader, fail) is failed
    assert run(config, loader, lambda _: None) is None
    assert Ends.seen == [JobStatus.FAILED, JobStatus.COMPLETED]
    assert capsys.readouterr().err == ""
