"""What Kubernetes makes of the manifests in `deploy/kubernetes`, without Kubernetes."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from helpers import REPO

KUBERNETES = REPO / "deploy/kubernetes"

Manifest = dict[str, Any]


@dataclass(frozen=True)
class Pod:
    """One pod of a Job.

    Attributes:
        name: by which the others find it.
        arguments: of its container, after those of the image.
        variables: of its container, as the kubelet resolves them.
        spec: what the manifest says about it.
        job: the Job.
    """

    name: str
    arguments: list[str]
    variables: dict[str, str]
    spec: Manifest
    job: Manifest

    def is_replaced(self, code: int) -> bool:
        """Whether the Job starts another pod in its place after that exit code.

        Raises:
            RuntimeError: the Job fails.
        """
        for rule in self.job["spec"]["podFailurePolicy"]["rules"]:
            if rule["action"] == "FailJob" and code in rule["onExitCodes"]["values"]:
                raise RuntimeError(f"{self.name} ended with {code}, and the Job fails")
        return code != 0


def documents(path: Path) -> list[Manifest]:
    """The objects of a file, or of all files of a folder."""
    files = sorted(path.glob("*.yaml")) if path.is_dir() else [path]
    return [document for file in files for document in yaml.safe_load_all(file.read_text())]


def of_kind(kind: str, manifests: list[Manifest]) -> list[Manifest]:
    return [each for each in manifests if isinstance(each, dict) and each.get("kind") == kind]


def pods_of(manifests: list[Manifest]) -> list[Pod]:
    """The pods of all Jobs."""
    return [
        _pod(job, index, manifests) for job in of_kind("Job", manifests) for index in range(job["spec"]["completions"])
    ]


def base() -> list[Manifest]:
    """`deploy/kubernetes/base` as kustomize puts it together, without names of images and labels."""
    folder = KUBERNETES / "base"
    manifests = [each for each in documents(folder) if isinstance(each, dict) and each["kind"] != "Kustomization"]
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    for job in of_kind("Job", manifests):
        for patch in kustomization["patches"]:
            for change in yaml.safe_load((folder / patch["path"]).read_text()):
                assert (change["op"], change["path"]) == ("add", "/spec/template/spec/containers/0/args")
                job["spec"]["template"]["spec"]["containers"][0]["args"] = change["value"]
    for given in kustomization["configMapGenerator"]:
        data = {name: (folder / name).read_text() for name in given["files"]}
        manifests.append({"kind": "ConfigMap", "metadata": {"name": given["name"]}, "data": data})
    return manifests


def _pod(job: Manifest, index: int, manifests: list[Manifest]) -> Pod:
    spec = job["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    known: dict[str, str] = {}
    for variable in container["env"]:
        known[variable["name"]] = _value(variable, index, manifests, known)
    # The host name of a pod of an Indexed Job, and the service that it names.
    name = f"{job['metadata']['name']}-{index}.{spec['subdomain']}"
    return Pod(name, container["args"], known, spec, job)


def _value(variable: Manifest, index: int, manifests: list[Manifest], known: dict[str, str]) -> str:
    if "value" in variable:
        # A name that is not known yet stays as it is.
        return re.sub(r"\$\((\w+)\)", lambda found: known.get(found[1], found[0]), variable["value"])
    source = variable["valueFrom"]
    if "fieldRef" in source:
        assert source["fieldRef"]["fieldPath"] == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
        return str(index)
    key = source["configMapKeyRef"]
    (config,) = [each for each in of_kind("ConfigMap", manifests) if each["metadata"]["name"] == key["name"]]
    return config["data"][key["key"]]


def cluster_of(pod: Pod) -> dict[str, list[str]]:
    """The addresses in the TF_CONFIG of a pod."""
    return json.loads(pod.variables["TF_CONFIG"])["cluster"]
