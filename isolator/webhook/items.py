"""The volumes, mounts and variables that an injected container carries: their one exact shape.

Values that the API server would fill in are written out, so that an item read back is equal to the item sent.
"""

from __future__ import annotations

from isolator import names
from isolator.webhook.pod import Container, Json

POD_UID_SOURCE: Json = {"fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.uid"}}


def volumes(mount: str, configmap: str | None, lock: bool) -> list[Json]:
    """Our volumes; `configmap` holds the limit, `lock` is false where the tenant has a lock folder."""
    found: list[Json] = [
        _host(names.VOLUME_VGPU, f"{mount}/{names.LIBRARY_FILE}", "File"),
        _host(names.VOLUME_PRELOAD, f"{mount}/{names.PRELOAD_KEY}", "File"),
        _host(names.VOLUME_CONTAINERS, f"{mount}/{names.CONTAINERS_DIRECTORY}", "Directory"),
    ]
    if lock:
        found.append({"name": names.VOLUME_VGPULOCK, "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}})
    return [*found, _limit(configmap)]


def _host(name: str, path: str, kind: str) -> Json:
    return {"name": name, "hostPath": {"path": path, "type": kind}}


def _limit(configmap: str | None) -> Json:
    """The limit file: KAI's key, not optional; without KAI's word the pod's UID, which is never a limit.

    A limit file is the authority over the environment, so a file that cannot be a limit keeps the driver from
    starting whatever variables the tenant sets. The UID has hyphens, nobody can choose or change it.
    """
    key = names.ENV_MEMORY_LIMIT
    if configmap is None:
        items: list[Json] = [{"path": key, "fieldRef": POD_UID_SOURCE["fieldRef"]}]
        return {"name": names.VOLUME_LIMIT, "downwardAPI": {"items": items, "defaultMode": 0o644}}
    source: Json = {"name": configmap, "items": [{"key": key, "path": key}]}
    return {"name": names.VOLUME_LIMIT, "configMap": {**source, "defaultMode": 0o644, "optional": False}}


def mounts(mount: str, container: str, lock: bool) -> list[Json]:
    """Our mounts in the container of that name; of the host's folders it sees its own alone."""
    found: list[Json] = [
        {"name": names.VOLUME_VGPU, "mountPath": f"{mount}/{names.LIBRARY_FILE}", "readOnly": True},
        {"name": names.VOLUME_PRELOAD, "mountPath": names.PRELOAD_FILE, "readOnly": True},
        {
            "name": names.VOLUME_CONTAINERS,
            "mountPath": f"{mount}/{names.CONTAINERS_DIRECTORY}",
            "subPathExpr": f"$({names.ENV_ISOLATOR_POD_UID})_{container}",
        },
    ]
    if lock:
        found.append({"name": names.VOLUME_VGPULOCK, "mountPath": names.VGPULOCK_DIRECTORY})
    limit: Json = {"name": names.VOLUME_LIMIT, "mountPath": f"{mount}/{names.LIMIT_FILE}"}
    return [*found, {**limit, "subPath": names.ENV_MEMORY_LIMIT, "readOnly": True}]


def required_env(mount: str) -> list[Json]:
    """Variables that are ours whatever the tenant wrote."""
    cache = f"{mount}/{names.CONTAINERS_DIRECTORY}/{names.CACHE_FILE}"
    return [
        {"name": names.ENV_ISOLATOR_POD_UID, "valueFrom": POD_UID_SOURCE},
        {"name": names.ENV_SHARED_CACHE, "value": cache},
    ]


def default_env(mount: str, container: str) -> list[Json]:
    """Variables that are set only where the tenant has none of that name."""
    return [
        {"name": names.ENV_POD_UID, "valueFrom": POD_UID_SOURCE},
        {"name": names.ENV_CONTAINER_NAME, "value": container},
        {"name": names.ENV_CONTAINER_VGPU_MOUNT, "value": mount},
    ]


def is_ours(mount: Json) -> bool:
    """Whether a volumeMount refers to a volume of ours: those are replaced, so it goes too."""
    return mount["name"] in names.VOLUMES


def own_env(container: Container, mount: str) -> list[int]:
    """Places of the variables that an earlier call added, so that taking them out restores the tenant's list.

    Our block begins with ISOLATOR_POD_UID; a variable of the same shape in front of it is the tenant's own.
    """
    required = required_env(mount)
    if required[0] not in container.env:
        return []
    start = container.env.index(required[0])
    ours = [*required, *default_env(mount, container.name)]
    return [i for i, entry in enumerate(container.env) if i >= start and entry in ours]


def is_injected(container: Container, mount: str) -> bool:
    """Whether an earlier call of ours injected this container, all in its exact shape."""
    expected = mounts(mount, container.name, lock=False)
    return all(m in container.mounts for m in expected) and all(
        entry in container.env for entry in required_env(mount)
    )
