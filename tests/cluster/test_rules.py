"""The rule at a real API server and on real nodes: opt-outs, targets, order of the webhooks, policies."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

import pytest
from admitted import DRY, Answer, accepted, submit
from harness import Cluster, wait_for
from kai import Kai, simulated_uuids
from kai_objects import MUTATING
from product import PASS, QUERY, STATE, Product, metrics, series, tenant, tenant_image, wait_running

from isolator import names

MEMORY = {"gpu-memory": "4096"}
MIB = 1 << 20

pytestmark = pytest.mark.usefixtures("product", "kai")


def without_host_folder(pod: dict[str, Any]) -> dict[str, Any]:
    """A tenant as its author would write it, without the simulated card's folder of the node."""
    result = copy.deepcopy(pod)
    result["spec"]["volumes"] = [v for v in result["spec"]["volumes"] if "hostPath" not in v]
    for container in result["spec"]["containers"]:
        container["volumeMounts"] = [m for m in container.get("volumeMounts", []) if m["name"] != "simgpu"]
    return result


# ---- opt-outs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "out"), [("false", True), ("FALSE", True), ("False", True), ("no", False)])
def test_opt_out_by_annotation(cluster: Cluster, namespace: str, text: str, out: bool) -> None:
    """C10: `false` in any case of letters, and nothing else, keeps the library out; the author is told."""
    answer = accepted(cluster, tenant("p", {**MEMORY, names.ANNOTATION_INJECT: text}), namespace, DRY)
    assert answer.injected() == ([] if out else ["main"])
    assert (answer.ours() == []) == out
    assert answer.status == ("skipped: opt-out-annotation" if out else "injected")
    assert ("this pod opted out of its GPU memory limit" in answer.said) == out


def test_opt_out_by_variable(cluster: Cluster, namespace: str) -> None:
    """A true CUDA_DISABLE_CONTROL in the target's own environment is an opt-out, a false one is none."""
    for value, out in (("true", True), ("1", True), ("false", False)):
        env = [{"name": names.ENV_DISABLE_CONTROL, "value": value}]
        answer = accepted(cluster, tenant("p", MEMORY, container={"env": env}), namespace, DRY)
        assert answer.injected() == ([] if out else ["main"]), value
        assert (f"{names.ENV_DISABLE_CONTROL} is set" in answer.said) == out, value


def test_opt_out_by_labels(cluster: Cluster, namespace: str) -> None:
    """C10: the label `ignore` on a pod, or on its namespace, keeps the webhook away; other values do not."""
    ignore = {names.LABEL_WEBHOOK: names.LABEL_WEBHOOK_IGNORE}
    assert accepted(cluster, tenant("p", MEMORY, labels=ignore), namespace, DRY).ours() == []
    other = {names.LABEL_WEBHOOK: "watch"}
    assert accepted(cluster, tenant("p", MEMORY, labels=other), namespace, DRY).injected() == ["main"]
    cluster.kubectl("label", "namespace", namespace, f"{names.LABEL_WEBHOOK}=ignore")

    def left_alone() -> bool:
        return accepted(cluster, tenant("p", MEMORY), namespace, DRY).ours() == []

    wait_for(left_alone, 10, "the API server to see the namespace's label")


# ---- targets, on nodes ------------------------------------------------------------------------------


