"""The manifests as `kubectl kustomize` builds them, held against the schemas of Kubernetes."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

import pods
import pytest
import yaml

pytestmark = pytest.mark.long

_VERSION = "1.31"


def built(variant: str) -> list[dict[str, Any]]:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    done = subprocess.run(
        ["kubectl", "kustomize", str(pods.KUBERNETES / variant)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return list(yaml.safe_load_all(done.stdout))


@pytest.mark.parametrize("variant", ["base", "object-storage", "tfjob"])
def test_manifests_satisfy_the_schemas(variant: str) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    checked = [each for each in built(variant) if each["kind"] != "TFJob"]
    assert len(checked) >= 2
    for manifest in checked:
        validate.validate(manifest, _VERSION, strict=True)
    with pytest.raises(validate.ValidationError):
        validate.validate({**checked[0], "specs": {}}, _VERSION, strict=True)


def test_what_kustomize_builds_is_what_the_quick_tests_check() -> None:
    assert [(pod.name, pod.arguments, pod.variables, pod.spec["containers"][0]["env"]) for pod in _by_name("base")] == [
        (pod.name, pod.arguments, pod.variables, pod.spec["containers"][0]["env"])
        for pod in sorted(pods.pods_of(pods.base()), key=lambda pod: pod.name)
    ]


def test_object_storage_needs_no_claim() -> None:
    manifests = built("object-storage")
    assert not pods.of_kind("PersistentVolumeClaim", manifests)
    assert not pods.of_kind("Deployment", manifests)
    for pod in _by_name("object-storage"):
        assert "run.dir=s3://my-bucket/train" in pod.arguments
        assert "run.dir=/runs/train" not in pod.arguments
        assert [volume["name"] for volume in pod.spec["volumes"]] == ["tmp"]
        assert [mount["name"] for mount in pod.spec["containers"][0]["volumeMounts"]] == ["tmp"]


def _by_name(variant: str) -> list[pods.Pod]:
    return sorted(pods.pods_of(built(variant)), key=lambda pod: pod.name)
