"""Our Deployment and DaemonSets: what keeps their pods from being made, started or ready."""

from __future__ import annotations

import re
from typing import Final

from isolator.doctor.cluster_facts import (
    COMPONENTS,
    LIBSYNC,
    MONITOR,
    WEBHOOK,
    Facts,
    Json,
    at,
    condition,
    listed,
    name,
    ready,
    some,
    space,
    statuses,
)
from isolator.doctor.cluster_groups import Groups
from isolator.doctor.report import Report

_IMAGE: Final = ("ImagePullBackOff", "ErrImagePull", "ErrImageNeverPull", "InvalidImageName")
_STARTING: Final = ("ContainerCreating", "PodInitializing")
_READ_ONLY: Final = re.compile(r"read-only file system", re.IGNORECASE)
_PRIORITY: Final = re.compile(r"PriorityClass|insufficient quota to match these scopes")


def judge(report: Report, facts: Facts) -> None:
    """Judges each of the three workloads and the path that they share."""
    for component in COMPONENTS:
        workload = facts.workload(component)
        if workload is None:
            continue
        report.check(component if component == WEBHOOK else f"{component} DaemonSet")
        _created(report, facts, workload)
        groups = Groups()
        for pod in facts.pods_of(component):
            if not ready(pod):
                _pod(report, groups, facts, component, pod)
        groups.tell(report)
    if facts.daemonsets is not None and facts.namespace and facts.workload(LIBSYNC) is None:
        report.find("workload_refused", facts.namespace, "there is no DaemonSet of libsync")
    _path(report, facts)
    _versions(report, facts)


# ---- are the pods made ---------------------------------------------------------------------------------


def _created(report: Report, facts: Facts, workload: Json) -> None:
    failure = condition(workload, "ReplicaFailure")
    if failure.get("status") == "True":
        _not_created(report, workload, str(failure.get("message")))
        return
    wanted = at(workload, "status", "desiredNumberScheduled")
    there = at(workload, "status", "currentNumberScheduled")
    if wanted is None or there is None or there >= wanted:
        return
    said = latest(facts, "FailedCreate", str(workload.get("kind") or "DaemonSet"), name(workload))
    if said:
        _not_created(report, workload, said)


def latest(facts: Facts, reason: str, kind: str, called: str) -> str:
    """The newest such Event's message; empty without one."""
    found = [
        each
        for each in facts.events or ()
        if each.get("reason") == reason
        and at(each, "involvedObject", "kind") == kind
        and at(each, "involvedObject", "name") == called
    ]
    found.sort(key=when)
    return str(found[-1].get("message") or "") if found else ""


def when(event: Json) -> str:
    """When an Event last happened, as text that can be compared."""
    keys = ("lastTimestamp", "eventTime")
    series = at(event, "series", "lastObservedTime")
    return str(series or next((event[k] for k in keys if event.get(k)), "") or "")


def _not_created(report: Report, workload: Json, said: str) -> None:
    called = at(workload, "spec", "template", "spec", "priorityClassName")
    subject = name(workload)
    if _PRIORITY.search(said) or (called and "exceeded quota" in said):
        report.find("priority_class", subject, f"{called}: {said}")
    elif "violates PodSecurity" in said:
        report.find("own_pod_security", subject, said, namespace=space(workload))
    else:
        report.find("workload_refused", subject, said)


# ---- do they run ---------------------------------------------------------------------------------------


def _pod(report: Report, groups: Groups, facts: Facts, component: str, pod: Json) -> None:
    node = at(pod, "spec", "nodeName")
    subject = f"{name(pod)} on {node}" if node else name(pod)
    waiting = [at(each, "state", "waiting") for each in statuses(pod) if at(each, "state", "waiting")]
    images = [each for each in waiting if each.get("reason") in _IMAGE]
    told = facts.told.get(name(pod))
    if images:
        groups.add("image_pull", pod, subject, str(images[0].get("message") or images[0].get("reason")))
    elif told and told != "ok":
        cause = _told(component, told)
        if cause:
            groups.add(cause, pod, subject, told)
        else:
            report.skip(subject, f"not ready: {told}")
    elif waiting and waiting[0].get("reason") not in _STARTING:
        ended = [at(each, "lastState", "terminated") or {} for each in statuses(pod)]
        code = next((each.get("exitCode") for each in ended if each.get("exitCode") is not None), None)
        seen = f"{waiting[0].get('reason')}{'' if code is None else f', its last exit status was {code}'}"
        groups.add("workload_failing", pod, subject, seen)
    elif condition(pod, "PodScheduled").get("status") == "False":
        said = str(condition(pod, "PodScheduled").get("message"))
        groups.add("workload_failing", pod, subject, f"no node takes it: {said}")
    else:
        _starting(report, groups, facts, pod, subject)


def _starting(report: Report, groups: Groups, facts: Facts, pod: Json, subject: str) -> None:
    reasons = ("FailedMount", "Failed", "FailedCreatePodSandBox")
    said = next((each for each in (latest(facts, r, "Pod", name(pod)) for r in reasons) if each), "")
    if _READ_ONLY.search(said):
        groups.add("mount_readonly", pod, subject, said)
    elif said:
        groups.add("workload_failing", pod, subject, said)
    else:
        away = {name(node) for node in facts.nodes or () if not ready(node)}
        gone = at(pod, "spec", "nodeName") in away
        report.skip(subject, "its node is not Ready" if gone else "it is starting")


def _told(component: str, told: str) -> str | None:
    """The cause behind a pod's own word on why it is not ready."""
    if component == WEBHOOK:
        return "webhook_bundle" if "caBundle" in told or "certificate" in told else None
    if component != LIBSYNC:
        return None
    if _READ_ONLY.search(told):
        return "mount_readonly"
    if "noexec" in told:
        return "mount_noexec"
    return "mount_differs" if "preload file" in told and "both come from" in told else "libsync_not_ready"


# ---- do they fit together ------------------------------------------------------------------------------


def _path(report: Report, facts: Facts) -> None:
    mounts = facts.mounts
    if len(mounts) < 2:
        return
    report.check("path of the library")
    if len(set(mounts.values())) > 1:
        seen = ", ".join(f"{part}: {mount}" for part, mount in sorted(mounts.items()))
        report.find("mount_differs", "paths.containerVgpuMount", seen)


def _versions(report: Report, facts: Facts) -> None:
    images = {part: at(facts.container(part), "image") for part in (WEBHOOK, LIBSYNC, MONITOR)}
    known = {part: str(image) for part, image in images.items() if image}
    if len(set(known.values())) > 1:
        seen = ", ".join(f"{part}: {image}" for part, image in sorted(known.items()))
        report.find("versions_differ", "images", seen)
        return
    wanted = next(iter(known.values()), None)
    others = [
        name(pod)
        for part in known
        for pod in facts.pods_of(part)
        if at(listed(pod, "spec", "containers"), 0, "image") != wanted
    ]
    if others:
        report.find("versions_differ", some(others), f"not of the image {wanted}")
