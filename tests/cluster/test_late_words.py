"""Pods whose words come or go after their creation, and debug containers: none reaches a GPU in silence."""

from __future__ import annotations

import json
from typing import Any

import pytest
from admitted import Watch, attach
from harness import Cluster, ClusterError, wait_for
from kai import Kai
from product import STATE, tenant, tenant_image, wait_running

from isolator import names

pytestmark = pytest.mark.usefixtures("product")


def test_words_that_come_late_and_go_early(cluster: Cluster, namespace: str, kai: Kai) -> None:
    """A gated pod that asks KAI only after admission, and takes its words back once bound, is told of."""
    devices = {"configMapRef": {"name": "p-0-evar"}}
    gates = [{"name": "example.com/gate"}]
    pod = tenant("late", {}, container={"envFrom": [devices]}, schedulingGates=gates)
    cluster.apply(pod, namespace)
    words = ("gpu-memory", names.ANNOTATION_CONFIGMAP)
    where = f"--namespace={namespace}"
    cluster.kubectl("annotate", "pod", "late", where, f"{words[0]}=4096", f"{words[1]}=p")
    ungated = json.dumps([{"op": "remove", "path": "/spec/schedulingGates"}])
    cluster.kubectl("patch", "pod", "late", where, "--type=json", f"--patch={ungated}")
    wait_for(lambda: cluster.get("pod/late", namespace=namespace)["spec"].get("nodeName"), 60, "the binding")
    cluster.kubectl("annotate", "pod", "late", where, *(f"{word}-" for word in words))
    wait_running(cluster, "late", namespace=namespace, kai=kai)
    assert "NVIDIA_VISIBLE_DEVICES=GPU-" in cluster.exec_("late", ["env"], namespace=namespace)
    watch = Watch(cluster, namespace, "late")
    watch.wait_state("uncapped")
    watch.wait_event("GPUMemoryUncapped", "the webhook did not see the pod")
    cluster.delete("pod", "late", namespace=namespace)


def test_mounts_that_look_like_ours(cluster: Cluster, namespace: str, kai: Kai) -> None:
    """A pod that keeps away from the webhook by its label does not pass for capped with mounts of its own."""
    mount = names.DEFAULT_VGPU_MOUNT
    paths = {
        names.VOLUME_VGPU: (f"{mount}/{names.LIBRARY_FILE}", f"{mount}/{names.LIBRARY_FILE}"),
        names.VOLUME_PRELOAD: (f"{mount}/{names.PRELOAD_KEY}", names.PRELOAD_FILE),
    }
    volumes = [{"name": n, "hostPath": {"path": path, "type": "File"}} for n, (path, _) in paths.items()]
    mounts = [{"name": n, "mountPath": at, "readOnly": True} for n, (_, at) in paths.items()]
    labels = {names.LABEL_WEBHOOK: names.LABEL_WEBHOOK_IGNORE}
    pod = tenant("posing", labels=labels, volumes=volumes, container={"volumeMounts": mounts})
    cluster.apply(pod, namespace)
    wait_running(cluster, "posing", namespace=namespace, kai=kai)
    watch = Watch(cluster, namespace, "posing")
    watch.wait_state("uncapped")
    watch.wait_event("GPUMemoryUncapped", names.LABEL_WEBHOOK)
    cluster.delete("pod", "posing", namespace=namespace)


def test_a_debug_container_gets_no_gpu_from_kai(cluster: Cluster, namespace: str, kai: Kai) -> None:
    """Also where the pod's annotation was changed first; one without such a reference comes in (B131)."""
    cluster.apply(tenant("debugged"), namespace)
    wait_running(cluster, "debugged", namespace=namespace, kai=kai)
    annotations = cluster.get("pod/debugged", namespace=namespace)["metadata"]["annotations"]
    configmap = f"{annotations[names.ANNOTATION_CONFIGMAP]}-0"
    where = f"--namespace={namespace}"
    cluster.kubectl("annotate", "--overwrite", "pod", "debugged", where, f"{names.ANNOTATION_CONFIGMAP}=q")
    debug: dict[str, Any] = {
        "name": "debug",
        "image": tenant_image(),
        "volumeMounts": [{"name": "simgpu", "mountPath": STATE}],
    }
    taking = {**debug, "envFrom": [{"configMapRef": {"name": configmap}}]}
    with pytest.raises(ClusterError, match="takes its GPU from KAI"):
        attach(cluster, "debugged", namespace, **taking)
    attach(cluster, "debugged", namespace, **debug)
    cluster.delete("pod", "debugged", namespace=namespace)
