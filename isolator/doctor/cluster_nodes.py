"""GPU nodes: their labels, the agents on them, and what the monitors tell of them."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from isolator import names
from isolator.doctor import tenants
from isolator.doctor.cluster_facts import (
    LIBSYNC,
    MONITOR,
    Facts,
    Json,
    at,
    labels,
    leaving,
    listed,
    name,
    some,
)
from isolator.doctor.report import Report
from isolator.monitor.document import Flags
from isolator.monitor.model import Uncapped


def judge(report: Report, facts: Facts) -> None:
    """Judges nodes, and tenants as the monitors see them."""
    if facts.nodes is not None:
        report.check("GPU nodes")
        shared = [node for node in facts.nodes if labels(node).get(names.NODE_LABEL_GPU) == "true"]
        if facts.asked:
            own = {at(pod, "spec", "nodeName") for pod in facts.pods or ()}
            shared = [node for node in shared if name(node) in own] or ([] if any(own) else shared)
        _memory(report, shared)
        _covered(report, facts, shared)
    _unlabelled(report, facts)
    _monitors(report, facts)


def _memory(report: Report, nodes: list[Json]) -> None:
    """The label that KAI computes the limit from."""
    wrong: dict[tuple[str, str], list[str]] = defaultdict(list)
    for node in nodes:
        found = tenants.label_fault(labels(node).get(names.NODE_LABEL_GPU_MEMORY))
        if found:
            wrong[found].append(name(node))
    for (cause, seen), which in wrong.items():
        report.find(cause, some(which), seen, node=min(which))


def _covered(report: Report, facts: Facts, nodes: list[Json]) -> None:
    """Whether each node has an installer and, where monitors are on, a monitor."""
    for part, cause in ((LIBSYNC, "libsync_gap"), (MONITOR, "monitor_gap")):
        workload = facts.workload(part)
        if workload is None or facts.own_pods is None or not _settled(workload):
            continue
        there = {at(pod, "spec", "nodeName") for pod in facts.pods_of(part)}
        there |= {_bound_for(pod) for pod in facts.pods_of(part)}
        bare = [
            name(node)
            for node in nodes
            if name(node) not in there and not leaving(node) and not _virtual(node)
        ]
        if bare:
            wanted = at(workload, "status", "desiredNumberScheduled")
            report.find(cause, some(bare), f"the DaemonSet is meant for {wanted} nodes, not for this")


def _settled(workload: Json) -> bool:
    """Whether its controller has made the pods that it wants: why not is said elsewhere, and in a roll-out a
    node is without one for a moment."""
    status = at(workload, "status") or {}
    wanted = status.get("desiredNumberScheduled") or 0
    made = [status.get(key) or 0 for key in ("currentNumberScheduled", "updatedNumberScheduled")]
    return status.get("observedGeneration") == at(workload, "metadata", "generation") and min(made) >= wanted


def _bound_for(pod: Json) -> Any:
    terms = at(
        pod,
        *("spec", "affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution"),
        "nodeSelectorTerms",
    )
    return at(listed(terms), 0, "matchFields", 0, "values", 0)


def _virtual(node: Json) -> bool:
    return labels(node).get("type") == "virtual-kubelet"


def _unlabelled(report: Report, facts: Facts) -> None:
    selector = at(facts.workload(MONITOR), "spec", "template", "spec", "nodeSelector") or {}
    if names.NODE_LABEL_GPU not in selector:
        return
    bare = [
        name(node)
        for node in facts.plain_nodes or ()
        if str(at(node, "status", "capacity", "nvidia.com/gpu") or "0") != "0"
        or names.NODE_LABEL_GPU_MEMORY in labels(node)
    ]
    if bare:
        report.find("gpu_unlabelled", some(bare), f"no {names.NODE_LABEL_GPU}", node=min(bare))


# ---- what the monitors tell ----------------------------------------------------------------------------


def _monitors(report: Report, facts: Facts) -> None:
    if facts.workload(MONITOR) is None:
        if facts.daemonsets is not None and facts.namespace:
            report.skip("tenants", "no monitor is installed (monitor.enabled=true)")
        return
    if facts.monitors:
        report.check("monitors")
        report.check("tenants")
    blind: list[str] = []
    for node, told in sorted(facts.monitors.items()):
        if at(told, "node", "nvml_up") is False:
            blind.append(node)
        if at(told, "node", "pod_watch_up") is False:
            seen = "the API server does not answer it: the tenants' names are not known"
            report.find("monitor_down", f"monitor of {node}", seen)
        for tenant in listed(told, "tenants"):
            if facts.asked in (None, (tenant.get("namespace"), tenant.get("pod"))):
                _tenant(report, tenant, facts.pods is not None)
    if blind:
        report.find("nvml_down", f"monitors of {some(blind)}", "NVML does not answer them")


def _tenant(report: Report, tenant: Json, pods_known: bool) -> None:
    parts = (tenant.get("namespace"), tenant.get("pod") or tenant.get("uid"), tenant.get("container"))
    subject = "/".join(str(part) for part in parts if part)
    state, kind, reason = tenant.get("state"), tenant.get("uncapped"), str(tenant.get("reason") or "")
    if pods_known and kind in (Uncapped.NOT_INJECTED, Uncapped.OPTED_OUT, Uncapped.SKIPPED):
        state = None  # the pods themselves tell these, with what to do
    flags = Flags(**{each: at(tenant, "flags", each) for each in ("mismatch", "tampered", "bypass")})
    tenants.verdict(report, subject, str(state), kind, reason, flags, refused="cuda_refused")
