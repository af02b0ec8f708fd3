"""The library's versions on real nodes: a hundred upgrades under load, and back by one value."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import uuid
from collections.abc import Iterator
from typing import Any

import images_other
import product as given
import pytest
from harness import Cluster, wait_for
from images_base import ROOT
from kai import Kai
from nodes import Node
from product import NAMESPACE, PASS, STATE, Product, component_pods
from steady import Steady, pinned, process_of

from isolator import names

UPGRADES = 100
MOUNT = names.DEFAULT_VGPU_MOUNT
LIBRARY = f"{MOUNT}/{names.LIBRARY_FILE}"
LIMIT_BYTES = 4147 << 20
MARK = b"build:%08d"
"""Ends a build's file: loads as the plain one does, and tells which it is."""
TAIL = f"tail -c 8 {LIBRARY}"
# Holds 3 GiB, takes and gives back, asks for too much, and starts processes that do the same; each looks at
# the library that it has mapped. Whatever is not as it must be is written down.
_WATCH = f"""
import ctypes, hashlib, json, os, subprocess, sys, time
LIBRARY = "{LIBRARY}"
def mapped():
    with open("/proc/self/maps") as lines:
        return sorted({{line.split()[4] for line in lines if "libvgpu.so" in line}})
def driver():
    cuda = ctypes.CDLL("libcuda.so.1")
    context = ctypes.c_void_p()
    assert cuda.cuInit(0) == 0 and cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert cuda.cuCtxSetCurrent(context) == 0
    return cuda
def ask(cuda, mib):
    where = ctypes.c_uint64()
    answer = cuda.cuMemAlloc_v2(ctypes.byref(where), ctypes.c_size_t(mib << 20))
    return answer or cuda.cuMemFree_v2(where)
if len(sys.argv) == 1:
    cuda = driver()
    print(ask(cuda, 512), ask(cuda, 1024), *mapped())
    sys.exit(0)
cuda, held = driver(), ctypes.c_uint64()
assert cuda.cuMemAlloc_v2(ctypes.byref(held), ctypes.c_size_t(3 << 30)) == 0
def facts():
    with open(LIBRARY, "rb") as file:
        return [mapped(), os.stat(LIBRARY).st_ino, hashlib.sha256(file.read()).hexdigest()]
first = facts()
told = {{"rounds": 0, "processes": 0, "wrong": [], "facts": first}}
while True:
    got = [ask(cuda, 512), ask(cuda, 2048)]
    if got != [0, 2] or facts() != first:
        told["wrong"].append([got, facts()])
    if told["rounds"] % 5 == 0:
        done = subprocess.run([sys.executable, "-c", os.environ["WATCH"]], capture_output=True, text=True)
        told["processes"] += 1
        if done.stdout.split() != ["0", "2", *first[0]]:
            told["wrong"].append([done.returncode, done.stdout, done.stderr[-500:]])
    told["rounds"] += 1
    with open("{STATE}/" + sys.argv[1] + ".new", "w") as file:
        json.dump(told, file)
    os.rename(file.name, "{STATE}/" + sys.argv[1])
    time.sleep(0.05)
"""


def status(node: Node) -> dict[str, Any]:
    """What libsync says of its node."""
    return dict(json.loads(node.path(f"{MOUNT}/{names.LIBSYNC_STATUS}").read_text()))


def mapped(node: Node, pod: dict[str, Any]) -> set[str]:
    """Device and inode of each library of ours that the pod's first process has mapped."""
    lines = node.run(["cat", f"/proc/{process_of(node, pod)}/maps"]).stdout.splitlines()
    return {" ".join(line.split()[3:5]) for line in lines if "libvgpu.so" in line}


class Watching:
    """Tenants on one node that watch themselves; `count` of them, in a namespace of their own."""

    def __init__(self, cluster: Cluster, kai: Kai, namespace: str, node: Node, count: int = 2) -> None:
        self.cluster, self.node, self.id = cluster, node, uuid.uuid4().hex[:8]
        wanted = []
        for number in range(count):
            name = f"watch-{number}"
            env = {"env": [{"name": "WATCH", "value": _WATCH}]}
            command = ["sh", "-c", f'exec python3 -c "$WATCH" {self.id}-{name}']
            wanted.append(pinned(name, node.name, command=command, container=env))
        cluster.apply(wanted, namespace)
        listed = [pod["metadata"]["name"] for pod in wanted]
        self.pods = given.wait_running(cluster, *listed, namespace=namespace, kai=kai, timeout=180)
        self.go_on()

    def told(self) -> list[dict[str, Any]]:
        files = [self.node.path(f"{STATE}/{self.id}-{pod['metadata']['name']}") for pod in self.pods]
        return [json.loads(file.read_text()) if file.exists() else {} for file in files]

    def go_on(self) -> list[dict[str, Any]]:
        """Each goes on and saw nothing wrong."""
        before = [each.get("rounds", -1) for each in self.told()]

        def further() -> bool:
            now = self.told()
            return all(each.get("rounds", -1) > was + 5 for each, was in zip(now, before, strict=True))

        wait_for(further, 90, "each tenant to go on")
        told = self.told()
        assert not [each["wrong"] for each in told if each["wrong"]], told
        return told


