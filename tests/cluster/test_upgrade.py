"""Upgrades: values of older releases, values that are wrong, drains, and a rollout under load."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import product as given
import pytest
import yaml
from harness import Cluster, ClusterError, wait_for
from kubernetes.client import CoreV1Api
from kubernetes.client.exceptions import ApiException
from product import Product
from releases import CHART, Release, release

from isolator import names


@pytest.fixture(scope="module")
def surroundings(cluster: Cluster) -> Iterator[None]:
    """What the values of 1.1 need: a runtime class, and the kind ServiceMonitor (here an open one)."""
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    monitor = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": "servicemonitors.monitoring.coreos.com"},
        "spec": {
            "group": "monitoring.coreos.com",
            "scope": "Namespaced",
            "names": {"kind": "ServiceMonitor", "plural": "servicemonitors", "singular": "servicemonitor"},
            "versions": [{"name": "v1", "served": True, "storage": True, "schema": schema}],
        },
    }
    runtime = {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": "nvidia"}}
    was = cluster.kubectl("get", "runtimeclass", "nvidia", "--ignore-not-found", "-o=name")
    cluster.apply([monitor, {**runtime, "handler": "nvidia"}])
    established = ["--for=condition=Established", f"crd/{monitor['metadata']['name']}"]
    cluster.kubectl("wait", "--timeout=60s", *established)
    yield
    cluster.kubectl("delete", f"crd/{monitor['metadata']['name']}", "--wait=false")
    if not was:
        cluster.kubectl("delete", "runtimeclass", "nvidia")


@pytest.fixture(scope="module")
def made(cluster: Cluster, product: Product, surroundings: None) -> Iterator[Release]:
    """A release of two replicas."""
    with release(cluster, "upgrades", replicaCount=2, drainSeconds=5) as installed:
        installed.upgrade()
        yield installed


def uids(made: Release) -> set[str]:
    return {pod["metadata"]["uid"] for pod in made.pods()}


# ---- values -----------------------------------------------------------------------------------------

NO_OPS = {
    "1.0": (
        "paths.hostInstallBase does nothing",
        "tls.patch does nothing",
        "webhook.image and librarySync.image",
    ),
    "1.1": ("webhook.gpuShareResources does nothing", "tls.patch does nothing"),
}


@pytest.mark.parametrize("old", ["1.0", "1.1"])
def test_values_of_older_releases(made: Release, old: str) -> None:
    """The values that were written for 1.0.0 and 1.1.0 still upgrade a release, monitor included, and the
    notes name those that do nothing any more."""
    values = yaml.safe_load((CHART / f"ci/upgrade-{old}-values.yaml").read_text())
    here = {"image": {"registry": ""}}
    said = made.upgrade(given.merged(values, made.values, here))

    shown = said[said.index("LOOK AT THIS") :]
    for line in NO_OPS[old]:
        assert line in shown
    assert made.admit() == "injected"
    if old == "1.1":
        monitor = made.cluster.get("daemonset", f"{made.name}-monitor", namespace=made.name)
        assert monitor["spec"]["template"]["spec"]["runtimeClassName"] == "nvidia"
        assert monitor["status"]["numberReady"] == len(made.cluster.nodes)


@pytest.mark.parametrize("version", [3, 4])
def test_wrong_value_changes_nothing(made: Release, version: int) -> None:
    """A misspelt value and a cluster that is too old are refused with a line that names it."""
    pods = uids(made)

    with pytest.raises(ClusterError, match="replicaCont"):
        made.upgrade({"webhook": {"replicaCont": 3}}, version=version)
    with pytest.raises(ClusterError, match=r"1\.30"):
        made.cluster.helm("template", "x", str(CHART), "--kube-version=1.29.0", version=version)
    assert uids(made) == pods


def test_missing_priority_class_does_not_take_the_webhook_down(made: Release) -> None:
    """An upgrade to pods that cannot be created fails in its time and says why; the old replicas serve on,
    and a rollback heals it."""
    cluster, pods = made.cluster, uids(made)
    revision = json.loads(cluster.helm("history", made.name, f"--namespace={made.name}", "-o=json"))[-1]

    with pytest.raises(ClusterError):
        made.upgrade({"webhook": {"priorityClassName": "no-such-class"}}, wait="5s")

    def told() -> bool:
        deployment = cluster.get("deployment", made.webhook, namespace=made.name)
        return "no PriorityClass with name no-such-class was found" in str(deployment["status"]["conditions"])

    wait_for(told, 60, "the Deployment to name the class", every=0.3)
    assert uids(made) == pods
    assert made.admit() == "injected"
    words = [made.name, str(revision["revision"]), f"--namespace={made.name}", "--wait", "--timeout=2m"]
    cluster.helm("rollback", *words)
    assert made.admit() == "injected"


# ---- always one that serves -------------------------------------------------------------------------


def evict(made: Release, pod: str) -> int:
    """Evicts a pod, as a drain does; the answer's code."""
    core = CoreV1Api(made.cluster.client())
    body: Any = {"metadata": {"name": pod, "namespace": made.name}}
    try:
        core.create_namespaced_pod_eviction(pod, made.name, body, _preload_content=False)
    except ApiException as error:
        return int(error.status)
    return 201


