"""What each alert is tried on: series in promtool's notation, and who must be named at which minute.

One minute a sample, from minute 0, which is also second 0 of `time()`. A case names everybody that fires:
whoever else is in its series does not.
"""

from __future__ import annotations

from typing import NamedTuple

DAY = 86400
GIB = 1 << 30
MONITOR = 'job="kai-resource-isolator/kai-resource-isolator-monitor"'
HOOK = 'job="kai-resource-isolator-webhook"'


class Case(NamedTuple):
    """`firing` are values of the label `by`; with `by` empty, [""] is one alert without such a label."""

    alert: str
    by: str
    series: dict[str, str]
    firing: list[str]
    minute: int = 20


def tenant(name: str, pod: str, more: str = "") -> str:
    """A series of one container, as a scrape with honorLabels stores it."""
    whose = f'namespace="team",pod="{pod}",container="main",{MONITOR},instance="n1:9394",node="n1"'
    return f"{name}{{{whose}{',' + more if more else ''}}}"


def device(name: str, uuid: str) -> str:
    """A series of one device."""
    return f'{name}{{device_uuid="{uuid}",{MONITOR},instance="n1:9394",node="n1"}}'


def node(name: str, instance: str, job: str = MONITOR, more: str = "") -> str:
    """A series about the target itself."""
    return f'{name}{{{job},instance="{instance}"{"," + more if more else ""}}}'


def flag(alert: str, name: str) -> list[Case]:
    """A 0/1 series of containers: who has 1 for long enough and still is there."""
    series = {
        tenant(name, "bad"): "1x30",
        tenant(name, "good"): "0x30",
        tenant(name, "mended"): "1x9 0x20",
        tenant(name, "gone"): "1x9 stale",
        tenant(name, "late"): "0x19 1x10",
    }
    return [Case(alert, "pod", series, ["bad"]), Case(alert, "pod", series, [], minute=0)]


def state(alert: str, value: str) -> list[Case]:
    """The state of containers."""
    name = "kai_isolator_container_state"
    series = {
        tenant(name, "bad", f'state="{value}"'): "1x30",
        tenant(name, "good", 'state="enforced"'): "1x30",
        tenant(name, "mended", f'state="{value}"'): "1x9 stale",
        tenant(name, "idle", 'state="idle"'): "1x30",
    }
    return [Case(alert, "pod", series, ["bad"]), Case(alert, "pod", series, [], minute=3)]


def down(alert: str, name: str) -> list[Case]:
    """A 0/1 series of nodes where 0 is bad."""
    series = {
        node(name, "bad"): "0x30",
        node(name, "good"): "1x30",
        node(name, "mended"): "0x9 1x20",
        node(name, "gone"): "0x9 stale",
        node(name, "restarted"): "1x9 0 1x20",
    }
    return [Case(alert, "instance", series, ["bad"]), Case(alert, "instance", series, [], minute=3)]


def absent(alert: str, name: str, job: str = MONITOR) -> list[Case]:
    """A series that is to be there, whatever its value."""
    return [
        Case(alert, "", {node("up", "x", 'job="other"'): "1x30"}, [""]),
        Case(alert, "", {node("up", "x", 'job="other"'): "1x30"}, [], minute=4),
        Case(alert, "", {node(name, "a", job): "1x5 stale", node(name, "b", job): "1x2 stale"}, [""]),
        Case(alert, "", {node(name, "a", job): "1x5 stale", node(name, "b", job): "0x30"}, []),
    ]


def targets(alert: str, good: list[str], other: list[str]) -> list[Case]:
    """`up` of scrape jobs: those of `good` are ours."""
    series = {node("up", f"bad-{job}", f'job="{job}"'): "0x30" for job in good}
    series |= {node("up", f"good-{job}", f'job="{job}"'): "1x30" for job in good}
    series |= {node("up", f"bad-{job}", f'job="{job}"'): "0x30" for job in other}
    series |= {node("up", "gone", f'job="{good[0]}"'): "0x9 stale"}
    firing = [f"bad-{job}" for job in good]
    return [Case(alert, "instance", series, firing), Case(alert, "instance", series, [], minute=4)]


def late(alert: str, name: str, before: int) -> list[Case]:
    """A time of something that is done again and again; at minute `before` the alert is only pending."""
    series = {
        node(name, "hangs"): "60x30",
        node(name, "good"): "0+60x30",
        node(name, "slow"): "-700+60x30",
        node(name, "gone"): "60x15 stale",
        node("kai_isolator_up", "never"): "1x30",
    }
    return [
        Case(alert, "instance", series, ["hangs"], minute=25),
        Case(alert, "instance", series, [], minute=before),
    ]


