"""Sharing pods: which run without a quota, which wait, and for what."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import timedelta
from typing import Final

from isolator import fraction, names
from isolator.doctor.cluster_facts import (
    Facts,
    Json,
    at,
    condition,
    labels,
    listed,
    name,
    statuses,
    title,
)
from isolator.doctor.cluster_groups import Groups
from isolator.doctor.cluster_kai import recent
from isolator.doctor.report import Report
from isolator.monitor import pods as monitored
from isolator.monitor.events import Reason
from isolator.monitor.model import PodView

_MEMORY: Final = re.compile(r"enough resources: GPU memory|insufficient GPU memory", re.IGNORECASE)
_LIBRARY: Final = re.compile(r"hostPath type check failed: (\S+)")
_KEY: Final = re.compile(
    rf"references non-existent config key: {names.ENV_MEMORY_LIMIT}|find key {names.ENV_MEMORY_LIMIT}"
)
_MAP: Final = re.compile(r'configmap "([^"]+)" not found', re.IGNORECASE)
_DRIVER: Final = re.compile(r"unsatisfied condition: cuda[^\s,\"]*|CUDA driver version is insufficient")
_HANDLER: Final = re.compile(r'no runtime for "([^"]+)" is configured')
_ENFORCE: Final = "pod-security.kubernetes.io/enforce"
_EVENT_LIFE: Final = timedelta(hours=1)
_OF_EVENT: Final[dict[str, str]] = {
    Reason.REFUSED: "cuda_refused",
    Reason.UNCAPPED: "tenant_uncapped",
    Reason.MISMATCH: "tenant_wrong",
    Reason.TAMPERED: "tenant_wrong",
}


def judge(report: Report, facts: Facts) -> None:
    """Judges the pods that share a GPU."""
    if facts.pods is None:
        return
    if facts.asked and not facts.pods:
        report.find("pod_missing", "/".join(facts.asked), "the API server does not know it")
        return
    report.check("sharing pods")
    groups = Groups()
    spaces: set[str] = set()
    for pod, view in sharing(facts):
        spaces.add(view.namespace)
        _injected(groups, facts, pod, view)
        _waits(groups, facts, pod)
    groups.tell(report)
    _spaces(report, facts, spaces)
    _events(report, facts)


def sharing(facts: Facts) -> Iterator[tuple[Json, PodView]]:
    """The pods that KAI gives a share of a card, and what the monitor would make of them."""
    for pod in facts.pods or ():
        try:
            view = monitored.view(pod, _mount_of(pod) or facts.mount)
        except (AttributeError, KeyError, TypeError):
            continue
        ended = at(pod, "status", "phase") in monitored.ENDED
        untouched = names.UNTOUCHED_NAMESPACES | {facts.namespace}
        if any(each.fraction for each in view.containers) and view.namespace not in untouched and not ended:
            yield pod, view


def _mount_of(pod: Json) -> str | None:
    """<mount> that the pod was injected with; None where it was not."""
    for volume in listed(pod, "spec", "volumes"):
        path = str(at(volume, "hostPath", "path") or "")
        if volume.get("name") == names.VOLUME_VGPU and path.endswith(f"/{names.LIBRARY_FILE}"):
            return path.removesuffix(f"/{names.LIBRARY_FILE}")
    return None


# ---- without a quota -----------------------------------------------------------------------------------


def _injected(groups: Groups, facts: Facts, pod: Json, view: PodView) -> None:
    mount = _mount_of(pod)
    if any(each.fraction and each.injected for each in view.containers):
        if mount is not None and mount != facts.mount:
            groups.add(
                "mount_differs", pod, title(pod), f"made with {mount}, and libsync keeps {facts.mount}"
            )
        return
    own = fraction.opted_out(view.annotations, view.labels)
    status = view.annotations.get(names.ANNOTATION_STATUS, "")
    if own or status.startswith(f"{names.STATUS_SKIPPED}opt-out"):
        groups.add("opted_out", pod, title(pod), own or status)
    elif _left_out(facts, view.namespace):
        groups.add(
            "opted_out",
            pod,
            title(pod),
            f"its namespace has {names.LABEL_WEBHOOK}={names.LABEL_WEBHOOK_IGNORE}",
        )
    elif status == f"{names.STATUS_SKIPPED}nvfractions":
        return  # NVIDIA's own enforcement holds it
    else:
        groups.add("pods_unlimited", pod, title(pod), status or "the webhook never saw it")


def _left_out(facts: Facts, place: str) -> bool:
    found = next((item for item in facts.namespaces or () if name(item) == place), {})
    return labels(found).get(names.LABEL_WEBHOOK) == names.LABEL_WEBHOOK_IGNORE


# ---- waiting -------------------------------------------------------------------------------------------


def said(facts: Facts, pod: Json) -> list[str]:
    """What kubelet and scheduler say of a pod now: its conditions, its containers' states, its warnings."""
    found = [
        str(at(each, key, kind, "message") or "")
        for each in statuses(pod)
        for key, kind in (("state", "waiting"), ("state", "terminated"), ("lastState", "terminated"))
    ]
    found.append(str(condition(pod, "PodScheduled").get("message") or ""))
    if at(pod, "status", "phase") == "Pending":
        events = facts.pod_events.get(str(at(pod, "metadata", "uid")), [])
        found += [str(each.get("message") or "") for each in events]
    return [text for text in found if text]


