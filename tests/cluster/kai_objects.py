"""Objects of KAI Scheduler's double: webhook configurations, the binder's arguments, reservation pods."""

from __future__ import annotations

import json
from typing import Any

import kai_rules as rules
from baseimages import PAUSE
from doubles import Double

from isolator import names

SCHEDULER = "kai-scheduler"
MUTATING = "mutating-kai-admission"
VALIDATING = "validating-kai-admission"
WEBHOOK = "admission.kai-scheduler.svc"
EXCLUDED = ["kube-system", names.KAI_NAMESPACE]


def _webhook(served: Double, path: str, operations: list[str]) -> dict[str, Any]:
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": operations, "resources": ["pods"]}
    outside = {"key": "kubernetes.io/metadata.name", "operator": "NotIn", "values": EXCLUDED}
    return {
        "name": WEBHOOK,
        "clientConfig": {"url": f"{served.url}{path}", "caBundle": served.ca_bundle},
        "rules": [rule],
        "failurePolicy": "Fail",
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
        "namespaceSelector": {"matchExpressions": [outside]},
        "matchConditions": [
            {"name": "scheduler", "expression": f"object.spec.schedulerName == '{SCHEDULER}'"}
        ],
    }


def configurations(mutating: Double, validating: Double) -> list[dict[str, Any]]:
    """The two configurations, called in the order of their names among those of others."""
    first = _webhook(mutating, "mutate--v1-pod", ["CREATE"]) | {"reinvocationPolicy": "IfNeeded"}
    second = _webhook(validating, "validate--v1-pod", ["CREATE", "UPDATE"])
    return [
        {
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": kind,
            "metadata": {"name": name},
            "webhooks": [webhook],
        }
        for kind, name, webhook in (
            ("MutatingWebhookConfiguration", MUTATING, first),
            ("ValidatingWebhookConfiguration", VALIDATING, second),
        )
    ]


def installation(mode: rules.Mode) -> list[dict[str, Any]]:
    """KAI's namespace and the Deployment `binder`, whose --plugins tells others that hamicore is on."""
    plugins = {
        "gpusharing": {"enabled": True, "priority": 100, "arguments": {"cdiEnabled": str(mode.cdi).lower()}}
    }
    if mode.hamicore and not mode.nvfractions:
        plugins["hamicore"] = {"enabled": True, "priority": 50}
    container = {
        "name": "binder",
        "image": PAUSE,
        "args": ["--plugins", json.dumps(plugins)],
    }
    labels = {"app": "binder"}
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": names.KAI_NAMESPACE}},
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "binder", "namespace": names.KAI_NAMESPACE},
            "spec": {
                # Its arguments are all there is to it: the test process binds.
                "replicas": 0,
                "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels}, "spec": {"containers": [container]}},
            },
        },
    ]


def reservation_pod(node: str, group: str, image: str) -> dict[str, Any]:
    """A pod as KAI reserves a card with: default scheduler, node given, no annotation of a fraction."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"gpu-reservation-{group[:8]}",
            "namespace": names.RESERVATION_NAMESPACE,
            "labels": {"app": "kai-resource-reservation", "runai-gpu-group": group},
        },
        "spec": {
            "nodeName": node,
            "containers": [{"name": "resource-reservation", "image": image}],
            "tolerations": [{"operator": "Exists"}],
            "terminationGracePeriodSeconds": 0,
        },
    }
