"""Each wrong input: one message, the right exit code, nothing made, nothing left running."""

import subprocess
import sys
from pathlib import Path

import keras  # noqa: F401 - it changes the environment, which no test may do
import pytest
from commands import kdist
from helpers import result_of

from kdist.cli.help import help_text
from kdist.cli.main import COMMANDS, run
from kdist.storage.folder import Folder
from kdist.storage.lock import RunLock

MINE = ["model._target_=user_code.build", "data._target_=user_code.data", "run.trust=[user_code]"]
HOSTS = ["+recipe=mnist", "cluster=hosts", "cluster.ps=[a:1,a:2]", "cluster.worker=[b:1,b:2]"]
SYNC = ["+recipe=mnist", "strategy=sync_replicas"]
TF_CONFIG_FORM = '{"cluster": {"ps": ["host:port"], "worker": [...]}, "task": {"type": "worker", "index": 0}}'

REFUSED = [
    (["+recipe=mnist", "cluster=0ps2w"], ["cluster=0ps2w", "NpsMw", "no parameter server"]),
    (["+recipe=mnist", "cluster=2ps0w"], ["cluster=2ps0w", "NpsMw", "no worker"]),
    (["+recipe=mnist", "cluster=banana"], ["cluster=banana", "NpsMw"]),
    (["+recipe=mnist", "cluster=2"], ["cluster=2", "NpsMw"]),
    (["+recipe=mnist", "cluster=0w"], ["cluster=0w", "NpsMw", "no worker"]),
    (["+recipe=mnist", "cluster=hosts"], ["cluster.job is not given", "ps, worker, chief"]),
    ([*HOSTS, "cluster.job=boss"], ["cluster.job=boss", "ps, worker, chief"]),
    ([*HOSTS, "cluster.job=ps", "cluster.task=2"], ["cluster.task", "ps:2", "cluster.ps has 2 such tasks"]),
    ([*HOSTS, "cluster.job=ps", "cluster.task=-1"], ["cluster.task=-1", "at least 0"]),
    ([*HOSTS, "cluster.job=ps", "cluster.task=first"], ["cluster.task", "first"]),
    ([*HOSTS, "cluster.job=chief"], ["cluster.chief has no such task"]),
    ([*HOSTS, "cluster.job=ps", "cluster.chief=a:1"], ["cluster.chief", "ps:0", "both at a:1", "each needs its own"]),
    ([*HOSTS, "cluster.job=ps", "cluster.ps=[b:2]"], ["ps:0", "worker:1", "both at b:2", "each needs its own"]),
    ([*HOSTS, "cluster.job=ps", "cluster.ps=[a]"], ["cluster.ps: a:", "host:port"]),
    ([*HOSTS, "cluster.job=ps", "cluster.ps=[a:99999]"], ["cluster.ps: a:99999:", "host:port"]),
    ([*HOSTS, "cluster.job=ps", "cluster.worker=[]"], ["cluster.worker", "no worker"]),
    ([*HOSTS, "cluster.job=ps", "cluster.ps=a:1"], ["cluster.ps", "list"]),
    ([*HOSTS, "cluster.job=ps", "strategy=mirrored"], ["strategy=mirrored", "one process"]),
    ([*HOSTS, "cluster.job=worker", "cluster.ps=[]", "strategy=sync_replicas"], ["sync_replicas", "parameter servers"]),
    (["+recipe=mnist", "cluster=tf_config"], ["cluster=tf_config", "TF_CONFIG is not set", TF_CONFIG_FORM]),
    (["+recipe=mnist", "cluster=2ps2w", "cluster.started_by=me"], ["cluster.started_by=me", "auto, kdist, slurm"]),
    (["+recipe=mnist", "cluster=2ps2w", "cluster.started_by=slurm"], ["cluster.started_by=slurm", "srun"]),
    (["+recipe=mnist", "cluster=2ps2w", "cluster.ps=[a:1]"], ["cluster.ps", "cluster=hosts", "cluster=2ps2w"]),
    (["+recipe=mnist", "cluster.job=ps"], ["cluster.job", "cluster=hosts", "cluster=local"]),
    (["+recipe=mnist", "cluster.devices.worker=0"], ["cluster.devices.worker=0", "list of GPU numbers"]),
    (["+recipe=mnist", "cluster.devices.worker=[-1]"], ["cluster.devices.worker=[-1]", "list of GPU numbers"]),
    (["+recipe=mnist", "cluster.devices.wroker=[1]"], ["did you mean cluster.devices.worker?"]),
    (
        ["+recipe=mnist", "strategy=warp"],
        ["strategy=warp", "auto, mirrored, multi_worker_mirrored, parameter_server, single, sync_replicas"],
    ),
    (["+recipe=mnist", "strategy=parameter_server"], ["parameter_server", "NpsMw"]),
    (["+recipe=mnist", "strategy=parameter_server", "cluster=4w"], ["parameter_server", "cluster=4w", "NpsMw"]),
    (["+recipe=mnist", "strategy=single", "cluster=1ps1w"], ["single", "cluster=local"]),
    (["+recipe=mnist", "strategy=single", "cluster=4w"], ["single", "cluster=4w", "cluster=local"]),
    (SYNC, ["sync_replicas", "cluster=local", "NpsMw"]),
    (["+recipe=mnist", "strategy=multi_worker_mirrored"], ["multi_worker_mirrored", "cluster=local", "Mw"]),
    (
        ["+recipe=mnist", "strategy=multi_worker_mirrored", "cluster=2ps2w"],
        ["multi_worker_mirrored", "no parameter servers", "cluster=2ps2w", "use Mw"],
    ),
    (["+recipe=mnist", "strategy=mirrored", "cluster=1ps1w"], ["mirrored", "cluster=1ps1w", "cluster=local"]),
    (["+recipe=mnist", "strategy=mirrored", "strategy.devices=1"], ["strategy.devices=1", "at least 2", "single"]),
    (["+recipe=mnist", "cluster=2ps2w", "strategy.devices=2"], ["strategy.devices=2", "parameter_server", "mirrored"]),
    (
        [*SYNC, "cluster=2ps2w", "strategy.backup_workers=2"],
        ["strategy.backup_workers=2", "less than", "2 on cluster=2ps2w"],
    ),
    (
        [*SYNC, "cluster=2ps4w", "strategy.backup_workers=1", "strategy.replicas_to_aggregate=4"],
        ["strategy.replicas_to_aggregate=4", "strategy.backup_workers=1", "3 of the 4 workers"],
    ),
    (["+recipe=mnist", "cluster=2ps2w", "strategy.backup_workers=1"], ["strategy.backup_workers=1", "sync_replicas"]),
    (["+recipe=mnist", "strategy.token_mode=loose"], ["strategy.token_mode=loose", "strict, tf1"]),
    (["+recipe=mnist", "strategy.partition_min_bytes=0"], ["strategy.partition_min_bytes=0", "at least 1"]),
    (["model=nope"], ["model=nope", "custom, linear, mnist_cnn, mnist_mlp, mnist_towers, recommender"]),
    (["+recipe=nope"], ["recipe=nope", "linear, mnist, mnist_mlp, mnist_sync, mnist_towers, recommender"]),
    (["+recipe=mnist", "train.stpes=5"], ["train.stpes", "did you mean train.steps?"]),
    (["+recipe=mnist", "optimizer.lr=0.1"], ["did you mean optimizer.learning_rate?"]),
    (
        ["+recipe=mnist", "hooks.checkpoint.every=5"],
        ["did you mean hooks.checkpoint.every_secs or hooks.checkpoint.every_steps?"],
    ),
    (["+recipe=mnist_mlp", "model.unit=5"], ["did you mean model.hidden_units?"]),
    (["+recipe=mnist", "run.logdir=here"], ["did you mean run.dir?"]),
    (["+recipe=mnist", "hooks.checkpoint.evry_steps=5"], ["did you mean hooks.checkpoint.every_steps?"]),
    (["+recipe=mnist", "train.steps=0"], ["train.steps=0", "at least 1"]),
    (["+recipe=mnist", "train.steps=many"], ["train.steps", "many"]),
    (["+recipe=mnist", "train.batch_size=0"], ["train.batch_size=0", "at least 1"]),
    (["+recipe=mnist", "train.steps_per_call=-1"], ["train.steps_per_call=-1", "at least 1, or auto"]),
    (["+recipe=mnist", "train.validation_every_steps=0"], ["train.validation_every_steps=0", "at least 1"]),
    (["+recipe=mnist", "train.epochs=2"], ["train.steps=2000", "train.epochs=2", "one"]),
    (["+recipe=mnist", "run.plan_only=maybe"], ["run.plan_only", "maybe"]),
    (["+recipe=mnist", "run.resume=maybe"], ["run.resume=maybe", "auto, never, must"]),
    (
        ["+recipe=mnist", "strategy.placement=best"],
        ["strategy.placement=best", "auto, round_robin, greedy, partitioned"],
    ),
    (["+recipe=mnist", "optimizer.learning_rate=-1"], ["optimizer.learning_rate=-1", "more than 0"]),
    (
        ["+recipe=mnist", "model._target_=nosuch.module.build", "run.trust=[nosuch]"],
        ["model", "nosuch.module.build", "No module named 'nosuch'"],
    ),
    (
        ["+recipe=mnist", "model._target_=user_code.nope", "run.trust=[user_code]"],
        ["model", "user_code.nope", "has no nope"],
    ),
    (["+recipe=mnist", "hooks.stop._target_=kdist.hooks.Never"], ["hooks.stop", "kdist.hooks.Never"]),
    (["+recipe=mnist", "+model.units=3"], ["model", "units"]),
    (["+recipe=mnist", "+callbacks.stop=3"], ["callbacks.stop", "_target_"]),
    (
        ["+recipe=mnist", "+callbacks.stop._target_=keras.callbacks.EarlyStopping", "+callbacks.stop.patients=3"],
        ["callbacks.stop", "keras.callbacks.EarlyStopping", "patients"],
    ),
    (
        ["+recipe=mnist", "+callbacks.stop._target_=user_code.build"],
        ["callbacks.stop._target_=user_code.build", "not trusted", "run.trust=[user_code]"],
    ),
    (["+recipe=mnist", "+train.foo=1"], ["train.foo", "no such key"]),
    (["+recipe=mnist", "+trian.steps=5"], ["trian", "did you mean train?"]),
    (["+recipe=mnist", "model.units=3"], ["model.units", "+model.units=..."]),
    (["+recipe=mnist", "train.steps=1.5"], ["train.steps", "1.5"]),
    (["+recipe=mnist", "run.seed=99999999999"], ["run.seed=99999999999", "2**32"]),
    (["+recipe=mnist", "cluster.start_timeout=inf"], ["cluster.start_timeout=inf", "finite"]),
    (["+recipe=mnist", "run.dir=/dev/null"], ["run.dir=/dev/null", "is a file"]),
    (["+recipe=mnist", "hooks=null"], ["None"]),
    (["+recipe=mnist", "cluster.isolate=maybe"], ["cluster.isolate=maybe", "never, auto, must"]),
    (
        [*HOSTS, "cluster.job=ps", "cluster.isolate=must"],
        ["cluster.isolate=must", "that kdist starts", "=hosts"],
    ),
    (
        [*HOSTS, "cluster.job=ps", "cluster.ps=[8.8.8.8:2222]"],
        ["ps:0", "8.8.8.8:2222", "cluster.allow_unprotected_network=true"],
    ),
    (
        ["+recipe=mnist", "model._target_=user_code.build"],
        ["model._target_=user_code.build", "not trusted", "run.trust=[user_code]"],
    ),
    (["+recipe=mnist", "loss={_target_: os.system}"], ["loss._target_=os.system", "not trusted"]),
    (["+recipe=mnist", "run.trust=[os]"], ["run.trust", "Python's own"]),
    (["+recipe=mnist", "run.trust=mine"], ["run.trust", "str"]),
    ([], ["model", "+recipe=mnist"]),
]

