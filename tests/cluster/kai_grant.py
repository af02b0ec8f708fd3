"""What KAI Scheduler's scheduler and binder compute for a fraction pod: portion, limit, ConfigMaps, labels.

Written from the contract's sections 1.5 to 1.8, floating-point steps included.
"""

from __future__ import annotations

import math

from kai_rules import Denied, Mode, Pod, annotations_of, configmap_names, container_at, positive, target

from isolator import names

BYTES_FROM = 1048576
"""A label of this size or more is bytes, as the scheduler reads it."""
MISSING_MEMORY_MIB = 100
"""What the scheduler takes a card for whose node has no label."""
GROUP_LABEL = "runai-gpu-group"
CDI_ANNOTATION = "nvidia.cdi.k8s.io/container."
CDI_NAME = "k8s.device-plugin.nvidia.com/gpu="


class BindError(Exception):
    """The pod cannot be bound now."""


# ---- rounding -----------------------------------------------------------------------------------------


def label_memory(label: str | None) -> int | None:
    """The number in a node's memory label, as it stands; None where it is missing or no number."""
    return int(label) if label is not None and positive(label) else None


def schedulable_mib(label: str | None) -> int:
    """M: what the scheduler divides by; bytes become MiB, hundreds are cut off."""
    memory = label_memory(label)
    if memory is None:
        return MISSING_MEMORY_MIB
    mib = memory // BYTES_FROM if memory >= BYTES_FROM else memory
    return mib - mib % 100


def requested_mib(pod: Pod, mode: Mode) -> int | None:
    """MiB that the pod asks for by number; None where it asks for a fraction."""
    given = annotations_of(pod)
    if names.ANNOTATION_FRACTION in given:
        return None
    if names.ANNOTATION_MEMORY in given:
        return int(given[names.ANNOTATION_MEMORY])
    name = container_at(pod, target(pod, mode))["name"]
    for suffix in (names.NVFRACTIONS_REQUEST, names.NVFRACTIONS_LIMIT):
        text = given.get(f"{names.NVFRACTIONS_PREFIX}{name}{suffix}", "")
        if positive(text.removesuffix("Mi")):
            return int(text.removesuffix("Mi"))
    raise Denied("the fraction request is no number of MiB")


def portion(pod: Pod, label: str | None, mode: Mode) -> float:
    """The share of one card: the annotation, or the request in whole hundredths of M, rounded up.

    In the order of KAI's own floating-point steps, whose error lifts some exact requests by a hundredth.
    """
    wanted = requested_mib(pod, mode)
    if wanted is None:
        return float(annotations_of(pod)[names.ANNOTATION_FRACTION])
    return math.ceil(float(wanted) / float(schedulable_mib(label)) * 100) / 100


def portion_text(share: float) -> str:
    """The share as GPU_PORTION shows it."""
    return f"{share:.2f}"


def limit(share: float, label: str | None, mode: Mode) -> str | None:
    """CUDA_DEVICE_MEMORY_LIMIT: of the label as it stands. None: left out, by a release that fails open."""
    memory = label_memory(label)
    granted = float(portion_text(share))
    if memory is None or granted == 0:
        if mode.fails_open:
            return None
        at = f"{names.NODE_LABEL_GPU_MEMORY}={label}"
        raise BindError(f"no limit from node label {at} and portion {granted:.2f}")
    return f"{math.trunc(memory * granted)}m"


def devices(pod: Pod) -> int:
    """Cards that the pod wants a share of."""
    return int(annotations_of(pod).get(names.ANNOTATION_DEVICES, "1"))


# ---- what the binder writes ---------------------------------------------------------------------------


def binding_data(
    pod: Pod, uuids: list[str], share: float, label: str | None, mode: Mode
) -> list[tuple[str, dict[str, str]]]:
    """The two ConfigMaps as (name, data); none in NvFractions mode."""
    if mode.nvfractions:
        return []
    prefix = annotations_of(pod).get(names.ANNOTATION_CONFIGMAP)
    if not prefix:
        raise BindError("the pod has no ConfigMap annotation: it did not pass the admission")
    place = target(pod, mode)
    capabilities, direct = configmap_names(prefix, place)
    data = {key: portion_text(share) for key in (names.ENV_GPU_PORTION, names.ENV_NUM_OF_GPUS)}
    evar: dict[str, str] = {}
    env = container_at(pod, place).get("env") or []
    visible = ",".join(f"{CDI_NAME}{uuid}" if mode.cdi else uuid for uuid in uuids)
    references = [entry["name"] for entry in env if "configMapKeyRef" in (entry.get("valueFrom") or {})]
    by_map = names.ENV_NVIDIA_VISIBLE_DEVICES in references
    (data if by_map else evar)[names.ENV_NVIDIA_VISIBLE_DEVICES] = visible
    cap = limit(share, label, mode) if mode.hamicore else None
    if cap is not None:
        data[names.ENV_MEMORY_LIMIT] = cap
    return [(capabilities, data), (direct, evar)]


def binding_metadata(
    pod: Pod, groups: list[str], uuids: list[str], label: str | None, mode: Mode
) -> dict[str, dict[str, str]]:
    """Annotations and labels that the binder puts on the pod."""
    name = container_at(pod, target(pod, mode))["name"]
    notes = {names.ANNOTATION_RESOURCE_TYPE: "Fraction"}
    if mode.knows_nvfractions and names.ANNOTATION_FRACTION in annotations_of(pod):
        memory = label_memory(label)
        if memory is None:
            raise BindError(f"node label {names.NODE_LABEL_GPU_MEMORY} is missing")
        granted = math.trunc(memory * float(annotations_of(pod)[names.ANNOTATION_FRACTION]))
        notes[f"{names.NVFRACTIONS_PREFIX}{name}{names.NVFRACTIONS_REQUEST}"] = f"{granted}Mi"
    if mode.nri:
        notes[f"{CDI_ANNOTATION}{name}"] = ",".join(f"{CDI_NAME}{uuid}" for uuid in uuids)
    labels = {GROUP_LABEL: groups[0]}
    if len(groups) > 1:
        labels |= {f"{GROUP_LABEL}/{group}": group for group in groups}
    return {"annotations": notes, "labels": labels}