def _waits(groups: Groups, facts: Facts, pod: Json) -> None:
    told = said(facts, pod)
    text = "\n".join(told)
    driver, handler = _DRIVER.search(text), _HANDLER.search(text)
    if driver:
        groups.add("driver_insufficient", pod, title(pod), driver[0])
    if handler:
        groups.add(
            "runtime_class_missing", pod, title(pod), f"the node's runtime has no handler {handler[1]}"
        )
    if at(pod, "status", "phase") != "Pending":
        return
    library, missing = _LIBRARY.search(text), _MAP.search(text)
    if library:
        where = str(at(pod, "spec", "nodeName"))
        groups.add("pods_no_library", pod, title(pod), f"{library[1]} is not on node {where}")
    elif _KEY.search(text):
        groups.add("pods_no_limit", pod, title(pod), f"KAI's ConfigMap has no {names.ENV_MEMORY_LIMIT}")
    elif missing:
        groups.add("pods_no_configmap", pod, title(pod), f"ConfigMap {missing[1]} is not there")
    elif not at(pod, "spec", "nodeName"):
        _unplaced(groups, pod, told)


def _unplaced(groups: Groups, pod: Json, told: list[str]) -> None:
    memory = [text for text in told if _MEMORY.search(text)]
    if memory:
        groups.add("pods_no_memory", pod, title(pod), memory[0])
    elif condition(pod, "PodScheduled").get("status") == "False":
        groups.add("pods_waiting", pod, title(pod), told[-1] if told else "the scheduler gives no reason")


# ---- namespaces and Events -----------------------------------------------------------------------------


def _spaces(report: Report, facts: Facts, spaces: set[str]) -> None:
    for item in facts.namespaces or ():
        level = labels(item).get(_ENFORCE)
        if name(item) in spaces and level in ("baseline", "restricted"):
            seen = f"it enforces {level} and has sharing pods: others like them are refused"
            report.find("tenant_pod_security", f"namespace {name(item)}", seen)


def _events(report: Report, facts: Facts) -> None:
    """The monitors' Events, where no monitor has been heard itself."""
    nodes = {str(at(pod, "metadata", "uid")): at(pod, "spec", "nodeName") for pod in facts.pods or ()}
    for event in facts.quota_events or ():
        about = at(event, "involvedObject") or {}
        node = nodes.get(str(about.get("uid")))
        cause = _OF_EVENT.get(str(event.get("reason")))
        if cause and node and node not in facts.monitors and recent(facts, event, _EVENT_LIFE):
            subject = f"{about.get('namespace')}/{about.get('name')}"
            report.find(cause, subject, str(event.get("message")))
