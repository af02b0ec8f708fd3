"""The admission policy at a real API server: open for everyone, closed for sharing pods without a quota."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import kubernetes
import policy_pods as pods
import pytest
from admitted import DRY, accepted, attach, submit
from harness import Cluster, ClusterError, wait_for
from kai import Kai
from product import CHART, STATE, Product, merged, tenant, wait_running, webhook_away

from isolator import names

SAID = "this pod shares a GPU without a memory quota: "
LACKS = "container main lacks its library, preload file, cache folder, limit"
INJECTED = f"{names.RELEASE}-injected"
TEMPLATE = "templates/webhook/admissionpolicy.yaml"

# ---- the policy alone, on pods as the webhook would leave them --------------------------------------


class Asked:
    """One connection to the API server: a test asks a hundred times."""

    def __init__(self, client: kubernetes.client.ApiClient) -> None:
        self._core = kubernetes.client.CoreV1Api(client)

    def refusal(self, pod: dict[str, Any], rule: str) -> str:
        """What a dry run is refused with in the namespace of a rule; empty where it is let in."""
        try:
            self._core.create_namespaced_pod(
                f"policy-{rule}", pods.ready(pod), dry_run="All", _preload_content=False
            )
        except kubernetes.client.ApiException as error:
            return str(json.loads(error.body)["message"])
        return ""


def documents(cluster: Cluster) -> Iterator[dict[str, Any] | str]:
    """A policy for each rule, as the chart renders it, and what the pods need."""
    for rule in pods.RULES:
        words = [rule, str(CHART), "--values=-", "--kube-version=1.35.0", f"--show-only={TEMPLATE}"]
        yield cluster.helm("template", *words, input=json.dumps(pods.values(rule)))
        metadata = {"name": f"policy-{rule}", "labels": {"policy": rule}}
        yield {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}
    for name in pods.SANDBOXES:
        node = {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": name}}
        yield {**node, "handler": "runc"}


@pytest.fixture(scope="module")
def asked(cluster: Cluster) -> Iterator[Asked]:
    """Each rule's policy in force in a namespace of its own."""
    made = list(documents(cluster))
    for each in made:
        cluster.apply(each)
    for rule in pods.RULES:
        cluster.wait_account(f"policy-{rule}")
    try:
        with cluster.client() as client:
            asked = Asked(client)
            for rule in pods.RULES:
                refused = lambda rule=rule: SAID in asked.refusal(pods.bare(), rule)  # noqa: E731
                wait_for(refused, 30, f"the policy {rule} to be in force")
            yield asked
    finally:
        for each in made:
            text = each if isinstance(each, str) else json.dumps(each)
            cluster.kubectl("delete", "--ignore-not-found", "--wait=false", "-f=-", input=text)


def test_what_the_webhook_makes_comes_in(asked: Asked) -> None:
    """A6: each row of the webhook's table, in KAI's modes and both orders, under the values that made it;
    also pods of a hundred containers and of thousands of variables."""
    every = [*pods.decided(), *pods.others()]
    assert len(every) > 70
    assert {what: said for what, rule, pod in every if (said := asked.refusal(pod, rule))} == {}


def test_what_the_webhook_never_makes_stays_out(asked: Asked) -> None:
    """A6: no injection, a part of it, a forged or a covered one: each is refused for its own reason."""
    every = list(pods.forged())
    assert len(every) > 40
    told = {what: (asked.refusal(pod, "usual"), word) for what, pod, word in every}
    assert {what: said for what, (said, word) in told.items() if SAID not in said or word not in said} == {}
    closed = {what: asked.refusal(pod, "open") for what, pod in pods.opting_out()}
    assert all(SAID in said for said in closed.values()), closed
    assert {what: said for what, pod in pods.opting_out() if (said := asked.refusal(pod, "usual"))} == {}


def test_expressions_are_of_the_right_types(cluster: Cluster, asked: Asked) -> None:
    """The API server's type checker has nothing to say about any of them."""
    found = cluster.get("validatingadmissionpolicies")["items"]
    ours = [item for item in found if item["metadata"]["name"].partition("-")[0] in pods.RULES]
    assert len(ours) == 2 * len(pods.RULES)
    for item in ours:
        assert item["status"]["observedGeneration"] == item["metadata"]["generation"]
        assert not item["status"]["typeChecking"].get("expressionWarnings")


# ---- the release with Ignore and the policy ---------------------------------------------------------


@pytest.fixture(scope="module")
def guarded(product: Product, kai: Kai) -> Iterator[Cluster]:
    """The shared release with failurePolicy Ignore and the policy; as before afterwards."""
    on = {"webhook": {"failurePolicy": "Ignore", "replicaCount": 1, "admissionPolicy": {"enabled": True}}}
    product.install(merged(product.values, on))
    try:
        yield product.cluster
    finally:
        product.install(product.values)


def replicated(name: str) -> dict[str, Any]:
    """A Deployment of one tenant."""
    pod = tenant(name)
    labels = {**pod["metadata"]["labels"], "app": name}
    template = {"metadata": {**pod["metadata"], "labels": labels}, "spec": pod["spec"]}
    del template["metadata"]["name"], template["spec"]["terminationGracePeriodSeconds"]
    selector = {"matchLabels": {"app": name}}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name},
        "spec": {"replicas": 1, "selector": selector, "template": template},
    }


