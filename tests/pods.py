"""Pods as Kubernetes makes them of the manifests in `deploy/kubernetes`, without Kubernetes."""

from __future__ import annotations

import os
import re
import subprocess
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
        command: of its container, with its arguments, which are also `arguments`; as the kubelet resolves them.
        variables: of its container, as the kubelet resolves them.
        spec: what the manifest says about it.
        job: the Job.
    """

    name: str
    command: list[str]
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
    return [_pod(job, index) for job in of_kind("Job", manifests) for index in range(job["spec"]["completions"])]


def base() -> list[Manifest]:
    """`deploy/kubernetes/base` as kustomize puts it together, without names of images and labels."""
    folder = KUBERNETES / "base"
    manifests = [each for each in documents(folder) if isinstance(each, dict) and "apiVersion" in each]
    (kustomization,) = of_kind("Kustomization", manifests)
    for job in of_kind("Job", manifests):
        for patch in kustomization["patches"]:
            for change in yaml.safe_load((folder / patch["path"]).read_text()):
                assert (change["op"], change["path"]) == ("add", "/spec/template/spec/containers/0/args")
                job["spec"]["template"]["spec"]["containers"][0]["args"] = change["value"]
    return [each for each in manifests if each is not kustomization]


def _pod(job: Manifest, index: int) -> Pod:
    spec, name = job["spec"]["template"]["spec"], job["metadata"]["name"]
    (container,) = spec["containers"]
    # The Job controller adds the index, after the others.
    known: dict[str, str] = {}
    for variable in container["env"]:
        known[variable["name"]] = _value(variable, name, known)
    known["JOB_COMPLETION_INDEX"] = str(index)
    command, arguments = ([_expanded(text, known) for text in container[key]] for key in ("command", "args"))
    # The host name of a pod of an Indexed Job, and the service that it names.
    return Pod(f"{name}-{index}.{spec['subdomain']}", [*command, *arguments], arguments, known, spec, job)


def _value(variable: Manifest, job: str, known: dict[str, str]) -> str:
    if "value" in variable:
        return _expanded(variable["value"], known)
    assert variable["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.labels['batch.kubernetes.io/job-name']"
    return job


def _expanded(text: str, known: dict[str, str]) -> str:
    # A name that is not known stays as it is.
    return re.sub(r"\$\((\w+)\)", lambda found: known.get(found[1], found[0]), text)


def environment_of(pod: Pod) -> dict[str, str]:
    """The variables with which a pod starts `python -m kdist`, once its shell has run."""
    shell, option, script, *_ = pod.command
    seen = script.replace("exec python", 'exec printf %s "$TF_CONFIG" #')
    done = subprocess.run([shell, option, seen], env={**pod.variables, "PATH": os.environ["PATH"]}, capture_output=True,
                          text=True, check=True, timeout=10)  # fmt: skip
    return {**pod.variables, "TF_CONFIG": done.stdout}
