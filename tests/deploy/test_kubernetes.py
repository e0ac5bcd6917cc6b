"""The manifests as `kubectl kustomize` builds them, held against the schemas of Kubernetes."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pods
import pytest
import yaml
from commands import kdist
from helpers import REPO

from kdist.cluster.resolve import membership_of
from kdist.config.schema import ClusterConfig

pytestmark = pytest.mark.long

_VERSION = "1.31"
OWN_IMAGE = REPO / "deploy/own-image"
FOLDERS = [*(pods.KUBERNETES / name for name in ("base", "more-workers", "object-storage", "gpu", "tfjob")), OWN_IMAGE]


def built(folder: Path) -> list[dict[str, Any]]:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    done = subprocess.run(
        ["kubectl", "kustomize", str(folder)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return list(yaml.safe_load_all(done.stdout))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_manifests_satisfy_the_schemas(folder: Path) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    checked = [each for each in built(folder) if each["kind"] != "TFJob"]
    assert len(checked) >= 2
    for manifest in checked:
        validate.validate(manifest, _VERSION, strict=True)
    with pytest.raises(validate.ValidationError):
        validate.validate({**checked[0], "specs": {}}, _VERSION, strict=True)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_prefix_makes_another_run_of_it(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(REPO / "deploy", tmp_path / "deploy")
    copy = tmp_path / "deploy" / folder.relative_to(REPO / "deploy")
    second = copy.parent / "second"
    second.mkdir()
    (second / "kustomization.yaml").write_text(f"resources: [../{copy.name}]\nnamePrefix: second-\n")
    # No name of the first run is left: not in an address, a selector or the name of a claim. The secret is the user's,
    # and a folder on another claim may have the same name.
    text = re.sub(r"train-storage|/runs/train|train\.epochs|my-training", "", yaml.safe_dump_all(built(second)))
    names = re.findall(r"[\w-]*train\b[\w-]*", text)
    assert len(names) > 3
    assert [name for name in names if not name.startswith("second-")] == []


def test_what_kustomize_builds_is_what_the_quick_tests_check() -> None:
    found = built(pods.KUBERNETES / "base")
    assert [(pod.name, pod.command, pod.variables) for pod in pods.pods_of(found)] == [
        (pod.name, pod.command, pod.variables) for pod in pods.pods_of(pods.base())
    ]


def test_object_storage_needs_no_claim() -> None:
    manifests = built(pods.KUBERNETES / "object-storage")
    assert not pods.of_kind("PersistentVolumeClaim", manifests)
    assert not pods.of_kind("Deployment", manifests)
    assert len(pods.of_kind("NetworkPolicy", manifests)) == 1
    for pod in pods.pods_of(manifests):
        assert "run.dir=s3://my-bucket/train" in pod.arguments
        assert "run.dir=/runs/train" not in pod.arguments
        assert [volume["name"] for volume in pod.spec["volumes"]] == ["tmp"]
        assert [mount["name"] for mount in pod.spec["containers"][0]["volumeMounts"]] == ["tmp"]


def test_every_pod_with_a_gpu_is_a_worker() -> None:
    every = pods.pods_of(built(pods.KUBERNETES / "gpu"))
    for pod in every:
        config = ClusterConfig("4w", allow_unprotected_network=True)
        membership = membership_of(config, pods.environment_of(pod))
        assert membership is not None
        assert membership.spec.address(membership.task) == f"{pod.name}:2222"
        assert membership.task.job == "worker"
        assert "cluster=4w" in pod.arguments
        assert pod.spec["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert len(every) == 4


def test_an_image_of_ones_own_trains_its_model(tmp_path: Path) -> None:
    (chief, *_) = pods.pods_of(built(OWN_IMAGE))
    shutil.copy(OWN_IMAGE / "my_code.py", tmp_path)
    given = [text for text in chief.arguments if text.startswith(("model.", "data.", "run.trust", "train."))]
    assert len(given) == 4
    done = kdist(*given, "run.dir=D", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "epochs=5 done" in done.stdout
