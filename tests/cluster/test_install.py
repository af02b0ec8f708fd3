"""The chart's life with Helm 3 and 4, by KAI's installer script and by `helm template | kubectl apply`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import product as given
import pytest
from harness import Cluster, ClusterError, wait_for
from product import NAMESPACE, Product
from releases import KINDS, package, release, vacated

from isolator import names

IN = f"--namespace={NAMESPACE}"
WEBHOOK = f"{names.RELEASE}-webhook"
PASSING = ("events", "pods", "controllerrevisions", "endpointslices", "endpoints")
"""Kinds that come and go by themselves, a moment after what they belong to."""


@pytest.fixture(scope="module")
def vacant(product: Product) -> Iterator[Cluster]:
    """The cluster without the shared release; its nodes keep what was installed."""
    with vacated(product) as cluster:
        yield cluster


def image_flags() -> list[str]:
    return [f"--set=image.{key}={value}" for key, value in given.image_values()["image"].items()]


def script(cluster: Cluster, *flags: str, version: int) -> str:
    """KAI's installer script, word by word but for our image, and the rollout that it waits for (C2, C3)."""
    words = ["upgrade", "--install", names.RELEASE, str(package()), "-n", NAMESPACE, "--create-namespace"]
    words += ["--set", "monitor.enabled=true", "--wait", "--timeout", "5m"]
    said = cluster.helm(*words, *image_flags(), *flags, version=version)
    cluster.wait_rollout(f"deployment/{WEBHOOK}", namespace=NAMESPACE)
    return said


def objects(cluster: Cluster, *, namespaced: bool) -> set[str]:
    """The names of everything in our namespace, or of everything outside of namespaces."""
    listed = ["api-resources", "--verbs=list,delete", "--output=name", f"--namespaced={namespaced}".lower()]
    kinds = [kind for kind in cluster.kubectl(*listed).split() if kind.partition(".")[0] not in PASSING]
    there = [IN] if namespaced else []
    words = ["get", ",".join(kinds), "--output=name", "--ignore-not-found", *there]
    return set(cluster.kubectl(*words).split())


def policies(cluster: Cluster) -> set[str]:
    """The failure policies of our configuration, whose entries all know the CA."""
    entries = cluster.get(KINDS, names.WEBHOOK_CONFIGURATION)["webhooks"]
    assert all(entry["clientConfig"].get("caBundle") for entry in entries)
    return {entry["failurePolicy"] for entry in entries}


def check_nothing_left(cluster: Cluster) -> None:
    """But for the Secret that the webhook made, the namespace, and the library on the nodes."""
    left = {each for each in objects(cluster, namespaced=False) if names.RELEASE in each}
    assert left == {f"namespace/{NAMESPACE}"}
    there = objects(cluster, namespaced=True)
    assert there == {"configmap/kube-root-ca.crt", "serviceaccount/default", f"secret/{WEBHOOK}-tls"}
    for node in cluster.nodes.values():
        assert node.path(f"{names.DEFAULT_VGPU_MOUNT}/libvgpu.so").stat().st_size > 0


def test_uninstall_leaves_nothing(vacant: Cluster) -> None:
    """What Helm 4 installed, it takes away: nothing is left that could act, and the nodes keep the library
    for tenants that run."""
    check_nothing_left(vacant)


def test_life_of_a_release(vacant: Cluster) -> None:
    """KAI's script installs into nothing with Helm 3, also where no node is labelled and the monitor wants no
    pod; `helm test` passes, and fails without a webhook; an upgrade is rolled back; what Helm 3 installed
    Helm 4 upgrades, rolls back and removes."""
    cluster = vacant
    cluster.delete("namespace", NAMESPACE, timeout=120)
    cluster.label_gpu(None)
    try:
        script(cluster, version=3)
        monitor = cluster.get("daemonset", f"{names.RELEASE}-monitor", namespace=NAMESPACE)
        assert monitor["status"]["desiredNumberScheduled"] == 0
    finally:
        cluster.label_gpu(15360)
    assert policies(cluster) == {"Fail"}
    check_monitors_without_nvml(cluster)

    script(cluster, "--set=webhook.failurePolicy=Ignore", *reachable(cluster), version=3)
    assert policies(cluster) == {"Ignore"}
    check_helm_test(cluster)
    cluster.helm("rollback", names.RELEASE, "1", IN, "--wait", "--timeout=5m", version=3)
    assert policies(cluster) == {"Fail"}

    script(cluster, "--set=webhook.failurePolicy=Ignore", version=4)
    assert policies(cluster) == {"Ignore"}
    cluster.helm("rollback", names.RELEASE, "1", IN, "--wait", "--timeout=5m", version=4)
    assert policies(cluster) == {"Fail"}
    cluster.helm("uninstall", names.RELEASE, IN, "--wait", version=4)
    check_nothing_left(cluster)


