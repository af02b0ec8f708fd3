"""What the service accounts may do on the cluster, and what a debug container may see of a tenant."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import product as given
import pytest
from admitted import attach
from baseimages import BUSYBOX
from harness import Cluster, ClusterError, wait_for
from kai import Kai
from product import NAMESPACE, Product
from releases import release

from isolator import names

Rights = set[tuple[str, str, str]]
"""(resource, name or "", verb)"""
CONFIGURATIONS = "mutatingwebhookconfigurations.admissionregistration.k8s.io"
WEBHOOK_CLUSTER: Rights = {(CONFIGURATIONS, names.WEBHOOK_CONFIGURATION, verb) for verb in ("get", "patch")}
WEBHOOK: Rights = WEBHOOK_CLUSTER | {
    ("secrets", "", "create"),
    *(("secrets", f"{names.RELEASE}-webhook-tls", verb) for verb in ("get", "patch")),
}
MONITOR: Rights = {
    *(("pods", "", verb) for verb in ("list", "watch")),
    ("nodes", "", "get"),
    *(("events", "", verb) for verb in ("create", "patch")),
}


def rights(cluster: Cluster, account: str, namespace: str, home: str = NAMESPACE) -> Rights:
    """What a service account may do in a namespace, beyond what every account may."""

    def told(name: str) -> Rights:
        who = f"--as=system:serviceaccount:{home}:{name}"
        listed = cluster.kubectl("auth", "can-i", "--list", f"--namespace={namespace}", who)
        found: Rights = set()
        for line in listed.splitlines()[1:]:
            resource, _, name, verbs = re.fullmatch(
                r"(\S*)\s+\[(.*?)\]\s+\[(.*?)\]\s+\[(.*)\]", line
            ).groups()  # type: ignore[union-attr]
            found |= {(resource, each, verb) for each in name.split() or [""] for verb in verbs.split()}
        return found

    return told(account) - told("default")


def test_accounts_may_do_what_security_md_lists(cluster: Cluster, product: Product) -> None:
    """The webhook's and the monitor's rights are exactly those of docs/security.md; libsync has none."""
    webhook, monitor, libsync = (f"{names.RELEASE}-{part}" for part in ("webhook", "monitor", "libsync"))

    assert rights(cluster, webhook, NAMESPACE) == WEBHOOK
    assert rights(cluster, webhook, "default") == WEBHOOK_CLUSTER
    assert rights(cluster, monitor, NAMESPACE) == rights(cluster, monitor, "default") == MONITOR
    assert rights(cluster, libsync, NAMESPACE) == rights(cluster, libsync, "default") == set()


def test_without_rbac_the_log_names_what_is_missing(cluster: Cluster, product: Product) -> None:
    """rbac.create=false gives no right at all; the webhook is not ready and says which one it needs. What
    security.md lists, bound by hand, is enough; so is the hook's account without a right of its own."""
    with release(cluster, "no-rbac") as made:
        values = {"rbac": {"create": False}, "librarySync": {"removeOnUninstall": True}}
        made.upgrade(values, "--no-hooks", wait="")
        for account in (made.webhook, f"{made.name}-uninstall"):
            assert rights(cluster, account, made.name, made.name) == set()

        def said() -> bool:
            pods = made.pods()
            log = cluster.logs(pods[0]["metadata"]["name"], namespace=made.name) if started(pods) else ""
            return f"not allowed to get Secret {made.name}/{made.webhook}-tls" in log

        wait_for(said, 90, "the log to name the missing right", every=0.5)
        words = [f"--serviceaccount={made.name}:{made.webhook}", f"--namespace={made.name}"]
        space = f"--namespace={made.name}"
        cluster.kubectl("create", "role", "any", "--verb=create", "--resource=secrets", space)
        one = [f"--resource-name={made.webhook}-tls", "--resource=secrets", "--verb=get,patch"]
        cluster.kubectl("create", "role", "one", *one, space)
        for role in ("any", "one"):
            cluster.kubectl("create", "rolebinding", role, f"--role={role}", *words)
        own = [f"--resource-name={made.configuration}", f"--resource={CONFIGURATIONS}", "--verb=get,patch"]
        cluster.kubectl("create", "clusterrole", made.name, *own)
        cluster.kubectl("create", "clusterrolebinding", made.name, f"--clusterrole={made.name}", words[0])
        try:
            cluster.wait_rollout(f"deployment/{made.webhook}", namespace=made.name)
            made.wait_admits()
        finally:
            cluster.kubectl("delete", f"clusterrole/{made.name}", f"clusterrolebinding/{made.name}")


