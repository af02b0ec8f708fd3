"""What KAI Scheduler reads from a pod and what its admission leaves on it, as far as the rule needs it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from isolator import names
from isolator.webhook.pod import Container, Pod, quote

_SUFFIX = re.compile(r"-i?[0-9]+(?:-evar)?")


@dataclass(frozen=True, slots=True)
class Marks:
    """KAI's second-pass traces: the containers that refer to its ConfigMaps, and where the limit comes from.

    `configmap` is the ConfigMap that KAI's binder writes the limit of the only marked container into; None
    where KAI left no limit. `moved` says that the container's index changed after KAI looked.
    """

    containers: tuple[Container, ...]
    configmap: str | None = None
    moved: bool = False


def is_legacy(annotations: dict[str, str]) -> bool:
    """Whether one of the two annotations that always make a fraction pod is present, empty or not."""
    return any(key in annotations for key in names.TRIGGER_ANNOTATIONS)


def nvfractions_containers(annotations: dict[str, str]) -> list[str]:
    """Container names in the keys nvidia.com/container.<name>.gpu-memory.request and .limit, each once."""
    found = set()
    for key in annotations:
        if not key.startswith(names.NVFRACTIONS_PREFIX):
            continue
        for suffix in (names.NVFRACTIONS_REQUEST, names.NVFRACTIONS_LIMIT):
            if key.endswith(suffix) and len(key) > len(names.NVFRACTIONS_PREFIX) + len(suffix):
                found.add(key[len(names.NVFRACTIONS_PREFIX) : -len(suffix)])
    return sorted(found)


def resolve(pod: Pod) -> tuple[Container | None, str]:
    """The container that KAI gives the GPU, or None and the sentence why KAI will refuse the pod."""
    asked = pod.annotations.get(names.ANNOTATION_CONTAINER, "")
    keyed = nvfractions_containers(pod.annotations)
    if len(keyed) > 1:
        return None, f"annotations name {len(keyed)} containers for one GPU share, KAI serves one"
    if asked and keyed and asked != keyed[0]:
        return None, f"annotations disagree on the container: {quote(asked)} and {quote(keyed[0])}"
    name = asked or (keyed[0] if keyed else "")
    if not name:
        return pod.first, ""
    found = pod.named(name)
    return found, "" if found else f"no container is called {quote(name)}"


def find_marks(pod: Pod) -> Marks:
    """KAI's traces. A name counts only with the prefix that KAI itself keeps in its annotation.

    Any reference counts, also one that a tenant wrote: a container that takes KAI's device list from KAI's
    ConfigMap gets the GPU, whoever wrote the line.
    """
    prefix = pod.annotations.get(names.ANNOTATION_CONFIGMAP, "")
    if not prefix:
        return Marks(())
    marked = tuple(c for c in pod.containers if _refers(c, prefix))
    if len(marked) != 1:
        return Marks(marked)
    target = marked[0]
    sources = {
        configmap
        for variable, configmap, _ in target.references()
        if variable in names.KAI_ENV and is_kais(configmap, prefix)
    }
    limits = {
        configmap
        for _, configmap, key in target.references(names.ENV_MEMORY_LIMIT)
        if key == names.ENV_MEMORY_LIMIT
    }
    if len(sources) != 1 or not sources & limits or any(s.endswith("-evar") for s in sources):
        return Marks(marked)
    # The binder counts the index when it binds; the reference may be older than the container's place.
    current = f"{prefix}-{'i' if target.init else ''}{target.index}"
    return Marks(marked, current, moved=current not in sources)


def is_kais(configmap: str, prefix: str) -> bool:
    """Whether KAI would write a ConfigMap of that name for this pod."""
    return configmap.startswith(prefix) and _SUFFIX.fullmatch(configmap, len(prefix)) is not None


def _refers(container: Container, prefix: str) -> bool:
    if any(is_kais(configmap, prefix) for configmap in container.bulk_references()):
        return True
    return any(
        variable in names.KAI_ENV and is_kais(configmap, prefix)
        for variable, configmap, _ in container.references()
    )
