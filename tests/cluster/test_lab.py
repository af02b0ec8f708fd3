"""The public lab's steps 4 to 8 on a real cluster, with its own flags and then with the defaults."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import product as given
import pytest
from baseimages import BUSYBOX
from harness import Cluster, wait_for
from kai import Kai, simulated_uuids
from product import NAMESPACE, PASS, STATE, Product

from isolator import names

PODS = ("kai-hami-lab12-a", "kai-hami-lab12-b")
LAB_LABEL = "hami.run/lab-12"
LIMIT_TEXT, USED_TEXT = "4.348444672e+09", "3.328180224e+09"
COS_MOUNT = "/home/kubernetes/bin/nvidia/vgpu"
FLAGS = f"""--set paths.containerVgpuMount={COS_MOUNT} --set-string librarySync.priorityClassName=
 --set-string monitor.priorityClassName= --set monitor.enabled=true""".split()
SERIES = re.compile(r'^hami_vgpu_memory_(used|limit)_bytes.*pod="(kai-hami-lab12-[ab])".* (\S+)$', re.M)

# The lab's start-up command. Its pods begin the test when both are there; in the lab each holds for 30 s.
COMMAND = f"""set -e
echo "limit=$CUDA_DEVICE_MEMORY_LIMIT"
nvidia-smi --query-gpu=uuid,memory.total --format=csv,noheader
touch {STATE}/$LAB_RUN-$HOSTNAME
until [ -e {STATE}/$LAB_RUN-{PODS[0]} ] && [ -e {STATE}/$LAB_RUN-{PODS[1]} ]; do sleep 0.1; done
HOLD_SECONDS=5 memory-limit
HOLD_SECONDS=100000 memory-limit 3072 | tee /tmp/held
"""


@dataclass
class Lab:
    """The lab after its step 6: the release installed, both pods ready on one node."""

    cluster: Cluster
    mount: str
    node: str
    pods: list[dict[str, Any]]

    def logs(self, pod: str) -> str:
        return self.cluster.logs(pod)


def lab_pod(name: str, run: str, privileged: bool) -> dict[str, Any]:
    """A pod of the lab's 04-shared-pods.yaml; ready when the proof is done and 3 GiB are held again."""
    probe = {"exec": {"command": ["grep", "-q", "3 GiB: no error", "/tmp/held"]}, "periodSeconds": 1}
    container = {
        "env": [{"name": "LAB_RUN", "value": run}],
        "readinessProbe": probe,
        "securityContext": {"privileged": privileged},
    }
    chosen = {"nodeSelector": {LAB_LABEL: "true"}}
    return given.tenant(name, {"gpu-memory": "4096"}, ["sh", "-c", COMMAND], container=container, **chosen)


@dataclass(frozen=True)
class Course:
    """How the lab is done: Helm flags, the path that follows, the node, KAI as installed there."""

    flags: tuple[str, ...]
    mount: str
    node: str
    privileged: bool
    kai: dict[str, Any]


COURSES = {
    # On GKE no runtime brings devices, so the lab's pods are privileged; KAI names the cards as CDI does.
    "lab-flags": Course(tuple(FLAGS), COS_MOUNT, "n1", True, {"version": (0, 17, 0), "cdi": True}),
    "defaults": Course(("--set", "monitor.enabled=true"), names.DEFAULT_VGPU_MOUNT, "n2", False, {}),
}


@pytest.fixture(scope="module")
def restored(product: Product) -> Iterator[Product]:
    """The shared release, put back after all courses."""
    yield product
    product.install(product.values)


@pytest.fixture(scope="module", params=COURSES)
def lab(request: pytest.FixtureRequest, cluster: Cluster, restored: Product, kai: Kai) -> Iterator[Lab]:
    """Steps 4 and 6: a fresh installation and the two pods."""
    course = COURSES[request.param]
    cluster.helm("uninstall", names.RELEASE, f"--namespace={NAMESPACE}", "--wait", "--timeout=3m")
    try:
        restored.install(given.merged(given.image_values(), given.driver_values()), *course.flags)
        cluster.kubectl("label", "node", course.node, f"{LAB_LABEL}=true")
        with kai.as_mode(**course.kai):
            cluster.apply([lab_pod(pod, request.param, course.privileged) for pod in PODS])
            yield Lab(cluster, course.mount, course.node, given.wait_running(cluster, *PODS, kai=kai))
    finally:
        cluster.delete("pod", *PODS, "lab12-monitor-check")
        cluster.kubectl("label", "node", course.node, f"{LAB_LABEL}-")


