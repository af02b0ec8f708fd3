"""Faults of our own parts and of the API server: what was capped stays capped, and heals without a hand."""

from __future__ import annotations

import hashlib
import random
import time
from pathlib import Path
from typing import Any

import pytest
from admitted import DRY, submit
from harness import Cluster, ClusterError, wait_for
from product import NAMESPACE, cache_folder, metrics, tenant, value, webhook_away
from steady import LIMIT_BYTES, Steady, component, pinned, process_of

from isolator import names

MOUNT = names.DEFAULT_VGPU_MOUNT
LIBRARY = f"{MOUNT}/{names.LIBRARY_FILE}"
WEBHOOK = f"deployment/{names.RELEASE}-webhook"
REPAIR_S = 60.0
"""Far above the shared release's interval of 5 s."""


@pytest.fixture(scope="module")
def gone(steady: Steady) -> Path:
    """The cache folder, on n1, of a pod that was deleted at the start of this file."""
    steady.cluster.apply(pinned("goes", "n1", annotations={"gpu-memory": "1024"}), steady.namespace)
    folder = cache_folder(steady.cluster, steady.run("goes"))
    steady.cluster.exec_("goes", ["memory-limit", "64"], namespace=steady.namespace)
    assert (folder / names.CACHE_FILE).exists()
    steady.cluster.delete("pod", "goes", namespace=steady.namespace)
    return folder


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def mapped(cluster: Cluster, pod: dict[str, Any]) -> set[int]:
    """Inodes of the library that the pod's first process has mapped."""
    node = cluster.nodes[pod["spec"]["nodeName"]]
    maps = node.run(["cat", f"/proc/{process_of(node, pod)}/maps"]).stdout.splitlines()
    return {int(line.split()[4]) for line in maps if f"/{names.LIBRARY_FILE}" in line}


def test_the_webhook_is_away_and_comes_back(cluster: Cluster, steady: Steady, gone: Path) -> None:
    """No share pod starts meanwhile, running ones are held, and afterwards pods start as before (B070)."""
    with webhook_away(cluster):
        wait_for(lambda: _refused(cluster, steady), 60, "share pods to be refused", every=0.5)
        steady.goes_on()
    wait_for(lambda: not _refused(cluster, steady), 60, "share pods to be accepted", every=0.5)
    cluster.apply(tenant("after"), steady.namespace)
    steady.run("after")
    steady.passes("after")
    cluster.delete("pod", "after", namespace=steady.namespace)


def _refused(cluster: Cluster, steady: Steady) -> bool:
    """Whether a share pod cannot be created for want of our webhook, by a dry run."""
    answer = submit(cluster, tenant("meanwhile"), steady.namespace, DRY)
    assert answer.pod or names.WEBHOOK_NAME in answer.said, answer.said
    return not answer.pod


def test_the_api_server_restarts_under_tenants(cluster: Cluster, steady: Steady) -> None:
    """Tenants are held throughout; the monitor's watch comes back, and our parts stay up."""
    cluster.restart_apiserver()
    steady.goes_on()
    wait_for(lambda: _all_watch(cluster), 120, "the watches of the monitors", every=1)
    for node in cluster.nodes:
        component(cluster, names.COMPONENT_LIBSYNC, node)
    cluster.wait_rollout(WEBHOOK, namespace=NAMESPACE, timeout=180)
    wait_for(lambda: not _refused(cluster, steady), 60, "share pods to be accepted", every=0.5)
    steady.never_restarted()


def _all_watch(cluster: Cluster) -> bool:
    try:
        return all(value(metrics(cluster, node), "kai_isolator_pod_watch_up") == 1 for node in cluster.nodes)
    except ClusterError:
        return False


def test_a_killed_monitor_comes_back_with_the_same_series(cluster: Cluster, steady: Steady) -> None:
    """SIGKILL: the kubelet starts it again, and every series of a container is there with its value."""
    monitor = component(cluster, names.COMPONENT_MONITOR, "n1")
    before = _container_series(cluster, steady)
    assert len(before) >= 5
    node = cluster.node(1)
    node.run(["kill", "-9", str(process_of(node, monitor))])
    wait_for(lambda: _restarts(cluster, names.COMPONENT_MONITOR) == 1, 60, "the restart", every=0.3)
    wait_for(lambda: _container_series(cluster, steady) == before, 60, "the same series", every=0.5)
    steady.goes_on("n1")


def _restarts(cluster: Cluster, name: str) -> int:
    """Restarts of a component's ready pod on n1."""
    pod = component(cluster, name, "n1")
    return int(pod["status"]["containerStatuses"][0]["restartCount"])


