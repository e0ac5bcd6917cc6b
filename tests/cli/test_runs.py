"""Whole runs by the command line, looked at from outside."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import keras
import pytest
from commands import Command, kdist
from helpers import REPO, environment, result_of, tasks_running, wait_until

from kdist.run.metrics_file import read_rows

pytestmark = pytest.mark.cluster

MINE = ["model._target_=user_code.build", "data._target_=user_code.data", "run.trust=[user_code]"]


def test_mnist_on_two_servers_and_two_workers(tmp_path: Path) -> None:
    """The main job, shortened; the whole recipe reaches 0.97."""
    part = REPO / "recipes" / "mnist_part.npz"
    done = kdist("+recipe=mnist", "cluster=2ps2w", "train.steps=400", f"data.path={part}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run_dir = next((tmp_path / "runs" / "mnist").iterdir())
    result = result_of(run_dir)
    assert (result["status"], result["global_step"], result["strategy"]) == ("done", 400, "parameter_server")
    assert result["metrics"]["validation"]["accuracy"] > 0.93
    assert (run_dir / ".hydra" / "config.yaml").exists()
    assert result["overrides"] == ["+recipe=mnist", "cluster=2ps2w", "train.steps=400", f"data.path={part}"]
    assert (result["config"]["train"]["steps"], result["config"]["data"]["path"]) == (400, str(part))
    reports = [row for row in read_rows(run_dir) if row["kind"] == "train"]
    assert [row["step"] for row in reports] == [100, 200, 300, 400]
    assert all(0 <= row["staleness"] < 10 and row["steps_per_second"] > 0 for row in reports)
    lines = done.stdout.splitlines()
    assert lines[0].startswith("kdist 0.1.0 | mnist | parameter_server on 2ps2w")
    assert lines[1].startswith(f"run dir   {run_dir.relative_to(tmp_path)}      tensorboard --logdir runs")
    closed = "network   closed to other machines, not to other users here (cluster.bind)"
    assert lines[3] == closed or lines[3].startswith("network   TensorFlow's servers listen on all interfaces, without")
    assert any(line.startswith("train | step    100/400 | loss ") for line in lines)
    assert lines[-1].startswith("done  | step    400/400 | loss ")
    assert done.stderr == ""
    # Plain Keras, in a process that does not know kdist.
    code = (
        "import sys, keras, numpy as np; d = np.load(sys.argv[1]); m = keras.saving.load_model(sys.argv[2]);"
        "print(m.evaluate(d['x_test'].astype('float32') / 255, d['y_test'], verbose=0, return_dict=True)['accuracy'],"
        " int(m.optimizer.iterations)); assert 'kdist' not in sys.modules"
    )
    plain = subprocess.run(
        [sys.executable, "-c", code, str(part), str(run_dir / "model.keras")],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    accuracy, iterations = plain.stdout.split()
    assert float(accuracy) == pytest.approx(result["metrics"]["validation"]["accuracy"], abs=1e-6)
    assert iterations == "400"


def test_the_same_run_dir_goes_on_where_it_stopped_and_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "D").mkdir()
    (tmp_path / "D").chmod(0o755)
    for cluster, steps in (("1ps1w", 30), ("local", 50)):
        done = kdist(*MINE, f"cluster={cluster}", f"train.steps={steps}", "run.dir=D", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert result_of(tmp_path / "D")["global_step"] == steps
    assert "load  | step     30    | checkpoints/ckpt-30" in done.stdout
    assert result_of(tmp_path / "D")["gradients"]["applied"] == 20
    assert (tmp_path / "D").stat().st_mode & 0o777 == 0o755


def test_no_epoch_trains_nothing_and_the_data_may_leave_the_size_of_batches_and_the_split_to_fit(
    tmp_path: Path,
) -> None:
    done = kdist(*MINE, "train.epochs=0", "train.batch_size=null", "run.dir=D", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "nothing to train: epochs=0" in done.stdout
    assert (result_of(tmp_path / "D")["status"], result_of(tmp_path / "D")["global_step"]) == ("done", 0)
    split = ["data._target_=user_code.split_form", "train.epochs=1", "train.batch_size=null"]
    done = kdist(*MINE, *split, "run.dir=E", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = result_of(tmp_path / "E")
    assert result["examples"] == 32 * result["global_step"] == 128
    assert result["metrics"]["validation"]["loss"] > 0


def test_config_overrides_what_the_model_was_compiled_with(tmp_path: Path) -> None:
    overrides = ["+model.compiled=false", "optimizer=adam", "optimizer.learning_rate=0.02", "optimizer.clipnorm=1"]
    done = kdist(
        *MINE, *overrides, "loss=sparse_categorical_crossentropy", "metrics=[accuracy]", "train.epochs=2", "run.dir=D",
        "data._target_=user_code.keras_form", "hooks.summary=null", "hooks.checkpoint.every_steps=5",
        "+callbacks.csv={_target_: keras.callbacks.CSVLogger, filename: log.csv}",
        "+hooks.best={_target_: kdist.hooks.BestCheckpoint, metric: accuracy}", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "log.csv").read_text().startswith("epoch,accuracy,loss,val_accuracy,val_loss\n0,")
    assert (tmp_path / "D" / "best" / "validation.json").exists()
    assert set(result_of(tmp_path / "D")["metrics"]["validation"]) == {"loss", "accuracy"}
    assert result_of(tmp_path / "D")["global_step"] == 16
    optimizer = keras.saving.load_model(tmp_path / "D" / "model.keras").optimizer
    assert isinstance(optimizer, keras.optimizers.Adam)
    assert float(optimizer.learning_rate) == pytest.approx(0.02)
    assert optimizer.clipnorm == 1.0


@pytest.mark.long
def test_multirun_runs_jobs_one_after_another_each_on_its_own_cluster(tmp_path: Path) -> None:
    done = kdist("-m", *MINE, "cluster=local,1ps1w", "train.steps=10", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (sweep,) = (tmp_path / "runs" / "train").iterdir()
    assert [folder.stat().st_mode & 0o777 for folder in (sweep, sweep / "0", sweep / "1")] == [0o700] * 3
    assert [result_of(sweep / number)["cluster"] for number in ("0", "1")] == ["local", "1ps1w"]
    assert not tasks_running(under=os.getpid())


class Run:
    """A long run in the background whose console and tasks a test can watch."""

    def __init__(self, cwd: Path, *arguments: str) -> None:
        self.log = cwd / "console.txt"
        self.log.touch()
        keys = ("cluster=1ps2w", "train.steps=1000000", "run.dir=D")
        self.process = Command(*MINE, *keys, *arguments, cwd=cwd, stdout=self.log)
        wait_until(lambda: "train | step" in self.log.read_text(), 60, "the run trains")
        self.tasks = tasks_running(under=self.process.pid)
        assert len(self.tasks) == 3

    def no_task_is_left(self) -> bool:
        return not [pid for pid in self.tasks if Path(f"/proc/{pid}").exists()]


@pytest.mark.parametrize(
    ("number", "code"),
    # The isolated run below is looked at in the same way.
    [
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.long),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.long),
    ],
)
def test_a_signal_saves_and_ends_everything_within_five_seconds(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    run = Run(tmp_path)
    try:
        run.process.send_signal(number)
        if number is signal.SIGTERM:
            # Supervisors send it to a process and to its group.
            run.process.send_signal(number)
        assert run.process.wait(5) == code
        assert run.no_task_is_left()
    finally:
        run.process.kill()
    assert_saved(run, number)


def assert_saved(run: Run, number: signal.Signals) -> None:
    """Checks what a run that a signal has ended has saved, and says of it."""
    folder = run.log.parent / "D"
    result = result_of(folder)
    assert result["status"] == "preempted"
    assert result["stopped_by"] == number.name
    newest = max(int(p.stem.removeprefix("ckpt-")) for p in (folder / "checkpoints").glob("ckpt-*.index"))
    assert newest == result["global_step"] > 0
    assert (
        f"stopped by {number.name} at step {newest}; last checkpoint: D/checkpoints/ckpt-{newest}"
        in run.log.read_text()
    )


@pytest.mark.parametrize(
    ("number", "code"), [pytest.param(signal.SIGINT, 130, marks=pytest.mark.long), (signal.SIGTERM, 143)]
)
def test_a_signal_before_training_ends_the_run_with_a_result(tmp_path: Path, number: signal.Signals, code: int) -> None:
    arguments = [sys.executable, "-m", "kdist", *MINE, "data._target_=user_code.slow_data", "run.dir=D"]
    with subprocess.Popen(
        arguments, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(3)][-1] == "reading\n"
        process.send_signal(number)
        _, said = process.communicate(timeout=5)
    assert process.returncode == code
    assert said == ("kdist: interrupted\n" if number is signal.SIGINT else "kdist: terminated\n")
    result = result_of(tmp_path / "D")
    assert result["status"] == "failed"
    assert number.name in result["error"]


@pytest.mark.long
def test_the_python_of_the_readme_works_as_a_script_without_a_guard(tmp_path: Path) -> None:
    script = tmp_path / "train_mine.py"
    script.write_text(
        """
