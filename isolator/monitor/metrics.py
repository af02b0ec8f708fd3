"""THE metric table: a row is a series' name, help, labels, and how it is read off a View.

Names and labels of hami_* are HAMi 2.10's, with its constant label zone="vGPU". A figure that is not known
has no series; a figure is never a label. docs/metrics.md says the same in words, and a test holds
the two together.
"""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.samples import Sample

from isolator import names
from isolator.monitor import allocation as a
from isolator.monitor import readings as r
from isolator.monitor.view import CONTAINER_LABELS, LEGACY_HOST_LABELS, LEGACY_LABELS, ZONE, View

VDEVICE = names.METRIC_LABELS
HOST = ("node", "device_index", "device_uuid", "device_type")
CONTAINER = CONTAINER_LABELS


@dataclass(frozen=True)
class Row:
    """One metric. `zone` rows carry HAMi's constant label besides `labels`."""

    name: str
    help: str
    labels: tuple[str, ...]
    read: r.Read

    @property
    def kind(self) -> str:
        """counter or gauge."""
        return "counter" if self.name.endswith("_total") else "gauge"

    @property
    def zone(self) -> bool:
        """Whether the row is one of HAMi's."""
        return not self.name.startswith(names.METRIC_PREFIX_OWN)

    @property
    def label_names(self) -> frozenset[str]:
        """Every label of its series."""
        return frozenset(self.labels) | (frozenset(ZONE) if self.zone else frozenset())

    def family(self, view: View) -> Metric:
        """The metric with its series."""
        make = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        made: Metric = make(self.name, self.help)
        made.samples = [Sample(self.name, labels, value) for labels, value in self.read(view)]
        return made


def _own(name: str, help: str, labels: tuple[str, ...], read: r.Read) -> Row:
    return Row(names.METRIC_PREFIX_OWN + name, help, labels, read)


