"""Nothing runs without its limit in silence: the author's warning, the pod's Event and the series say why."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from admitted import DRY, Watch, accepted, submit
from harness import Cluster, ClusterError, wait_for
from kai import Kai
from kai_objects import MUTATING
from product import PASS, QUERY, Product, merged, metrics, tenant, value, wait_running, webhook_away

from isolator import names

MEMORY = {"gpu-memory": "4096"}
FRACTION = {"gpu-fraction": "0.25"}
LABEL = names.NODE_LABEL_GPU_MEMORY
NO_LIMIT = 'KAI set no GPU memory limit for container "main" (is its HAMi-core mode on?)'
MIB = 1 << 20

pytestmark = pytest.mark.usefixtures("product", "kai")


@pytest.fixture
def hamicore_off(kai: Kai) -> Iterator[None]:
    """KAI as it is without hamicore: everything but the limit."""
    with kai.as_mode(hamicore=False):
        yield


@pytest.fixture
def relabel(cluster: Cluster) -> Iterator[Any]:
    """Sets the memory label of all nodes, None takes it away; afterwards it is as before."""

    def put(memory: str | None) -> None:
        word = f"{LABEL}-" if memory is None else f"{LABEL}={memory}"
        cluster.kubectl("label", "nodes", "--all", "--overwrite", word)

    yield put
    put("15360")


def start(cluster: Cluster, namespace: str, kai: Kai, pod: dict[str, Any]) -> Watch:
    """Creates a pod and waits until it is ready."""
    accepted(cluster, pod, namespace)
    name = pod["metadata"]["name"]
    wait_running(cluster, name, namespace=namespace, kai=kai)
    return Watch(cluster, namespace, name)


def refused_start(cluster: Cluster, pod: str, namespace: str, *before: str) -> str:
    """What the lab's program says where CUDA does not start."""
    with pytest.raises(ClusterError) as failure:
        cluster.exec_(pod, [*before, "/usr/local/bin/memory-limit"], namespace=namespace)
    return str(failure.value)


# ---- hamicore off: the three answers ----------------------------------------------------------------


def test_refuse(cluster: Cluster, namespace: str, kai: Kai, hamicore_off: None) -> None:
    """onNoLimit refuse: the pod runs and CUDA does not start in it, whatever limit it gives itself; warning,
    Event and state say so before and after a program has tried."""
    env = [{"name": names.ENV_MEMORY_LIMIT, "value": "100g"}]
    pod = tenant("refused", MEMORY, container={"env": env})
    warned = accepted(cluster, pod, namespace)
    assert f"{NO_LIMIT}: CUDA will not start in it" in warned.said
    assert warned.status == "injected"
    wait_running(cluster, "refused", namespace=namespace, kai=kai)
    watch = Watch(cluster, namespace, "refused")
    watch.wait_state("refused")
    # NVML alone makes no region and changes nothing.
    cluster.exec_("refused", ["nvidia-smi"], namespace=namespace)
    for before in ([], ["env", "-i"], ["env", "ISOLATOR_ENFORCE=off", "CUDA_DEVICE_MEMORY_LIMIT=8g"]):
        said = refused_start(cluster, "refused", namespace, *before)
        assert re.search(r"cuInit: .*\(800\)", said), said
        assert "CUDA is refused" in said
    watch.wait_state("refused")
    cluster.kubectl("annotate", "pod", "refused", f"--namespace={namespace}", f"{names.ANNOTATION_STATUS}-")
    watch.wait_event("GPUMemoryRefused", "KAI gave no limit")
    watch.wait_state("refused")
    cluster.delete("pod", "refused", namespace=namespace)


def test_kai_never_looked(cluster: Cluster, namespace: str) -> None:
    """The first pass alone: the limit file holds the pod's UID, no limit, and CUDA does not start."""
    known = cluster.get("mutatingwebhookconfiguration", MUTATING)

    def seen() -> bool:
        pod = accepted(cluster, tenant("p", MEMORY), namespace, DRY).pod
        return names.ANNOTATION_CONFIGMAP in pod["metadata"]["annotations"]

    cluster.delete("mutatingwebhookconfiguration", MUTATING)
    try:
        wait_for(lambda: not seen(), 15, "KAI to be called no more")
        accepted(cluster, tenant("unseen", MEMORY, nodeName="n1"), namespace)
    finally:
        kept = {key: known[key] for key in ("apiVersion", "kind", "webhooks")}
        cluster.apply({**kept, "metadata": {"name": MUTATING}})
        wait_for(seen, 15, "KAI to be called again")
    pod = wait_running(cluster, "unseen", namespace=namespace)[0]
    limit = ["cat", f"{names.DEFAULT_VGPU_MOUNT}/{names.LIMIT_FILE}"]
    assert cluster.exec_("unseen", limit, namespace=namespace) == pod["metadata"]["uid"]
    said = refused_start(cluster, "unseen", namespace, "env", "CUDA_DEVICE_MEMORY_LIMIT=8g")
    assert re.search(r"cuInit: .*\(800\)", said), said
    Watch(cluster, namespace, "unseen").wait_state("refused")


