"""`isolator doctor cluster` on a real cluster: sharing pods that run without a quota, wait or are refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from doctorrun import Doctor, finding
from harness import Cluster, wait_for
from kai import Kai
from product import Product, tenant, wait_running
from test_doctor_nodes import labelled

from isolator import names

MOUNT = names.DEFAULT_VGPU_MOUNT
ON_N2 = {"kubernetes.io/hostname": "n2"}


@pytest.fixture(scope="module")
def doctor(cluster: Cluster, product: Product, kai: Kai) -> Doctor:
    """The doctor of the session's cluster, healthy and with KAI."""
    return Doctor(cluster)


@contextmanager
def pod(cluster: Cluster, place: str, made: dict[str, Any]) -> Iterator[str]:
    """A pod that is there meanwhile; its name."""
    name = made["metadata"]["name"]
    cluster.apply(made, place)
    try:
        yield name
    finally:
        cluster.delete("pod", name, namespace=place)


def bound(cluster: Cluster, place: str, name: str) -> dict[str, Any]:
    """The pod once KAI has given it a node."""
    found: dict[str, Any] = {}

    def there() -> bool:
        found.update(cluster.get("pod", name, namespace=place))
        return bool(found["spec"].get("nodeName"))

    wait_for(there, 60, f"KAI to bind {name}", every=0.2)
    return found


def test_a_pod_that_waits_for_the_library(cluster: Cluster, doctor: Doctor, namespace: str) -> None:
    """The library's folder is hidden on the pod's node: `hostPath type check failed`, by its Event (B110)."""
    node = cluster.node(2)
    node.run(["mount", "-t", "tmpfs", "tmpfs", MOUNT])
    try:
        with pod(cluster, namespace, tenant("held", nodeSelector=ON_N2)):
            found = doctor.says("the library is not on the pod's node", 84, "pods_no_library")
            assert "n2" in finding(found, "pods_no_library")["fix"]
            one = doctor.look("--pod", f"{namespace}/held")
            assert [each["id"] for each in one["findings"]] == ["pods_no_library"]
    finally:
        node.run(["umount", "--lazy", MOUNT])


def test_a_pod_that_waits_for_its_limit(cluster: Cluster, doctor: Doctor, kai: Kai, namespace: str) -> None:
    """KAI 0.17.0 leaves the limit out without a label: held, and the label that causes it decides (B093)."""
    key = names.NODE_LABEL_GPU_MEMORY
    made = tenant("held", {"gpu-fraction": "0.25"}, nodeSelector=ON_N2)
    with kai.as_mode(version=(0, 17, 0)), labelled(cluster, "node/n2", key, None, "15360"):
        cluster.apply(made, namespace)
        bound(cluster, namespace, "held")
        doctor.says("no memory label, and a pod that KAI bound", 52, "label_missing", "pods_no_limit")
    try:
        doctor.says("KAI's ConfigMap without a limit", 85, "pods_no_limit")
        one = doctor.look("--pod", f"{namespace}/held")
        assert {each["id"] for each in one["findings"]} == {"pods_no_limit"}
    finally:
        cluster.delete("pod", "held", namespace=namespace)


def test_a_pod_whose_configmap_never_came(cluster: Cluster, doctor: Doctor, namespace: str) -> None:
    """A node was chosen past KAI, so that nobody wrote its ConfigMaps."""
    with pod(cluster, namespace, tenant("held", nodeName="n1")):
        doctor.says("a pod without KAI's ConfigMap", 86, "pods_no_configmap")


def test_a_pod_that_waits_for_gpu_memory(cluster: Cluster, doctor: Doctor, namespace: str) -> None:
    """Lab: Pending with KAI's words for it, which its condition carries."""
    waiting = tenant("held", {"gpu-memory": "15000"}, nodeSelector={"nowhere": "true"})
    says = "no nodes with enough resources were found: node n1 didn't have enough resources: GPU memory"
    with pod(cluster, namespace, waiting):
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": says}
        patch = json.dumps({"status": {"conditions": [condition]}})
        where = f"--namespace={namespace}"
        cluster.kubectl("patch", "pod", "held", where, "--subresource=status", f"--patch={patch}")
        found = doctor.says("Pending: GPU memory", 87, "pods_no_memory")
        assert "restart kai-scheduler" in finding(found, "pods_no_memory")["fix"]