VGPU_ROWS = (
    Row("hami_vgpu_memory_used_bytes", "vGPU device memory usage in bytes.", VDEVICE, r.device("used")),
    Row("hami_vgpu_memory_limit_bytes", "vGPU memory limit in bytes, 0: none.", VDEVICE, r.device("limit")),
    Row("hami_vgpu_memory_context_bytes", "vGPU memory of contexts in bytes.", VDEVICE, r.device("context")),
    Row("hami_vgpu_memory_module_bytes", "vGPU memory of modules in bytes.", VDEVICE, r.device("module")),
    Row("hami_vgpu_memory_buffer_bytes", "vGPU memory of allocations in bytes.", VDEVICE, r.device("data")),
    Row("hami_container_device_memory_bytes", "Container memory in bytes.", VDEVICE, r.device("used")),
    Row(
        "hami_container_device_utilization_ratio",
        "Container device SM utilization ratio (0-100).",
        VDEVICE,
        r.device("sm_util"),
    ),
    Row(
        "hami_container_last_kernel_elapsed_seconds",
        "Seconds since last kernel execution in container.",
        VDEVICE,
        r.elapsed(),
    ),
)
HOST_ROWS = (
    Row("hami_host_gpu_memory_used_bytes", "GPU memory usage in bytes.", HOST, r.host("memory_used")),
    Row("hami_host_gpu_utilization_ratio", "GPU core utilization (0-100).", HOST, r.host("utilization")),
    Row(
        "hami_host_gpu_memory_controller_utilization_ratio",
        "GPU memory controller utilization (0-100).",
        HOST,
        r.host("memory_utilization"),
    ),
    Row("hami_host_gpu_temperature_celsius", "GPU temperature.", HOST, r.host("temperature")),
    Row("hami_host_gpu_power_usage_watts", "GPU power usage.", HOST, r.host("power_watts")),
    Row("hami_gpu_memory_limit_bytes", "Memory of the GPU in bytes.", HOST, r.host("memory_total")),
    Row("hami_gpu_memory_allocated_bytes", "Sum of the limits on the GPU in bytes.", HOST, r.allocated()),
)
SELF_ROWS = (
    _own("up", "Whether the caches of this node were scanned.", (), r.one(r.up)),
    _own("build_info", "Version of the monitor; always 1.", ("version",), r.build),
    _own("scan_duration_seconds", "Duration of the last scan.", (), r.scanned(lambda v: v.snapshot.duration)),
    _own("last_scan_timestamp_seconds", "Time of the last scan.", (), r.scanned(lambda v: v.snapshot.time)),
    _own("source_errors_total", "Failed reads of a source.", ("source",), r.errors),
    _own("skipped_files", "Cache folders, files and devices without series.", ("reason",), r.skipped),
    _own(
        "pod_watch_up",
        "Whether the watch of this node's pods is connected.",
        (),
        r.scanned(lambda v: v.snapshot.pod_watch_up),
    ),
    _own("nvml_up", "Whether NVML answers.", (), r.scanned(r.nvml_up)),
    _own("library_info", "Library on this node; always 1.", ("version", "sha256"), r.library),
    _own("library_ready", "Whether the library on this node is verified.", (), r.libsync("ready")),
    _own("library_verified_timestamp_seconds", "Time of its last check.", (), r.libsync("verified_at")),
    _own("oversized_caches", "Cache folders over their size limit.", (), r.libsync("oversized_caches")),
)
ENFORCEMENT_ROWS = (
    _own("refusals_total", "Refused requests for device memory.", VDEVICE, r.refusals),
    _own("last_refusal_timestamp_seconds", "Time of the last refusal.", VDEVICE, r.last_refusal),
    _own("container_state", "Enforcement: the state that holds is 1.", (*CONTAINER, "state"), r.states),
    _own("uncapped_containers", "Containers of fraction pods without a limit.", ("reason",), r.uncapped),
    _own(
        "container_uncapped",
        "1: runs without a limit, and why.",
        (*CONTAINER, "reason"),
        r.uncapped_by,
    ),
    _own("region_tampered", "Whether a limit or quota word was altered.", CONTAINER, r.flag("tampered")),
    _own("sm_limit_unenforced", "Whether an SM limit is ignored.", CONTAINER, r.flag("sm_unenforced")),
    _own("expected_limit_bytes", "Limit that KAI grants.", CONTAINER, r.verdict("expected_limit")),
    _own("limit_mismatch", "Whether the limit is not what KAI grants.", CONTAINER, r.verdict("mismatch")),
    _own("device_ledger_bytes", "Memory that all containers are charged for.", ("device_uuid",), r.ledger),
    _own("device_used_bytes", "Memory used on the GPU, by NVML.", ("device_uuid",), r.nvml_used),
    _own("container_nvml_bytes", "Memory used, by NVML.", (*CONTAINER, "device_uuid"), r.nvml_bytes),
    _own("container_bypass", "Whether GPU memory is used without a region.", CONTAINER, r.verdict("bypass")),
)
LEGACY_ROWS = (
    Row("HostGPUMemoryUsage", "GPU memory usage.", LEGACY_HOST_LABELS, r.host("memory_used", "legacy")),
    Row("HostCoreUtilization", "GPU core utilization.", LEGACY_HOST_LABELS, r.host("utilization", "legacy")),
    Row("vGPU_device_memory_usage_in_bytes", "vGPU usage.", LEGACY_LABELS, r.device("used", "legacy")),
    Row("vGPU_device_memory_limit_in_bytes", "vGPU limit.", LEGACY_LABELS, r.device("limit", "legacy")),
    Row("Device_memory_desc_of_container", "Memory usage.", LEGACY_LABELS, r.device("used", "legacy")),
    Row("Device_utilization_desc_of_container", "Utilization.", LEGACY_LABELS, r.device("sm_util", "legacy")),
    Row("Device_last_kernel_of_container", "Seconds since.", LEGACY_LABELS, r.elapsed("legacy")),
)
# What HAMi's scheduler exports and its dashboards show; `promtool check metrics` dislikes some of the names.
SCHEDULER_ROWS = (
    Row("hami_gpu_shared_count", "Containers that share the GPU.", HOST, r.sharing()),
    Row("hami_gpu_core_limit_ratio", "Compute of the GPU, always 100.", HOST, a.cores("hami")),
    Row("hami_gpu_core_allocated_ratio", "Sum of the SM limits.", HOST, a.cores_allocated("hami")),
    Row("hami_node_gpu_overview", "Sum of the limits in bytes.", HOST, r.allocated()),
    Row("hami_node_gpu_memory_allocated_ratio", "That of all memory (0-1).", HOST, a.share_allocated("hami")),
    Row("hami_vgpu_memory_allocated_bytes", "Limit in bytes.", a.LABELS, a.memory(a.LABELS)),
    Row("hami_vgpu_core_allocated_ratio", "SM limit.", a.LABELS, a.core(a.LABELS)),
    Row("GPUDeviceMemoryLimit", "Memory of the GPU.", LEGACY_HOST_LABELS, r.host("memory_total", "legacy")),
    Row("GPUDeviceMemoryAllocated", "Sum of the limits.", LEGACY_HOST_LABELS, r.allocated("legacy")),
    Row("GPUDeviceSharedNum", "Containers that share it.", LEGACY_HOST_LABELS, r.sharing("legacy")),
    Row("GPUDeviceCoreLimit", "Always 100.", LEGACY_HOST_LABELS, a.cores("legacy")),
    Row("GPUDeviceCoreAllocated", "Sum of the SM limits.", LEGACY_HOST_LABELS, a.cores_allocated("legacy")),
    Row("nodeGPUOverview", "Sum of the limits.", LEGACY_HOST_LABELS, r.allocated("legacy")),
    Row("nodeGPUMemoryPercentage", "That of all (0-1).", LEGACY_HOST_LABELS, a.share_allocated("legacy")),
    Row("vGPUPodsDeviceAllocated", "Limit in bytes.", a.LEGACY_LABELS, a.memory(a.LEGACY_LABELS)),
    Row("vGPUMemoryAllocated", "Limit in bytes.", a.LEGACY_LABELS, a.memory(a.LEGACY_LABELS)),
    Row("vGPUCoreAllocated", "SM limit.", a.LEGACY_LABELS, a.core(a.LEGACY_LABELS)),
    Row("vGPUMemoryPercentage", "Limit of all (0-1).", a.LEGACY_LABELS, a.memory_share(a.LEGACY_LABELS)),
    Row("vGPUCorePercentage", "SM limit (0-1).", a.LEGACY_LABELS, a.core(a.LEGACY_LABELS, 100)),
)


def table(legacy: bool) -> tuple[Row, ...]:
    """Every row, those of HAMi's dashboards only when asked for."""
    return (
        *VGPU_ROWS,
        *HOST_ROWS,
        *SELF_ROWS,
        *ENFORCEMENT_ROWS,
        *(LEGACY_ROWS + SCHEDULER_ROWS if legacy else ()),
    )