@pytest.fixture(scope="module")
def changed(product: Product) -> Iterator[Any]:
    """Installs the shared release with other values of the webhook; put back once, at the end."""

    def install(**webhook: Any) -> None:
        product.install(merged(product.values, {"webhook": webhook}))

    yield install
    product.install(product.values)


def test_release(cluster: Cluster, namespace: str, kai: Kai, changed: Any, hamicore_off: None) -> None:
    """onNoLimit release: the pod runs without the library, and all three ways say that it has no limit."""
    changed(onNoLimit="release")
    pod = tenant("released", MEMORY)
    warned = accepted(cluster, pod, namespace)
    assert f"{NO_LIMIT}: it runs without a limit" in warned.said
    assert warned.ours() == []
    assert warned.status == "skipped: no-limit"
    wait_running(cluster, "released", namespace=namespace, kai=kai)
    watch = Watch(cluster, namespace, "released")
    assert cluster.exec_("released", QUERY, namespace=namespace) == "15360\n"
    watch.wait_state("uncapped")
    assert watch.uncapped("skipped") >= 1
    watch.wait_event("GPUMemoryUncapped", "no-limit")
    cluster.delete("pod", "released", namespace=namespace)
    wait_for(lambda: watch.uncapped("skipped") == 0, 60, "the count to fall")


def test_deny_and_no_opt_out(cluster: Cluster, namespace: str, kai: Kai, changed: Any) -> None:
    """onNoLimit deny refuses the pod in a sentence. podOptOut false: annotation, label and variable of a pod
    do nothing, and its author is told so; those of the namespace still hold."""
    changed(onNoLimit="deny", podOptOut=False)
    with kai.as_mode(hamicore=False):
        denied = submit(cluster, tenant("denied", MEMORY), namespace)
    assert not denied.pod
    assert f'admission webhook "{names.WEBHOOK_NAME}" denied the request' in denied.said
    assert f"{names.RELEASE}: {NO_LIMIT}: this cluster denies such pods" in denied.said
    pod = tenant(
        "no-way-out",
        {**MEMORY, names.ANNOTATION_INJECT: "false"},
        labels={names.LABEL_WEBHOOK: names.LABEL_WEBHOOK_IGNORE},
        container={"env": [{"name": names.ENV_DISABLE_CONTROL, "value": "true"}]},
    )
    answer = accepted(cluster, pod, namespace)
    assert answer.injected() == ["main"]
    for what in (names.ANNOTATION_INJECT, names.LABEL_WEBHOOK, names.ENV_DISABLE_CONTROL):
        assert re.search(rf"{re.escape(what)} is ignored: this cluster has no opt-out of pods", answer.said)
    wait_running(cluster, "no-way-out", namespace=namespace, kai=kai)
    assert PASS in cluster.exec_("no-way-out", ["memory-limit"], namespace=namespace)
    cluster.kubectl("label", "namespace", namespace, f"{names.LABEL_WEBHOOK}=ignore")

    def left_alone() -> bool:
        return accepted(cluster, tenant("p", MEMORY), namespace, DRY).ours() == []

    wait_for(left_alone, 10, "the API server to see the namespace's label")


# ---- the webhook away -------------------------------------------------------------------------------


def test_webhook_down_fail(cluster: Cluster, namespace: str, changed: Any) -> None:
    """B070 B073 B074: with no webhook running a share is refused by our webhook's name, and every other pod,
    those of kube-system and of KAI's scheduler among them, starts."""
    changed()

    def refused() -> bool:
        return not submit(cluster, tenant("share", MEMORY), namespace, DRY).pod

    with webhook_away(cluster):
        wait_for(refused, 60, "share pods to be refused", every=0.5)
        said = submit(cluster, tenant("share", MEMORY), namespace)
        assert not said.pod
        assert f'failed calling webhook "{names.WEBHOOK_NAME}"' in said.said
        others = {
            "plain": (namespace, tenant("plain", {})),
            "unscheduled": (namespace, tenant("unscheduled", {}, schedulerName="default-scheduler")),
            "system": ("kube-system", tenant("system", MEMORY, schedulerName="default-scheduler")),
        }
        for name, (place, pod) in others.items():
            accepted(cluster, pod, place)
            wait_running(cluster, name, namespace=place)
        cluster.delete("pod", "system", namespace="kube-system")


