"""KAI Scheduler's own end-to-end suite for this integration, spec by spec, and the life of the series."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import product as given
import pytest
from harness import Cluster, wait_for
from kai import Kai
from product import NAMESPACE, PASS, QUERY, Product

from isolator import names

LABEL_MIB = 15360
MEMORY_2000 = {"gpu-memory": "2000"}
KAI_GRANT_2000 = 2150
"""MiB that KAI grants for 2000 on a T4: 14 hundredths."""
MIB = 1 << 20
USED = "hami_vgpu_memory_used_bytes"
LIMIT = "hami_vgpu_memory_limit_bytes"


def e2e_pod(name: str, annotations: dict[str, str]) -> dict[str, Any]:
    """The suite's pod: an ordinary user, confined, without any GPU resource."""
    pod = given.tenant(
        name,
        annotations,
        container={
            "name": "ubuntu-container",
            "securityContext": {
                "runAsUser": 1000,
                "runAsNonRoot": True,
                "allowPrivilegeEscalation": False,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
        },
        tolerations=[{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    )
    container = pod["spec"]["containers"][0]
    del container["command"]
    container["args"] = ["sleep", "infinity"]
    return pod


@pytest.fixture
def running(cluster: Cluster, product: Product, kai: Kai, namespace: str) -> Iterator[Any]:
    """Starts pods and waits for them; they go away with the test."""

    def start(*pods: dict[str, Any]) -> dict[str, Any]:
        cluster.apply(list(pods), namespace)
        wanted = [pod["metadata"]["name"] for pod in pods]
        return given.wait_running(cluster, *wanted, namespace=namespace, kai=kai)[0]

    yield start
    cluster.delete("pod", "--all", namespace=namespace)


def limit_in(cluster: Cluster, pod: str, namespace: str) -> int:
    """CUDA_DEVICE_MEMORY_LIMIT as a shell in the pod sees it, in MiB."""
    text = cluster.exec_(pod, ["sh", "-c", "echo $CUDA_DEVICE_MEMORY_LIMIT"], namespace=namespace).strip()
    assert re.fullmatch(r"\d+m", text), text
    return int(text[:-1])


def test_spec_1_limit_is_injected(cluster: Cluster, namespace: str, running: Any) -> None:
    """Spec 1: ready, and the limit is there, above 0 and below the node's memory."""
    pod = running(e2e_pod("one", MEMORY_2000))
    assert 0 < limit_in(cluster, "one", namespace) < LABEL_MIB
    assert limit_in(cluster, "one", namespace) == KAI_GRANT_2000
    assert pod["metadata"]["annotations"][names.ANNOTATION_STATUS] == "injected"
    assert "resources" not in pod["spec"]["containers"][0] or not pod["spec"]["containers"][0]["resources"]


def test_spec_2_nvidia_smi_shows_the_limit(cluster: Cluster, namespace: str, running: Any) -> None:
    """Spec 2 (C8, C9): standard output is one integer, the MiB of the limit, nothing else beside it."""
    running(e2e_pod("two", MEMORY_2000))
    shown = cluster.exec_("two", QUERY, namespace=namespace)
    assert re.fullmatch(r"\d+\n", shown), shown
    assert int(shown) == limit_in(cluster, "two", namespace) == KAI_GRANT_2000
    assert cluster.exec_("two", ["id", "-u"], namespace=namespace) == "1000\n"


def test_spec_3_fraction_is_a_quarter(cluster: Cluster, namespace: str, running: Any) -> None:
    """Spec 3: a fraction of 0.25 is a quarter of the node's one GPU, within 1 %, and nvidia-smi agrees."""
    running(e2e_pod("three", {"gpu-fraction": "0.25"}))
    limit = limit_in(cluster, "three", namespace)
    assert abs(limit - LABEL_MIB * 0.25) <= LABEL_MIB * 0.25 * 0.01
    assert int(cluster.exec_("three", QUERY, namespace=namespace)) == limit < LABEL_MIB


def test_spec_4_monitor_sees_the_use(cluster: Cluster, namespace: str, running: Any) -> None:
    """Spec 4: 64 MiB are held; found by its names, the monitor shows them within 60 s by the pod proxy."""
    node = running(e2e_pod("four", MEMORY_2000))["spec"]["nodeName"]
    hold = "HOLD_SECONDS=600 memory-limit 64 >/tmp/held 2>&1 &"
    cluster.exec_("four", ["sh", "-c", hold], namespace=namespace)
    cluster.get("daemonset", "kai-resource-isolator-monitor", namespace=NAMESPACE)
    labels = {"namespace": namespace, "pod": "four", "container": "ubuntu-container"}

    def used() -> float:
        return given.value(given.metrics(cluster, node), USED, **labels) or 0

    wait_for(lambda: used() >= 64 * MIB, 60, "the memory in use to be shown")
    assert used() < KAI_GRANT_2000 * MIB
    assert "no error" in cluster.exec_("four", ["cat", "/tmp/held"], namespace=namespace)
    limit = given.value(given.metrics(cluster, node), LIMIT, **labels)
    assert limit == KAI_GRANT_2000 * MIB


def test_series_end_with_the_pod(cluster: Cluster, namespace: str, running: Any) -> None:
    """B162: a pod that is gone has no series at the next scrape; its neighbour keeps its own."""
    command = ["sh", "-c", "HOLD_SECONDS=100000 exec memory-limit 1024"]
    node = running(given.tenant("goes", command=command))["spec"]["nodeName"]
    # KAI fills a card that is in use first.
    assert running(given.tenant("stays", command=command))["spec"]["nodeName"] == node

    def shown() -> set[str]:
        found = given.series(given.metrics(cluster, node), USED, namespace=namespace)
        return {each.labels["pod"] for each in found if each.value > 1024 * MIB}

    wait_for(lambda: shown() == {"goes", "stays"}, 60, "both pods' series")
    cluster.delete("pod", "goes", namespace=namespace)
    wait_for(lambda: shown() == {"stays"}, 20, "the series of the deleted pod to end")
    assert "goes" not in {each.labels.get("pod") for each in given.metrics(cluster, node)}


RUNS = """nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits
memory-limit
HOLD_SECONDS=100000 memory-limit 3072 &
until [ -e /tmp/stop ]; do sleep 0.2; done
"""


def test_restarted_container_keeps_its_limit(cluster: Cluster, namespace: str, running: Any) -> None:
    """The second run of a container has the limit of the first, nothing of its charges, and one series."""
    node = running(given.tenant("again", command=["sh", "-c", RUNS]))["spec"]["nodeName"]

    def held() -> float | None:
        return given.value(given.metrics(cluster, node), USED, pod="again", namespace=namespace)

    def proved() -> bool:
        return cluster.logs("again", namespace=namespace).count("allocate 3 GiB: no error") == 2

    wait_for(proved, 60, "the first run's proof")
    first = wait_for(held, 30, "the first run's series")
    cluster.exec_("again", ["touch", "/tmp/stop"], namespace=namespace)

    def restarted() -> bool:
        status = cluster.get("pod", "again", namespace=namespace)["status"]["containerStatuses"][0]
        return status["restartCount"] == 1 and status["ready"]

    wait_for(restarted, 90, "the container to be restarted", every=0.5)
    wait_for(proved, 60, "the second run's proof")
    for words in ((), ("--previous",)):
        log = cluster.logs("again", *words, namespace=namespace)
        assert log.startswith("4147\n")
        assert PASS in log
    wait_for(lambda: held() == first, 30, "the second run's charges, once")
    samples = given.metrics(cluster, node)
    assert given.value(samples, LIMIT, pod="again", namespace=namespace) == 4147 * MIB