import keras, kdist
from helpers import toy_data
x, y = toy_data()

def build_model():
    model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(3, activation="softmax")])
    model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    return model

for cluster in ("1ps1w", "1ps1w"):
    trainer = kdist.Trainer(build_model, cluster=cluster, strategy="parameter_server",
                            hooks=[kdist.hooks.StopAtStep(last_step=20), kdist.hooks.CheckpointSaver(every_secs=60)])
    history = trainer.fit(x, y, batch_size=64, steps=20, validation_data=(x, y))
    assert trainer.evaluate(x, y, return_dict=True)["loss"] > 0 and trainer.predict(x).shape == (256, 3)
    trainer.model.save("mine.keras")
    assert len(history.history["val_loss"]) == len(history.epoch) == 5
""",
    )
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False,
        env=environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "runs" / "train_mine").iterdir())) == 2
    assert done.stdout.count("steps=") == 2


def test_an_isolated_run_is_out_of_reach_or_says_that_it_is_not_and_a_signal_saves_and_ends_it(tmp_path: Path) -> None:
    unshare = ["unshare", "--map-root-user", "--net", "true"]
    permitted = bool(shutil.which("unshare")) and subprocess.run(unshare, check=False).returncode == 0
    run = Run(tmp_path, "cluster.isolate=auto")
    try:
        said = run.log.read_text()
        # Not by connecting to the port of a server: in this namespace it may be another program's.
        namespaces = {Path(f"/proc/{pid}/ns/net").stat().st_ino for pid in run.tasks}
        within_reach = Path("/proc/self/ns/net").stat().st_ino in namespaces
        run.process.send_signal(signal.SIGINT)
        assert run.process.wait(5) == 130
        assert run.no_task_is_left()
    finally:
        run.process.kill()
    assert within_reach is not permitted
    private = "network   private namespace: only processes of this run reach its servers"
    assert (private in said.splitlines()) is permitted
    assert said.count("kdist: cluster.isolate=auto: ") == (0 if permitted else 1)
    assert_saved(run, signal.SIGINT)
    for path in (tmp_path / "D").rglob("*"):
        assert path.stat().st_uid == os.getuid()


def test_a_secret_of_the_environment_is_nowhere_and_the_run_dir_is_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "correct-horse-battery-staple"
    monkeypatch.setenv("DATABASE_PASSWORD", secret)
    done = kdist(
        *MINE, "+data.password=${oc.env:DATABASE_PASSWORD}", "cluster=1ps1w", "train.steps=20",
        "run.log_device_placement=true", "run.dir=new/D", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert secret not in done.stdout + done.stderr
    files = [path for path in (tmp_path / "new").rglob("*") if path.is_file()]
    assert {"config.yaml", "overrides.yaml", "hydra.yaml", "result.json", "ps-0.log"} <= {path.name for path in files}
    assert not [path for path in files if secret.encode() in path.read_bytes()]
    assert result_of(tmp_path / "new" / "D")["config"]["data"]["password"] == "${oc.env:DATABASE_PASSWORD}"
    assert (tmp_path / "new" / "D").stat().st_mode & 0o777 == 0o700