class Builds:
    """Builds of the library on a node, and the installer that puts one in place."""

    def __init__(self, node: Node) -> None:
        self.node, self.folder = node, f"/opt/builds-{uuid.uuid4().hex[:8]}"
        self.own = node.path(LIBRARY).read_bytes()
        node.path(self.folder).mkdir()

    def install(self, number: int) -> None:
        """One pass of libsync, started by hand: the DaemonSet's stands by while this one's is fresh."""
        data = self.own + MARK % number
        for name, content in (("libvgpu.so", data), ("version", b"2.0.%d\n" % number)):
            self.node.path(f"{self.folder}/{name}").write_bytes(content)
        words = [f"--mount={MOUNT}", f"--library={self.folder}/libvgpu.so", "--group=65532", "--once"]
        words += [f"--version-file={self.folder}/version"]
        command = ["env", f"PYTHONPATH={ROOT}", sys.executable, "-m", "isolator.libsync", *words]
        done: subprocess.CompletedProcess[str] = self.node.run(command)
        assert done.returncode == 0, done.stderr

    def current(self) -> int:
        """Which one the node has."""
        return int(self.node.path(LIBRARY).read_bytes()[-8:])


def newcomer(name: str, node: Node) -> dict[str, Any]:
    """A pod that says which build it was given and that it is held to its limit by it."""
    return pinned(name, node.name, command=["sh", "-c", f"{TAIL}; echo; memory-limit 2>&1; sleep infinity"])


def said_by(cluster: Cluster, pod: str, namespace: str) -> int:
    """The build's number as a newcomer tells it, once it was held to its limit."""

    def whole() -> str:
        text = cluster.logs(pod, namespace=namespace)
        return text if PASS in text else ""

    given.wait_running(cluster, pod, namespace=namespace)
    return int(wait_for(whole, 60, f"{pod} to pass", every=0.3).partition("\n")[0])


@pytest.fixture
def builds(cluster: Cluster, product: Product) -> Iterator[Builds]:
    """Builds on n1; the release's own library is back there afterwards."""
    made = Builds(cluster.node(1))
    yield made
    ours = hashlib.sha256(made.own).hexdigest()
    wait_for(lambda: status(made.node)["library_sha256"] == ours, 60, "the release's own library", every=0.5)


def test_hundred_upgrades_while_tenants_allocate(
    cluster: Cluster, kai: Kai, builds: Builds, namespace: str
) -> None:
    """L1: through a hundred upgrades no tenant crashes or gets past its limit, running processes and later
    ones of the same container keep one library (inode, bytes), each new pod has the library that was current
    when it started, and a container that starts again has the newest."""
    node = builds.node
    watching = Watching(cluster, kai, namespace, node)
    before = [mapped(node, pod) for pod in watching.pods]
    assert all(len(each) == 1 for each in before)
    seen = []
    for number in range(1, UPGRADES + 1):
        builds.install(number)
        if number % 20 == 1:
            # One at a time: the card has room for three such limits.
            cluster.apply(newcomer(f"new-{number}", node), namespace)
        elif number % 20 == 19:
            seen.append(said_by(cluster, f"new-{number - 18}", namespace))
            assert number - 18 <= seen[-1] <= number
            if number < UPGRADES - 1:
                cluster.delete("pod", f"new-{number - 18}", namespace=namespace)
    assert builds.current() == UPGRADES

    told = watching.go_on()
    assert [mapped(node, pod) for pod in watching.pods] == before
    last = f"new-{UPGRADES - 19}"
    node.run(["kill", "-9", str(process_of(node, cluster.get("pod", last, namespace=namespace)))])
    wait_for(
        lambda: said_after_restart(cluster, last, namespace) == f"{UPGRADES:08d}",
        60,
        "a restart",
        every=0.5,
    )
    told_by_monitor = given.metrics(cluster, node.name)
    for pod in watching.pods:
        used = given.value(told_by_monitor, "hami_vgpu_memory_used_bytes", pod=pod["metadata"]["name"])
        assert used is not None and 3 << 30 < used <= LIMIT_BYTES
        found = cluster.get("pod", pod["metadata"]["name"], namespace=namespace)
        assert found["status"]["containerStatuses"][0]["restartCount"] == 0
    kept = [path.name for path in node.path(f"{MOUNT}/versions").iterdir()]
    assert len(kept) == 3 and any(name.startswith(f"2.0.{UPGRADES}-") for name in kept)
    rounds, processes = (sum(each[key] for each in told) for key in ("rounds", "processes"))
    print(f"{UPGRADES} upgrades: {rounds} rounds, {processes} new processes, 0 wrong; new pods got {seen}")


