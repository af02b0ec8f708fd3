"""KAI Scheduler as far as quotas hang on it: its parts, its hamicore plugin, its reservation pods."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from typing import Final

from isolator import names
from isolator.doctor.cluster_facts import Facts, Json, at, listed, name, ready, some, statuses
from isolator.doctor.cluster_webhook import answers
from isolator.doctor.cluster_workloads import when
from isolator.doctor.report import Report

_NVML: Final = re.compile(r"ERROR_LIBRARY_NOT_FOUND|libnvidia-ml\.so[.\d]*: cannot open", re.IGNORECASE)
_CLASS: Final = re.compile(r'RuntimeClass "([^"]+)" not found')
_HAMICORE: Final = re.compile(r'"hamicore"\s*:\s*\{[^{}]*')
_RECENT: Final = timedelta(minutes=15)


def judge(report: Report, facts: Facts) -> None:
    """Judges KAI."""
    if facts.kai is not None:
        report.check("KAI")
        hooks = [*_hooks(facts.mutating), *_hooks(facts.validating)]
        if not facts.kai and not hooks:
            report.find("kai_absent", names.KAI_NAMESPACE, "there is no Deployment of KAI's")
        _parts(report, facts)
        _binder(report, facts)
    if facts.reservations is not None:
        report.check("KAI's reservation pods")
        for pod in facts.reservations:
            _reservation(report, facts, pod)
    _refused(report, facts)


def _hooks(configurations: list[Json] | None) -> list[tuple[str, Json]]:
    """(configuration, its webhook) of those that KAI serves."""
    return [
        (name(item), entry)
        for item in configurations or ()
        for entry in listed(item, "webhooks")
        if at(entry, "clientConfig", "service", "namespace") == names.KAI_NAMESPACE
        or f".{names.KAI_NAMESPACE}." in str(entry.get("name"))
    ]


def _parts(report: Report, facts: Facts) -> None:
    dead = [
        name(item)
        for item in facts.kai or ()
        if at(item, "spec", "replicas") != 0 and not at(item, "status", "readyReplicas")
    ]
    if dead:
        report.find("kai_not_ready", some(dead), "no replica is ready")
    if facts.kai_slices is None:
        return
    open_for = {
        at(piece, "metadata", "labels", "kubernetes.io/service-name")
        for piece in facts.kai_slices
        if answers(piece)
    }
    for configuration, entry in [*_hooks(facts.mutating), *_hooks(facts.validating)]:
        service = at(entry, "clientConfig", "service", "name")
        if service and service not in open_for and entry.get("failurePolicy") != "Ignore":
            kinds = {str(each) for rule in listed(entry, "rules") for each in at(rule, "resources") or ()}
            seen = f"its Service {service} has no endpoint: {some(list(kinds))} are refused"
            report.find("kai_not_ready", configuration, seen)


def _binder(report: Report, facts: Facts) -> None:
    """The binder's --plugins are all by which KAI tells others that hamicore is on."""
    binder = next((item for item in facts.kai or () if name(item) == "binder"), None)
    if binder is None:
        return
    words = [
        str(word)
        for container in listed(binder, "spec", "template", "spec", "containers")
        for key in ("command", "args")
        for word in at(container, key) or ()
    ]
    plugins = " ".join(words).partition("--plugins")[2]
    own = _HAMICORE.search(plugins)
    if "hamicore" not in plugins or (own and re.search(r'"enabled"\s*:\s*false', own[0])):
        report.find("kai_hamicore_off", "KAI's binder", "it runs without the hamicore plugin")


def _reservation(report: Report, facts: Facts, pod: Json) -> None:
    states = [at(each, key, "terminated") or {} for each in statuses(pod) for key in ("state", "lastState")]
    said = " ".join(str(state.get("message") or "") for state in states)
    said += facts.reservation_logs.get(name(pod), "")
    failing = at(pod, "status", "phase") == "Failed" or any(
        at(each, "state", "waiting", "reason") not in (None, "ContainerCreating", "PodInitializing")
        or at(each, "state", "terminated", "exitCode")
        for each in statuses(pod)
    )
    found = _NVML.search(said)
    if found and not ready(pod):
        report.find("nvml_not_found", name(pod), f"it says {found[0]}")
    elif failing:
        waiting = [at(each, "state", "waiting", "reason") for each in statuses(pod)]
        why = next((str(each) for each in waiting if each), str(at(pod, "status", "phase")))
        report.find("reservation_failing", name(pod), why, pod=name(pod))


# ---- pods that a controller could not create -----------------------------------------------------------


def recent(facts: Facts, event: Json, within: timedelta = _RECENT) -> bool:
    """Whether an Event happened a short while ago."""
    try:
        return facts.now - datetime.fromisoformat(when(event)) <= within
    except ValueError:
        return False


def _refused(report: Report, facts: Facts) -> None:
    """ReplicaSets, Jobs and others say here what a sharing pod was refused for."""
    held: dict[str, list[str]] = {}
    for event in facts.refusals or ():
        said, where = str(event.get("message")), at(event, "involvedObject") or {}
        owner = f"{where.get('namespace')}/{where.get('name')}"
        if where.get("namespace") == facts.namespace or not recent(facts, event):
            continue
        missing = _CLASS.search(said)
        if missing:
            seen = "pods are refused: the class is not there"
            report.find("runtime_class_missing", missing[1], seen, name=missing[1])
        elif "violates PodSecurity" in said and names.VOLUME_VGPU in said:
            held.setdefault(str(where.get("namespace")), []).append(owner)
    for place, owners in held.items():
        report.find("tenant_pod_security", f"namespace {place}", f"pods of {some(owners)} are refused")