def test_webhook_missed(cluster: Cluster, namespace: str, kai: Kai, changed: Any) -> None:
    """B074: failurePolicy Ignore and no webhook: the pod starts without a limit, and its Event and the series
    say that the webhook did not see it."""
    changed(failurePolicy="Ignore")
    with webhook_away(cluster):
        watch = start(cluster, namespace, kai, tenant("missed", MEMORY))
        assert cluster.exec_("missed", QUERY, namespace=namespace) == "15360\n"
        watch.wait_state("uncapped")
        assert watch.uncapped("not_injected") >= 1
        watch.wait_event("GPUMemoryUncapped", "the webhook did not see the pod")


def test_opted_out(cluster: Cluster, product: Product, namespace: str, kai: Kai, changed: Any) -> None:
    """A pod that opted out runs without the library; Event and series say that it wanted so."""
    product.install(product.values)
    pod = tenant("out", {**MEMORY, names.ANNOTATION_INJECT: "false"})
    watch = start(cluster, namespace, kai, pod)
    assert names.LIBRARY_FILE not in cluster.exec_("out", ["cat", "/proc/1/maps"], namespace=namespace)
    watch.wait_state("uncapped")
    assert watch.uncapped("opted_out") >= 1
    watch.wait_event("GPUMemoryUncapped", f"annotation {names.ANNOTATION_INJECT} is false")


# ---- KAI's key and the node's label -----------------------------------------------------------------


def test_missing_key_holds_the_pod(cluster: Cluster, namespace: str, kai: Kai, relabel: Any) -> None:
    """KAI up to 0.17.0 leaves the limit out in silence where the node's label is missing: the pod is held
    with an Event that names the key, and starts capped once the key is there."""
    relabel(None)
    with kai.as_mode(version=(0, 17, 0)):
        pod = accepted(cluster, tenant("held", FRACTION), namespace).pod
        event = f"references non-existent config key: {names.ENV_MEMORY_LIMIT}"

        def held() -> bool:
            found = cluster.events("held", namespace=namespace)
            return any(each["reason"] == "FailedMount" and event in each["message"] for each in found)

        wait_for(held, 120, "the mount's Event")
    status = cluster.get("pod", "held", namespace=namespace)["status"]
    assert status["containerStatuses"][0]["state"]["waiting"]["reason"] == "ContainerCreating"
    configmap = pod["metadata"]["annotations"][names.ANNOTATION_CONFIGMAP] + "-0"
    patch = f'{{"data": {{"{names.ENV_MEMORY_LIMIT}": "3840m"}}}}'
    cluster.kubectl("patch", "configmap", configmap, f"--namespace={namespace}", f"--patch={patch}")
    wait_running(cluster, "held", namespace=namespace, timeout=180)
    assert cluster.exec_("held", QUERY, namespace=namespace) == "3840\n"
    assert PASS in cluster.exec_("held", ["memory-limit"], namespace=namespace)


def test_label_in_bytes(cluster: Cluster, namespace: str, kai: Kai, relabel: Any) -> None:
    """A label in bytes makes KAI write a limit far above the card: it is cut to the card, and Event and
    series say that it is not what KAI grants."""
    relabel(str(15360 * MIB))
    hold = ["sh", "-c", "HOLD_SECONDS=100000 exec memory-limit 1024"]
    watch = start(cluster, namespace, kai, tenant("bytes", MEMORY, hold))
    limit = cluster.exec_("bytes", ["printenv", names.ENV_MEMORY_LIMIT], namespace=namespace)
    assert int(limit.strip().removesuffix("m")) > 15360 * MIB // 10
    card = int(cluster.exec_("bytes", QUERY, namespace=namespace))
    assert 15000 < card <= 15360
    labels = {"namespace": namespace, "pod": "bytes", "container": "main"}

    def shown(name: str) -> float | None:
        return value(metrics(cluster, watch.node), name, **labels)

    wait_for(lambda: shown("kai_isolator_limit_mismatch") == 1, 60, "the mismatch")
    assert shown("kai_isolator_expected_limit_bytes") == 4147 * MIB
    assert int(shown("hami_vgpu_memory_limit_bytes") or 0) // MIB == card
    watch.wait_event("GPUMemoryLimitMismatch", LABEL)
