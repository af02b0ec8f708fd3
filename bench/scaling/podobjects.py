"""Pods as they run on a node: a training job with KAI's words and ours, and what a kubelet reports of it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
A_NODE = 20
"""Pods of one made-up node."""
SPACE = "bench"


def pod(number: int) -> dict[str, Any]:
    """A pod as it is bound: what a training job has, KAI's words and ours."""
    lab = json.loads((ROOT / "tests" / "data" / "webhook" / "lab-second-pass.json").read_text())["pod"]
    made: dict[str, Any] = copy.deepcopy(lab)
    made["metadata"] |= {"name": f"training-job-{number}", "namespace": SPACE}
    spec = made["spec"]
    spec.pop("nodeSelector", None)
    spec.pop("runtimeClassName", None)  # a class that this cluster lacks
    spec["nodeName"] = f"made-up-{number // A_NODE}"
    return made


def running(number: int) -> dict[str, Any]:
    """Its status once it runs."""
    now = "2026-12-01T00:00:00Z"
    kinds = ("PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady", "PodScheduled")
    container = {
        "name": "cuda",
        "image": "docker.io/nvidia/cuda:12.4.1-devel-ubuntu22.04",
        "imageID": "docker.io/nvidia/cuda@sha256:" + f"{number:064x}",
        "containerID": "containerd://" + f"{number:064x}",
        "ready": True,
        "started": True,
        "restartCount": 0,
        "state": {"running": {"startedAt": now}},
    }
    return {
        "phase": "Running",
        "conditions": [{"type": t, "status": "True", "lastTransitionTime": now} for t in kinds],
        "hostIP": "10.0.0.1",
        "podIP": f"10.1.{number // 250}.{number % 250}",
        "startTime": now,
        "containerStatuses": [container],
    }
