"""NOTES: what was installed, and what of KAI's side or of the values needs a look."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fake_api
import pytest
from charting import CHART, NAMESPACE, RELEASE, Helm

from isolator import names


def deployment(*arguments: str) -> dict[str, Any]:
    container = {"name": "binder", "args": list(arguments)}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "binder", "namespace": names.KAI_NAMESPACE},
        "spec": {"template": {"spec": {"containers": [container]}}},
    }


def node(name: str, **labels: str) -> dict[str, Any]:
    found = {f"nvidia.com/gpu.{key}": value for key, value in labels.items()}
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": found}}


def namespace(level: str) -> dict[str, Any]:
    labels = {"pod-security.kubernetes.io/enforce": level}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": labels}}


PLUGINS = json.dumps({"gpusharing": {"enabled": True}, "hamicore": {"enabled": True, "priority": 50}})
GOOD = [
    deployment("--plugins", PLUGINS, "--v=3"),
    node("n1", present="true", memory="15360"),
    namespace("privileged"),
]


@pytest.fixture
def notes(each_helm: Helm, tmp_path: Path) -> Any:
    """`notes(objects, *arguments)` -> NOTES of an installation into a cluster that has `objects`."""

    def call(objects: list[dict[str, Any]], *arguments: str, forbidden: tuple[str, ...] = ()) -> str:
        with fake_api.cluster(objects, tmp_path, forbidden) as kubeconfig:
            command = ["install", RELEASE, str(CHART), "-n", NAMESPACE, "--dry-run=server"]
            more = ["--kubeconfig", str(kubeconfig), "--disable-openapi-validation"]
            return each_helm.run(*command, *more, *arguments).stdout.split("NOTES:", 1)[1]

    return call


def test_says_what_was_installed(notes: Any) -> None:
    """Each workload by name, how to check, and nothing to look at where all is well."""
    text = notes(GOOD, "--set", "monitor.enabled=true")
    for name in ("webhook", "libsync", "monitor"):
        assert f"{RELEASE}-{name}" in text
    assert f"helm test {RELEASE} -n {NAMESPACE}" in text
    assert "LOOK AT THIS" not in text


@pytest.mark.parametrize(
    ("objects", "line"),
    [
        ([deployment("--plugins", '{"gpusharing":{"enabled":true}}')], "without its hamicore plugin"),
        ([deployment('--plugins={"hamicore":{"enabled":false}}')], "without its hamicore plugin"),
        ([deployment("--v=3")], "without its hamicore plugin"),
        ([node("n2", present="true")], "No usable label nvidia.com/gpu.memory (MiB) on 1 GPU node(s), n2"),
        ([node("n2", present="true", memory="15Gi")], "No usable label nvidia.com/gpu.memory"),
        ([node("n2", present="true", memory="16106127360")], "in bytes on 1 node(s), n2"),
        ([node("n2")], "No node carries nvidia.com/gpu.present=true"),
        ([namespace("baseline")], "enforces Pod Security level baseline"),
        ([namespace("restricted")], f"kubectl label namespace {NAMESPACE}"),
        (
            [
                {
                    "apiVersion": "admissionregistration.k8s.io/v1",
                    "kind": "MutatingWebhookConfiguration",
                    "metadata": {"name": "hami-webhook"},
                    "webhooks": [{"name": "vgpu.hami.io"}],
                }
            ],
            "hami-webhook is the webhook of the HAMi platform",
        ),
    ],
)
def test_warns_of_the_cluster(notes: Any, objects: list[dict[str, Any]], line: str) -> None:
    """One warning, and only that, for what the cluster lacks."""
    text = notes(objects, "--set", "monitor.enabled=true")
    warnings = [item for item in text.split("LOOK AT THIS:")[1].splitlines() if item.startswith("- ")]
    assert len(warnings) == 1
    assert line in text


def test_old_values_are_named(notes: Any) -> None:
    """Values of 1.0 that do nothing any more are accepted, and each is named."""
    text = notes(GOOD, "-f", str(CHART / "ci" / "upgrade-1.0-values.yaml"))
    for value in ("paths.hostInstallBase", "tls.patch", "webhook.image and librarySync.image"):
        assert f"- {value}" in text
    newer = notes(GOOD, "-f", str(CHART / "ci" / "upgrade-1.1-values.yaml"))
    assert "- webhook.gpuShareResources does nothing" in newer
    assert "hostInstallBase" not in newer


@pytest.mark.parametrize(
    ("flag", "line"),
    [
        ("webhook.failurePolicy=Ignore", "admissionPolicy.enabled=true refuses them"),
        (
            "webhook.admissionPolicy.enabled=true,webhook.admissionPolicy.validationActions={Warn}",
            "admissionPolicy only warns or audits",
        ),
        ("webhook.onNoLimit=release", "runs without a quota"),
        ("webhook.excludedNamespaces={kube-system}", "reservation pods must not be touched"),
        ("image.repository=projecthami/kai-resource-isolator", "needs an image built from this project"),
        ("monitor.serviceMonitor.enabled=true,monitor.podMonitor.enabled=true", "scraped twice"),
        ("monitor.grafana.enabled=true", "monitor.grafana or monitor.prometheusRule is on without"),
        ("monitor.podMonitor.enabled=true", "on without monitor.enabled=true"),
        ("webhook.podDisruptionBudget.minAvailable=2", "minAvailable is 2 of 2 replicas: no node"),
        ("webhook.podDisruptionBudget.minAvailable=100%", "minAvailable is 100% of 2 replicas: no node"),
        ("webhook.podDisruptionBudget.maxUnavailable=0", "maxUnavailable is 0: no node"),
    ],
)
def test_risky_values_are_named(notes: Any, flag: str, line: str) -> None:
    """A value that gives a guarantee away says so."""
    assert line in notes(GOOD, "--set", flag)


def test_odd_objects_do_not_stop_an_installation(notes: Any) -> None:
    """Objects with nothing in them are passed over: a failing note would fail the release."""
    bare = [
        {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n"}},
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}},
        {
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "MutatingWebhookConfiguration",
            "metadata": {"name": "empty"},
        },
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "binder", "namespace": names.KAI_NAMESPACE},
            "spec": {"template": {"spec": {"containers": [{"name": "binder"}]}}},
        },
    ]
    assert "without its hamicore plugin" in notes(bare)


def test_looking_around_can_be_switched_off(notes: Any) -> None:
    """Where the installing user may not list nodes, the installation goes on without those notes."""
    text = notes(GOOD, "--set", "notes.lookAround=false", forbidden=("/nodes", "/binder"))
    assert f"{RELEASE}-webhook" in text
