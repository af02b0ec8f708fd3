"""Faults of a node: cut off, kubelet restarted, disk full, rebooted. What was capped stays capped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from harness import Cluster, ClusterError, wait_for
from nodes import Node
from product import NAMESPACE, WORKLOADS, component_pods, metrics, series, value
from steady import (
    LIMIT_BYTES,
    Steady,
    component,
    local_metrics,
    pinned,
    restart_component,
)

from isolator import names

MOUNT = names.DEFAULT_VGPU_MOUNT
SMALL_MIB = 16


def limit_shown(cluster: Cluster, steady: Steady, node: str) -> bool:
    """Whether the monitor of a node shows the steady tenant's limit, through the API server."""
    labels = {"namespace": steady.namespace, "pod": f"steady-{node}"}
    try:
        return value(metrics(cluster, node), "hami_vgpu_memory_limit_bytes", **labels) == LIMIT_BYTES
    except ClusterError:
        return False


def test_a_node_that_is_cut_off_goes_on_holding_and_showing_its_tenants(
    cluster: Cluster, steady: Steady
) -> None:
    """Cut off: refusals go on, the monitor serves there and says its watch is down; healed: all is back."""
    node, monitor = cluster.node(2), component(cluster, names.COMPONENT_MONITOR, "n2")
    address = monitor["status"]["podIP"]
    node.cut()
    try:
        cluster.wait_nodes(False, ["n2"], timeout=90)
        steady.goes_on()
        wait_for(
            lambda: value(local_metrics(node, address), "kai_isolator_pod_watch_up") == 0,
            120,
            "the monitor to see that its watch is down",
            every=0.5,
        )
        labels = {"namespace": steady.namespace, "pod": "steady-n2"}
        shown = series(local_metrics(node, address), "hami_vgpu_memory_limit_bytes", **labels)
        assert [each.value for each in shown] == [LIMIT_BYTES]
    finally:
        node.heal()
    cluster.wait_nodes(True, timeout=90)
    wait_for(
        lambda: value(local_metrics(node, address), "kai_isolator_pod_watch_up") == 1,
        120,
        "the watch",
        every=0.5,
    )
    wait_for(lambda: limit_shown(cluster, steady, "n2"), 60, "the series of n2", every=0.5)
    steady.goes_on()
    steady.never_restarted()


def test_a_kubelet_restarts_under_tenants(cluster: Cluster, steady: Steady) -> None:
    """Held while it is away and after; pods start on the node as before."""
    node = cluster.node(1)
    node.stop_kubelet()
    try:
        steady.goes_on("n1")
    finally:
        node.start_kubelet()
    cluster.wait_nodes(True, timeout=90)
    cluster.apply(pinned("after-kubelet", "n1"), steady.namespace)
    steady.run("after-kubelet")
    steady.passes("after-kubelet")
    steady.goes_on("n1")
    steady.never_restarted()
    cluster.delete("pod", "after-kubelet", namespace=steady.namespace)


# ---- a full disk ------------------------------------------------------------------------------------


@contextmanager
def small_disk(cluster: Cluster, node: Node) -> Iterator[bytes]:
    """A file system of 16 MiB at <mount> with an older release's installation; the bytes of its library."""
    library = node.path(MOUNT).joinpath(names.LIBRARY_FILE).read_bytes() + b"an older release"
    node.run(["mount", "-t", "tmpfs", "-o", f"size={SMALL_MIB}m,mode=755", "tmpfs", MOUNT])
    try:
        place = node.path(MOUNT)
        (place / names.CONTAINERS_DIRECTORY).mkdir()
        (place / names.CONTAINERS_DIRECTORY).chmod(0o1777)
        (place / names.PRELOAD_KEY).write_text(f"{MOUNT}/{names.LIBRARY_FILE}\n")
        (place / names.LIBRARY_FILE).write_bytes(library)
        (place / names.LIBRARY_FILE).chmod(0o755)
        yield library
    finally:
        node.run(["umount", "--lazy", MOUNT])
        for name in (names.COMPONENT_LIBSYNC, names.COMPONENT_MONITOR):
            restart_component(cluster, name, node.name)
            component(cluster, name, node.name)


