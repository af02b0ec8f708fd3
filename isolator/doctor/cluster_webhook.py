"""The webhook: its configuration, certificate, endpoints and budget."""

from __future__ import annotations

import base64
import binascii
from datetime import timedelta
from typing import Final

from isolator import names
from isolator.doctor.cluster_facts import WEBHOOK, Facts, Json, at, listed, name
from isolator.doctor.report import Report
from isolator.webhook import certs

_SOON: Final = timedelta(days=21)
"""As the warning of the alert rules (docs/metrics.md)."""


INSTALL: Final = "install the chart again: helm upgrade --install kai-resource-isolator"


def look(namespace: str | None) -> str:
    """The command that shows what the webhook's pods wait for."""
    selector = f"{names.COMPONENT_LABEL}={names.COMPONENT_WEBHOOK}"
    return f"kubectl describe pods -n {namespace} -l {selector}"


def judge(report: Report, facts: Facts) -> None:
    """Judges what the API server knows of the webhook."""
    if facts.mutating is None:
        return
    report.check("webhook configuration")
    found = facts.configuration
    if found is None:
        if facts.deployments or facts.daemonsets:
            report.find(
                "webhook_missing", names.WEBHOOK_CONFIGURATION, "the other parts are there, it is not"
            )
        return
    _serves(report, facts)
    _trusted(report, facts, found)
    ignoring = [str(e.get("name")) for e in listed(found, "webhooks") if e.get("failurePolicy") == "Ignore"]
    if ignoring and facts.policies == []:
        report.find(
            "webhook_ignored", name(found), "failurePolicy is Ignore, and no admission policy stands behind"
        )
    _conflicts(report, facts)


def _conflicts(report: Report, facts: Facts) -> None:
    for item in facts.mutating or ():
        if any(entry.get("name") == "vgpu.hami.io" for entry in listed(item, "webhooks")):
            report.find("hami_platform", name(item), "it changes pods that ask for a GPU")


# ---- does it answer ------------------------------------------------------------------------------------


def _serves(report: Report, facts: Facts) -> None:
    place = facts.namespace
    service = f"{facts.service[0]}/{facts.service[1]}" if facts.service else names.RELEASE
    workload = facts.workload(WEBHOOK)
    if workload is None:
        if facts.deployments is not None:
            report.find("webhook_down", service, "there is no Deployment behind it", action=INSTALL)
        return
    report.check("webhook")
    wanted = at(workload, "spec", "replicas")
    running = at(workload, "status", "readyReplicas") or 0
    if not running:
        seen = "it is scaled to 0 replicas" if wanted == 0 else f"none of {wanted} replicas is ready"
        said = sorted({facts.told[name(p)] for p in facts.pods_of(WEBHOOK) if name(p) in facts.told})
        scale = f"kubectl scale deployment {name(workload)} -n {place} --replicas=2"
        report.find(
            "webhook_down",
            name(workload),
            f"{seen}{': ' if said else ''}{'; '.join(said)}",
            action=scale if wanted == 0 else look(place),
        )
    elif facts.slices is not None and not any(answers(each) for each in facts.slices):
        seen = f"{running} replicas are ready, and the Service has no endpoint: its selector or port"
        report.find("webhook_down", service, seen, action=look(place))
    elif running > 1:
        _budget(report, facts, running)


def answers(piece: Json) -> bool:
    """Whether an EndpointSlice has an address that takes connections."""
    return any(
        at(each, "conditions", "ready") is not False and at(each, "addresses")
        for each in listed(piece, "endpoints")
    )


def _budget(report: Report, facts: Facts, running: int) -> None:
    for budget in facts.budgets or ():
        component = at(budget, "spec", "selector", "matchLabels", names.COMPONENT_LABEL)
        expected = at(budget, "status", "expectedPods")
        if component != names.COMPONENT_WEBHOOK or not expected:
            continue
        if at(budget, "status", "disruptionsAllowed") == 0 and running >= expected:
            report.find("drain_blocked", name(budget), f"{running} replicas are ready, and none may go")


# ---- is it trusted -------------------------------------------------------------------------------------


def _trusted(report: Report, facts: Facts, found: Json) -> None:
    bundles = {str(at(each, "clientConfig", "caBundle") or "") for each in listed(found, "webhooks")}
    report.check("caBundle")
    trusted: list[bytes] = []
    for bundle in bundles:
        try:
            pem = base64.b64decode(bundle)
        except binascii.Error:
            pem = b""
        one = certs.split(pem)
        if not one:
            report.find(
                "webhook_bundle",
                name(found),
                "caBundle is empty" if not bundle else "caBundle is no certificate",
            )
            return
        if all(certs.expiry(each) <= facts.now for each in one):
            report.find(
                "webhook_bundle", name(found), f"caBundle ended at {certs.expiry(one[0]):%Y-%m-%d %H:%MZ}"
            )
            return
        trusted += one
    _certificate(report, facts, trusted)


def _certificate(report: Report, facts: Facts, trusted: list[bytes]) -> None:
    if facts.secret is None or facts.service is None:
        return
    report.check("webhook certificate")
    secret = f"Secret of {facts.service[1]}"
    leaf, own = facts.secret.get("tls.crt", b""), certs.split(facts.secret.get("ca.crt", b""))
    if not leaf:
        report.find("webhook_certificate", secret, "it is not there, or has no tls.crt")
        return
    host = f"{facts.service[1]}.{facts.service[0]}.svc"
    fault = certs.leaf_fault(leaf, [host], facts.now)
    if fault:
        report.find("webhook_certificate", secret, f"tls.crt {fault}")
        return
    if own and own[0] not in trusted:
        report.find("webhook_bundle", secret, "caBundle lacks the CA that the Secret has")
    left = certs.expiry(leaf) - facts.now
    if left < _SOON:
        report.find("certificate_due", secret, f"tls.crt ends in {left.days} days")
