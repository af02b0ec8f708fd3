"""From the API's JSON to the little that is kept of a pod: PodView, and the table of one node's pods.

No value of an environment variable is looked at and no spec is kept, so neither can reach a log or a metric.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any, Final

from isolator import fraction, mountpath, names
from isolator.monitor.model import Container, PodView

MAX_PODS: Final = 1000
"""Pods kept of one node; a kubelet runs 110 by default."""
_ANNOTATIONS: Final = frozenset(
    {
        *names.TRIGGER_ANNOTATIONS,
        names.ANNOTATION_CONTAINER,
        names.ANNOTATION_CONFIGMAP,
        names.ANNOTATION_DEVICES,
        names.ANNOTATION_INJECT,
        names.ANNOTATION_RESOURCE_TYPE,
        names.ANNOTATION_STATUS,
    }
)
_TEXT: Final = 253
ENDED: Final = ("Succeeded", "Failed")
"""Phases of a pod that does not run again."""

Json = Mapping[str, Any]


def _list(owner: Json, key: str) -> list[Any]:
    """A list that the API may leave out or send as null."""
    return owner.get(key) or []


def _map(owner: Json, key: str) -> Json:
    return owner.get(key) or {}


def _has_limit_key(container: Json, prefix: str) -> bool:
    """Whether the container's limit comes from a ConfigMap of KAI's for this pod."""
    for entry in _list(container, "env"):
        if entry.get("name") == names.ENV_MEMORY_LIMIT:
            source = _map(_map(entry, "valueFrom"), "configMapKeyRef").get("name")
            return fraction.is_kais(str(source), prefix)
    return False


def target(spec: Json, annotations: Mapping[str, str]) -> tuple[bool, int] | None:
    """The container that KAI gives the GPU to, as (init, index); None for no fraction pod or no such name.

    The one container that carries KAI's key wins over the annotations: something that came later may have
    put a container in front. Where several carry one, the annotations decide.
    """
    if not (fraction.is_fraction(annotations) or fraction.is_bound(annotations)):
        return None
    places = [
        (init, index, container)
        for init, key in ((True, "initContainers"), (False, "containers"))
        for index, container in enumerate(_list(spec, key))
    ]
    prefix = annotations.get(names.ANNOTATION_CONFIGMAP, "")
    marked = [(init, index) for init, index, container in places if _has_limit_key(container, prefix)]
    if len(marked) == 1:
        return marked[0]
    asked = fraction.named(annotations)
    if not asked:
        return (False, 0)
    found = ((init, index) for init, index, container in places if [container.get("name")] == asked)
    return next(found, None)


def _volume(spec: Json, name: str) -> Json:
    return next((volume for volume in _list(spec, "volumes") if volume.get("name") == name), {})


def _is_injected(spec: Json, container: Json, mount: str, opted_out: bool) -> bool:
    """Whether the container has the host's library and preload file, by mounts that nobody else makes.

    Names alone are not believed: a tenant may give a volume of its own the same name, and a pod that keeps
    away from the webhook may carry mounts that look like ours beside one that hides them. Release 1.1 of
    the upstream project mounts the whole folder; its pods live on across a migration.
    """
    mounts = {
        (str(entry.get("name")), str(entry.get("mountPath"))) for entry in _list(container, "volumeMounts")
    }
    host = _map(_volume(spec, names.VOLUME_VGPU), "hostPath").get("path")
    ours = {
        (names.VOLUME_VGPU, f"{mount}/{names.LIBRARY_FILE}"),
        (names.VOLUME_PRELOAD, names.PRELOAD_FILE),
    }
    # Either makes the library ask for a limit; without both it lets everything pass.
    demands = {
        (names.VOLUME_LIMIT, f"{mount}/{names.LIMIT_FILE}"),
        (names.VOLUME_CONTAINERS, f"{mount}/{names.CONTAINERS_DIRECTORY}"),
    }
    if ours <= mounts:
        preload = _map(_volume(spec, names.VOLUME_PRELOAD), "hostPath").get("path")
        whole = host == f"{mount}/{names.LIBRARY_FILE}" and preload == f"{mount}/{names.PRELOAD_KEY}"
        hidden = any(mountpath.hides(path, mount) for _, path in mounts - ours - demands)
        return whole and bool(demands & mounts) and not hidden
    upstream = any(path == names.PRELOAD_FILE for _, path in mounts)
    return not opted_out and upstream and (names.VOLUME_VGPU, mount) in mounts and host == mount


def _limit(spec: Json, container: Json) -> tuple[str | None, bool]:
    """(KAI's ConfigMap behind the limit file, whether the file holds the pod's UID in place of a limit)."""
    if not any(entry.get("name") == names.VOLUME_LIMIT for entry in _list(container, "volumeMounts")):
        return None, False
    volume = _volume(spec, names.VOLUME_LIMIT)
    found = _map(volume, "configMap").get("name")
    return (str(found) if found else None), bool(_map(volume, "downwardAPI"))


def _seconds(text: str | None) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp() if text else None
    except ValueError:
        return None


def _containers(pod: Json, annotations: Mapping[str, str], mount: str) -> Iterator[Container]:
    meta, spec, status = pod["metadata"], _map(pod, "spec"), _map(pod, "status")
    wanted = target(spec, annotations)
    opted_out = fraction.opted_out(annotations, _map(meta, "labels")) is not None
    states = {
        entry.get("name"): entry
        for key in ("initContainerStatuses", "containerStatuses")
        for entry in _list(status, key)
    }
    for init, key in ((True, "initContainers"), (False, "containers")):
        for index, container in enumerate(_list(spec, key)):
            state = states.get(container["name"], {})
            running = _map(state, "state").get("running")
            configmap, withheld = _limit(spec, container)
            yield Container(
                namespace=str(meta["namespace"]),
                pod=str(meta["name"]),
                uid=str(meta["uid"]),
                name=str(container["name"]),
                init=init,
                injected=_is_injected(spec, container, mount, opted_out),
                running=running is not None,
                started=_seconds((running or {}).get("startedAt")),
                container_id=str(state.get("containerID") or "").rpartition("://")[2],
                fraction=wanted == (init, index),
                limit_configmap=configmap,
                limit_withheld=withheld,
            )


def view(pod: Json, mount: str) -> PodView:
    """What is kept of one pod object (decoded JSON); `mount` is the folder of the library.

    Raises AttributeError, KeyError or TypeError for something that is no pod.
    """
    meta, spec, status = pod["metadata"], _map(pod, "spec"), _map(pod, "status")
    given = _map(meta, "annotations")
    annotations = {
        key: str(value)[:_TEXT]
        for key, value in given.items()
        if key in _ANNOTATIONS or key.startswith(names.NVFRACTIONS_PREFIX)
    }
    label = _map(meta, "labels").get(names.LABEL_WEBHOOK)
    return PodView(
        namespace=str(meta["namespace"]),
        name=str(meta["name"]),
        uid=str(meta["uid"]),
        containers=tuple(_containers(pod, annotations, mount)),
        annotations=annotations,
        labels={} if label is None else {names.LABEL_WEBHOOK: str(label)},
        scheduler=str(spec.get("schedulerName") or ""),
        live=status.get("phase") not in ENDED,
    )


def _as_first_seen(pod: PodView, before: PodView | None) -> PodView:
    """The pod with the words that it came to this node with, as far as it had any.

    KAI reads them when it binds the pod. Whoever may change a pod may change them afterwards; that changes
    neither who has the GPU nor what was granted.
    """
    if before is None:
        return pod
    containers = pod.containers
    if any(c.fraction for c in before.containers):
        targets = {(c.init, c.name) for c in before.containers if c.fraction}
        containers = tuple(replace(c, fraction=(c.init, c.name) in targets) for c in containers)
    return replace(
        pod,
        containers=containers,
        annotations={**pod.annotations, **before.annotations},
        labels={**pod.labels, **before.labels},
    )


class PodTable:
    """The pods of one node by UID; one writer, any number of readers, each with a snapshot of its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pods: dict[str, PodView] = {}
        self.dropped = 0
        """Unfinished pods left out because the table was full."""

    def replace(self, pods: Iterable[PodView]) -> None:
        """Takes a whole list; what is not in it is gone."""
        with self._lock:
            before, self._pods = self._pods, {}
            self.dropped = 0
            for pod in pods:
                self._put(_as_first_seen(pod, before.get(pod.uid)))

    def put(self, pod: PodView) -> None:
        """Adds or changes one pod."""
        with self._lock:
            self._put(_as_first_seen(pod, self._pods.get(pod.uid)))

    def _put(self, pod: PodView) -> None:
        if pod.uid not in self._pods and len(self._pods) >= MAX_PODS:
            # Finished pods of jobs may lie about in any number; a running one takes such a place.
            ended = next((uid for uid, known in self._pods.items() if not known.live), None)
            if not pod.live or ended is None:
                self.dropped += pod.live
                return
            del self._pods[ended]
        self._pods[pod.uid] = pod

    def remove(self, uid: str) -> None:
        """Forgets one pod."""
        with self._lock:
            self._pods.pop(uid, None)

    def snapshot(self) -> dict[str, PodView]:
        """A copy that no later event changes."""
        with self._lock:
            return dict(self._pods)
