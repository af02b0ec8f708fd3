"""Which pods reach the webhook at all: the conditions of the configuration, judged by a real API server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from admitted import DRY, Calls, accepted, attach, submit
from harness import Cluster, ClusterError
from kai import Kai
from kai_objects import reservation_pod
from product import NAMESPACE, Product, tenant, tenant_image, wait_running

from isolator import names

MEMORY = {"gpu-memory": "4096"}
NVFRACTIONS = {"nvidia.com/container.main.gpu-memory.request": "4096Mi"}
FIRST, LIMITED = ("inject", "first-pass"), ("inject", "limited")
TWICE = {FIRST: 1, LIMITED: 1}


def default_pod(annotations: dict[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    """A pod of the default scheduler; without annotations the field is absent, not empty."""
    pod = tenant("default", annotations or {}, **{"schedulerName": "default-scheduler", **spec})
    if annotations is None:
        del pod["metadata"]["annotations"]
    return pod


@pytest.fixture(scope="module")
def reserved(cluster: Cluster) -> Iterator[str]:
    """KAI's namespace of reservation pods."""
    metadata = {"name": names.RESERVATION_NAMESPACE}
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
    cluster.wait_account(names.RESERVATION_NAMESPACE)
    yield names.RESERVATION_NAMESPACE
    cluster.kubectl("delete", "namespace", names.RESERVATION_NAMESPACE)


@pytest.fixture
def calls(cluster: Cluster, product: Product, kai: Kai) -> Calls:
    """Counts from here on."""
    return Calls(cluster)


def test_ten_pods(cluster: Cluster, calls: Calls, namespace: str) -> None:
    """B072: of ten pods those of KAI's scheduler with a share reach the webhook, twice each, and no other;
    a pod that opts out by annotation is one of them, because its author is told so."""
    plain = tenant("plain", {})
    del plain["metadata"]["annotations"]
    optout = {names.ANNOTATION_INJECT: "false"}
    skipped = {("skip", "opt-out-annotation"): 2}
    table: dict[str, tuple[dict[str, Any], tuple[int, dict[Any, int]]]] = {
        "memory": (tenant("p", MEMORY), (2, TWICE)),
        "fraction": (tenant("p", {"gpu-fraction": "0.5"}), (2, TWICE)),
        "nvfractions": (tenant("p", NVFRACTIONS), (2, {("skip", "nvfractions"): 1, LIMITED: 1})),
        "opted out by annotation": (tenant("p", {**MEMORY, **optout}), (2, skipped)),
        "opted out by label": (tenant("p", MEMORY, labels={names.LABEL_WEBHOOK: "ignore"}), (0, {})),
        "no annotations": (plain, (0, {})),
        "other annotations": (tenant("p", {"team": "a", "gpu": "1"}), (0, {})),
        "default scheduler, no annotations": (default_pod(), (0, {})),
        "default scheduler, gpu-memory": (default_pod(MEMORY), (0, {})),
        "volcano, gpu-memory": (default_pod(MEMORY, schedulerName="volcano"), (0, {})),
    }
    seen = {}
    for case, (pod, _) in table.items():
        accepted(cluster, pod, namespace, DRY)
        seen[case] = calls.look()
    assert seen == {case: expected for case, (_, expected) in table.items()}


def test_namespaces_left_out(cluster: Cluster, calls: Calls, namespace: str, reserved: str) -> None:
    """B070: in kube-system, KAI's, the reservation and our own namespace, and in one labelled `ignore`, not
    even a pod that asks for a share reaches the webhook; KAI's reservation pods come through as they are."""
    cluster.kubectl("label", "namespace", namespace, f"{names.LABEL_WEBHOOK}=ignore")
    for place in ("kube-system", names.KAI_NAMESPACE, reserved, NAMESPACE, namespace):
        answer = accepted(cluster, tenant("left-out", MEMORY), place, DRY)
        assert answer.ours() == [], place
        assert answer.status is None, place
    pod = reservation_pod("n1", "3f2a9c70-group", tenant_image())
    answer = accepted(cluster, pod, reserved)
    assert answer.ours() == []
    assert [c["name"] for c in answer.pod["spec"]["containers"]] == ["resource-reservation"]
    assert calls.look() == (0, {})