#: They differ from others only in the key, or in what its value is.
SIBLINGS = {
    "cluster.task=-1",
    "cluster.ps=[a:99999]",
    "cluster.ps=[b:2]",
    "cluster.started_by=me",
    "cluster.devices.worker=[-1]",
    "cluster.devices.wroker=[1]",
    "cluster.isolate=maybe",
    "hooks.checkpoint.evry_steps=5",
    "strategy.partition_min_bytes=0",
    "strategy.placement=best",
    "strategy.token_mode=loose",
    "train.batch_size=0",
    "train.steps=many",
    "train.validation_every_steps=0",
    "+recipe=nope",
    "+trian.steps=5",
}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [pytest.param(*case, marks=[pytest.mark.long] * bool(SIBLINGS.intersection(case[0]))) for case in REFUSED],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_wrong_config_is_refused_in_one_line_before_anything_is_made(
    arguments: list[str],
    said: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TF_CONFIG", raising=False)
    assert_refused(arguments, said, tmp_path, capsys)


@pytest.mark.parametrize(
    ("tf_config", "said"),
    [
        ("worker:0", ["TF_CONFIG: is not JSON", TF_CONFIG_FORM]),
        ('{"cluster": {"worker": ["b:1"]}}', ["TF_CONFIG: has no task", TF_CONFIG_FORM]),
        ('{"cluster": {"worker": ["b:1"]}, "task": {"index": 0}}', ["TF_CONFIG: task has no type", TF_CONFIG_FORM]),
        ('{"cluster": {"worker": ["b:1"]}, "task": {"type": "worker", "index": 1}}', ["worker:1", "has 1 such task"]),
        ('{"cluster": {"ps": "a:1", "worker": ["b:1"]}, "task": {"type": "ps"}}', ["cluster.ps", "list of addresses"]),
    ],
)
def test_a_wrong_tf_config_is_refused_in_one_line_before_anything_is_made(
    tf_config: str,
    said: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TF_CONFIG", tf_config)
    assert_refused(["+recipe=mnist", "cluster=tf_config"], ["TF_CONFIG", *said], tmp_path, capsys)


TRUSTING_FILES = {
    "run: {trust: [user_code]}": ["run.trust: user_code is not from the command line"],
    "hydra: {callbacks: {x: {_target_: user_code.build}}}": ["hydra.callbacks.x._target_=user_code.build"],
    "hydra: {job_logging: {root: {handlers: [x]}, handlers: {x: {class: user_code.build}}}}": [
        "hydra.job_logging.handlers.x.class=user_code.build"
    ],
    "hydra: {job: {env_set: {LD_PRELOAD: x.so}}}": ["hydra.job.env_set.LD_PRELOAD"],
    # What is checked and what Hydra calls could differ.
    "hydra: {callbacks: {x: {_target_: '${oc.env:X,keras.callbacks.History}'}}}": [
        "hydra.callbacks.x._target_=${oc.env:X,keras.callbacks.History}: has to be written out"
    ],
    "hydra: {launcher: {_target_: user_code.build}}": ["hydra.launcher._target_=user_code.build"],
    "hydra: {job_logging: {handlers: {x: {class: logging.FileHandler, filename: .bashrc}}}}": [
        "hydra.job_logging.handlers.x.filename=.bashrc: is not in the run dir"
    ],
    "hydra: {job: {name: ../x}}": ["hydra.job.name=../x"],
    "hydra: {hydra_logging: {handlers: {x: {class: logging.handlers.HTTPHandler, host: h}}}}": [
        "hydra.hydra_logging.handlers.x.class=logging.handlers.HTTPHandler"
    ],
}


@pytest.mark.parametrize(
    ("by", "content"),
    [
        *[("--config-dir={}", content) for content in TRUSTING_FILES],
        # The same files, found in another way.
        *[
            pytest.param("hydra.searchpath=[file://{}]", content, marks=[pytest.mark.long] * (number > 1))
            for number, content in enumerate(TRUSTING_FILES)
        ],
    ],
)
def test_no_file_trusts_a_package_or_has_hydra_call_one(
    content: str,
    by: str,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", list(sys.argv))
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    folder = tmp_path_factory.mktemp("conf")
    (folder / "recipe").mkdir()
    (folder / "recipe" / "theirs.yaml").write_text(f"# @package _global_\n{content}\n")
    run_dir = tmp_path_factory.mktemp("run")
    mine = ["model=linear", "data=linear", "train.steps=2", f"run.dir={run_dir}"]
    assert_refused(["+recipe=theirs", *mine, by.format(folder)], TRUSTING_FILES[content], tmp_path, capsys)


def test_what_hydra_does_for_a_trial_is_checked_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "theirs.yaml").write_text(
        "# @package _global_\nhydra: {job: {env_set: {LD_PRELOAD: x.so}}}\n"
    )
    mine = ["model=linear", "data=linear", "train.steps=2", "run.dir=S", f"--config-dir={tmp_path}"]
    assert run(["-m", "+recipe=theirs,linear", *mine]) == 2
    assert "hydra.job.env_set.LD_PRELOAD: is not from the command line" in capsys.readouterr().err
    assert not list((tmp_path / "S").glob("*/.hydra"))


def test_packages_of_a_files_searchpath_are_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "lurking.py").write_text("raise SystemExit('imported')")
    for place, said in {"pkg://kdist.conf": "mine", "pkg://lurking": "hydra.searchpath: pkg://lurking is not"}.items():
        (tmp_path / "mine.yaml").write_text(f"defaults: [kdist_schema, _self_]\nhydra: {{searchpath: ['{place}']}}\n")
        assert run(["--config-dir=.", "--config-name=mine", "+no_such_key=1"]) == 2
        assert (said in capsys.readouterr().err) == (said != "mine")


@pytest.mark.parametrize("more", [[], ["--config-dir=."], ["-m", "run.seed=1,2"]])
def test_a_second_chief_of_a_run_dir_writes_nothing(
    more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    folder = tmp_path / "D" / ("0" if "-m" in more else "")
    (folder / ".hydra").mkdir(parents=True)
    for name in ("config", "hydra", "overrides"):
        (folder / ".hydra" / f"{name}.yaml").write_text("of the first")
    (folder / "trial.json").write_text('{"overrides": {"recipe": "linear", "run.seed": "1"}}')
    with RunLock(Folder(folder)):
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        assert run([*more, "+recipe=linear", "train.steps=2", "run.dir=D"]) == 2
        assert "D: is in use by" in capsys.readouterr().err.replace("D/0", "D")
        assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            "{sweeper: {sampler: {_target_: os.system}}}",
            "hydra.sweeper.sampler._target_=os.system: is not",
        ),
        (
            "{sweeper: {custom_search_space: user_code.build}}",
            "hydra.sweeper.custom_search_space=user_code.build",
        ),
        ("{launcher: {setup: ['touch x']}}", "hydra.launcher.setup[0]=touch x: text"),
        ("{sweeper: {n_trials: 3, params: {model.units: 'choice(1,2)'}}, launcher: {timeout_min: 5}}", None),
    ],
)
def test_a_file_chooses_plugins_and_their_numbers_only(
    content: str, said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    plugins = "override hydra/sweeper: optuna, override hydra/launcher: submitit_slurm"
    (tmp_path / "mine.yaml").write_text(f"defaults: [kdist_schema, _self_, {plugins}]\nhydra: {content}\n")
    # What its user types may be anything.
    typed = ["hydra.launcher.name=mine", "hydra.sweeper.study_name=mine", "no_such_key=1"]
    assert run(["--config-dir=.", "--config-name=mine", *typed[:2], *typed[2 if said is None else 3 :]]) == 2
    assert (said or "no_such_key") in capsys.readouterr().err


def assert_refused(arguments: list[str], said: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("kdist: error: ")
    assert captured.err.count("\n") == 1
    for words in said:
        assert words in captured.err
    assert list(folder.iterdir()) == []


FAILING = [
    (["model._target_=user_code.not_a_model"], 2, ["user_code.not_a_model", "int", "keras.Model"]),
    (["+model.compiled=false"], 2, ["not compiled", "optimizer", "loss"]),
    (["model._target_=user_code.build_own_train_step"], 2, ["OwnTrainStep.train_step", "return a dict"]),
    (["data._target_=user_code.wrong_form"], 2, ["user_code.wrong_form", "features", "must return"]),
    (["optimizer.name=nope"], 2, ["optimizer.name=nope", "adam"]),
    (["optimizer.beta_1=0.5"], 2, ["optimizer.beta_1", "SGD takes no beta_1", "momentum"]),
    (["loss=nope"], 2, ["loss=nope"]),
    (["run.plan_only=true"], 2, ["cluster=local", "no parameter servers", "NpsMw"]),
    (["strategy=mirrored"], 2, ["strategy=mirrored", "no GPUs", "strategy.devices=2"]),
    (["+callbacks.x={_target_: keras.callbacks.BackupAndRestore, backup_dir: b}"], 2, ["BackupAndRestore", "run_dir"]),
    (["+callbacks.x={_target_: keras.optimizers.SGD}"], 2, ["SGD is no keras.callbacks.Callback"]),
    (["+hooks.x={_target_: kdist.hooks.EarlyStopping, mode: up}"], 2, ["EarlyStopping.mode=up", "auto, min, max"]),
    (["hooks=progressive", "hooks.progressive.window=0"], 2, ["ProgressiveValidation.window=0", "whole number"]),
    (["hooks=progressive", "hooks.progressive.metrics=[auc]"], 2, ["metrics=auc", "the model reports loss"]),
    (["+hooks.x={_target_: kdist.hooks.BestCheckpoint, metric: progressive_loss}"], 2, ["nothing reports it"]),
    (["hooks.stop.last_step=abc"], 2, ["last_step=abc", "whole number"]),
    (["hooks.checkpoint.every_steps=1.5"], 2, ["hooks.checkpoint.every_steps=1.5", "whole number"]),
    (["+data.label_offset=9"], 1, ["chief: InvalidArgumentError", "label value"]),
    (["+data.num_features=4"], 1, ["incompatible"]),
    (["data._target_=user_code.raising_dataset"], 1, ["KeyError", "no such column", "user_code.py"]),
    (["+data.scale=1e30"], 1, ["NanTensor", "step", "last good checkpoint", "checkpoints/ckpt-0"]),
]
#: Like another one, of another hook or key.
FAILING_ALIKE = {
    "loss=nope",
    "hooks.progressive.metrics=[auc]",
    "hooks.progressive.window=0",
    "hooks.checkpoint.every_steps=1.5",
    "+data.num_features=4",
}


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [pytest.param(*case, marks=[pytest.mark.long] * (case[0][-1] in FAILING_ALIKE)) for case in FAILING],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_failing_run_says_whose_error_it_is_once(
    arguments: list[str],
    code: int,
    said: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", list(sys.argv))
    monkeypatch.setattr("kdist.fit.signals.exit_at_once", None)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    assert run([*MINE, "train.steps=20", "run.dir=out", *arguments]) == code
    stderr = capsys.readouterr().err
    assert stderr.count("kdist: error: ") == 1
    assert "Traceback" not in stderr
    for words in said:
        assert words in stderr
    result = result_of(tmp_path / "out")
    assert result["status"] == "failed"
    assert result["error"]
    assert (result["strategy"], result["cluster"]) == (
        "mirrored" if "mirrored" in str(arguments) else "single",
        "local",
    )
    assert result["overrides"] == [*MINE, "train.steps=20", "run.dir=out", *arguments]
    assert (result["config"]["train"]["steps"], result["config"]["run"]["dir"]) == (20, "out")
    assert result["started"] < result["ended"]


def test_the_run_dir_of_a_newer_version_is_refused_and_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", list(sys.argv))
    monkeypatch.setattr("kdist.fit.signals.exit_at_once", None)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    record = '{"format": 99, "status": "done", "versions": {"kdist": "9.1"}}'
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "result.json").write_text(record)
    assert run([*MINE, "train.steps=20", "run.dir=out"]) == 2
    expected = "kdist: error: out/result.json: was written by kdist 9.1, in format 99; this version reads format 1\n"
    assert capsys.readouterr().err == expected
    assert (tmp_path / "out" / "result.json").read_text() == record


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["+data.label_offset=9"], ["worker:", "label value"]),
        pytest.param(
            ["data._target_=user_code.raising_dataset"], ["KeyError", "no such column"], marks=pytest.mark.long
        ),
        pytest.param(["+data.scale=1e30"], ["NanTensor", "last good checkpoint"], marks=pytest.mark.long),
    ],
)
def test_a_failing_run_on_a_cluster_says_whose_error_it_is_once(
    arguments: list[str], said: list[str], tmp_path: Path
) -> None:
    done = kdist(*MINE, "cluster=1ps2w", "train.steps=20", "run.dir=out", *arguments, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("kdist: error: ") == 1
    assert "Traceback" not in done.stderr
    for words in said:
        assert words in done.stderr


def test_data_path_is_refused_with_what_is_expected(tmp_path: Path) -> None:
    done = kdist("+recipe=mnist", "data.path=nowhere.npz", cwd=tmp_path)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "data.path=nowhere.npz" in done.stderr
    assert "x_train" in done.stderr


def test_help_and_refusal_do_not_import_tensorflow(tmp_path: Path) -> None:
    code = (
        "import sys; from kdist.cli.main import run; run(['--help']); run(['+recipe=mnist', 'train.steps=0']); "
        "run(['+recipe=mnist', 'cluster=x']); run(['+recipe=mnist', 'cluster=hosts']); "
        "assert not {'tensorflow', 'keras'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, capture_output=True, timeout=60)


def test_help_lists_every_group_and_key_with_its_meaning() -> None:
    text = help_text(COMMANDS)
    for words in (
        "cluster=2ps2w",
        "hosts | local | tf_config | NpsMw",
        "auto | mirrored | multi_worker_mirrored | parameter_server | single | sync_replicas",
        "mnist | mnist_mlp",
        "train.steps ",
        "run.resume ",
        "75",
    ):
        assert words in text
    assert all(len(line) < 160 for line in text.splitlines())
    # What a newcomer needs first comes first.
    assert text.splitlines()[2] == "groups (GROUP=OPTION)"


@pytest.mark.parametrize(
    "key",
    [
        "train.steps", "train.epochs", "train.batch_size", "train.max_restarts", "train.validate_with_ema", "run.seed",
        "run.verbose", "run.grace_secs", "run.resume", "run.export_max_bytes", "run.metrics_port", "strategy.name",
        "strategy.backup_workers", "cluster.shape", "cluster.bind", "cluster.patience", "optimizer.learning_rate",
        "data.path",
        *(
            pytest.param(key, marks=pytest.mark.long)
            for key in ("run.start_from", "optimizer.name", "hooks.checkpoint.every_steps", "model.hidden_units")
        ),
    ],
)  # fmt: skip
def test_the_value_of_a_variable_is_in_no_message(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINE", "s3cr3t,t0ken=1")
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.setattr("kdist.fit.signals.exit_at_once", None)
    assert run(["+recipe=mnist_mlp", "cluster=1ps1w", "train.steps=2", f"{key}=${{oc.env:MINE}}", "run.dir=D"]) != 0
    said = capsys.readouterr()
    assert "${oc.env:MINE}" in said.err
    files = [path.read_text(errors="replace") for path in Path().rglob("*") if path.is_file()]
    assert not any("s3cr3t" in text for text in (said.out, said.err, *files))


@pytest.mark.parametrize("value", ["0", "-3", "1e3", "0x1f", "007.50"])
def test_the_number_in_a_variable_is_in_no_message(
    value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MINE", value)
    assert run(["+recipe=mnist_mlp", "train.batch_size=${oc.env:MINE}"]) == 2
    assert "${oc.env:MINE}" in capsys.readouterr().err
