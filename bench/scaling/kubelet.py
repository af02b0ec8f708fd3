"""Watches of ConfigMaps that a real kubelet opens for a fraction pod, with and without our limit volume."""

from __future__ import annotations

import json
import time
from typing import Any

from baseimages import BUSYBOX
from harness import Cluster, wait_for
from kaimodel import kai, us

from bench.scaling.podobjects import SPACE

PODS = 5
KAIS = "train-abc1234-shared-gpu"
"""What the double of KAI's admission calls every pod's ConfigMaps."""
DATA = {
    "CUDA_DEVICE_MEMORY_LIMIT": "4147m",
    "GPU_PORTION": "0.25",
    "NVIDIA_VISIBLE_DEVICES": "0",
    "RUNAI_NUM_OF_GPUS": "0.25",
    "RUNAI-VISIBLE-DEVICES": "0",
}


def _pod(name: str, node: str, ours: bool) -> dict[str, Any]:
    """A bound pod with ConfigMaps of its own. The host's files need an installed node and are left out."""
    container = {"name": "main", "image": BUSYBOX, "command": ["sleep", "3600"]}
    spec = {"schedulerName": "kai-scheduler", "containers": [container], "terminationGracePeriodSeconds": 0}
    meta = {"name": name, "annotations": {"gpu-memory": "4096"}}
    made = kai({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec})
    if ours:
        made = us(made)[0]
        gone = {volume["name"] for volume in made["spec"]["volumes"] if "hostPath" in volume}
        made["spec"]["volumes"] = [v for v in made["spec"]["volumes"] if v["name"] not in gone]
        main = made["spec"]["containers"][0]
        main["volumeMounts"] = [mount for mount in main["volumeMounts"] if mount["name"] not in gone]
    made["spec"]["nodeName"] = node
    made["spec"].pop("runtimeClassName", None)
    renamed: dict[str, Any] = json.loads(json.dumps(made).replace(KAIS, f"{name}-shared-gpu"))
    return renamed


def _maps(pod: dict[str, Any]) -> set[str]:
    """The ConfigMaps that it names."""
    found = {v["configMap"]["name"] for v in pod["spec"].get("volumes", ()) if "configMap" in v}
    for container in pod["spec"]["containers"]:
        for entry in container.get("env", ()):
            if "configMapKeyRef" in entry.get("valueFrom", {}):
                found.add(entry["valueFrom"]["configMapKeyRef"]["name"])
        found |= {e["configMapRef"]["name"] for e in container.get("envFrom", ()) if "configMapRef" in e}
    return found


def watches(cluster: Cluster) -> dict[str, Any]:
    """A row for pods as KAI leaves them and one for those that we have injected: watches a pod."""

    def now() -> float:
        return cluster.metrics("apiserver_longrunning_requests", resource="configmaps", verb="WATCH")

    found: dict[str, Any] = {}
    for kind, ours in (("KAI alone", False), ("with ours", True)):
        time.sleep(2)
        before, names = now(), [f"{kind.split()[-1]}-{number}" for number in range(PODS)]
        for name in names:
            pod = _pod(name, next(iter(cluster.nodes)), ours)
            for each in sorted(_maps(pod)):
                meta = {"name": each}
                cluster.apply(
                    {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": DATA}, SPACE
                )
            cluster.apply(pod, SPACE)
        for name in names:
            cluster.wait_pod(name, namespace=SPACE)
        wait_for(lambda start=before: now() - start >= PODS, 20, "the kubelet's watches")
        time.sleep(3)  # more of them may come
        found[f"ConfigMap watches of a pod, {kind}"] = {"watches": (now() - before) / PODS}
        cluster.delete("pod", *names, namespace=SPACE)
        wait_for(lambda start=before: now() <= start, 60, "the kubelet to end its watches")
    return found
