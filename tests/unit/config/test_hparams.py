"""Rows of TensorBoard's HParams tab, read back as TensorBoard does."""

from pathlib import Path

import keras  # noqa: F401 - it changes the environment, which no test may do
import pytest
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.hparams import api_pb2, metadata
from tensorboard.plugins.hparams.backend_context import Context
from tensorboard.plugins.hparams.list_session_groups import Handler

from kdist.config.hparams import hparams_of, of_run
from kdist.run.result import Result, final_metrics
from kdist.run.summaries import Summaries

CONFIG = {
    "optimizer": {"learning_rate": {"_target_": "keras.optimizers.schedules.CosineDecay"}},
    "train": {"batch_size": 64},
    "model": {"units": [32, 16], "bias": True, "rate": 0.5},
    "run": {"seed": 3},
}


def test_what_is_swept_and_chosen_is_shown() -> None:
    overrides = ["+recipe=mnist", "cluster=2ps2w", "model.units=[32,16]", "++model.bias=true", "run.seed=3", "~loss"]
    overrides += ["hooks.nan=null", "+data.password=${oc.env:PASSWORD}", "run.dir=D", "sweep.mode=max", "strategy=auto"]
    found = hparams_of(CONFIG, overrides, ["model.rate", "model.missing"])
    assert found == {
        "recipe": "mnist",
        "cluster": "2ps2w",
        "strategy": "auto",
        "run.seed": 3,
        "hooks.nan": "null",
        # A list is a text; what is None is left out.
        "model.units": "[32,16]",
        # Not what it stands for.
        "data.password": "${oc.env:PASSWORD}",
        "model.bias": True,
        "model.rate": 0.5,
    }
    # The run knows what it has come to.
    assert of_run("parameter_server", "2ps2w", 0.1, found) == {
        **found,
        "strategy": "parameter_server",
        "optimizer.learning_rate": 0.1,
    }


def test_a_row_is_what_tensorboard_reads(tmp_path: Path) -> None:
    result = Result(metrics={"train": {"loss": 2.0}, "validation": {"loss": 1.0, "auc": float("nan")}})
    metrics = final_metrics(result)
    assert metrics == {"final/validation_loss": 1.0, "final/train_loss": 2.0}
    summaries = Summaries(tmp_path)
    summaries.hparams("mnist/3", {"cluster": "2ps2w", "train.batch_size": 64}, metrics, began=5.0, ok=False)
    summaries.close()
    events = EventAccumulator(str(tmp_path / "hparams")).Reload()
    content = events.SummaryMetadata(metadata.SESSION_START_INFO_TAG).plugin_data.content
    start = metadata.parse_session_start_info_plugin_data(content)
    assert {name: value.WhichOneof("kind") for name, value in start.hparams.items()} == {
        "cluster": "string_value",
        "train.batch_size": "number_value",
    }
    assert start.start_time_secs == 5.0
    assert start.group_name == "mnist/3"
    content = events.SummaryMetadata(metadata.SESSION_END_INFO_TAG).plugin_data.content
    assert metadata.parse_session_end_info_plugin_data(content).status == api_pb2.STATUS_FAILURE
    assert {tag for tag in events.Tags()["tensors"] if tag.startswith("final/")} == set(metrics)
    assert events.Tensors("final/train_loss")[0].tensor_proto.float_val[0] == pytest.approx(2.0)


def test_a_run_is_one_row_whatever_else_it_writes(tmp_path: Path) -> None:
    for name in ("0", "1"):
        summaries = Summaries(tmp_path / name / "tb")
        for split in ("train", "validation"):
            summaries.scalars(split, {"loss": 1.0}, 3)
        # A run that is resumed writes its row again.
        for loss in (2.0, 1.0):
            summaries.hparams(f"{name} in sweep", {"units": 8}, {"final/train_loss": loss}, began=5.0, ok=True)
            summaries.close()
    multiplexer = EventMultiplexer().AddRunsFromDirectory(str(tmp_path)).Reload()
    provider = MultiplexerDataProvider(multiplexer, str(tmp_path))
    backend = Context(TBContext(logdir=str(tmp_path), multiplexer=multiplexer, data_provider=provider))
    request = api_pb2.ListSessionGroupsRequest(
        slice_size=10, allowed_statuses=[api_pb2.STATUS_SUCCESS], aggregation_type=api_pb2.AGGREGATION_AVG
    )
    request.col_params.add().metric.tag = "final/train_loss"
    found = Handler(RequestContext(), backend, "", request).run().session_groups
    assert [(group.name, len(group.sessions)) for group in found] == [("0 in sweep", 1), ("1 in sweep", 1)]
    assert [[value.value for value in group.metric_values] for group in found] == [[1.0]] * 2
