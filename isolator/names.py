"""Every name that users, KAI Scheduler, HAMi's monitor and the chart know us by.

A name of the contract is written here and nowhere else in Python; the chart's copies are tested against
this file. Defaults that a chart value can change are called DEFAULT_*.
"""

from __future__ import annotations

from typing import Final

# ---- Pod annotations and labels that say which pod and which container ---------------------------

ANNOTATION_FRACTION: Final = "gpu-fraction"
"""KAI: share of one GPU, a number in (0, 1). Its presence alone makes a fraction pod."""
ANNOTATION_MEMORY: Final = "gpu-memory"
"""KAI: MiB of one GPU, no unit. Its presence alone makes a fraction pod."""
TRIGGER_ANNOTATIONS: Final = (ANNOTATION_FRACTION, ANNOTATION_MEMORY)
ANNOTATION_CONTAINER: Final = "gpu-fraction-container-name"
"""KAI: the one container that gets the GPU, init containers first; spec.containers[0] without it."""
ANNOTATION_DEVICES: Final = "gpu-fraction-num-devices"
"""KAI: number of devices that the fraction is taken from."""
NVFRACTIONS_PREFIX: Final = "nvidia.com/container."
NVFRACTIONS_REQUEST: Final = ".gpu-memory.request"
NVFRACTIONS_LIMIT: Final = ".gpu-memory.limit"
"""KAI 0.18: nvidia.com/container.<name>.gpu-memory.request and .limit; does not tell the sharing mode."""
ANNOTATION_CONFIGMAP: Final = "runai/shared-gpu-configmap"
"""KAI: prefix of its ConfigMaps: <prefix>-<index>; -i<index> for an init container. Not ours to write."""
ANNOTATION_INJECT: Final = "kai-resource-isolator.io/inject"
"""Opt-out of a pod: "false", in any case of letters."""
LABEL_WEBHOOK: Final = "kai-resource-isolator.io/webhook"
"""Opt-out of a namespace or pod: "ignore"."""
LABEL_WEBHOOK_IGNORE: Final = "ignore"
ANNOTATION_STATUS: Final = "kai-resource-isolator.io/status"
"""What the webhook did: "injected" or "skipped: <reason>"; always overwritten, decides nothing."""
STATUS_INJECTED: Final = "injected"
STATUS_SKIPPED: Final = "skipped: "
ANNOTATION_RESOURCE_TYPE: Final = "received-resource-type"
"""KAI's binder: "Fraction" on a bound fraction pod."""

# ---- Environment of a tenant: what KAI or HAMi sets and the library reads ------------------------

ENV_MEMORY_LIMIT: Final = "CUDA_DEVICE_MEMORY_LIMIT"
"""Limit of every device; written by KAI's binder through a ConfigMap. With `_<i>`: of device i alone."""
ENV_MEMORY_LIMIT_INDEXED: Final = "CUDA_DEVICE_MEMORY_LIMIT_{index}"
ENV_SHARED_CACHE: Final = "CUDA_DEVICE_MEMORY_SHARED_CACHE"
"""Absolute path of the region file."""
ENV_SM_LIMIT: Final = "CUDA_DEVICE_SM_LIMIT"
"""Compute share in percent: recorded and exported, not enforced yet."""
ENV_SM_LIMIT_INDEXED: Final = "CUDA_DEVICE_SM_LIMIT_{index}"
ENV_LOG_LEVEL: Final = "LIBCUDA_LOG_LEVEL"
"""0 silent, 1 errors, 2 warnings too (default); higher values add nothing."""
ENV_VISIBLE_DEVICES: Final = "CUDA_VISIBLE_DEVICES"
ENV_NVIDIA_VISIBLE_DEVICES: Final = "NVIDIA_VISIBLE_DEVICES"
"""KAI: the reserved GPUs, by UUID or CDI name. Never ours to write."""
ENV_GPU_PORTION: Final = "GPU_PORTION"
ENV_NUM_OF_GPUS: Final = "RUNAI_NUM_OF_GPUS"
"""KAI: the portion as "%.2f", twice. Never ours to write."""
ENV_DISABLE_CONTROL: Final = "CUDA_DISABLE_CONTROL"
"""A true value in the target's own environment is the pod's opt-out."""
KAI_ENV: Final = (ENV_MEMORY_LIMIT, ENV_NVIDIA_VISIBLE_DEVICES, ENV_GPU_PORTION, ENV_NUM_OF_GPUS)

# ---- Environment of a tenant: what the webhook sets ----------------------------------------------

ENV_ENFORCE: Final = "ISOLATOR_ENFORCE"
ENFORCE_REQUIRED: Final = "required"
"""ISOLATOR_ENFORCE=required: without a usable limit the driver does not start."""
ENV_ISOLATOR_POD_UID: Final = "ISOLATOR_POD_UID"
"""The pod's UID for subPathExpr; always overwritten, because POD_UID may be the tenant's own."""
ENV_NODE_NAME: Final = "NODE_NAME"
"""Of our own pods: the node they run on."""
ENV_PREFIX_WEBHOOK: Final = "ISOLATOR_WEBHOOK_"
ENV_PREFIX_MONITOR: Final = "ISOLATOR_MONITOR_"
"""Of our own pods: settings by field name, in capitals (docs/settings.md)."""
ENV_MONITOR_LISTEN: Final = f"{ENV_PREFIX_MONITOR}LISTEN"
ENV_MONITOR_MOUNT: Final = f"{ENV_PREFIX_MONITOR}MOUNT"
ENV_MONITOR_NODE_NAME: Final = f"{ENV_PREFIX_MONITOR}NODE_NAME"
ENV_POD_UID: Final = "POD_UID"
ENV_CONTAINER_NAME: Final = "CONTAINER_NAME"
ENV_CONTAINER_VGPU_MOUNT: Final = "CONTAINER_VGPU_MOUNT"
"""Releases 1.0 and 1.1: the region is <mount>/containers/<POD_UID>_<CONTAINER_NAME>/usage.cache."""

