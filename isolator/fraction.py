"""KAI's words on a pod, read the same way by webhook and monitor: is it a fraction pod, who gets the GPU?"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from isolator import names

_SUFFIX: Final = re.compile(r"-i?[0-9]+(?:-evar)?")
_NAME: Final = re.compile(r"(.+)-i?[0-9]+(?:-evar)?")


def is_legacy(annotations: Mapping[str, str]) -> bool:
    """Whether one of the two annotations that always make a fraction pod is present, empty or not."""
    return any(key in annotations for key in names.TRIGGER_ANNOTATIONS)


def is_bound(annotations: Mapping[str, str]) -> bool:
    """Whether KAI's binder noted that it gave the pod a share, whatever the pod's other words say now."""
    return annotations.get(names.ANNOTATION_RESOURCE_TYPE) == "Fraction"


def declines(annotations: Mapping[str, str]) -> bool:
    """Whether the pod's annotation, in any case of letters, says that it wants no limit."""
    return annotations.get(names.ANNOTATION_INJECT, "").lower() == "false"


def ignores(labels: Mapping[str, str]) -> bool:
    """Whether the pod's label keeps it away from the webhook."""
    return labels.get(names.LABEL_WEBHOOK) == names.LABEL_WEBHOOK_IGNORE


def opted_out(annotations: Mapping[str, str], labels: Mapping[str, str]) -> str | None:
    """The pod's own word that it wants no limit, for a message; None without one."""
    if declines(annotations):
        return f"annotation {names.ANNOTATION_INJECT} is false"
    if ignores(labels):
        return f"label {names.LABEL_WEBHOOK} is {names.LABEL_WEBHOOK_IGNORE}"
    return None


def is_fraction(annotations: Mapping[str, str]) -> bool:
    """Whether KAI, 0.18 included, takes the pod for a fraction pod."""
    return is_legacy(annotations) or bool(_keyed(annotations))


def named(annotations: Mapping[str, str]) -> list[str]:
    """Names of the containers that the annotations give the GPU to, each once.

    None named means spec.containers[0]. KAI serves one, so it refuses a pod with two.
    """
    asked = annotations.get(names.ANNOTATION_CONTAINER, "")
    return sorted(_keyed(annotations) | ({asked} if asked else set()))


def _keyed(annotations: Mapping[str, str]) -> set[str]:
    """Container names in the keys nvidia.com/container.<name>.gpu-memory.request and .limit."""
    found = set()
    for key in annotations:
        if not key.startswith(names.NVFRACTIONS_PREFIX):
            continue
        for suffix in (names.NVFRACTIONS_REQUEST, names.NVFRACTIONS_LIMIT):
            if key.endswith(suffix) and len(key) > len(names.NVFRACTIONS_PREFIX) + len(suffix):
                found.add(key[len(names.NVFRACTIONS_PREFIX) : -len(suffix)])
    return found


def is_kais(configmap: str, prefix: str) -> bool:
    """Whether KAI would write a ConfigMap of that name for a pod whose annotation says `prefix`."""
    if not prefix or not configmap.startswith(prefix):
        return False
    return _SUFFIX.fullmatch(configmap, len(prefix)) is not None


def prefix_of(configmap: str) -> str:
    """The prefix that KAI made this ConfigMap's name from; empty where it is no such name."""
    found = _NAME.fullmatch(configmap)
    return found[1] if found else ""