def test_pods_that_run_without_a_quota(cluster: Cluster, doctor: Doctor, kai: Kai, namespace: str) -> None:
    """One that asks for its share after its creation is a fault, one that opted out a notice."""
    late = tenant("late", {}, nodeSelector={"kubernetes.io/hostname": "n1"})
    with pod(cluster, namespace, late):
        wait_running(cluster, "late", namespace=namespace, kai=kai)
        cluster.kubectl("annotate", "pod", "late", f"--namespace={namespace}", "gpu-memory=1024")
        found = doctor.says("a sharing pod that the webhook never saw", 83, "pods_unlimited")
        assert finding(found, "pods_unlimited")["subject"] == f"{namespace}/late"
    out = tenant("out", {"gpu-memory": "1024", names.ANNOTATION_INJECT: "false"})
    with pod(cluster, namespace, out):
        wait_running(cluster, "out", namespace=namespace, kai=kai)
        doctor.says("a pod that opted out (notice)", 0, "opted_out")


def test_a_container_that_is_refused_cuda(cluster: Cluster, doctor: Doctor, kai: Kai, namespace: str) -> None:
    """KAI gave no limit when it was made; the node's monitor tells, and so does its log."""
    command = ["sh", "-c", "memory-limit 512 || sleep infinity"]
    with kai.as_mode(hamicore=False):
        cluster.apply(tenant("refused", command=command), namespace)
    try:
        wait_running(cluster, "refused", namespace=namespace, kai=kai)
        doctor.says("a container whose CUDA is refused", 89, "cuda_refused")
        one = doctor.look("--pod", "refused", "--namespace", namespace)
        assert any("its log says" in each["detail"] for each in one["findings"])
    finally:
        cluster.delete("pod", "refused", namespace=namespace)


@pytest.mark.parametrize(
    ("fault", "line", "status", "cause"),
    [
        (
            "an image newer than the driver",
            "CUDA driver version is insufficient for CUDA runtime version",
            92,
            "driver_insufficient",
        ),
        ("no /dev/nvidia* in the container", "no CUDA-capable device is detected", 32, "no_devices"),
        (
            "the loader looks for the library elsewhere",
            "ERROR: ld.so: object '/opt/vgpu/libvgpu.so' from /etc/ld.so.preload cannot be preloaded"
            " (cannot open shared object file): ignored.",
            65,
            "mount_differs",
        ),
    ],
)
def test_what_a_pods_log_tells(
    cluster: Cluster,
    doctor: Doctor,
    kai: Kai,
    namespace: str,
    fault: str,
    line: str,
    status: int,
    cause: str,
) -> None:
    """Lab: known lines, read with --pod alone; nothing else of a log is repeated."""
    says = ["sh", "-c", f'echo "password=hunter2"; echo "{line}"; sleep infinity']
    with pod(cluster, namespace, tenant("told", command=says)):
        wait_running(cluster, "told", namespace=namespace, kai=kai)
        found = doctor.says(fault, status, cause, words=("--pod", f"{namespace}/told"))
        assert "hunter2" not in json.dumps(found)


def test_a_limit_that_somebody_raised(cluster: Cluster, doctor: Doctor, kai: Kai, namespace: str) -> None:
    """KAI's ConfigMap was edited: compared with what annotations and label give."""
    with pod(cluster, namespace, tenant("rich")):
        made = wait_running(cluster, "rich", namespace=namespace, kai=kai)[0]
        prefix = made["metadata"]["annotations"][names.ANNOTATION_CONFIGMAP]
        where = ["configmap", f"{prefix}-0", f"--namespace={namespace}"]
        for text, status, cause in (("9000m", 91, "limit_raised"), ("12", 27, "limit_malformed")):
            patch = json.dumps({"data": {names.ENV_MEMORY_LIMIT: text}})
            cluster.kubectl("patch", *where, f"--patch={patch}")
            fault = f"KAI's ConfigMap says {text}"
            doctor.says(fault, status, cause, words=("--pod", f"{namespace}/rich"))
