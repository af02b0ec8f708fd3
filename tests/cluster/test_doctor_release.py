"""`isolator doctor cluster` on a real cluster: the release itself broken, its webhook and its agents."""

from __future__ import annotations

import base64
import datetime as dt
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import product as given
import pytest
from doctorrun import Doctor, finding
from harness import Cluster, wait_for
from kai import Kai
from product import NAMESPACE, Product, webhook_away
from test_doctor_nodes import labelled

from isolator import names
from isolator.webhook import certs

HOOK = names.WEBHOOK_CONFIGURATION
COS = "/home/kubernetes"


@pytest.fixture(scope="module")
def doctor(cluster: Cluster, product: Product, kai: Kai) -> Iterator[Doctor]:
    """The doctor of the session's cluster, whose release is put back afterwards."""
    yield Doctor(cluster)
    product.install(product.values)
    Doctor(cluster).says("the release is put back", 0)


def change(product: Product, values: Mapping[str, Any]) -> None:
    """An upgrade that nobody waits for."""
    words = ["upgrade", names.RELEASE, str(given.CHART), f"--namespace={NAMESPACE}", "--reset-values"]
    product.cluster.helm(*words, "--values=-", input=json.dumps(given.merged(product.values, values)))


def test_no_replica_of_the_webhook(cluster: Cluster, doctor: Doctor) -> None:
    """The Deployment tells, and the API server's refusal of a sharing pod agrees: one cause (B074)."""
    with webhook_away(cluster):
        found = doctor.says("the webhook scaled to 0", 68, "webhook_down")
        assert NAMESPACE in finding(found, "webhook_down")["fix"]
    doctor.says("the webhook is back", 0)


def test_a_cabundle_of_another_ca(cluster: Cluster, doctor: Doctor) -> None:
    """The webhook puts its own back within seconds: each look is after a new fault (B075)."""
    other = certs.issue_ca(dt.datetime.now(dt.UTC)).certificate_pem()

    def spoil(text: bytes = other) -> None:
        entries = cluster.get("mutatingwebhookconfiguration", HOOK)["webhooks"]
        place = "/webhooks/{}/clientConfig/caBundle"
        value = base64.b64encode(text).decode()
        patch = [{"op": "replace", "path": place.format(i), "value": value} for i in range(len(entries))]
        cluster.kubectl(
            "patch", "mutatingwebhookconfiguration", HOOK, "--type=json", f"--patch={json.dumps(patch)}"
        )

    found = doctor.says("caBundle of another CA", 69, "webhook_bundle", again=spoil)
    assert any("lacks the CA" in each["detail"] for each in found["findings"])
    wait_for(lambda: doctor.look()["healthy"], 60, "the webhook to set caBundle again")


def test_parts_that_do_not_agree_on_the_path(cluster: Cluster, product: Product, doctor: Doctor) -> None:
    """Lab: libvgpu.so cannot be preloaded. The preload file names a path that libsync does not keep."""
    other = json.dumps({"data": {names.PRELOAD_KEY: f"/opt/vgpu/{names.LIBRARY_FILE}\n"}})
    where = ["configmap", f"{names.RELEASE}-ldpreload"]
    cluster.kubectl("patch", *where, f"--namespace={NAMESPACE}", f"--patch={other}")
    try:
        found = doctor.says("a preload file of another path", 65, "mount_differs")
        assert "/opt/vgpu" in finding(found, "mount_differs")["detail"]
    finally:
        cluster.delete(*where, namespace=NAMESPACE)  # a field that was patched is no longer Helm's
        change(product, {})


def test_a_namespace_of_ours_that_enforces_pod_security(cluster: Cluster, doctor: Doctor) -> None:
    """Host folders are refused at level baseline: a pod of libsync does not come back."""
    key = "pod-security.kubernetes.io/enforce"
    with labelled(cluster, f"namespace/{NAMESPACE}", key, "baseline", None):
        (pod,) = given.component_pods(cluster, names.COMPONENT_LIBSYNC, "n2")
        cluster.delete("pod", pod["metadata"]["name"], namespace=NAMESPACE)
        found = doctor.says("our namespace at Pod Security baseline", 63, "own_pod_security")
        assert f"namespace {NAMESPACE}" in finding(found, "own_pod_security")["fix"]


