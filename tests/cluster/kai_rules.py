"""What KAI Scheduler's admission does to a pod in `hamicore` mode and the others, as functions of data.

Written from the contract's sections 1.3 and 1.4; a pod is the API's dictionary. What the scheduler and the
binder compute is in kai_grant.py, the API side in kai.py.
"""

from __future__ import annotations

import copy
import math
import random
import string
from dataclasses import dataclass
from typing import Any

from isolator import names

Pod = dict[str, Any]

GPU_RESOURCE = "nvidia.com/gpu"
NAME_MAX = 63


class Denied(Exception):
    """The pod is refused at admission."""


@dataclass(frozen=True)
class Mode:
    """A KAI release and how it was installed."""

    hamicore: bool = True
    """False is NonMemoryEnforced: everything but the limit."""
    nvfractions: bool = False
    """NVIDIA's own enforcement: no ConfigMaps at all."""
    nri: bool = False
    """The GPU Operator injects devices by annotation, not by NVIDIA_VISIBLE_DEVICES."""
    cdi: bool = False
    """binder.plugins.gpusharing.arguments.cdiEnabled: CDI names in place of UUIDs."""
    runtime_class: str = ""
    """admission.gpuFractionRuntimeClassName; KAI's own default is nvidia."""
    version: tuple[int, int, int] = (0, 18, 2)

    @property
    def fails_open(self) -> bool:
        """Without a usable node label the limit is left out in silence."""
        return self.version <= (0, 17, 0)

    @property
    def knows_nvfractions(self) -> bool:
        """Annotations nvidia.com/container.<name>.gpu-memory.* make a fraction pod too."""
        return self.version >= (0, 18, 0)


# ---- which pods, which container ----------------------------------------------------------------------


def annotations_of(pod: Pod) -> dict[str, str]:
    """The pod's annotations; empty where it has none."""
    return pod["metadata"].get("annotations") or {}


def _nvfractions_containers(pod: Pod, mode: Mode) -> set[str]:
    found = set()
    for key in annotations_of(pod) if mode.knows_nvfractions else ():
        for suffix in (names.NVFRACTIONS_REQUEST, names.NVFRACTIONS_LIMIT):
            if key.startswith(names.NVFRACTIONS_PREFIX) and key.endswith(suffix):
                found.add(key[len(names.NVFRACTIONS_PREFIX) : -len(suffix)])
    return found


def is_fraction(pod: Pod, mode: Mode) -> bool:
    """Presence counts, also of an empty value."""
    given = annotations_of(pod)
    return any(key in given for key in names.TRIGGER_ANNOTATIONS) or bool(_nvfractions_containers(pod, mode))


def target(pod: Pod, mode: Mode) -> tuple[bool, int]:
    """The container that gets the GPU: (is an init container, index); init containers are searched first."""
    wanted = _nvfractions_containers(pod, mode)
    if names.ANNOTATION_CONTAINER in annotations_of(pod):
        wanted.add(annotations_of(pod)[names.ANNOTATION_CONTAINER])
    if len(wanted) > 1:
        raise Denied(f"the annotations name several fraction containers: {', '.join(sorted(wanted))}")
    if not wanted:
        return False, 0
    name = wanted.pop()
    for init, key in ((True, "initContainers"), (False, "containers")):
        for index, container in enumerate(pod["spec"].get(key) or []):
            if container["name"] == name:
                return init, index
    raise Denied(f"fraction container {name!r} not found")


def container_at(pod: Pod, place: tuple[bool, int]) -> dict[str, Any]:
    """The container at a place that target() gave."""
    init, index = place
    found: dict[str, Any] = pod["spec"]["initContainers" if init else "containers"][index]
    return found


# ---- admission ----------------------------------------------------------------------------------------


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def positive(text: str) -> bool:
    return text.isascii() and text.isdigit() and int(text) > 0


def _requests_gpu(pod: Pod) -> bool:
    groups = (pod["spec"].get("containers") or []) + (pod["spec"].get("initContainers") or [])
    return any(GPU_RESOURCE in ((c.get("resources") or {}).get("limits") or {}) for c in groups)


