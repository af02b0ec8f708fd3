"""One pod, deeper: the limit that KAI wrote for it, its log, and the monitor of its node."""

from __future__ import annotations

import errno
import re
from typing import Final

from isolator import names
from isolator.doctor import pod_limit
from isolator.doctor.cluster_facts import MONITOR, Facts, Json, at, labels, listed, name, title
from isolator.doctor.cluster_pods import sharing
from isolator.doctor.report import Report
from isolator.monitor import grants
from isolator.monitor.words import size

_PRELOAD: Final = re.compile(r"object '([^']+)' from /etc/ld\.so\.preload cannot be preloaded ?(\([^)]*\))?")
_REFUSED: Final = re.compile(r"CUDA is refused")
_DRIVER: Final = re.compile(r"CUDA driver version is insufficient[\w ]*")
_DEVICE: Final = re.compile(
    r"no CUDA-capable device is detected|CUDA_ERROR_NO_DEVICE|/dev/nvidia\S*: No such file"
)
_NO_DRIVER: Final = re.compile(
    r"libcuda\.so(?:\.1)?: cannot open shared object file|Failed to load libcuda|ERROR_LIBRARY_NOT_FOUND"
)


def judge(report: Report, facts: Facts) -> None:
    """Judges the pod that was asked for."""
    if not facts.asked or not facts.pods:
        return
    found = list(sharing(facts))
    if not found:
        where = title(facts.pods[0])
        report.skip(where, "it does not share a GPU: no annotation gpu-memory or gpu-fraction, or it is over")
        return
    pod = found[0][0]
    _limit(report, facts, pod)
    _log(report, facts, pod)
    _devices(report, pod)
    node = str(at(pod, "spec", "nodeName") or "")
    if node and facts.workload(MONITOR) is not None and node not in facts.monitors:
        there = any(at(each, "spec", "nodeName") == node for each in facts.pods_of(MONITOR))
        if not there and facts.own_pods is not None:
            report.find("monitor_gap", node, f"{title(pod)} runs there")
        else:
            report.skip("the pod's tenants", f"the monitor of {node} was not heard")


def _limit(report: Report, facts: Facts, pod: Json) -> None:
    if facts.limits is None:
        return
    report.check("limit")
    if not at(pod, "spec", "nodeName"):
        return
    text = at(facts.limits, names.ENV_MEMORY_LIMIT)
    where = f"{names.ENV_MEMORY_LIMIT} of {title(pod)}"
    if text is None:
        report.find("pods_no_limit", where, "KAI's ConfigMap, or the key in it, is not there")
        return
    error, value = pod_limit.parse(str(text).encode())
    if error == errno.ENODATA:
        report.find("pods_no_limit", where, "it is empty")
    elif error:
        zero = re.fullmatch(r"\s*0+\s*[kmgt]?i?b?\s*", str(text), re.IGNORECASE)
        why = "is zero" if zero else "is malformed, or under 64 MiB"
        report.find("limit_zero" if zero else "limit_malformed", where, f"what KAI's ConfigMap says {why}")
    else:
        _grant(report, facts, pod, value)


def _grant(report: Report, facts: Facts, pod: Json, value: int) -> None:
    node = next((n for n in facts.nodes or () if name(n) == at(pod, "spec", "nodeName")), None)
    if node is None:
        return
    annotations = {key: str(text) for key, text in (at(pod, "metadata", "annotations") or {}).items()}
    grant = grants.expected(annotations, labels(node).get(names.NODE_LABEL_GPU_MEMORY))
    if grant.basis is grants.Basis.KNOWN and grant.limit is not None and grants.exceeds(grant, value):
        seen = f"{size(value)}, and its annotations and the label give {size(grant.limit)}"
        report.find("limit_raised", title(pod), seen)


def _log(report: Report, facts: Facts, pod: Json) -> None:
    """Only what is known to be a sign is repeated of a log: it may hold anything."""
    if facts.log is None:
        return
    report.check("log")
    where, node = title(pod), str(at(pod, "spec", "nodeName"))
    preload, driver = _PRELOAD.search(facts.log), _DRIVER.search(facts.log)
    if preload and preload[1] != f"{facts.mount}/{names.LIBRARY_FILE}":
        seen = f"the loader looks for {preload[1]}, and libsync keeps {facts.mount}"
        report.find("mount_differs", where, seen)
    elif preload:
        report.find("preload_ignored", where, preload[0])
    if driver:
        report.find("driver_insufficient", where, f"its log says {driver[0].strip()}", node=node)
    for cause, sign in (("cuda_refused", _REFUSED), ("no_devices", _DEVICE), ("no_driver", _NO_DRIVER)):
        found = sign.search(facts.log)
        if found:
            report.find(cause, where, f"its log says {found[0]}")


def _devices(report: Report, pod: Json) -> None:
    """From outside it cannot be seen whether a container has devices; where nothing asks for them, say so."""
    annotations = at(pod, "metadata", "annotations") or {}
    asks = at(pod, "spec", "runtimeClassName") or any("cdi.k8s.io" in str(key) for key in annotations)
    mounts = any(
        str(at(volume, "hostPath", "path") or "").startswith("/dev/nvidia")
        for volume in listed(pod, "spec", "volumes")
    )
    if not asks and not mounts:
        why = "no runtime class, CDI annotation or device mount asks for them, so only the node's default "
        report.skip("devices", why + "runtime can give them: run `isolator doctor pod` in the container")
