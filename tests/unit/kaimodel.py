"""KAI Scheduler's mutating admission, as far as it matters beside another webhook; pods to try it on.

A model, written from what KAI documents and does: it chooses the container, keeps a ConfigMap prefix in an
annotation, removes and appends its variables, and adds a volume and an envFrom source once.
"""

from __future__ import annotations

import copy
import re
from typing import Any

import jsonpatch

from isolator.webhook.patch import build_patch
from isolator.webhook.rule import Rule, Verdict, decide

Json = dict[str, Any]
PREFIX_KEY = "runai/shared-gpu-configmap"
NAMED = "gpu-fraction-container-name"
LEGACY = ("gpu-fraction", "gpu-memory")
NVFRACTIONS = re.compile(r"nvidia\.com/container\.(.+)\.gpu-memory\.(?:request|limit)")
VARIABLES = ("NVIDIA_VISIBLE_DEVICES", "RUNAI_NUM_OF_GPUS", "GPU_PORTION", "CUDA_DEVICE_MEMORY_LIMIT")


class RefusedError(Exception):
    """KAI denies the pod."""


def _target(spec: Json, annotations: dict[str, str]) -> tuple[Json, str]:
    keyed = {m[1] for m in map(NVFRACTIONS.fullmatch, annotations) if m}
    name = annotations.get(NAMED)
    if len(keyed) > 1 or (name and keyed and keyed != {name}):
        raise RefusedError("containers disagree")
    name = name or next(iter(keyed), None)
    if not name:
        return spec["containers"][0], "0"
    for kind, letter in (("initContainers", "i"), ("containers", "")):
        for index, container in enumerate(spec.get(kind) or []):
            if container["name"] == name:
                return container, f"{letter}{index}"
    raise RefusedError(f"no container {name}")


def kai(
    pod: Json, hamicore: bool = True, nri: bool = False, marks: bool = True, runtime_class: str = "nvidia"
) -> Json:
    """The pod after KAI's admission. `marks` is false in NvFractions mode, `hamicore` without a limit."""
    pod = copy.deepcopy(pod)
    annotations = pod["metadata"].get("annotations") or {}
    fraction = any(key in annotations for key in LEGACY) or any(map(NVFRACTIONS.fullmatch, annotations))
    if not fraction or pod["spec"].get("schedulerName") != "kai-scheduler":
        return pod
    spec = pod["spec"]
    container, index = _target(spec, annotations)
    spec.setdefault("runtimeClassName", runtime_class)
    if not marks:
        return pod
    annotations.setdefault(PREFIX_KEY, "train-abc1234-shared-gpu")
    pod["metadata"]["annotations"] = annotations
    capabilities = f"{annotations[PREFIX_KEY]}-{index}"
    for name in VARIABLES:
        if (name == VARIABLES[0] and nri) or (name == VARIABLES[3] and not hamicore):
            continue
        reference: Json = {"name": capabilities, "key": name}
        if name == VARIABLES[3]:
            reference["optional"] = True
        kept = [entry for entry in container.get("env") or [] if entry["name"] != name]
        container["env"] = [*kept, {"name": name, "valueFrom": {"configMapKeyRef": reference}}]
    volume = {"name": f"{capabilities}-vol", "configMap": {"name": capabilities, "defaultMode": 420}}
    if volume not in (spec.get("volumes") or []):
        spec["volumes"] = [*(spec.get("volumes") or []), volume]
    source = {"configMapRef": {"name": f"{capabilities}-evar"}}
    if source not in (container.get("envFrom") or []):
        container["envFrom"] = [*(container.get("envFrom") or []), source]
    return pod


def us(pod: Json, rule: Rule | None = None, namespace: str = "team") -> tuple[Json, Verdict]:
    """The pod after our webhook, with the verdict; the patch is applied by a strict RFC 6902 library."""
    rule = rule or Rule()
    before = copy.deepcopy(pod)
    verdict = decide(pod, namespace, rule)
    patch = build_patch(pod, verdict, rule)
    assert before == pod, "the rule changed its input"
    return jsonpatch.apply_patch(copy.deepcopy(pod), patch), verdict


def mutated(pod: Json, rule: Rule | None = None) -> Json:
    """The pod after our webhook."""
    return us(pod, rule)[0]


def fraction_pod(**spec: Any) -> Json:
    """A small pod that asks for 4096 MiB; keyword arguments replace members of its spec."""
    members = {"schedulerName": "kai-scheduler", "containers": [{"name": "main", "image": "cuda"}], **spec}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "train", "annotations": {"gpu-memory": "4096"}},
        "spec": members,
    }


def target_of(pod: Json, verdict: Verdict) -> Json:
    """The container that the verdict is about."""
    assert verdict.target is not None
    kind = "initContainers" if verdict.target.init else "containers"
    found: Json = pod["spec"][kind][verdict.target.index]
    return found