def not_ready(cluster: Cluster, node: str) -> str:
    """The log of a libsync that runs and is not ready; empty otherwise."""
    for pod in component_pods(cluster, names.COMPONENT_LIBSYNC, node):
        if not any(each["ready"] for each in pod["status"].get("containerStatuses", [])):
            return cluster.logs(pod["metadata"]["name"], namespace=NAMESPACE)
    return ""


def test_a_full_disk_keeps_the_old_library_and_heals(cluster: Cluster, steady: Steady) -> None:
    """Not ready, with a line that says what to do; the old library stays whole, no tenant is uncapped."""
    node = cluster.node(2)
    with small_disk(cluster, node) as old:
        cluster.apply(pinned("early", "n2"), steady.namespace)
        steady.run("early")
        steady.passes("early")
        node.run(f"dd if=/dev/zero of={MOUNT}/filler bs=64k status=none", check=False)
        restart_component(cluster, names.COMPONENT_LIBSYNC, "n2")
        line = f"no space left at {MOUNT}: free disk space or inodes on the node; what is installed stays"
        wait_for(
            lambda: line in not_ready(cluster, "n2"), 120, "libsync to say that the disk is full", every=0.5
        )
        library = node.path(f"{MOUNT}/{names.LIBRARY_FILE}")
        assert library.read_bytes() == old
        steady.passes("early")
        cluster.apply(pinned("late", "n2"), steady.namespace)
        steady.run("late")
        said = cluster.exec_("late", ["sh", "-c", "memory-limit 2>&1 || true"], namespace=steady.namespace)
        assert "GiB: no error" not in said or "another 2 GiB: out of memory" in said, said
        assert "CUDA is refused" in said and "No space left" in said, said
        node.path(f"{MOUNT}/filler").unlink()
        component(cluster, names.COMPONENT_LIBSYNC, "n2")
        assert library.read_bytes() == old.removesuffix(b"an older release")
        for name in ("early", "late"):
            steady.passes(name)
        cluster.delete("pod", "early", "late", namespace=steady.namespace)
    steady.goes_on()


# ---- a reboot ---------------------------------------------------------------------------------------


def power_off(node: Node) -> None:
    """Ends kubelet, containerd and every container of the node, none of them asked."""
    node.stop_kubelet()
    pids = [line.split()[1] for line in node.ctr("tasks", "ls").stdout.splitlines()[1:]]
    assert node.containerd
    node.containerd.stop()
    for line in node.run(["ps", "-eo", "pid,comm"]).stdout.splitlines():
        if "containerd-shim" in line:
            pids.append(line.split()[0])
    for pid in pids:
        node.run(["kill", "-9", pid], check=False)


def power_on(node: Node) -> None:
    node.start_containerd()
    wait_for(lambda: node.ctr("version", check=False).returncode == 0, 60, "containerd", every=0.3)
    node.start_kubelet()


def started(pod: dict[str, Any]) -> float:
    """When the pod's container was started, s since the epoch."""
    state = pod["status"]["containerStatuses"][0]["state"]
    return datetime.fromisoformat(state["running"]["startedAt"]).timestamp()


def test_a_node_that_boots_without_an_installation_waits_for_it(cluster: Cluster, steady: Steady) -> None:
    """<mount> is empty after the boot: tenants start when the library is there again, and are held."""
    node, before = cluster.node(1), steady.told("n1")
    power_off(node)
    place = node.path(MOUNT)
    try:
        node.run(f"rm -rf {MOUNT}/*")
        assert not list(place.iterdir())
    finally:
        power_on(node)
    cluster.wait_nodes(True, timeout=120)

    def again() -> dict[str, Any] | None:
        pod = cluster.get("pod", "steady-n1", namespace=steady.namespace)
        status = pod["status"]["containerStatuses"][0]
        return pod if status["restartCount"] and status["ready"] else None

    pod = wait_for(again, 240, "the tenant of n1 to run again", every=0.5)
    assert pod and pod["metadata"]["uid"] == steady.pods["n1"]["metadata"]["uid"]
    assert started(pod) + 1 >= (place / names.LIBRARY_FILE).stat().st_mtime
    wait_for(lambda: steady.told("n1")["start"] > before["start"], 60, "its program")
    steady.goes_on()
    for workload in WORKLOADS:
        cluster.wait_rollout(workload, namespace=NAMESPACE, timeout=240)
    wait_for(lambda: limit_shown(cluster, steady, "n1"), 120, "the series of n1", every=0.5)
