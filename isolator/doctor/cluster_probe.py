"""A sharing pod that the API server is asked to admit and not to keep: does every webhook answer?"""

from __future__ import annotations

import re
from typing import Any, Final

from isolator import kube, names
from isolator.doctor.cluster_calls import Client
from isolator.doctor.cluster_facts import Admission, Facts, at, listed
from isolator.doctor.cluster_webhook import look
from isolator.doctor.report import Report

WHAT: Final = "admission of a sharing pod"
_CALLING: Final = re.compile(r'failed calling webhook "([^"]+)"')
_CLASS: Final = re.compile(r'RuntimeClass "([^"]+)" not found')


def pod(scheduler: str) -> dict[str, Any]:
    """A sharing pod that no Pod Security level refuses for its own sake."""
    closed = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "runAsNonRoot": True,
        "runAsUser": 65532,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    container = {
        "name": "main",
        "image": "never-pulled",
        "securityContext": closed,
        "resources": {
            "requests": {"cpu": "1m", "memory": "1Mi"},
            "limits": {"cpu": "1m", "memory": "1Mi"},
        },
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "generateName": "isolator-doctor-",
            "annotations": {names.ANNOTATION_MEMORY: "1024"},
            "labels": {"kai.scheduler/queue": "default-queue"},
        },
        "spec": {"schedulerName": scheduler, "containers": [container]},
    }


def ask(client: Client, namespace: str, scheduler: str) -> Admission:
    """Asks. Raises one of kube.FAILURES where that says nothing about the admission."""
    path = f"/api/v1/namespaces/{namespace}/pods"
    try:
        made = client.post(path, pod(scheduler), dryRun="All", fieldManager=names.RELEASE)
    except kube.ApiError as error:
        # A refusal by a right that this user lacks is no answer; one by a webhook or a rule is.
        if error.status in (401, 404) or "cannot create resource" in error.said or not error.said:
            raise
        return Admission(namespace, refused=error.said)
    return Admission(namespace, pod=made)


def judge(report: Report, facts: Facts) -> None:
    """Judges the answer."""
    answer = facts.admission
    if answer is None:
        return
    where = f"namespace {answer.namespace}"
    if answer.refused:
        _refused(report, facts, where, answer.refused)
        return
    report.check(WHAT)
    status = str(at(answer.pod, "metadata", "annotations", names.ANNOTATION_STATUS) or "")
    if status != names.STATUS_INJECTED:
        if facts.configuration is not None and not _apart(facts, answer.namespace):
            said = f": {status}" if status else ": nothing answered for it"
            report.find("webhook_skips", where, f"a sharing pod is let through as it is{said}")
    elif _kai_answers(answer.pod) and not _limited(answer.pod):
        seen = f"its admission gives a sharing pod no {names.ENV_MEMORY_LIMIT}"
        report.find("kai_hamicore_off", "KAI", seen)


def _apart(facts: Facts, namespace: str) -> bool:
    """Whether the namespace is left out on purpose."""
    for item in facts.namespaces or ():
        if at(item, "metadata", "name") == namespace:
            return bool(at(item, "metadata", "labels", names.LABEL_WEBHOOK) == names.LABEL_WEBHOOK_IGNORE)
    return namespace in names.UNTOUCHED_NAMESPACES


def _kai_answers(made: Any) -> bool:
    return at(made, "metadata", "annotations", names.ANNOTATION_CONFIGMAP) is not None


def _limited(made: Any) -> bool:
    return any(
        entry.get("name") == names.ENV_MEMORY_LIMIT and at(entry, "valueFrom", "configMapKeyRef")
        for container in listed(made, "spec", "containers")
        for entry in listed(container, "env")
    )


def _refused(report: Report, facts: Facts, where: str, said: str) -> None:
    calling, missing = _CALLING.search(said), _CLASS.search(said)
    if calling and calling[1] == names.WEBHOOK_NAME:
        _unanswered(report, facts, said)
    elif calling and names.KAI_NAMESPACE in calling[1]:
        report.find("kai_not_ready", calling[1], f"the API server gets no answer: {tail(said)}")
    elif missing:
        seen = f"KAI adds RuntimeClass {missing[1]} to sharing pods, and the cluster has none"
        report.find("runtime_class_missing", missing[1], seen, name=missing[1])
    elif f"{names.RELEASE}:" in said and "no GPU memory limit" in said:
        report.find("kai_hamicore_off", "KAI", "it gives a sharing pod no limit, and such pods are denied")
    elif "violates PodSecurity" in said and "hostPath" in said:
        report.find("tenant_pod_security", where, "its Pod Security level refuses the quota's host folders")
    else:
        report.skip(WHAT, f"{where} refuses one ({said}): name another by --namespace")
        return
    report.check(WHAT)


def tail(said: str) -> str:
    """The end of the API server's sentence, which has the cause."""
    return said[-200:].rpartition("?timeout=")[2].partition(": ")[2] or said[-200:]


def _unanswered(report: Report, facts: Facts, said: str) -> None:
    why = tail(said)
    cause = "webhook_unreachable"
    if "x509" in said or "tls:" in said or "certificate" in said:
        of_leaf = any(word in said for word in ("expired", "not yet valid", "is valid for", "not valid for"))
        cause = "webhook_certificate" if of_leaf else "webhook_bundle"
    elif any(word in said for word in ("no endpoints", "not found", "connection refused")):
        cause = "webhook_down"
    if not any(finding.cause.id == cause for finding in report.findings):
        action = look(facts.namespace)
        report.find(cause, names.WEBHOOK_NAME, why, namespace=facts.namespace, action=action)