def validate(pod: Pod, mode: Mode) -> None:
    """Raises Denied with the reason; pods that are no fraction pods pass, except with `mps`."""
    given = annotations_of(pod)
    if given.get("mps") == "true" and not is_fraction(pod, mode):
        raise Denied("mps is only for fraction pods")
    if not is_fraction(pod, mode):
        return
    fraction, memory = given.get(names.ANNOTATION_FRACTION), given.get(names.ANNOTATION_MEMORY)
    if fraction is not None and not 0 < _number(fraction) < 1:
        raise Denied(f"gpu-fraction must be a number in (0, 1), not {fraction!r}")
    if memory is not None and not positive(memory):
        raise Denied(f"gpu-memory must be a positive number of MiB, not {memory!r}")
    if _requests_gpu(pod):
        raise Denied(f"a fraction pod cannot have a {GPU_RESOURCE} limit")
    if names.ANNOTATION_DEVICES in given and not positive(given[names.ANNOTATION_DEVICES]):
        raise Denied("gpu-fraction-num-devices must be a positive number")
    target(pod, mode)


def configmap_prefix(pod: Pod, chance: random.Random) -> str:
    """The annotation's value, or a new name whose longest use is still a valid volume name."""
    given = annotations_of(pod).get(names.ANNOTATION_CONFIGMAP)
    if given:
        return given
    meta = pod["metadata"]
    owners = meta.get("ownerReferences") or []
    base = owners[0]["name"] if owners else meta.get("name") or meta.get("generateName") or "pod"
    tail = "-" + "".join(chance.choices(string.ascii_lowercase + string.digits, k=7)) + "-shared-gpu"
    room = NAME_MAX - len(tail) - len("-i99") - len("-evar")
    return base.replace(".", "-")[:room].rstrip("-") + tail


def configmap_names(prefix: str, place: tuple[bool, int]) -> tuple[str, str]:
    """The capabilities and the direct-environment ConfigMap of a container."""
    init, index = place
    name = f"{prefix}-{'i' if init else ''}{index}"
    return name, f"{name}-evar"


def _set_env(container: dict[str, Any], name: str, configmap: str, optional: bool) -> None:
    """Removes the variable, however it was set, and appends it anew."""
    kept = [entry for entry in container.get("env") or [] if entry["name"] != name]
    reference: dict[str, Any] = {"name": configmap, "key": name}
    if optional:
        reference["optional"] = True
    container["env"] = [*kept, {"name": name, "valueFrom": {"configMapKeyRef": reference}}]


def mutate(pod: Pod, mode: Mode, chance: random.Random | None = None) -> Pod:
    """The pod as admission returns it; the argument is left as it is. A second call changes nothing."""
    validate(pod, mode)
    if not is_fraction(pod, mode):
        return pod
    result = copy.deepcopy(pod)
    place = target(result, mode)
    container = container_at(result, place)
    if mode.runtime_class and not result["spec"].get("runtimeClassName"):
        result["spec"]["runtimeClassName"] = mode.runtime_class
    if mode.nvfractions:
        return result
    prefix = configmap_prefix(result, chance or random.Random())
    result["metadata"].setdefault("annotations", {})[names.ANNOTATION_CONFIGMAP] = prefix
    capabilities, direct = configmap_names(prefix, place)
    if not mode.nri:
        _set_env(container, names.ENV_NVIDIA_VISIBLE_DEVICES, capabilities, optional=False)
    for variable in (names.ENV_NUM_OF_GPUS, names.ENV_GPU_PORTION):
        _set_env(container, variable, capabilities, optional=False)
    volumes = result["spec"].get("volumes") or []
    if not any(volume["name"] == f"{capabilities}-vol" for volume in volumes):
        volume = {"name": f"{capabilities}-vol", "configMap": {"name": capabilities}}
        result["spec"]["volumes"] = [*volumes, volume]
    sources = container.get("envFrom") or []
    if not any((source.get("configMapRef") or {}).get("name") == direct for source in sources):
        container["envFrom"] = [*sources, {"configMapRef": {"name": direct, "optional": False}}]
    if mode.hamicore:
        _set_env(container, names.ENV_MEMORY_LIMIT, capabilities, optional=True)
    return result
