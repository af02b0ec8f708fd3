"""What was read of a cluster: decoded API objects, None where it could not be read. No call is made here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from isolator import names

Json = Mapping[str, Any]
Objects = list[Json]

LIBSYNC: Final = "libsync"
MONITOR: Final = "monitor"
WEBHOOK: Final = "webhook"
COMPONENTS: Final = {
    WEBHOOK: names.COMPONENT_WEBHOOK,
    LIBSYNC: names.COMPONENT_LIBSYNC,
    MONITOR: names.COMPONENT_MONITOR,
}
_SHOWN: Final = 3


def some(values: list[str]) -> str:
    """The first of them, and how many more there are."""
    kept = sorted(dict.fromkeys(values))
    more = f" and {len(kept) - _SHOWN} more" if len(kept) > _SHOWN else ""
    return ", ".join(kept[:_SHOWN]) + more


def at(value: Any, *path: str | int) -> Any:
    """What lies at a path of keys and indexes; None where the path ends early."""
    for key in path:
        if isinstance(value, Mapping) and isinstance(key, str):
            value = value.get(key)
        elif isinstance(value, list) and isinstance(key, int) and len(value) > key:
            value = value[key]
        else:
            return None
    return value


def listed(value: Any, *path: str | int) -> Objects:
    """The objects of a list at a path, which may be missing."""
    found = at(value, *path)
    return [item for item in found if isinstance(item, Mapping)] if isinstance(found, list) else []


def labels(item: Json) -> Json:
    """An object's labels."""
    return at(item, "metadata", "labels") or {}


def name(item: Json) -> str:
    """An object's name."""
    return str(at(item, "metadata", "name") or "")


def space(item: Json) -> str:
    """An object's namespace."""
    return str(at(item, "metadata", "namespace") or "")


def title(item: Json) -> str:
    """namespace/name."""
    return f"{space(item)}/{name(item)}"


def leaving(item: Json) -> bool:
    """Whether it is being deleted."""
    return at(item, "metadata", "deletionTimestamp") is not None


def condition(item: Json, kind: str) -> Json:
    """The condition of a type; empty where there is none."""
    found = (each for each in listed(item, "status", "conditions") if each.get("type") == kind)
    return next(found, {})


def ready(pod: Json) -> bool:
    """Whether a pod is Ready."""
    return condition(pod, "Ready").get("status") == "True"


def statuses(pod: Json) -> Objects:
    """The statuses of its containers, init containers first."""
    return listed(pod, "status", "initContainerStatuses") + listed(pod, "status", "containerStatuses")


def variable(container: Json | None, wanted: str) -> str | None:
    """A literal variable of a container of ours."""
    entries = (each for each in listed(container, "env") if each.get("name") == wanted)
    value = at(next(entries, {}), "value")
    return None if value is None else str(value)


@dataclass
class Admission:
    """The answer to a sharing pod that is not kept: what became of it, or the refusal."""

    namespace: str
    pod: Json | None = None
    refused: str = ""


