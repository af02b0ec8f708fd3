"""Causes that show on a node: codes 40 to 59."""

from __future__ import annotations

from typing import Final

from isolator.doctor.cause import Cause

_LIBSYNC = "restart libsync on this node"


def _row(identity: str, code: int, title: str, fix: str, notice: bool = False) -> Cause:
    return Cause(identity, code, title, fix, "node", notice)


NODE: Final[tuple[Cause, ...]] = (
    _row(
        "mount_missing",
        40,
        "the mount is not on this node, or is not ours",
        "does libsync run here (librarySync.nodeSelector, tolerations)? is {mount} its --mount?",
    ),
    _row(
        "mount_readonly",
        41,
        "the mount is on a read-only file system",
        "set paths.containerVgpuMount to a writable folder (COS: /home/kubernetes/bin/nvidia/vgpu)",
    ),
    _row(
        "mount_noexec",
        42,
        "the mount's file system does not allow programs",
        "set paths.containerVgpuMount to a folder on an executable file system",
    ),
    _row(
        "libsync_not_ready",
        43,
        "the installer says what keeps it",
        "do what it says; it tries again by itself",
    ),
    _row(
        "libsync_absent",
        44,
        "no installer has reported on this node",
        "does libsync run here? kubectl get pods -A -l app.kubernetes.io/component=kai-libsync -o wide",
    ),
    _row(
        "node_library_missing",
        45,
        "the library is not on this node",
        _LIBSYNC + "; remove what is in the place of {library}",
    ),
    _row(
        "node_library_foreign_arch",
        46,
        "the node's library is built for another machine",
        "use the image of this architecture for libsync",
    ),
    _row(
        "node_library_damaged",
        47,
        "the node's library is truncated or no shared library",
        _LIBSYNC + "; check the node's disk",
    ),
    _row(
        "node_library_differs",
        48,
        "the node's library is not the one that was installed",
        _LIBSYNC + "; find out who writes to {library}",
    ),
    _row(
        "node_library_refused",
        49,
        "the loader does not take the node's library",
        "do what the loader says; SELinux or AppArmor may refuse it, see docs/troubleshooting.md",
    ),
    _row(
        "node_preload_wrong",
        50,
        "the preload file does not name the library",
        _LIBSYNC + "; the one path value is paths.containerVgpuMount",
    ),
    _row(
        "containers_wrong",
        51,
        "the folder of the caches is missing or closed to tenants",
        _LIBSYNC + "; it must be a folder of mode 1777 on the node",
    ),
    _row(
        "label_missing",
        52,
        "the node has no memory label",
        "kubectl label node {node} nvidia.com/gpu.memory=<MiB from nvidia-smi>, then restart kai-scheduler",
    ),
    _row(
        "label_bytes",
        53,
        "the node's memory label is no number of MiB",
        "kubectl label node {node} nvidia.com/gpu.memory=<MiB from nvidia-smi> --overwrite",
    ),
    _row(
        "tenant_uncapped",
        54,
        "a container runs without a limit",
        "see the pod's annotation kai-resource-isolator.io/status; recreate the pod",
    ),
    _row(
        "tenant_wrong",
        55,
        "a container's limit or cache is not as it should be",
        "run `isolator doctor pod` in that container (kubectl debug), and recreate the pod",
    ),
    _row(
        "nvml_down",
        56,
        "the monitor gets no answer from the driver",
        "monitor.runtimeClassName=nvidia, or monitor.driverPath; does nvidia-smi answer on the node?",
    ),
    _row(
        "monitor_down",
        57,
        "the monitor does not answer, or cannot do its work",
        "does the monitor run on this node (monitor.nodeSelector)? its log says why not",
    ),
    _row(
        "libsync_stale",
        58,
        "the installer has not looked at this node for long",
        _LIBSYNC + ": what it keeps is no longer watched",
    ),
    _row(
        "cache_unreadable",
        59,
        "a cache file cannot be read",
        "look at {file}; recreate the pod where its library is another product's",
        notice=True,
    ),
)