def test_init_container_as_target(cluster: Cluster, namespace: str, kai: Kai) -> None:
    """KAI looks among the init containers first: that one is held to 4147 MiB, no other is touched."""
    mount = [{"name": "simgpu", "mountPath": STATE}]
    shared = {"image": tenant_image(), "imagePullPolicy": "Never", "volumeMounts": mount}
    first = {"name": "prepare", "command": ["true"], **shared}
    load = {"name": "load", "command": ["sh", "-c", "nvidia-smi -L >/dev/null && memory-limit"], **shared}
    pod = tenant("init", {**MEMORY, names.ANNOTATION_CONTAINER: "load"}, initContainers=[first, load])
    answer = accepted(cluster, pod, namespace)
    assert answer.injected() == ["load"]
    limit = answer.volume(names.VOLUME_LIMIT)
    assert limit is not None
    assert re.fullmatch(r"init-\w{7}-shared-gpu-i1", limit["configMap"]["name"])
    wait_running(cluster, "init", namespace=namespace, kai=kai)
    assert PASS in cluster.logs("init", "--container=load", namespace=namespace)
    maps = cluster.exec_("init", ["cat", "/proc/1/maps"], namespace=namespace)
    assert names.LIBRARY_FILE not in maps


def test_named_container_as_target(cluster: Cluster, namespace: str, kai: Kai) -> None:
    """gpu-fraction-container-name: the second container is held to its limit, its neighbour is untouched."""
    mount = [{"name": "simgpu", "mountPath": STATE}]
    gpu = {"name": "gpu", "image": tenant_image(), "imagePullPolicy": "Never", "volumeMounts": mount}
    gpu["command"] = ["sleep", "infinity"]
    annotations = {"gpu-fraction": "0.25", names.ANNOTATION_CONTAINER: "gpu"}
    answer = accepted(cluster, tenant("named", annotations, containers=[gpu]), namespace)
    assert answer.injected() == ["gpu"]
    assert "env" not in answer.container("main")
    wait_running(cluster, "named", namespace=namespace, kai=kai)
    assert cluster.exec_("named", QUERY, container="gpu", namespace=namespace) == "3840\n"
    assert cluster.exec_("named", QUERY, container="main", namespace=namespace) == "15360\n"
    wrong = submit(cluster, tenant("p", {**MEMORY, names.ANNOTATION_CONTAINER: "nobody"}), namespace, DRY)
    assert not wrong.pod
    assert "'nobody' not found" in wrong.said


def test_two_devices(cluster: Cluster, namespace: str, kai: Kai) -> None:
    """gpu-fraction-num-devices 2 on a node with two cards: a quarter of each, a series by vdevice_index."""
    before = kai.gpus
    uuids = simulated_uuids(count=2)
    cards = [{"name": "SIMGPU_COUNT", "value": "2"}, {"name": "SIMGPU_STATE", "value": f"{STATE}/two-cards"}]
    annotations = {"gpu-fraction": "0.25", names.ANNOTATION_DEVICES: "2"}
    kai.gpus = {"n2": uuids}
    try:
        pod = tenant(
            "two", annotations, container={"env": cards}, nodeSelector={"kubernetes.io/hostname": "n2"}
        )
        accepted(cluster, pod, namespace)
        wait_running(cluster, "two", namespace=namespace, kai=kai)
    finally:
        kai.gpus = before
    assert cluster.exec_("two", QUERY, namespace=namespace) == "3840\n3840\n"
    visible = cluster.exec_("two", ["printenv", names.ENV_NVIDIA_VISIBLE_DEVICES], namespace=namespace)
    assert sorted(visible.strip().split(",")) == sorted(uuids)
    assert PASS in cluster.exec_("two", ["memory-limit", "3072", "2048"], namespace=namespace)
    labels = {"namespace": namespace, "pod": "two"}

    def limits() -> list[Any]:
        found = series(metrics(cluster, "n2"), "hami_vgpu_memory_limit_bytes", **labels)
        return [(s.labels["vdevice_index"], s.labels["device_uuid"], s.value) for s in found]

    expected = [(str(index), uuid, 3840.0 * MIB) for index, uuid in enumerate(uuids)]
    wait_for(lambda: sorted(limits()) == expected, 30, f"a series a device, not {limits()}")
    cluster.delete("pod", "two", namespace=namespace)