def forged_tenant() -> dict[str, Any]:
    """A tenant that brings volumes and mounts of our names, and says that it is injected."""
    volumes = [{"name": name, "emptyDir": {}} for name in (names.VOLUME_VGPU, names.VOLUME_PRELOAD)]
    mounts = [
        {"name": names.VOLUME_VGPU, "mountPath": f"{pods.MOUNT}/{names.LIBRARY_FILE}", "readOnly": True}
    ]
    status = {"gpu-memory": "4096", names.ANNOTATION_STATUS: names.STATUS_INJECTED}
    return tenant("p", status, volumes=volumes, container={"volumeMounts": mounts})


def test_nothing_changes_while_the_webhook_is_there(guarded: Cluster, namespace: str) -> None:
    """Tenants, forging ones too, come in injected; opt-outs and others as ever; late words do not."""
    for pod in (tenant("p"), forged_tenant()):
        assert accepted(guarded, pod, namespace, DRY).injected() == ["main"]
    out = tenant("p", {"gpu-memory": "4096", names.ANNOTATION_INJECT: "FALSE"})
    for pod in (out, tenant("p", {})):
        assert accepted(guarded, pod, namespace, DRY).injected() == []
    idle = {"nvidia.com/container.x": ""}  # shares nothing, and must not pass for a pod that does
    gated = tenant("late", idle, schedulingGates=[{"name": "example.com/gate"}])
    accepted(guarded, gated, namespace)
    note = ["annotate", "pod", "late", f"--namespace={namespace}"]
    guarded.kubectl(*note, "team=a")
    with pytest.raises(ClusterError, match="annotations that share a GPU come too late"):
        guarded.kubectl(*note, "gpu-memory=4096")
    guarded.delete("pod", "late", namespace=namespace)


def test_closed_for_sharing_pods_alone_while_it_is_away(guarded: Cluster, namespace: str, kai: Kai) -> None:
    """A6: with Ignore and no webhook a sharing pod is refused in one line, everyone else is served; debug
    containers get no volume of ours; what a controller owes comes once the webhook is back."""
    accepted(guarded, tenant("running"), namespace)
    wait_running(guarded, "running", namespace=namespace, kai=kai)
    with webhook_away(guarded):
        for pod in (tenant("p"), forged_tenant()):
            answer = submit(guarded, pod, namespace, DRY)
            assert not answer.pod and SAID in answer.said and "kubectl -n" in answer.said
            assert len(answer.said.strip().splitlines()) == 1, answer.said
        assert LACKS in submit(guarded, tenant("p"), namespace, DRY).said
        served(guarded, namespace)
        accepted(guarded, replicated("owed"), namespace)
        wait_for(lambda: told_of(guarded, namespace), 30, "the event of the refused replica")
        debugged(guarded, namespace)
        warned(guarded, namespace)
    guarded.wait_rollout("deployment/owed", namespace=namespace)


def served(cluster: Cluster, namespace: str) -> None:
    """Pods that are none of ours, or are let alone."""
    ignore = {names.LABEL_WEBHOOK: names.LABEL_WEBHOOK_IGNORE}
    off = {"env": [{"name": names.ENV_DISABLE_CONTROL, "value": "1"}]}
    for pod in (
        tenant("p", {}),
        tenant("p", labels=ignore),
        tenant("p", container=off),
        tenant("p", schedulerName="default-scheduler"),
    ):
        accepted(cluster, pod, namespace, DRY)
    accepted(cluster, tenant("p"), names.RELEASE, DRY)


def told_of(cluster: Cluster, namespace: str) -> bool:
    """Whether a controller's event shows why its pod is not made."""
    found = cluster.get("events", "--field-selector=reason=FailedCreate", namespace=namespace)["items"]
    return any(LACKS in each["message"] and "create the pod again" in each["message"] for each in found)


def debugged(cluster: Cluster, namespace: str) -> None:
    """A debug container with all tenants' folders, or KAI's devices, is refused; a plain one comes in."""
    mounts = [{"name": names.VOLUME_CONTAINERS, "mountPath": "/caches"}]
    with pytest.raises(ClusterError, match="mounts a volume of the GPU memory limit"):
        attach(cluster, "running", namespace, "peeks", volumeMounts=mounts)
    prefix = cluster.get("pod/running", namespace=namespace)["metadata"]["annotations"][
        names.ANNOTATION_CONFIGMAP
    ]
    devices = [{"configMapRef": {"name": f"{prefix}-0-evar"}}]
    with pytest.raises(ClusterError, match="takes its GPU from KAI"):
        attach(cluster, "running", namespace, "takes", envFrom=devices)
    attach(cluster, "running", namespace, "plain", volumeMounts=[{"name": "simgpu", "mountPath": STATE}])


def warned(cluster: Cluster, namespace: str) -> None:
    """With Warn the pod comes in and its author reads the same sentence."""
    patch = json.dumps({"spec": {"validationActions": ["Warn", "Audit"]}})
    words = ["patch", f"validatingadmissionpolicybinding/{INJECTED}", "--type=merge", "--patch", patch]
    cluster.kubectl(*words)

    def warns() -> bool:
        answer = submit(cluster, tenant("p"), namespace, DRY)
        assert SAID in answer.said
        return bool(answer.pod)

    wait_for(warns, 20, "the API server to take the binding in")
    cluster.kubectl(*words[:-1], json.dumps({"spec": {"validationActions": ["Deny"]}}))
