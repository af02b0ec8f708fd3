"""Tenants that ask all the time for more than their limit, and what they saw, read without the API server."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from harness import Cluster, wait_for
from kai import Kai
from nodes import Node
from product import NAMESPACE, PASS, STATE, component_pods, samples, tenant, wait_running
from prometheus_client.samples import Sample

from isolator import names

LIMIT_BYTES = 4147 << 20
# Holds 3 GiB and asks for 2 more, ten times a second; counts the answers in a file on the node.
_WATCH = f"""
import ctypes, json, os, sys, time
cuda = ctypes.CDLL("libcuda.so.1")
context, where, more = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_uint64()
assert cuda.cuInit(0) == 0 and cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert cuda.cuCtxSetCurrent(context) == 0
assert cuda.cuMemAlloc_v2(ctypes.byref(where), ctypes.c_size_t(3 << 30)) == 0
told = {{"granted": 0, "refused": 0, "other": 0, "start": time.time()}}
while True:
    answer = cuda.cuMemAlloc_v2(ctypes.byref(more), ctypes.c_size_t(2 << 30))
    told[{{0: "granted", 2: "refused"}}.get(answer, "other")] += 1
    if answer == 0:
        cuda.cuMemFree_v2(more)
    with open("{STATE}/" + sys.argv[1] + ".new", "w") as file:
        json.dump(told, file)
    os.rename(file.name, "{STATE}/" + sys.argv[1])
    time.sleep(0.1)
"""


def pinned(name: str, node: str, **more: Any) -> dict[str, Any]:
    """A tenant on that node."""
    return tenant(name, nodeSelector={"kubernetes.io/hostname": node}, **more)


@dataclass
class Steady:
    """One such tenant on each node, in a namespace of its own."""

    cluster: Cluster
    kai: Kai
    namespace: str = field(default_factory=lambda: f"steady-{uuid.uuid4().hex[:8]}")
    pods: dict[str, dict[str, Any]] = field(default_factory=dict)

    def start(self) -> None:
        """Starts the tenants; the namespace is there."""
        for node in self.cluster.nodes:
            command = ["python3", "-c", _WATCH, self.file(node)]
            self.cluster.apply(pinned(f"steady-{node}", node, command=command), self.namespace)
        for node in self.cluster.nodes:
            self.pods[node] = self.run(f"steady-{node}")
            self.goes_on(node)

    def run(self, name: str, timeout: float = 180) -> dict[str, Any]:
        """The pod of that name in this namespace, once it is ready."""
        return wait_running(self.cluster, name, namespace=self.namespace, kai=self.kai, timeout=timeout)[0]

    def file(self, node: str) -> str:
        return f"{self.namespace}-{node}"

    def told(self, node: str) -> dict[str, float]:
        """What the tenant of a node has counted; nothing before its first answer."""
        path = self.cluster.nodes[node].path(f"{STATE}/{self.file(node)}")
        return dict(json.loads(path.read_text())) if path.exists() else {}

    def goes_on(self, *nodes: str) -> None:
        """From now on it is refused as before, and was refused all the time."""
        for node in nodes or self.cluster.nodes:
            before = self.told(node).get("refused", 0)
            wait_for(lambda node=node, n=before: self.told(node).get("refused", 0) > n + 3, 60, f"{node}")
            told = self.told(node)
            assert told["granted"] == told["other"] == 0, (node, told)

    def never_restarted(self) -> None:
        for pod in self.pods.values():
            found = self.cluster.get("pod", pod["metadata"]["name"], namespace=self.namespace)
            assert found["metadata"]["uid"] == pod["metadata"]["uid"]
            assert found["status"]["containerStatuses"][0]["restartCount"] == 0

    def passes(self, name: str) -> None:
        """A program started now in that pod is held to the limit."""
        self.cluster.wait_exec(name, namespace=self.namespace, timeout=60)
        said = self.cluster.exec_(name, ["sh", "-c", "memory-limit 2>&1"], namespace=self.namespace)
        assert PASS in said, said


@contextmanager
def steady_tenants(cluster: Cluster, kai: Kai) -> Iterator[Steady]:
    """The tenants, started; gone afterwards."""
    made = Steady(cluster, kai)
    with cluster.space(made.namespace):
        made.start()
        yield made


def component(cluster: Cluster, name: str, node: str, timeout: float = 180) -> dict[str, Any]:
    """The ready pod of a component on a node."""

    def ready() -> dict[str, Any] | None:
        for pod in component_pods(cluster, name, node):
            if all(each["ready"] for each in pod["status"].get("containerStatuses", [{"ready": False}])):
                return pod
        return None

    found = wait_for(ready, timeout, f"{name} on {node}", every=0.5)
    assert found
    return found


def restart_component(cluster: Cluster, name: str, node: str) -> None:
    """Deletes a component's pod on a node; the workload makes a new one."""
    for pod in component_pods(cluster, name, node):
        cluster.delete("pod", pod["metadata"]["name"], namespace=NAMESPACE)


def process_of(node: Node, pod: dict[str, Any]) -> int:
    """The first process of a pod's only container, as the node numbers it."""
    wanted = pod["status"]["containerStatuses"][0]["containerID"].rpartition("/")[2]
    for line in node.ctr("tasks", "ls").stdout.splitlines():
        if line.startswith(wanted):
            return int(line.split()[1])
    raise AssertionError(f"no process of {pod['metadata']['name']}")


def local_metrics(node: Node, address: str) -> list[Sample]:
    """The samples of the monitor at a pod's address, asked from the node itself."""
    ask = (
        "import sys, urllib.request as u;"
        "print(u.build_opener(u.ProxyHandler({})).open(sys.argv[1], timeout=10).read().decode())"
    )
    url = f"http://{address}:{names.MONITOR_PORT}{names.METRICS_PATH}"
    return samples(node.run(["python3", "-c", ask, url]).stdout)
