"""From answers to what is kept of them, and the words for what was asked."""

from __future__ import annotations

import base64
import binascii
import json
import shutil
import subprocess
from collections.abc import Callable, Mapping
from typing import Any, Final

from isolator import kube, names
from isolator.doctor.cluster_facts import at, listed, statuses
from isolator.monitor.document import dump, load


def target(pod: Mapping[str, Any]) -> str:
    """The container with our limit; empty where none has it."""
    for key in ("initContainers", "containers"):
        for container in listed(pod, "spec", key):
            if any(each.get("name") == names.VOLUME_LIMIT for each in listed(container, "volumeMounts")):
                return str(container.get("name"))
    return ""


def running(pod: Mapping[str, Any]) -> bool:
    """Whether a container of it runs."""
    return any(at(each, "state", "running") for each in statuses(pod))


def waits(pod: Mapping[str, Any]) -> bool:
    """Whether a container of it waits for something."""
    return any(at(each, "state", "waiting") for each in statuses(pod))


def told(ask: Callable[[], str]) -> str:
    """The line of a pod's /readyz, which answers 503 while it is not ready."""
    try:
        return ask().strip()
    except kube.ApiError as error:
        if error.status == 503 and error.said:
            return error.said
        raise


def document(ask: Callable[[], str]) -> Mapping[str, Any]:
    """A monitor's status document, as this version knows it. Raises ContractError for anything else."""
    found: dict[str, Any] = json.loads(dump(load(ask().encode())))
    return found


def certificates(secret: Mapping[str, Any]) -> dict[str, bytes]:
    """The certificates of a Secret; its keys are dropped here."""
    found = {}
    for key in ("tls.crt", "ca.crt"):
        try:
            found[key] = base64.b64decode(at(secret, "data", key) or "")
        except binascii.Error:
            found[key] = b""
    return found


def kubectl() -> Mapping[str, Any] | None:
    """The version of the kubectl on PATH; None without one."""
    program = shutil.which("kubectl")
    if program is None:
        return None
    words = [program, "version", "--client", "--output=json"]
    done = subprocess.run(words, capture_output=True, timeout=3, check=True, stdin=subprocess.DEVNULL)
    found = at(json.loads(done.stdout), "clientVersion")
    return found if isinstance(found, Mapping) else None


TITLES: Final = {
    "mutating": "MutatingWebhookConfigurations",
    "validating": "ValidatingWebhookConfigurations",
    "policies": "ValidatingAdmissionPolicies",
    "deployments": "the webhook's Deployment",
    "daemonsets": "the DaemonSets",
    "own_pods": "our pods",
    "nodes": "GPU nodes",
    "plain_nodes": "nodes without a GPU label",
    "kai": "KAI's Deployments",
    "kai_slices": "KAI's endpoints",
    "reservations": "KAI's reservation pods",
    "refusals": "Events of refused pods",
    "quota_events": "Events of the monitors",
    "events": "Events of the release's namespace",
    "pods": "sharing pods",
    "slices": "the webhook's endpoints",
    "budgets": "PodDisruptionBudgets",
    "secret": "the webhook's Secret",
    "preload": "the preload file's ConfigMap",
    "admission": "admission of a sharing pod",
    "limits": "the pod's ConfigMap",
    "log": "the pod's log",
    "kubectl": "kubectl's version",
}
