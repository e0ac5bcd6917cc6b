"""The manifests in `deploy/kubernetes`, as far as they can be checked without Kubernetes and its tools."""

from __future__ import annotations

from typing import Any

import pods
import pytest
import yaml

from kdist.cluster.resolve import membership_of
from kdist.cluster.spec import ClusterShape
from kdist.config.schema import ClusterConfig


def value_of(key: str, arguments: list[str]) -> str:
    (found,) = [text.partition("=")[2] for text in arguments if text.startswith(f"{key}=")]
    return found


def test_the_tasks_of_all_pods_make_the_cluster_that_the_command_asks_for() -> None:
    every = pods.pods_of(pods.base())
    memberships = {}
    for pod in every:
        shape = value_of("cluster", pod.arguments)
        config = ClusterConfig(shape, allow_unprotected_network=True)
        membership = membership_of(config, pods.environment_of(pod))
        assert membership is not None
        memberships[pod.name] = membership
        # The pod that has the address is the task that it takes itself for.
        assert membership.spec.address(membership.task) == f"{pod.name}:2222"
    (spec,) = {membership.spec for membership in memberships.values()}
    assert spec.shape == ClusterShape.parse(shape)
    assert {membership.task for membership in memberships.values()} == set(spec.shape.tasks)
    assert [pod.name for pod in every if memberships[pod.name].is_chief] == ["train-0.train"]


def test_the_chief_has_time_to_save() -> None:
    for pod in pods.pods_of(pods.base()):
        assert pod.spec["terminationGracePeriodSeconds"] >= float(value_of("run.grace_secs", pod.arguments)) + 10


@pytest.mark.parametrize(("code", "is_replaced"), [(0, False), (75, True), (143, True), (137, True)])
def test_a_pod_is_replaced_where_a_retry_helps(code: int, is_replaced: bool) -> None:
    for pod in pods.pods_of(pods.base()):
        assert pod.is_replaced(code) == is_replaced
        # The API refuses a podFailurePolicy with another restartPolicy.
        assert pod.spec["restartPolicy"] == "Never"
        assert pod.job["spec"]["podReplacementPolicy"] == "Failed"


@pytest.mark.parametrize("code", [1, 2])
def test_a_run_that_would_fail_again_ends_all_its_pods(code: int) -> None:
    every = pods.pods_of(pods.base())
    # The servers of a run whose chief has failed would wait for the next one, for hours.
    assert len({id(pod.job) for pod in every}) == 1
    for pod in every:
        with pytest.raises(RuntimeError, match="the Job fails"):
            pod.is_replaced(code)


def test_the_service_names_pods_before_they_are_ready_and_nobody_else_reaches_them() -> None:
    manifests = pods.base()
    (service,) = pods.of_kind("Service", manifests)
    assert (service["spec"]["clusterIP"], service["spec"]["publishNotReadyAddresses"]) == ("None", True)
    (job,) = pods.of_kind("Job", manifests)
    # The Job controller labels its pods with its name.
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    policy, _ = pods.of_kind("NetworkPolicy", manifests)
    own = {"matchLabels": service["spec"]["selector"]}
    assert policy["spec"]["podSelector"] == own
    assert policy["spec"]["ingress"] == [{"from": [{"podSelector": own}]}]


def _containers(manifests: list[Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    specs = [
        each["spec"]["template"]["spec"] for kind in ("Job", "Deployment") for each in pods.of_kind(kind, manifests)
    ]
    for job in pods.of_kind("TFJob", manifests):
        specs += [replica["template"]["spec"] for replica in job["spec"]["tfReplicaSpecs"].values()]
    return [(spec, container) for spec in specs for container in spec["containers"]]


@pytest.mark.parametrize("variant", ["base", "more-workers", "tfjob"])
def test_no_pod_has_more_rights_than_it_needs(variant: str) -> None:
    found = _containers(pods.documents(pods.KUBERNETES / variant))
    assert found
    for spec, container in found:
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["automountServiceAccountToken"] is False
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert container["resources"]["requests"]
        assert container["resources"]["limits"]["memory"]


def test_the_variant_for_kubeflow_has_the_same_command_and_restarts_after_75() -> None:
    (job,) = pods.of_kind("TFJob", pods.documents(pods.KUBERNETES / "tfjob"))
    replicas = job["spec"]["tfReplicaSpecs"]
    shape = ClusterShape.parse(value_of("cluster", _containers([job])[0][1]["args"]))
    assert {name: each["replicas"] for name, each in replicas.items()} == {
        "Worker": shape.num_workers,
        "PS": shape.num_ps,
    }
    for replica in replicas.values():
        # ExitCode takes 75 for final.
        assert replica["restartPolicy"] == "OnFailure"
        (container,) = replica["template"]["spec"]["containers"]
        assert container["name"] == "tensorflow"
        assert container["args"] == pods.pods_of(pods.base())[0].arguments


def test_workers_that_join_do_what_the_job_does_and_are_let_in() -> None:
    manifests = pods.base()
    (workers,) = pods.of_kind("Deployment", pods.documents(pods.KUBERNETES / "more-workers"))
    spec = workers["spec"]["template"]["spec"]
    (job,), chief = pods.of_kind("Job", manifests), pods.pods_of(manifests)[0]
    (container,) = spec["containers"]
    given, own = set(chief.arguments), set(container["args"])
    assert own - given == {"cluster=hosts", "cluster.job=worker", "cluster.chief=$(JOB)-0.$(JOB):2222"}
    # Of the chief, and of pods that wait for the next one.
    assert {text.partition("=")[0] for text in given - own} == {"cluster", "run.dir", "cluster.wait_for_next_chief"}
    (label,) = pods.of_kind("Service", manifests)[0]["spec"]["selector"].items()
    assert label in workers["spec"]["template"]["metadata"]["labels"].items()
    (variable,) = container["env"]
    assert variable["valueFrom"]["fieldRef"]["fieldPath"] == f"metadata.labels['{label[0]}']"
    assert chief.name == f"{label[1]}-0.{label[1]}"
    of_job = job["spec"]["template"]["spec"]
    assert spec["terminationGracePeriodSeconds"] == of_job["terminationGracePeriodSeconds"]
    assert container["resources"] == of_job["containers"][0]["resources"]


def test_what_variants_share_is_the_same() -> None:
    base, tfjob = pods.KUBERNETES / "base", pods.KUBERNETES / "tfjob"
    assert (base / "run-dir.yaml").read_text() == (tfjob / "run-dir.yaml").read_text()
    # Both select pods by the label that their controller gives them.
    first, _ = pods.documents(base / "network-policy.yaml")
    assert yaml.safe_dump(first).replace("batch.kubernetes.io", "training.kubeflow.org") == yaml.safe_dump(
        yaml.safe_load((tfjob / "network-policy.yaml").read_text())
    )
