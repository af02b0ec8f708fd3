"""Admission warnings: what a pod's author wrote that will not do what it seems to.

The API server shows a warning to whoever creates the pod; each is one short line, about 120
characters besides what it quotes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from isolator import fraction, names
from isolator.webhook.pod import Container, Json, Pod, as_object, quote

_INTEGER = re.compile(r"[0-9]{1,18}")
_NUMBER = re.compile(r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_TRUE = frozenset({"1", "true", "yes", "on", "t", "y"})
_INDEXED_LIMIT = re.compile(re.escape(names.ENV_MEMORY_LIMIT) + r"_[0-9]+")
_NO_DEVICES = frozenset({None, "", "none", "void"})
_CDI_CONTAINER = "nvidia.cdi.k8s.io/container."
"""The GPU Operator's NRI plugin gives a container the devices of this annotation with its name."""
_CDI_POD = ("nvidia.cdi.k8s.io/pod", "cdi.k8s.io/")
"""Annotations that give devices to every container of the pod."""
_MOUNTERS = frozenset({"ALL", "SYS_ADMIN", "CAP_SYS_ADMIN"})
"""Capabilities with which a container can take our mounts away."""


def is_true(text: str) -> bool:
    """Whether a literal switch says yes. A word that is neither yes nor no does not switch a limit off."""
    return text.strip().lower() in _TRUE


def on_annotations(annotations: dict[str, str]) -> list[str]:
    """Malformed values of KAI's annotations; KAI refuses them, but not in a sentence that helps."""
    found = []
    memory = annotations.get(names.ANNOTATION_MEMORY)
    if memory is not None and not (_INTEGER.fullmatch(memory) and int(memory) > 0):
        found.append(
            f"annotation {names.ANNOTATION_MEMORY}={quote(memory)}: write whole MiB without a unit, like 8000"
        )
    fraction = annotations.get(names.ANNOTATION_FRACTION)
    if fraction is not None:
        value = float(fraction) if _NUMBER.fullmatch(fraction) else 0.0
        if not 0 < value < 1:
            found.append(
                f"annotation {names.ANNOTATION_FRACTION}={quote(fraction)}: write a number like 0.5, below 1"
            )
        elif float(f"{value:.2f}") == 0:
            found.append(f"annotation {names.ANNOTATION_FRACTION}={quote(fraction)}: KAI rounds it to 0.00")
    devices = annotations.get(names.ANNOTATION_DEVICES)
    if devices is not None and not (_INTEGER.fullmatch(devices) and int(devices) > 0):
        found.append(f"annotation {names.ANNOTATION_DEVICES}={quote(devices)}: write a positive whole number")
    return found


def on_target(container: Container, annotations: dict[str, str]) -> list[str]:
    """Variables and rights of the target container that do not have, or go round, the effect they aim at."""
    found = []
    prefix = annotations.get(names.ANNOTATION_CONFIGMAP, "")
    for entry in container.env:
        name = entry["name"]
        if name == names.ENV_MEMORY_LIMIT and not _is_kais_reference(entry, prefix):
            found.append(f"{name} of the pod is not used: the limit comes from its annotation")
        elif _INDEXED_LIMIT.fullmatch(name):
            found.append(f"{quote(name)} can lower the limit of a device, not raise it")
        elif name.startswith("ISOLATOR_") and name != names.ENV_ISOLATOR_POD_UID:
            found.append(f"{quote(name)} cannot switch enforcement off in a pod")
        elif name == "LD_PRELOAD" and names.LIBRARY_FILE in str(entry.get("value")):
            found.append(f"LD_PRELOAD of {names.LIBRARY_FILE} is not needed: the pod gets the node's own")
    security = as_object(container.raw.get("securityContext"), f"{container.where}.securityContext")
    if security.get("privileged") is True:
        found.append(
            f"container {quote(container.name)} is privileged: it can go round its GPU memory limit,"
            " nested containers have none"
        )
    where = f"{container.where}.securityContext.capabilities"
    added = as_object(security.get("capabilities"), where).get("add")
    if isinstance(added, list) and any(isinstance(each, str) and each.upper() in _MOUNTERS for each in added):
        found.append(f"container {quote(container.name)} may unmount its GPU memory limit: drop SYS_ADMIN")
    return found


def _is_kais_reference(entry: Json, prefix: str) -> bool:
    source = entry.get("valueFrom")
    reference = source.get("configMapKeyRef") if isinstance(source, dict) else None
    return isinstance(reference, dict) and fraction.is_kais(str(reference.get("name")), prefix)


def on_replaced(container: Container, required: list[Json]) -> list[str]:
    """Variables of the tenant that ours replace: an earlier call's are equal and give no warning."""
    ours = {str(entry["name"]): entry for entry in required}
    return [
        f"{entry['name']} of the pod is replaced: the quota library's own value is needed"
        for entry in container.env
        if entry["name"] in ours and entry != ours[entry["name"]]
    ]


def on_pod(pod: Pod) -> list[str]:
    """Members of the pod's spec that keep KAI from what it is asked for."""
    if pod.spec.get("nodeName"):
        return ["spec.nodeName is set: KAI does not place this pod and reserves no GPU memory for it"]
    return []


def on_others(pod: Pod, target: Container) -> list[str]:
    """Containers beside the target that ask for GPUs by themselves: nothing limits those."""
    others = [container for container in pod.containers if container is not target]
    found = on_devices(others)
    keys = {f"{_CDI_CONTAINER}{container.name}" for container in others}
    for key in pod.annotations:
        if key in keys or (others and key.startswith(_CDI_POD)):
            found.append(
                f"annotation {quote(key, 80)} gives devices to a container that nothing limits: leave it out"
            )
    return found


def on_devices(containers: Iterable[Container]) -> list[str]:
    """Containers that nothing limits and that name GPUs, by a literal or from anywhere else."""
    return [
        f"container {quote(container.name)} sets {names.ENV_NVIDIA_VISIBLE_DEVICES} itself: nothing limits it"
        for container in containers
        if any(
            entry["name"] == names.ENV_NVIDIA_VISIBLE_DEVICES
            and (entry.get("valueFrom") is not None or entry.get("value") not in _NO_DEVICES)
            for entry in container.env
        )
    ]