def _container_series(cluster: Cluster, steady: Steady) -> dict[Any, float]:
    """hami_vgpu_* of the steady tenant of n1."""
    try:
        samples = metrics(cluster, "n1")
    except ClusterError:
        return {}
    found = [each for each in samples if each.labels.get("namespace") == steady.namespace]
    return {
        (each.name, tuple(sorted(each.labels.items()))): each.value
        for each in found
        if each.name.startswith(names.METRIC_PREFIX_VGPU)
    }


def older(cluster: Cluster) -> bytes:
    """A library that works as ours and is another file: what an older release left."""
    return cluster.node(1).path(LIBRARY).read_bytes() + b"an older release"


def put(cluster: Cluster, data: bytes) -> None:
    """Puts a library in place on n1, as an older release did."""
    path = cluster.node(1).path(LIBRARY)
    new = path.with_name("older")
    new.write_bytes(data)
    new.chmod(0o755)
    new.rename(path)


def test_a_libsync_killed_at_any_moment_leaves_a_whole_library(cluster: Cluster, steady: Steady) -> None:
    """SIGKILL at chance moments of an installation: the old or the new library, whole, at every look."""
    libsync = component(cluster, names.COMPONENT_LIBSYNC, "n1")
    name, path = libsync["metadata"]["name"], cluster.node(1).path(LIBRARY)
    old = older(cluster)
    whole = {digest(path), hashlib.sha256(old).hexdigest()}
    seen, chance = [], random.Random(7)
    script = (
        """isolator libsync --once >/dev/null 2>&1 & sleep "$1"; kill -9 $! 2>/dev/null; wait $!; echo $?"""
    )
    for _ in range(12):
        put(cluster, old)
        delay = f"{chance.uniform(0.05, 0.5):.3f}"
        seen.append(cluster.exec_(name, ["sh", "-c", script, "sh", delay], namespace=NAMESPACE).strip())
        assert digest(path) in whole
    assert "137" in seen, seen
    put(cluster, old)
    node = cluster.node(1)
    node.run(["kill", "-9", str(process_of(node, libsync))])
    new = (whole - {hashlib.sha256(old).hexdigest()}).pop()
    wait_for(lambda: digest(path) == new, REPAIR_S, "the installation to be finished", every=0.1)
    component(cluster, names.COMPONENT_LIBSYNC, "n1")
    left = [each.name for each in path.parent.iterdir() if each.name.startswith(".libsync-")]
    assert not left
    steady.goes_on("n1")


@pytest.mark.parametrize("how", ["deleted", "altered", "folder"])
def test_a_damaged_library_is_repaired_under_running_tenants(
    cluster: Cluster, steady: Steady, how: str
) -> None:
    """Within the interval it is back; who runs keeps what it has mapped, who starts gets the new file."""
    path, pod = cluster.node(1).path(LIBRARY), steady.pods["n1"]
    before, kept = digest(path), mapped(cluster, pod)
    assert len(kept) == 1
    if how == "altered":
        put(cluster, older(cluster))
    else:
        path.unlink()
        if how == "folder":
            path.mkdir()
    wait_for(lambda: path.is_file() and digest(path) == before, REPAIR_S, f"a {how} library", every=0.1)
    assert mapped(cluster, pod) == kept
    new = f"new-{how}"
    cluster.apply(pinned(new, "n1"), steady.namespace)
    steady.run(new)
    steady.passes(new)
    seen = cluster.exec_(new, ["stat", "-c", "%i", LIBRARY], namespace=steady.namespace)
    assert int(seen) == path.stat().st_ino
    cluster.delete("pod", new, namespace=steady.namespace)
    wait_for(lambda: value(metrics(cluster, "n1"), "kai_isolator_library_ready") == 1, 60, "ready", every=0.5)
    steady.goes_on("n1")


def test_the_cache_of_a_deleted_pod_goes_and_that_of_a_live_one_never(
    cluster: Cluster, steady: Steady, gone: Path
) -> None:
    """A minute after its pod the folder is gone; those of running pods are there, with their limit shown."""
    began = time.monotonic()
    wait_for(lambda: not gone.exists(), 120, "the folder of the deleted pod to go", every=0.5)
    print(f"waited {time.monotonic() - began:.0f} s more")
    assert (cache_folder(cluster, steady.pods["n1"]) / names.CACHE_FILE).exists()
    labels = {"namespace": steady.namespace, "pod": "steady-n1"}
    assert value(metrics(cluster, "n1"), "hami_vgpu_memory_limit_bytes", **labels) == LIMIT_BYTES
    steady.goes_on()
    steady.never_restarted()