def check_monitors_without_nvml(cluster: Cluster) -> None:
    """Nodes that are labelled later get a monitor that is ready without NVML, and says so."""

    def ready() -> bool:
        monitor = cluster.get("daemonset", f"{names.RELEASE}-monitor", namespace=NAMESPACE)["status"]
        return bool(monitor["desiredNumberScheduled"] == monitor["numberReady"] == len(cluster.nodes))

    wait_for(ready, 120, "the monitors", every=0.5)
    samples = given.metrics(cluster, "n1")
    assert given.value(samples, "kai_isolator_nvml_up") == 0
    assert given.value(samples, "kai_isolator_up") == 1


def reachable(cluster: Cluster) -> list[str]:
    """Values for `helm test` without DNS and kube-proxy: each name leads to one pod, at the port it has."""
    places = {names.COMPONENT_WEBHOOK: f"{WEBHOOK}.{NAMESPACE}.svc"}
    places[names.COMPONENT_MONITOR] = f"{names.RELEASE}-monitor.{NAMESPACE}.svc"
    aliases = [
        {"ip": given.component_pods(cluster, component)[0]["status"]["podIP"], "hostnames": [name]}
        for component, name in places.items()
    ]
    return ["--set=service.port=8443", f"--set-json=tests.hostAliases={json.dumps(aliases)}"]


def check_helm_test(cluster: Cluster) -> None:
    """It passes with both Helms, and does not in the same time when the webhook has no replica."""
    for version in (3, 4):
        assert "Succeeded" in cluster.helm("test", names.RELEASE, IN, "--timeout=60s", version=version)
    with given.webhook_away(cluster):
        with pytest.raises(ClusterError):
            cluster.helm("test", names.RELEASE, IN, "--timeout=10s")
        cluster.delete("pod", f"{names.RELEASE}-test", namespace=NAMESPACE)


# ---- without Helm in the cluster --------------------------------------------------------------------


def stripped(cluster: Cluster, rendered: str) -> list[dict[str, Any]]:
    """The rendered objects as the API server has them, without what servers and controllers keep."""
    found = json.loads(cluster.kubectl("get", "-f-", "--output=json", input=rendered))["items"]
    for each in found:
        each.pop("status", None)
        each["metadata"].pop("managedFields", None)
    return list(found)


@pytest.mark.parametrize("side", ["client", "server"])
def test_template_and_apply(cluster: Cluster, product: Product, side: str) -> None:
    """`helm template | kubectl apply`, at the client's or the server's side, installs all that is needed; a
    second time it changes nothing, caBundle included."""
    with release(cluster, f"gitops-{side}") as made:
        values = json.dumps(
            given.merged(made.values, {"namespace": {"create": True}, "tests": {"enabled": False}})
        )
        words = [
            "template",
            made.name,
            str(package()),
            f"--namespace={made.name}",
            "--no-hooks",
            "--values=-",
        ]
        rendered = cluster.helm(*words, input=values)
        apply = ["apply", "-f-", *(["--server-side", "--field-manager=gitops"] if side == "server" else [])]
        cluster.kubectl(*apply, input=rendered)
        try:
            cluster.wait_rollout(f"deployment/{made.webhook}", namespace=made.name)
            made.wait_admits()
            bundle, before = made.bundle(), stripped(cluster, rendered)
            assert bundle == made.secret()["ca.crt"]

            said = cluster.kubectl(*apply, input=rendered)
            assert stripped(cluster, rendered) == before
            assert made.bundle() == bundle
            if side == "client":
                assert {line.split()[-1] for line in said.splitlines()} == {"unchanged"}, said
            assert made.admit() == "injected"
        finally:
            cluster.kubectl("delete", "--wait=false", "-f-", input=rendered)
