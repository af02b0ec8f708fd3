"""`isolator doctor cluster`: what an administrator's machine can tell, by the API server alone."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from isolator import kube, names
from isolator.doctor import (
    cluster_kai,
    cluster_nodes,
    cluster_pod,
    cluster_pods,
    cluster_probe,
    cluster_webhook,
    cluster_workloads,
)
from isolator.doctor.cluster_calls import Client
from isolator.doctor.cluster_facts import Facts, at
from isolator.doctor.cluster_gather import Gather
from isolator.doctor.report import Report
from isolator.errors import UsageError

PATIENCE = 5.0
"""Seconds that a far API server has; a healthy one needs less than one."""
_JUDGES: Final = {
    "webhook": cluster_webhook.judge,
    "admission": cluster_probe.judge,
    "workloads": cluster_workloads.judge,
    "KAI": cluster_kai.judge,
    "nodes": cluster_nodes.judge,
    "sharing pods": cluster_pods.judge,
    "the pod": cluster_pod.judge,
}


def examine(
    kubeconfig: Path | None = None,
    context: str | None = None,
    namespace: str | None = None,
    pod: str | None = None,
    patience: float = PATIENCE,
) -> Report:
    """Looks at a cluster, with `pod` (NAME or NAMESPACE/NAME) at that pod among its tenants alone.

    `namespace`: of the pod, or where a sharing pod is tried (default). Raises UnavailableError where no API
    server answers, UsageError for a pod's name that is none.
    """
    asked = _asked(namespace, pod)
    report = Report("cluster", "")
    api = kube.chosen(kubeconfig, context)
    report.subject = "/".join(asked) if asked else api.host
    place = asked[0] if asked else namespace or "default"
    facts = Gather(Client(api, patience), place, asked).look()
    judge(report, facts)
    return report.done()


def _asked(namespace: str | None, pod: str | None) -> tuple[str, str] | None:
    if pod is None:
        return None
    place, slash, called = pod.rpartition("/")
    if not called or (slash and not place) or "/" in place:
        raise UsageError(f"--pod {pod}: give NAME or NAMESPACE/NAME")
    if place and namespace not in (None, place):
        raise UsageError(f"--pod {pod} and --namespace {namespace} name two namespaces")
    return (place or namespace or "default", called)


def judge(report: Report, facts: Facts) -> None:
    """Says what is wrong in `facts`; a pure function of them."""
    for what, why in facts.unchecked:
        report.skip(what, why)
    if _nothing(facts):
        report.check("objects of this product")
        report.find(
            "not_installed",
            report.subject,
            f"no Deployment, DaemonSet or webhook of {names.RELEASE} is in this cluster",
        )
        return
    for what, part in _JUDGES.items():
        try:
            part(report, facts)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            # One odd object must not hide what the others tell.
            report.skip(what, f"an object of another form ({type(error).__name__})")
    _skew(report, facts)


def _nothing(facts: Facts) -> bool:
    known = facts.mutating is not None and facts.deployments == [] and facts.daemonsets == []
    return known and facts.configuration is None


def _skew(report: Report, facts: Facts) -> None:
    minors = []
    for version in (facts.kubectl, facts.version):
        digits = "".join(mark for mark in str(at(version, "minor") or "") if mark.isdigit())
        if not digits:
            return
        minors.append(int(digits))
    if not report.checks:
        return  # where nothing of the cluster could be looked at, this is no health
    report.check("kubectl")
    if abs(minors[0] - minors[1]) > 1:
        report.find("kubectl_skew", "kubectl", f"it is 1.{minors[0]}, the API server 1.{minors[1]}")
