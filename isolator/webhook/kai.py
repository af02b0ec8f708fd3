"""What KAI Scheduler reads from a pod and what its admission leaves on it, as far as the rule needs it."""

from __future__ import annotations

from dataclasses import dataclass

from isolator import fraction, names
from isolator.webhook.pod import Container, Pod, quote

_ALWAYS = frozenset(names.KAI_ENV) - {names.ENV_NVIDIA_VISIBLE_DEVICES}
"""KAI replaces these in every mode; with the GPU Operator's NRI plugin the device list stays the tenant's."""


@dataclass(frozen=True, slots=True)
class Marks:
    """KAI's second-pass traces: the containers that refer to its ConfigMaps, and where the limit comes from.

    `configmap` is the ConfigMap that KAI's binder writes the limit of the only marked container into; None
    where KAI left no limit. `moved` says that the container's index changed after KAI looked, `claimed` that
    a limit from KAI is referred to, whether or not the other traces agree with it.
    """

    containers: tuple[Container, ...]
    configmap: str | None = None
    moved: bool = False
    claimed: bool = False


def resolve(pod: Pod) -> tuple[Container | None, str]:
    """The container that KAI gives the GPU, or None and the sentence why KAI will refuse the pod."""
    named = fraction.named(pod.annotations)
    if len(named) > 1:
        shown = ", ".join(map(quote, named[:4]))
        return None, f"annotations disagree on the container ({shown}): KAI gives a GPU share to one"
    if not named:
        return pod.first, ""
    (name,) = named
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
        if variable in _ALWAYS and fraction.is_kais(configmap, prefix)
    }
    limits = {
        configmap
        for _, configmap, key in target.references(names.ENV_MEMORY_LIMIT)
        if key == names.ENV_MEMORY_LIMIT
    }
    claimed = any(fraction.is_kais(configmap, prefix) for configmap in limits)
    if len(sources) != 1 or not sources & limits or any(s.endswith("-evar") for s in sources):
        return Marks(marked, claimed=claimed)
    # The binder counts the index when it binds; the reference may be older than the container's place.
    current = f"{prefix}-{'i' if target.init else ''}{target.index}"
    return Marks(marked, current, moved=current not in sources, claimed=claimed)


def takers(pod: Pod, containers: list[Container]) -> list[Container]:
    """Those of the given containers that take this pod's GPU from KAI's ConfigMaps.

    Asked of a running pod, whose annotations may have changed: our limit volume names the ConfigMap for good.
    """
    prefixes = {pod.annotations.get(names.ANNOTATION_CONFIGMAP, "")}
    for volume in pod.volumes:
        source = volume.get("configMap") if volume["name"] == names.VOLUME_LIMIT else None
        if isinstance(source, dict):
            prefixes.add(fraction.prefix_of(str(source.get("name"))))
    return [c for c in containers if any(_refers(c, prefix) for prefix in prefixes)]


def _refers(container: Container, prefix: str) -> bool:
    if any(fraction.is_kais(configmap, prefix) for configmap in container.bulk_references()):
        return True
    return any(
        variable in names.KAI_ENV and fraction.is_kais(configmap, prefix)
        for variable, configmap, _ in container.references()
    )