@dataclass
class Facts:
    """One look at a cluster. Lists are None where they could not be read; `unchecked` says why."""

    now: datetime = field(default_factory=lambda: datetime.now(UTC))
    version: Json | None = None
    mutating: Objects | None = None
    validating: Objects | None = None
    policies: Objects | None = None
    deployments: Objects | None = None
    daemonsets: Objects | None = None
    own_pods: Objects | None = None
    nodes: Objects | None = None
    plain_nodes: Objects | None = None
    """Nodes without the label nvidia.com/gpu.present; a few of them."""
    namespaces: Objects | None = None
    kai: Objects | None = None
    """KAI's Deployments."""
    kai_slices: Objects | None = None
    reservations: Objects | None = None
    reservation_logs: dict[str, str] = field(default_factory=dict)
    pods: Objects | None = None
    """Pods of the schedulers that share GPUs, or the one that was asked for."""
    refusals: Objects | None = None
    """Events of pods that a controller could not create."""
    quota_events: Objects | None = None
    """Our monitors' Events on pods."""
    events: Objects | None = None
    """Warnings of the release's namespace."""
    pod_events: dict[str, Objects] = field(default_factory=dict)
    """Warnings about a pod, by UID."""
    slices: Objects | None = None
    budgets: Objects | None = None
    secret: dict[str, bytes] | None = None
    """Certificates of the webhook's Secret, without keys."""
    preload: str | None = None
    told: dict[str, str] = field(default_factory=dict)
    """What a pod of ours that is not ready answers at /readyz, by name."""
    monitors: dict[str, Json] = field(default_factory=dict)
    """Status documents by node."""
    admission: Admission | None = None
    limits: Json | None = None
    """Data of the ConfigMap behind the asked pod's limit; empty where it is not there."""
    log: str | None = None
    """End of the asked pod's log."""
    kubectl: Json | None = None
    asked: tuple[str, str] | None = None
    """Namespace and name of the one pod that is meant."""
    unchecked: list[tuple[str, str]] = field(default_factory=list)

    @property
    def configuration(self) -> Json | None:
        """Our MutatingWebhookConfiguration: by its name, else by its webhook's."""
        found = [item for item in self.mutating or () if name(item) == names.WEBHOOK_CONFIGURATION]
        found += [
            item
            for item in self.mutating or ()
            if any(entry.get("name") == names.WEBHOOK_NAME for entry in listed(item, "webhooks"))
        ]
        return found[0] if found else None

    @property
    def service(self) -> tuple[str, str] | None:
        """Namespace and name of the webhook's Service."""
        client = at(self.configuration, "webhooks", 0, "clientConfig", "service")
        return (str(client.get("namespace")), str(client.get("name"))) if client else None

    @property
    def namespace(self) -> str | None:
        """The release's namespace; None where nothing tells it."""
        if self.service:
            return self.service[0]
        first = [*(self.deployments or ()), *(self.daemonsets or ())]
        return space(first[0]) if first else None

    def workload(self, component: str) -> Json | None:
        """Our Deployment or DaemonSet of a component."""
        kind = self.deployments if component == WEBHOOK else self.daemonsets
        for item in kind or ():
            if labels(item).get(names.COMPONENT_LABEL) == COMPONENTS[component] and (
                space(item) == self.namespace
            ):
                return item
        return None

    def pods_of(self, component: str) -> Iterator[Json]:
        """Our pods of a component that stay."""
        for pod in self.own_pods or ():
            if (
                labels(pod).get(names.COMPONENT_LABEL) == COMPONENTS[component]
                and space(pod) == self.namespace
                and not leaving(pod)
                and at(pod, "status", "phase") not in ("Succeeded", "Failed")
            ):
                yield pod

    def container(self, component: str) -> Json | None:
        """The container of a workload's template."""
        found = at(self.workload(component), "spec", "template", "spec", "containers", 0)
        return found if isinstance(found, Mapping) else None

    @property
    def mounts(self) -> dict[str, str]:
        """<mount> as each of our parts was told, by part."""
        found = {
            WEBHOOK: variable(self.container(WEBHOOK), "ISOLATOR_WEBHOOK_MOUNT"),
            MONITOR: variable(self.container(MONITOR), "ISOLATOR_MONITOR_MOUNT"),
        }
        words = at(self.container(LIBSYNC), "command") or []
        told = [str(word)[8:] for word in words if str(word).startswith("--mount=")]
        found[LIBSYNC] = told[0] if told else None
        if self.preload is not None:
            found["preload file"] = self.preload.strip().removesuffix(f"/{names.LIBRARY_FILE}")
        return {part: mount for part, mount in found.items() if mount is not None}

    @property
    def mount(self) -> str:
        """<mount>: where libsync installs."""
        known = self.mounts
        return known.get(LIBSYNC) or next(iter(known.values()), names.DEFAULT_VGPU_MOUNT)