@pytest.mark.parametrize("case", ["nvfractions-only", "nri"])
def test_newer_kai(cluster: Cluster, namespace: str, kai: Kai, case: str) -> None:
    """A pod with NvFractions keys alone in HamiCore mode, and one whose devices come through NRI without
    NVIDIA_VISIBLE_DEVICES: both have the library and KAI's limit."""
    nvfractions = {"nvidia.com/container.main.gpu-memory.request": "4096Mi"}
    annotations = MEMORY if case == "nri" else nvfractions
    with kai.as_mode(nri=case == "nri"):
        answer = accepted(cluster, tenant(case, annotations), namespace)
        assert answer.injected() == ["main"]
        variables = [entry["name"] for entry in answer.container()["env"]]
        assert (names.ENV_NVIDIA_VISIBLE_DEVICES in variables) == (case != "nri")
        pod = wait_running(cluster, case, namespace=namespace, kai=kai)[0]
    assert ("nvidia.cdi.k8s.io/container.main" in pod["metadata"]["annotations"]) == (case == "nri")
    assert cluster.exec_(case, QUERY, namespace=namespace) == "4147\n"
    assert PASS in cluster.exec_(case, ["memory-limit"], namespace=namespace)


def test_nvfractions_mode_is_left_alone(cluster: Cluster, namespace: str, kai: Kai) -> None:
    """Where NVIDIA enforces the share, a pod with its annotations alone carries nothing of ours."""
    with kai.as_mode(nvfractions=True):
        request = {"nvidia.com/container.main.gpu-memory.request": "4096Mi"}
        answer = accepted(cluster, tenant("p", request), namespace, DRY)
    assert answer.ours() == []
    assert answer.said == ""
    assert answer.status is None


# ---- the order of the webhooks ----------------------------------------------------------------------


@pytest.fixture
def kai_first(cluster: Cluster, product: Product, kai: Kai) -> Iterator[None]:
    """KAI's configuration under a name that sorts before ours."""
    known = cluster.get("mutatingwebhookconfiguration", MUTATING)
    last = {key: known[key] for key in ("apiVersion", "kind", "webhooks")}
    first = {**last, "metadata": {"name": "aaa-kai-admission"}}
    cluster.apply(first)
    cluster.delete("mutatingwebhookconfiguration", MUTATING)
    yield
    cluster.apply({**last, "metadata": {"name": MUTATING}})
    cluster.delete("mutatingwebhookconfiguration", "aaa-kai-admission")


def normal(answer: Answer) -> dict[str, Any]:
    """The pod without what is drawn by lot; lists that have no order in their meaning are sorted."""
    metadata, spec = answer.pod["metadata"], copy.deepcopy(answer.pod["spec"])
    prefix = metadata["annotations"][names.ANNOTATION_CONFIGMAP]
    spec["volumes"] = [v for v in spec["volumes"] if not v["name"].startswith("kube-api-access-")]
    for container in spec["containers"]:
        container["env"] = sorted(container["env"], key=lambda entry: str(entry["name"]))
        mounts = [m for m in container["volumeMounts"] if not m["name"].startswith("kube-api-access-")]
        container["volumeMounts"] = sorted(mounts, key=lambda each: str(each["mountPath"]))
    spec["volumes"].sort(key=lambda volume: str(volume["name"]))
    kept = {key: metadata[key] for key in ("annotations", "labels")}
    return dict(rename({"metadata": kept, "spec": spec}, prefix))


def rename(value: Any, prefix: str) -> Any:
    """The same value with KAI's drawn prefix written as PREFIX."""
    if isinstance(value, dict):
        return {key: rename(each, prefix) for key, each in value.items()}
    if isinstance(value, list):
        return [rename(each, prefix) for each in value]
    return value.replace(prefix, "PREFIX") if isinstance(value, str) else value


@pytest.fixture
def ours_first(cluster: Cluster, namespace: str, kai: Kai) -> dict[str, Any]:
    """The pod as it comes out in the usual order: KAI's first look finds the library in it."""
    kai.reviews.clear()
    made = normal(accepted(cluster, tenant("p", MEMORY), namespace, DRY))
    assert names.VOLUME_VGPU in str(kai.reviews[0]["object"])
    return made