def test_drain_leaves_one_replica(made: Release) -> None:
    """The disruption budget gives one of two replicas to a drain and refuses the other until a new one is
    ready; with maxUnavailable 0 none goes; a value that is nonsense counts as one."""
    cluster = made.cluster

    def budget() -> dict[str, Any]:
        found: dict[str, Any] = cluster.get("poddisruptionbudget", made.webhook, namespace=made.name)
        return found

    made.upgrade()
    wait_for(lambda: budget()["status"].get("disruptionsAllowed") == 1, 60, "the budget to allow one")
    first, second = (pod["metadata"]["name"] for pod in made.pods())
    assert evict(made, first) == 201
    assert evict(made, second) == 429
    cluster.wait_rollout(f"deployment/{made.webhook}", namespace=made.name)
    wait_for(lambda: budget()["status"].get("disruptionsAllowed") == 1, 60, "the budget to allow one again")

    made.upgrade({"webhook": {"podDisruptionBudget": {"maxUnavailable": 0}}})
    wait_for(lambda: budget()["status"].get("disruptionsAllowed") == 0, 60, "the budget to allow none")
    assert "minAvailable" not in budget()["spec"]
    made.upgrade({"webhook": {"podDisruptionBudget": {"minAvailable": "-3"}}})
    assert budget()["spec"]["minAvailable"] == 1


class Stream:
    """Dry-run creations of sharing pods, one after the other, by some threads."""

    def __init__(self, made: Release, threads: int = 4) -> None:
        self.made, self.stopping = made, threading.Event()
        self.outcomes: list[str] = []
        self.threads = [threading.Thread(target=self._run, daemon=True) for _ in range(threads)]

    def _run(self) -> None:
        core, body = CoreV1Api(self.made.cluster.client()), self.made.pod("streamed")
        while not self.stopping.wait(0.05):
            try:
                answer = core.create_namespaced_pod("default", body, dry_run="All", _preload_content=False)
                notes = json.loads(answer.data)["metadata"]["annotations"]
                self.outcomes.append(notes.get(names.ANNOTATION_STATUS, "not looked at"))
            except Exception as error:
                self.outcomes.append(f"{getattr(error, 'body', None) or error}"[:300])

    def __enter__(self) -> Stream:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        for thread in self.threads:
            thread.join(30)


def test_rollout_refuses_no_pod(made: Release) -> None:
    """While both replicas are replaced each sharing pod is admitted and injected: none refused, none let
    through."""
    made.upgrade()
    pods = uids(made)
    with Stream(made) as stream:
        wait_for(lambda: len(stream.outcomes) > 20, 60, "the stream")
        made.upgrade({"logging": {"level": "debug"}})
        wait_for(lambda: len(made.pods()) == 2 and not pods & uids(made), 60, "the old replicas to go")
        time.sleep(made.values["webhook"]["drainSeconds"])

    wrong = [each for each in stream.outcomes if each != "injected"]
    print(f"{len(stream.outcomes)} creations during a rollout, {len(wrong)} failed")
    assert not wrong, wrong[:5]