_LIBRARY = {
    **{node("kai_isolator_up", each): "1x30" for each in ("never", "good", "broken", "new")},
    node("kai_isolator_library_ready", "good"): "1x30",
    node("kai_isolator_library_ready", "broken"): "0x30",
    node("kai_isolator_library_ready", "new"): "_x5 1x25",
}
_UNCAPPED = {
    tenant("kai_isolator_container_uncapped", "missed", 'reason="not_injected"'): "1x30",
    tenant("kai_isolator_container_uncapped", "bare", 'reason="no_limit"'): "1x30",
    tenant("kai_isolator_container_uncapped", "sandbox", 'reason="skipped"'): "1x30",
    tenant("kai_isolator_container_uncapped", "out", 'reason="opted_out"'): "1x30",
    tenant("kai_isolator_container_uncapped", "bypass", 'reason="bypass"'): "1x30",
    tenant("kai_isolator_container_uncapped", "gone", 'reason="not_injected"'): "1x9 stale",
    tenant("kai_isolator_container_state", "good", 'state="enforced"'): "1x30",
}
_USED, _LIMIT = "hami_vgpu_memory_used_bytes", "hami_vgpu_memory_limit_bytes"
_NEAR = {
    tenant(_USED, "full", 'device_uuid="GPU-1"'): "96x40",
    tenant(_LIMIT, "full", 'device_uuid="GPU-1"'): "100x40",
    tenant(_USED, "at"): "95x40",
    tenant(_LIMIT, "at"): "100x40",
    tenant(_USED, "dips"): "96x12 50 96x30",
    tenant(_LIMIT, "dips"): "100x40",
    tenant(_USED, "nolimit"): "96x40",
    tenant(_LIMIT, "nolimit"): "0x40",
    tenant(_USED, "unknown"): "96x40",
    tenant(_USED, "gone"): "96x12 stale",
    tenant(_LIMIT, "gone"): "100x12 stale",
}
_REFUSED = "kai_isolator_refusals_total"
_MISMATCH = {
    **{tenant(_LIMIT, pod): "100x30" for pod in ("bad", "good", "unknown")},
    tenant("kai_isolator_limit_mismatch", "bad"): "1x30",
    tenant("kai_isolator_limit_mismatch", "good"): "0x30",
}
_DRIVER, _LEDGER = "kai_isolator_device_used_bytes", "kai_isolator_device_ledger_bytes"
_DEVICES = {
    device(_DRIVER, "bad"): f"{10 * GIB}x40",
    device(_LEDGER, "bad"): f"{4 * GIB}x40",
    device(_DRIVER, "contexts"): f"{5 * GIB}x40",
    device(_LEDGER, "contexts"): f"{4 * GIB}x40",
    device(_DRIVER, "whole"): f"{10 * GIB}x40",
    device(_LEDGER, "whole"): "0x40",
    device(_DRIVER, "unknown"): f"{10 * GIB}x40",
}
_EXPIRY = "kai_isolator_certificate_expiry_timestamp_seconds"
_ENDS = {
    node(_EXPIRY, "year", HOOK): f"{365 * DAY}x70",
    node(_EXPIRY, "month", HOOK): f"{22 * DAY}x70",
    node(_EXPIRY, "weeks", HOOK): f"{20 * DAY}x70",
    node(_EXPIRY, "days", HOOK): f"{2 * DAY}x70",
    node(_EXPIRY, "ended", HOOK): "60x70",
    node(_EXPIRY, "renewed", HOOK): f"{2 * DAY}x9 {90 * DAY}x60",
    node(_EXPIRY, "none", HOOK): "0x70",
}
_ERRORS, _LOADS = "kai_isolator_admission_errors_total", "kai_isolator_certificate_loads_total"