def test_both_orders_end_in_the_same_pod(
    cluster: Cluster, namespace: str, kai: Kai, ours_first: dict[str, Any], kai_first: None
) -> None:
    """C13: called before KAI, with a second look, or after it, the pod is the same."""

    seen: list[Answer] = []

    def kai_was_first() -> bool:
        """The API server takes a changed configuration in late: KAI's first look says who was first."""
        kai.reviews.clear()
        seen.append(accepted(cluster, tenant("p", MEMORY), namespace, DRY))
        return names.VOLUME_VGPU not in str(kai.reviews[0]["object"])

    wait_for(kai_was_first, 15, "KAI to be called first")
    assert normal(seen[-1]) == ours_first
    assert len([v for v in ours_first["spec"]["volumes"] if v["name"] in names.VOLUMES]) == len(names.VOLUMES)


def test_copied_pod_is_made_again(cluster: Cluster, namespace: str, kai: Kai) -> None:
    """B135: the pod as `kubectl get -o yaml` shows it is accepted under another name: nothing of ours is in
    it twice, and it runs at its limit."""
    accepted(cluster, tenant("first", MEMORY), namespace)
    shown = wait_running(cluster, "first", namespace=namespace, kai=kai)[0]
    cluster.delete("pod", "first", namespace=namespace)
    again = {key: shown[key] for key in ("apiVersion", "kind", "spec")}
    del again["spec"]["nodeName"]
    kept = {key: shown["metadata"][key] for key in ("annotations", "labels")}
    again["metadata"] = {"name": "again", **kept}
    answer = accepted(cluster, again, namespace)
    spec = answer.pod["spec"]
    for path, items in (("volumes", spec["volumes"]), ("env", answer.container()["env"])):
        found = [item["name"] for item in items]
        assert len(found) == len(set(found)), path
    paths = [mount["mountPath"] for mount in answer.container()["volumeMounts"]]
    assert len(paths) == len(set(paths))
    assert spec["containers"] == shown["spec"]["containers"]
    wait_running(cluster, "again", namespace=namespace, kai=kai)
    assert PASS in cluster.exec_("again", ["memory-limit"], namespace=namespace)


# ---- policies and rights ----------------------------------------------------------------------------


def test_pod_security_baseline(cluster: Cluster, namespace: str) -> None:
    """B140: in a namespace that enforces `baseline` a share is refused in a sentence that names our volumes;
    a pod without a share, and one that opted out, start."""
    level = "pod-security.kubernetes.io/enforce=baseline"
    cluster.kubectl("label", "namespace", namespace, level)
    refused = submit(cluster, without_host_folder(tenant("share", MEMORY)), namespace, DRY)
    assert not refused.pod
    assert 'violates PodSecurity "baseline' in refused.said
    assert "hostPath volumes" in refused.said
    assert names.VOLUME_VGPU in refused.said
    assert accepted(cluster, without_host_folder(tenant("plain", {})), namespace, DRY).ours() == []
    out = {**MEMORY, names.ANNOTATION_INJECT: "false"}
    assert accepted(cluster, without_host_folder(tenant("out", out)), namespace, DRY).ours() == []


def test_privileged_pod_is_warned_of(cluster: Cluster, namespace: str) -> None:
    """B085: a privileged pod is injected like another, its author reads that it can go round its limit."""
    rights = {"securityContext": {"privileged": True}}
    answer = accepted(cluster, tenant("p", MEMORY, container=rights), namespace, DRY)
    assert answer.injected() == ["main"]
    assert 'container "main" is privileged: it can go round its GPU memory limit' in answer.said
    assert answer.said.count("is privileged") == 1
    assert "privileged" not in accepted(cluster, tenant("q", MEMORY), namespace, DRY).said