def said_after_restart(cluster: Cluster, pod: str, namespace: str) -> str:
    """The build's number as the second run of a container says it, else ""."""
    found = cluster.get("pod", pod, namespace=namespace)["status"]["containerStatuses"][0]
    if found["restartCount"] != 1 or "running" not in found["state"]:
        return ""
    return cluster.logs(pod, namespace=namespace).partition("\n")[0]


# ---- one value ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def others(cluster: Cluster, product: Product, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Images of two other releases on the nodes, by tag, with their libraries: one sound, one damaged."""
    whole = cluster.node(1).path(LIBRARY).read_bytes()
    found = {"1.1.9": whole + MARK % 119, "0.0.1": whole[: len(whole) // 2]}
    for tag, data in found.items():
        archive = tmp_path_factory.mktemp("images") / f"{tag}.tar"
        images_other.make(given.built()[0][0], archive, tag, tag, data)
        cluster.load_image(archive)
        archive.unlink()
    return found


def workloads(cluster: Cluster) -> set[str]:
    """UIDs of the webhook's and the monitors' pods."""
    parts = (names.COMPONENT_WEBHOOK, names.COMPONENT_MONITOR)
    return {pod["metadata"]["uid"] for part in parts for pod in component_pods(cluster, part)}


def version_told(cluster: Cluster, node: str) -> set[str]:
    """The version in the monitor's library_info of a node."""
    told = given.metrics(cluster, node)
    return {each.labels["version"] for each in told if each.name.endswith("_library_info")}


def roll_back(cluster: Cluster) -> None:
    """The whole release, to the revision before."""
    cluster.helm("rollback", names.RELEASE, f"--namespace={NAMESPACE}", "--wait", "--timeout=3m")


def test_back_by_one_value_and_by_helm_rollback(
    cluster: Cluster, product: Product, steady: Steady, others: dict[str, bytes], namespace: str
) -> None:
    """librarySync.libraryTag gives the nodes another release's library and nothing else: running pods keep
    theirs, new ones get it, libsync and the monitor name it; a damaged one is refused with a line and changes
    nothing; `helm rollback` brings the release's own back."""
    nodes = cluster.nodes
    own_library = cluster.node(1).path(LIBRARY).read_bytes()
    before, others_before = {n: mapped(nodes[n], steady.pods[n]) for n in nodes}, workloads(cluster)
    own = {n: status(nodes[n])["library_version"] for n in nodes}
    product.install(given.merged(product.values, {"librarySync": {"libraryTag": "1.1.9"}}))
    for name, node in nodes.items():
        assert status(node)["library_version"] == "1.1.9" and status(node)["ready"] is True
        assert node.path(LIBRARY).read_bytes() == others["1.1.9"]
        wait_for(lambda name=name: version_told(cluster, name) == {"1.1.9"}, 30, "the monitor", every=0.5)
    cluster.apply(newcomer("new", cluster.node(1)), namespace)
    assert said_by(cluster, "new", namespace) == 119
    steady.goes_on()

    tag = {"librarySync": {"libraryTag": "0.0.1"}}
    words = ["upgrade", names.RELEASE, str(given.CHART), f"--namespace={NAMESPACE}", "--reset-values"]
    cluster.helm(*words, "--values=-", input=json.dumps(given.merged(product.values, tag)))
    problems = wait_for(
        lambda: [str(told["problem"]) for node in nodes.values() if (told := status(node))["problem"]],
        90,
        "a node to refuse it",
        every=0.5,
    )
    assert "librarySync.libraryTag" in problems[0] and "truncated" in problems[0], problems
    assert len(problems) == 1, "the roll-out waits at the first node"
    for node in nodes.values():
        assert node.path(LIBRARY).read_bytes() == others["1.1.9"]
        assert status(node)["library_version"] == "1.1.9"
    roll_back(cluster)
    assert [status(node)["library_version"] for node in nodes.values()] == ["1.1.9"] * len(nodes)
    product.install(product.values)
    for name, node in nodes.items():
        assert status(node)["library_version"] == own[name]
        assert node.path(LIBRARY).read_bytes() == own_library
    assert {n: mapped(nodes[n], steady.pods[n]) for n in nodes} == before
    assert workloads(cluster) == others_before
    steady.goes_on()
    steady.never_restarted()