def test_components_are_ready_at_the_path(lab: Lab) -> None:
    """Step 4: the rendered path, the three roll-outs, one installer and one monitor a GPU node."""
    cluster = lab.cluster
    words = ["get", "cm", "kai-resource-isolator-ldpreload", f"--namespace={NAMESPACE}"]
    path = cluster.kubectl(*words, r"-o=jsonpath={.data.ld\.so\.preload}")
    assert path.strip() == f"{lab.mount}/libvgpu.so"
    for workload in ("ds/kai-resource-isolator-libsync", "ds/kai-resource-isolator-monitor"):
        cluster.wait_rollout(workload, namespace=NAMESPACE, timeout=300)
    cluster.wait_rollout("deploy/kai-resource-isolator-webhook", namespace=NAMESPACE, timeout=300)
    for component in (names.COMPONENT_LIBSYNC, names.COMPONENT_MONITOR):
        placed = [pod["spec"]["nodeName"] for pod in given.component_pods(cluster, component)]
        assert sorted(placed) == ["n1", "n2"], component
    for node in cluster.nodes.values():
        installed = node.path(f"{lab.mount}/libvgpu.so").read_bytes()
        assert installed[:4] == b"\x7fELF"
        assert node.path(f"{lab.mount}/ld.so.preload").read_text() == f"{lab.mount}/libvgpu.so\n"


def test_pods_share_the_card_at_4147_mib(lab: Lab) -> None:
    """Step 6: both on one node; each logs KAI's limit, the same UUID and 4147 MiB of it."""
    assert {pod["spec"]["nodeName"] for pod in lab.pods} == {lab.node}
    uuid = simulated_uuids()[0]
    for pod in PODS:
        assert lab.logs(pod).splitlines()[:2] == ["limit=4147m", f"{uuid}, 4147 MiB"]


def test_ceiling_is_enforced_in_both_at_once(lab: Lab) -> None:
    """Step 7: 3 GiB are granted, 2 GiB more are refused, PASS, and the two intervals overlap."""
    intervals = []
    for pod in PODS:
        log = lab.logs(pod)
        proof = [line for line in log.splitlines() if re.match("allocate |PASS:", line)]
        assert proof[:3] == [
            "allocate 3 GiB: no error",
            "allocate another 2 GiB: out of memory",
            PASS,
        ]
        times = [float(line.split("=")[1]) for line in log.splitlines() if line.startswith("test_")]
        intervals.append((times[0], times[1]))
    (start_a, end_a), (start_b, end_b) = intervals
    assert max(start_a, start_b) < min(end_a, end_b)


def lab_series(text: str) -> set[tuple[str, ...]]:
    """The lab's grep: kind, pod and the figure as it is written."""
    return set(SERIES.findall(text))


EXPECTED = {(kind, pod, text) for kind, text in (("limit", LIMIT_TEXT), ("used", USED_TEXT)) for pod in PODS}


def test_monitor_shows_limit_and_use(lab: Lab) -> None:
    """Step 8, B168: a pod that calls that node's monitor reads both series of both pods, digit by digit."""
    cluster = lab.cluster
    monitor = given.component_pods(cluster, names.COMPONENT_MONITOR, lab.node)[0]
    # Waits for the next scan: the pods became ready a moment ago.
    wait_for(lambda: lab_series(given.metrics_text(cluster, lab.node)) == EXPECTED, 60, "the lab's series")
    fetch = f"wget -qO- http://{monitor['status']['podIP']}:9394/metrics"
    words = ["run", "lab12-monitor-check", f"--image={BUSYBOX}", "--restart=Never"]
    cluster.kubectl(*words, "--command", "--", "sh", "-c", fetch)
    cluster.wait_pod("lab12-monitor-check", "Succeeded", timeout=180)
    text = cluster.logs("lab12-monitor-check")
    assert lab_series(text) == EXPECTED
    assert len(SERIES.findall(text)) == 4


def test_other_node_shows_nothing_of_them(lab: Lab) -> None:
    """Each monitor knows its own node alone."""
    other = next(name for name in lab.cluster.nodes if name != lab.node)
    text = given.metrics_text(lab.cluster, other)
    assert "kai-hami-lab12" not in text
    assert "kai_isolator_up 1.0" in text
