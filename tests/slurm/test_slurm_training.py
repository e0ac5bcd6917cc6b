"""Training in Slurm jobs, as the batch script that ships and as users start it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from helpers import REPO, result_of
from network import Network
from slurm_system import SlurmSystem, why_not

pytestmark = pytest.mark.long

SCRIPT = str(REPO / "deploy" / "slurm" / "train.sbatch")
#: A small model of the tests' own.
MINE = ("model._target_=user_code.build", "data._target_=user_code.data", "run.trust=[user_code]", "run.name=mine")
# Five processes import TensorFlow on the cores of one machine.
START_SECS = 180.0


def test_the_batch_script_trains_on_four_nodes(slurm: SlurmSystem) -> None:
    job = slurm.submit(SCRIPT, *MINE, "train.steps=300")
    assert job.end(START_SECS) == "COMPLETED", job.output
    result = result_of(job.run_dir("mine"))
    assert (result["status"], result["global_step"]) == ("done", 300)
    assert (result["cluster"], result["strategy"], result["workers"]) == ("2ps3w", "parameter_server", 3)
    # Where the tasks are is said once, by the chief.
    lines = [line for line in job.output.splitlines() if line.startswith("task  | ")]
    assert [line.split(" | ")[1].strip() for line in lines] == ["ps:0", "ps:1", "worker:0", "worker:1", "worker:2"]
    nodes = [line.split(" | ")[2].partition(":")[0] for line in lines]
    assert set(nodes) == {node.name for node in slurm.nodes}
    assert lines[2].endswith(" | also the chief")
    assert job.restarts == 0


def test_a_heterogeneous_job_trains(slurm: SlurmSystem) -> None:
    workers = ("--ntasks=3", "--nodes=3", "--gpus-per-node=1")
    servers = ("--ntasks=2", "--nodes=1", "--cpus-per-task=4", "--mem=64G")
    job = slurm.submit(*workers, ":", *servers, SCRIPT, *MINE, "train.steps=300", "strategy=sync_replicas")
    assert job.end(START_SECS) == "COMPLETED", job.output
    result = result_of(job.run_dir("mine"))
    assert (result["status"], result["global_step"], result["strategy"]) == ("done", 300, "sync_replicas")
    lines = [line for line in job.output.splitlines() if line.startswith("task  | ps:")]
    assert len({line.split(" | ")[2].partition(":")[0] for line in lines}) == 1, lines


def test_workers_without_servers_train_as_a_step(slurm: SlurmSystem, tmp_path: Path) -> None:
    said = slurm.run(
        *("srun", "--ntasks=3", "--nodes=2", "--distribution=cyclic"),
        *("python", "-m", "kdist", *MINE, "cluster=3w", "train.steps=50", f"run.dir={tmp_path / 'D'}"),
        timeout=START_SECS,
    )
    result = result_of(tmp_path / "D")
    assert (result["status"], result["global_step"], result["workers"]) == ("done", 50, 3), said
    assert result["strategy"] == "multi_worker_mirrored"


def test_a_program_is_the_same_under_srun(slurm: SlurmSystem, tmp_path: Path) -> None:
    program = tmp_path / "mine.py"
    program.write_text(
        "import user_code\n"
        "import kdist\n"
        f"trainer = kdist.Trainer(user_code.build, cluster='1ps2w', run_dir={str(tmp_path / 'D')!r})\n"
        "trainer.fit(**user_code.data(), steps=50)\n"
        "print('ENDED', flush=True)\n"
    )
    said = slurm.run("srun", "--ntasks=3", "python", str(program), timeout=START_SECS)
    # Every process goes on after fit.
    assert said.count("ENDED") == 3
    assert result_of(tmp_path / "D")["global_step"] == 50


def test_a_node_that_does_not_come_is_named_and_the_job_ends(slurm: SlurmSystem, tmp_path: Path) -> None:
    # One of three processes is no task of the run.
    alone = f"[ $SLURM_PROCID = 2 ] || exec python -m kdist {' '.join(MINE)} cluster=1ps2w cluster.start_timeout=20 "
    ended = slurm.attempt(
        "srun", "--ntasks=3", "--nodes=3", "bash", "-c", f"{alone} run.dir={tmp_path / 'D'}", timeout=START_SECS
    )
    assert ended.returncode == 75, ended.stdout
    assert "did not respond within 20 s (cluster.start_timeout): nothing listens at host" in ended.stdout
    assert "kdist: error: ps:0 (host" in ended.stdout


def test_a_sweep_is_a_job_array(slurm: SlurmSystem, tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    said = slurm.attempt(
        *("python", "-m", "kdist", "-m", *MINE, "cluster=1ps1w", "train.steps=50", "optimizer.learning_rate=0.1,0.01"),
        *("hydra/launcher=submitit_slurm", "hydra.launcher.timeout_min=10", f"run.dir={folder}"),
        timeout=2 * START_SECS,
    )
    assert said.returncode == 0, said.stdout
    for trial in ("0", "1"):
        result = result_of(folder / trial)
        assert (result["status"], result["global_step"], result["cluster"]) == ("done", 50, "1ps1w")
    # One array, whose jobs are numbered.
    jobs = {path.name for path in (folder / ".submitit").iterdir() if re.fullmatch(r"\d+_\d+", path.name)}
    assert {job.partition("_")[2] for job in jobs} == {"0", "1"}
    assert len({job.partition("_")[0] for job in jobs}) == 1
    assert "sweep | 2 trials" in said.stdout


def test_ports_that_slurm_reserves_are_used(tmp_path: Path) -> None:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    folder = tmp_path / "slurm"
    with Network(3, tmp_path) as network, SlurmSystem(network, folder, reserves_ports=True) as system:
        said = system.run(
            *("srun", "--ntasks=3", "--nodes=2", "python", "-m", "kdist", *MINE, "cluster=1ps2w", "train.steps=20"),
            timeout=START_SECS,
        )
    found = re.findall(r"^task  \| \S+ +\| host\d:(\d+)", said, re.MULTILINE)
    assert len(found) == 3, said
    assert all(12000 <= int(port) <= 12999 for port in found)