# ---- Paths ---------------------------------------------------------------------------------------

DEFAULT_VGPU_MOUNT: Final = "/usr/local/vgpu"
"""<mount>: the same folder on the host and in the container (chart value paths.containerVgpuMount)."""
LIBRARY_FILE: Final = "libvgpu.so"
"""<mount>/libvgpu.so, the soname as well."""
LIMIT_DIRECTORY: Final = "limit"
LIMIT_FILE: Final = f"{LIMIT_DIRECTORY}/{ENV_MEMORY_LIMIT}"
"""<mount>/limit/CUDA_DEVICE_MEMORY_LIMIT: the limit, where it is a read-only mount of its own."""
CONTAINERS_DIRECTORY: Final = "containers"
"""<mount>/containers: on the host a <podUID>_<container> folder each, in the container its own alone."""
CACHE_FILE: Final = "usage.cache"
"""The region file of one container."""
CACHE_SUFFIX: Final = ".cache"
"""HAMi names a region file <random uuid>.cache."""
VERSIONS_DIRECTORY: Final = "versions"
"""<mount>/versions/<version>-<hash>/libvgpu.so: each installed library; <mount>/libvgpu.so is one of them."""
LIBSYNC_STATUS: Final = "libsync.json"
"""<mount>/libsync.json: what the installer found and did on this node, for the monitor."""
PODS_DIRECTORY: Final = "/var/lib/kubelet/pods"
"""The kubelet's folder with one folder a pod, by UID."""
PRELOAD_FILE: Final = "/etc/ld.so.preload"
PRELOAD_KEY: Final = "ld.so.preload"
"""Key of the preload ConfigMap and the file's name on the host."""
VGPULOCK_DIRECTORY: Final = "/tmp/vgpulock"
DEFAULT_CACHE: Final = "/tmp/cudevshr.cache"
"""Where HAMi-core keeps the region when no variable names it, and so do we."""

# ---- Objects in the cluster ----------------------------------------------------------------------

RELEASE: Final = "kai-resource-isolator"
WEBHOOK_CONFIGURATION: Final = "kai-resource-isolator-mutating"
"""KAI's end-to-end suite skips itself where this MutatingWebhookConfiguration is absent."""
WEBHOOK_NAME: Final = "vgpu.lib.kai-resource-isolator.io"
WEBHOOK_EPHEMERAL_NAME: Final = "ephemeral.vgpu.lib.kai-resource-isolator.io"
"""The entry for debug containers of pods that carry our volumes."""
WEBHOOK_PATH: Final = "/mutate"
VOLUME_VGPU: Final = "kai-resource-isolator-vgpu"
"""hostPath File <mount>/libvgpu.so, read-only at the same path."""
VOLUME_PRELOAD: Final = "kai-resource-isolator-preload"
"""hostPath File <mount>/ld.so.preload, read-only at /etc/ld.so.preload."""
VOLUME_CONTAINERS: Final = "kai-resource-isolator-containers"
"""hostPath Directory <mount>/containers; the container sees its own folder of it (subPathExpr)."""
VOLUME_VGPULOCK: Final = "kai-resource-isolator-vgpulock"
"""emptyDir in memory, 1 MiB, at /tmp/vgpulock."""
VOLUME_LIMIT: Final = "kai-resource-isolator-limit"
"""KAI's ConfigMap, the limit's key alone and not optional, by subPath at <mount>/limit/<key>."""
VOLUMES: Final = (VOLUME_VGPU, VOLUME_PRELOAD, VOLUME_CONTAINERS, VOLUME_VGPULOCK, VOLUME_LIMIT)
COMPONENT_LABEL: Final = "app.kubernetes.io/component"
COMPONENT_WEBHOOK: Final = "kai-webhook"
COMPONENT_LIBSYNC: Final = "kai-libsync"
COMPONENT_MONITOR: Final = "kai-vgpu-monitor"
KAI_SCHEDULER: Final = "kai-scheduler"
"""schedulerName of the pods that KAI places."""
KAI_NAMESPACE: Final = "kai-scheduler"
RESERVATION_NAMESPACE: Final = "kai-resource-reservation"
"""Pods here hold a whole GPU for its tenants and are never touched."""
UNTOUCHED_NAMESPACES: Final = frozenset({"kube-system", KAI_NAMESPACE, RESERVATION_NAMESPACE})
"""No tenants: the cluster's own pods, KAI's, and those that hold GPUs for tenants."""
NODE_LABEL_GPU: Final = "nvidia.com/gpu.present"
NODE_LABEL_GPU_MEMORY: Final = "nvidia.com/gpu.memory"
"""MiB of a node's GPU; KAI computes the limit from it."""

# ---- Ports and metrics ---------------------------------------------------------------------------

WEBHOOK_PORT: Final = 8443
MONITOR_PORT: Final = 9394
LIBSYNC_PORT: Final = 9395
METRICS_PATH: Final = "/metrics"
STATUS_PATH: Final = "/status.json"
"""Of the monitor: its node's devices, tenants and health, for `isolator top` and `isolator doctor`."""
HEALTH_PATH: Final = "/healthz"
READY_PATH: Final = "/readyz"
METRIC_PREFIX_VGPU: Final = "hami_vgpu_"
METRIC_PREFIX_OWN: Final = "kai_isolator_"
"""HAMi's names for what its dashboards show, an own prefix for our own health."""
METRIC_LABELS: Final = ("namespace", "pod", "container", "vdevice_index", "device_uuid")