def started(pods: list[dict[str, Any]]) -> bool:
    return bool(pods) and any(
        "running" in each["state"] for each in pods[0]["status"].get("containerStatuses", [])
    )


# ---- debug containers -------------------------------------------------------------------------------


@pytest.fixture
def running(cluster: Cluster, product: Product, kai: Kai, namespace: str) -> Iterator[str]:
    """A capped tenant `debugged`."""
    cluster.apply(given.tenant("debugged"), namespace)
    given.wait_running(cluster, "debugged", namespace=namespace, kai=kai)
    yield "debugged"
    cluster.delete("pod", "--all", namespace=namespace, wait=False)


@pytest.mark.parametrize("volume", [names.VOLUME_CONTAINERS, names.VOLUME_VGPU])
def test_debug_container_with_our_volume_is_denied(
    cluster: Cluster, running: str, namespace: str, volume: str
) -> None:
    """Such a container cannot have a subPath, so it would see, and could write, every tenant's folder of the
    node. It is denied, also after the pod's annotations and labels were changed."""
    words = ["pod", running, f"--namespace={namespace}", "--overwrite"]
    cluster.kubectl("annotate", *words, f"{names.ANNOTATION_STATUS}-", "gpu-memory-")
    cluster.kubectl("label", *words, f"{names.LABEL_WEBHOOK}={names.LABEL_WEBHOOK_IGNORE}")
    mounts = [{"name": volume, "mountPath": "/all"}]

    with pytest.raises(ClusterError, match=names.WEBHOOK_EPHEMERAL_NAME) as denied:
        attach(cluster, running, namespace, "spy", volumeMounts=mounts)
    assert "spy" in str(denied.value)
    assert "ephemeralContainers" not in cluster.get("pod", running, namespace=namespace)["spec"]


def test_kubectl_debug_works(cluster: Cluster, running: str, namespace: str) -> None:
    """An ordinary `kubectl debug` into a tenant is admitted, runs, and sees nothing of other tenants."""
    words = [running, f"--namespace={namespace}", f"--image={BUSYBOX}", "--image-pull-policy=Never"]
    cluster.kubectl("debug", *words, "--target=main", "--container=look", "--", "sleep", "infinity")

    def there() -> bool:
        status = cluster.get("pod", running, namespace=namespace)["status"]
        return any("running" in each["state"] for each in status.get("ephemeralContainerStatuses", []))

    wait_for(there, 60, "the debug container to run", every=0.3)
    shown = cluster.exec_(running, ["sh", "-c", "mount"], container="look", namespace=namespace)
    assert names.DEFAULT_VGPU_MOUNT not in shown
    limit = cluster.exec_(
        running,
        ["sh", "-c", "nvidia-smi --query-gpu=memory.total --format=csv,noheader"],
        namespace=namespace,
    )
    assert limit.strip() == "4147 MiB"


def test_debugging_of_other_pods_does_not_call_us(cluster: Cluster, product: Product, namespace: str) -> None:
    """A pod without our volumes is debugged without our webhook, even one that is away."""
    cluster.apply(given.tenant("plain", {}, schedulerName="default-scheduler"), namespace)
    given.wait_running(cluster, "plain", namespace=namespace)
    before = cluster.webhook_calls(names.WEBHOOK_EPHEMERAL_NAME)
    attach(cluster, "plain", namespace, "look")
    assert cluster.webhook_calls(names.WEBHOOK_EPHEMERAL_NAME) == before
    cluster.delete("pod", "--all", namespace=namespace, wait=False)