CASES = [
    Case("GPUMemoryUncapped", "pod", _UNCAPPED, ["missed", "bare", "sandbox"]),
    Case("GPUMemoryUncapped", "pod", _UNCAPPED, [], minute=3),
    Case("GPUMemoryOptedOut", "pod", _UNCAPPED, ["out"]),
    Case("GPUMemoryOptedOut", "pod", _UNCAPPED, [], minute=3),
    *flag("GPUMemoryBypass", "kai_isolator_container_bypass"),
    *flag("GPUMemoryTampered", "kai_isolator_region_tampered"),
    Case("GPUMemoryLimitMismatch", "pod", _MISMATCH, ["bad"]),
    Case("GPUMemoryLimitMismatch", "pod", _MISMATCH, [], minute=3),
    *state("GPUMemoryStartRefused", "refused"),
    *state("GPUMemoryRegionUnreadable", "unreadable"),
    Case("GPUMemoryNearLimit", "pod", _NEAR, ["full"]),
    Case("GPUMemoryNearLimit", "pod", _NEAR, ["dips", "full"], minute=30),
    Case("GPUMemoryNearLimit", "pod", _NEAR, [], minute=9),
    Case(
        "GPUMemoryRefusals",
        "pod",
        {
            tenant(_REFUSED, "many"): "0+2x30",
            tenant(_REFUSED, "few"): "0+0.5x30",
            tenant(_REFUSED, "old"): "500x30",
            tenant(_REFUSED, "restarted"): "500x12 0 1 2x20",
            tenant(_REFUSED, "again"): "500x12 0+3x20",
            tenant(_REFUSED, "gone"): "0+9x5 stale",
        },
        ["again", "many"],
    ),
    *targets(
        "GPUMemoryMonitorDown",
        [
            "kai-resource-isolator/kai-resource-isolator-monitor",
            "kai-resource-isolator-monitor-nodes",
            "kai-resource-isolator",
        ],
        ["node-exporter", "kai-resource-isolator-webhook"],
    ),
    *absent("GPUMemoryMonitorAbsent", "kai_isolator_up"),
    *down("GPUMemoryNodeBlind", "kai_isolator_up"),
    *late("GPUMemoryScanStale", "kai_isolator_last_scan_timestamp_seconds", 18),
    *down("GPUMemoryPodWatchDown", "kai_isolator_pod_watch_up"),
    *down("GPUMemoryLibraryNotReady", "kai_isolator_library_ready"),
    *late("GPUMemoryLibraryStale", "kai_isolator_library_verified_timestamp_seconds", 21),
    Case("GPUMemoryLibraryMissing", "instance", _LIBRARY, ["never"]),
    Case("GPUMemoryLibraryMissing", "instance", _LIBRARY, [], minute=9),
    *down("GPUMemoryNVMLDown", "kai_isolator_nvml_up"),
    Case("GPUMemoryLedgerBelowDriver", "device_uuid", _DEVICES, ["bad"]),
    Case("GPUMemoryLedgerBelowDriver", "device_uuid", _DEVICES, [], minute=14),
    *targets(
        "GPUMemoryWebhookDown",
        ["kai-resource-isolator-webhook", "ServiceMonitor/kai-resource-isolator-webhook"],
        ["kai-resource-isolator", "other-webhook"],
    ),
    *absent("GPUMemoryWebhookAbsent", _EXPIRY, HOOK),
    Case("GPUMemoryAdmissionErrors", "job", {node(_ERRORS, "a", HOOK): "0x14 1x20"}, [HOOK[5:-1]]),
    Case("GPUMemoryAdmissionErrors", "job", {node(_ERRORS, "a", HOOK): "5x14 0x20"}, []),
    Case("GPUMemoryAdmissionErrors", "job", {node(_ERRORS, "a", HOOK): "0x3 7x40"}, [], minute=30),
    Case("GPUMemoryWebhookNoCertificate", "instance", _ENDS, ["none"]),
    Case("GPUMemoryWebhookNoCertificate", "instance", _ENDS, [], minute=3),
    Case(
        "GPUMemoryCertificateTurnedDown",
        "instance",
        {
            node(_LOADS, "bad", HOOK, 'result="failed"'): "0x9 1x20",
            node(_LOADS, "good", HOOK, 'result="failed"'): "0x30",
            node(_LOADS, "good", HOOK, 'result="ok"'): "1x9 2x20",
            node(_LOADS, "restarted", HOOK, 'result="failed"'): "3x9 0x20",
        },
        ["bad"],
    ),
    Case("GPUMemoryCertificateExpires", "instance", _ENDS, ["days", "ended", "weeks"]),
    Case("GPUMemoryCertificateExpires", "instance", _ENDS, [], minute=3),
    Case("GPUMemoryCertificateExpiresSoon", "instance", _ENDS, ["days", "ended"]),
    Case("GPUMemoryCertificateExpiresSoon", "instance", _ENDS, [], minute=3),
]
