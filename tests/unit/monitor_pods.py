"""Pod objects as the API gives them, for tests of the monitor."""

from __future__ import annotations

from typing import Any

from isolator import names

MOUNT = names.DEFAULT_VGPU_MOUNT


def uid(number: int) -> str:
    """A pod's UID."""
    return f"00000000-0000-0000-0000-{number:012x}"


def container(name: str = "main", injected: bool = False, limit: bool = True) -> dict[str, Any]:
    """A container, with our mounts where injected."""
    made: dict[str, Any] = {"name": name, "image": "x"}
    if injected:
        made["volumeMounts"] = [
            {"name": names.VOLUME_VGPU, "mountPath": f"{MOUNT}/{names.LIBRARY_FILE}", "readOnly": True},
            {"name": names.VOLUME_PRELOAD, "mountPath": names.PRELOAD_FILE, "readOnly": True},
        ]
        if limit:
            mount = {"name": names.VOLUME_LIMIT, "mountPath": f"{MOUNT}/{names.LIMIT_FILE}"}
            made["volumeMounts"].append(mount)
    return made


def volumes() -> list[dict[str, Any]]:
    """The volumes that the webhook adds, as far as the monitor looks at them."""
    return [
        {"name": names.VOLUME_VGPU, "hostPath": {"path": f"{MOUNT}/{names.LIBRARY_FILE}", "type": "File"}},
        {"name": names.VOLUME_PRELOAD, "hostPath": {"path": f"{MOUNT}/{names.PRELOAD_KEY}", "type": "File"}},
        {"name": names.VOLUME_LIMIT, "configMap": {"name": "p-abc-shared-gpu-0"}},
    ]


def pod(number: int = 1, injected: bool = True, **given: Any) -> dict[str, Any]:
    """A running fraction pod `pod-<number>` of one container; given: annotations, containers, init, phase."""
    containers = given.get("containers", [container(injected=injected)])
    init = given.get("init", [])
    annotations = given.get("annotations", {"gpu-memory": "4096", names.ANNOTATION_STATUS: "injected"})
    running = {"running": {"startedAt": "2026-08-01T10:00:00Z"}}
    return {
        "kind": "Pod",
        "metadata": {
            "namespace": "team",
            "name": f"pod-{number}",
            "uid": uid(number),
            "annotations": annotations,
            "labels": given.get("labels", {}),
        },
        "spec": {
            "nodeName": "node-1",
            "schedulerName": given.get("scheduler", "kai-scheduler"),
            "initContainers": init,
            "containers": containers,
            "volumes": volumes() if injected else [],
        },
        "status": {
            "phase": given.get("phase", "Running"),
            "containerStatuses": [
                {"name": c["name"], "state": running, "containerID": f"containerd://{number:064x}"}
                for c in containers
            ],
            "initContainerStatuses": [{"name": c["name"], "state": {"terminated": {}}} for c in init],
        },
    }