def test_pod_of_a_deployment(cluster: Cluster, calls: Calls, namespace: str) -> None:
    """A controller's pod has no name and no namespace yet when it is judged: injected like any other; the
    Deployment, its changes and the pod's later updates are no matter of ours."""
    labels = {"app": "shared"}
    template = tenant("unused", MEMORY, labels=labels)
    del template["metadata"]["name"]
    spec = {"selector": {"matchLabels": labels}, "template": {k: template[k] for k in ("metadata", "spec")}}
    cluster.apply(
        {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "shared"}, "spec": spec},
        namespace,
    )
    cluster.wait_rollout("deployment/shared", namespace=namespace, timeout=180)
    pod = cluster.get("pods", "--selector=app=shared", namespace=namespace)["items"][0]
    assert pod["metadata"]["generateName"].startswith("shared-")
    assert pod["metadata"]["annotations"][names.ANNOTATION_STATUS] == "injected"
    assert calls.look() == (2, TWICE)
    name = pod["metadata"]["name"]
    cluster.kubectl("label", "pod", name, f"--namespace={namespace}", "step=updated")
    cluster.kubectl("annotate", "pod", name, f"--namespace={namespace}", "gpu-memory=9000", "--overwrite")
    cluster.kubectl("label", "deployment", "shared", f"--namespace={namespace}", "step=updated")
    assert calls.look() == (0, {})


def test_ephemeral_containers(cluster: Cluster, calls: Calls, namespace: str) -> None:
    """A debug container of a pod of others is no call; in an injected pod it is one, and only one that mounts
    our volumes, where it would see every tenant's folder, is denied."""
    pods = tenant("plain", {}), tenant("share", MEMORY)
    cluster.apply(list(pods), namespace)
    wait_running(cluster, "plain", "share", namespace=namespace)
    calls.look()
    attach(cluster, "plain", namespace, "look")
    assert calls.look() == (0, {})
    attach(cluster, "share", namespace, "look")
    assert calls.look() == (1, {("skip", "not-fraction"): 1})
    peek = {"name": names.VOLUME_CONTAINERS, "mountPath": "/every-tenant"}
    with pytest.raises(ClusterError, match="mounts a volume of the GPU memory limit"):
        attach(cluster, "share", namespace, "peek", volumeMounts=[peek])
    assert calls.look() == (1, {("deny", "ephemeral-mount"): 1})


def test_dry_run(cluster: Cluster, calls: Calls, namespace: str) -> None:
    """dryRun=All shows the pod as it would be, and changes nothing: no pod, no Secret, no configuration."""

    def versions() -> list[str]:
        secrets = cluster.get("secrets", namespace=NAMESPACE)["items"]
        configuration = cluster.get("mutatingwebhookconfiguration", names.WEBHOOK_CONFIGURATION)
        return [each["metadata"]["resourceVersion"] for each in (*secrets, configuration)]

    before = versions()
    answer = accepted(cluster, tenant("dry", MEMORY), namespace, DRY)
    assert answer.injected() == ["main"]
    assert answer.status == "injected"
    assert calls.look() == (2, TWICE)
    assert submit(cluster, tenant("dry", MEMORY), namespace, DRY).injected() == ["main"]
    assert cluster.get("pods", namespace=namespace)["items"] == []
    assert versions() == before


def test_malformed_share_is_kais_to_refuse(cluster: Cluster, calls: Calls, namespace: str) -> None:
    """An empty annotation still makes a share: one call, our warning, and KAI's refusal."""
    answer = submit(cluster, tenant("empty", {"gpu-memory": ""}), namespace, DRY)
    assert not answer.pod
    assert "admission.kai-scheduler.svc" in answer.said
    assert calls.look() == (1, {FIRST: 1})
