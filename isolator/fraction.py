"""KAI's words on a pod, read the same way by webhook and monitor: is it a fraction pod, who gets the GPU?"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from isolator import names

_SUFFIX: Final = re.compile(r"-i?[0-9]+(?:-evar)?")


def is_legacy(annotations: Mapping[str, str]) -> bool:
    """Whether one of the two annotations that always make a fraction pod is present, empty or not."""
    return any(key in annotations for key in names.TRIGGER_ANNOTATIONS)


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