def test_a_webhook_configuration_that_was_deleted(cluster: Cluster, product: Product, doctor: Doctor) -> None:
    """The rest of the release is there."""
    cluster.delete("mutatingwebhookconfiguration", HOOK)
    doctor.says("no webhook configuration", 67, "webhook_missing")
    change(product, {})
    doctor.says("the configuration is back", 0)


@contextmanager
def quota(cluster: Cluster) -> Iterator[None]:
    """As on GKE: no pod of a system class in the release's namespace."""
    scope = {"scopeName": "PriorityClass", "operator": "In", "values": ["system-node-critical"]}
    made = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "no-system-pods"},
        "spec": {"hard": {"pods": "0"}, "scopeSelector": {"matchExpressions": [scope]}},
    }
    cluster.apply(made, NAMESPACE)
    try:
        wait_for(
            lambda: cluster.get("resourcequota/no-system-pods", namespace=NAMESPACE).get("status"),
            30,
            "the quota",
        )
        yield
    finally:
        cluster.delete("resourcequota", "no-system-pods", namespace=NAMESPACE)


def test_a_priority_class_that_the_namespace_does_not_allow(
    cluster: Cluster, product: Product, doctor: Doctor
) -> None:
    """Lab: the DaemonSet is rejected for system-node-critical (B178)."""
    with quota(cluster):
        change(product, {"librarySync": {"priorityClassName": "system-node-critical"}})
        found = doctor.says("libsync with priority class system-node-critical", 62, "priority_class")
        assert finding(found, "priority_class")["subject"].endswith("-libsync")


def test_an_image_that_is_nowhere(product: Product, doctor: Doctor) -> None:
    """The tag of the release cannot be pulled; parts of before still run."""
    change(product, {"image": {"tag": "no-such-tag"}})
    found = doctor.says("an image that no node has", 61, "image_pull", "versions_differ")
    seen = [each["detail"] for each in found["findings"] if each["id"] == "image_pull"]
    assert seen and all("no-such-tag" in each for each in seen)


def test_a_read_only_root_file_system(cluster: Cluster, product: Product, doctor: Doctor) -> None:
    """Lab: libsync reports Read-only file system (COS); its own line is repeated (B113)."""
    for node in cluster.nodes.values():
        node.run(f"mkdir -p {COS} && mount -t tmpfs -o ro tmpfs {COS}")
    try:
        change(product, {"paths": {"containerVgpuMount": f"{COS}/vgpu"}})
        found = doctor.says("a read-only file system under the mount", 41, "mount_readonly")
        seen = [each["detail"] for each in found["findings"]]
        assert all("read-only file system" in each.lower() for each in seen)
    finally:
        for node in cluster.nodes.values():
            node.run(["umount", "--lazy", COS])


def test_an_agent_that_is_not_meant_for_a_gpu_node(product: Product, doctor: Doctor) -> None:
    """Lab: the monitor is absent from the workload's node. Both agents' selectors leave n2 out."""
    chosen = {"kubernetes.io/hostname": "n1"}
    change(product, {"monitor": {"nodeSelector": chosen}, "librarySync": {"nodeSelector": chosen}})
    found = doctor.says("a GPU node without agents", 79, "libsync_gap", "monitor_gap")
    assert finding(found, "monitor_gap")["subject"] == "n2"


def test_the_policy_that_lets_pods_through(product: Product, doctor: Doctor) -> None:
    """A notice alone: the cluster is sound as long as the webhook answers."""
    change(product, {"webhook": {"failurePolicy": "Ignore"}})
    doctor.says("failurePolicy Ignore without a policy (notice)", 0, "webhook_ignored")
    with webhook_away(product.cluster):
        found = doctor.says(
            "the webhook scaled to 0 with failurePolicy Ignore",
            68,
            *("webhook_down", "webhook_skips", "webhook_ignored"),
        )
        assert "nothing answered" in finding(found, "webhook_skips")["detail"]
