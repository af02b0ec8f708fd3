"""What our requests cost a real API server: bytes, and processor ms of kube-apiserver and etcd.

The control plane of tests/cluster with one real node. Made-up nodes carry pods of ours, injected, bound,
reported running, with the fields that all of that leaves. Requests go as a service account with the rights of
the chart's, over HTTP/1.1 and JSON as the monitor's do. What the servers do of themselves is measured first
and taken off.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bench.scaling import kubelet
from bench.scaling.podobjects import A_NODE, SPACE, pod, running
from bench.scaling.server import Server, up
from isolator import kube
from isolator.monitor import podwatch

SIZES = (200, 1000, 2000)
"""Pods of the cluster at which a list is measured: one that costs more in a larger cluster would not hold."""


def _each(numbers: range, do: Callable[[int], Any]) -> None:
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(do, numbers))


MERGE = "application/merge-patch+json"
PODS = f"/api/v1/namespaces/{SPACE}/pods"


def _grow(server: Server, have: int, to: int) -> None:
    api = server.admin

    def node(number: int) -> None:
        labels = {"nvidia.com/gpu.memory": "15360"}
        made = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": f"made-up-{number}", "labels": labels},
        }
        api.ask("/api/v1/nodes", method="POST", body=made)

    def one(number: int) -> None:
        made = pod(number)
        api.ask(PODS, method="POST", body=made)
        path = f"{PODS}/{made['metadata']['name']}/status"
        api.ask(path, method="PATCH", body={"status": running(number)}, content_type=MERGE)

    _each(range(have // A_NODE, to // A_NODE), node)
    _each(range(have, to), one)


def _selector(number: int) -> str:
    return f"spec.nodeName=made-up-{number},{podwatch._UNFINISHED}"


def _read(api: kube.Api, path: str, query: dict[str, str] | None = None, **sent: Any) -> int:
    answer = api.open(path, query, **sent)
    try:
        return len(answer.data)
    finally:
        answer.release_conn()


def _lists(server: Server, pods: int) -> dict[str, Any]:
    """A node's list, from the server's cache and from the store, in a cluster of so many pods."""
    nodes = pods // A_NODE

    def ask(version: dict[str, str]) -> Callable[[kube.Api, int], int]:
        return lambda api, i: _read(api, "/api/v1/pods", {"fieldSelector": _selector(i % nodes), **version})

    return {
        f"list of {A_NODE} pods of {pods}": server.requests(200, ask({"resourceVersion": "0"})),
        f"the same from the store, of {pods}": server.requests(30, ask({})),
    }


def _nodes(server: Server) -> dict[str, Any]:
    """A node with as many images as a kubelet reports: from the store, from the cache, its metadata alone."""
    path, cached = "/api/v1/nodes/made-up-0", {"resourceVersion": "0"}
    images = [
        {"names": [f"registry.example.com/team/image-{i}@sha256:{i:064x}", f"registry.example.com/i-{i}:1"]}
        for i in range(50)
    ]
    change = {"status": {"images": images}}
    server.admin.ask(f"{path}/status", method="PATCH", body=change, content_type=MERGE)
    partial = "application/json;as=PartialObjectMetadata;v=v1;g=meta.k8s.io,application/json"
    return {
        "node": server.requests(400, lambda api, _: _read(api, path)),
        "node, cached": server.requests(400, lambda api, _: _read(api, path, cached)),
        "node, cached, metadata": server.requests(
            400, lambda api, _: _read(api, path, cached, accept=partial)
        ),
    }


def _watch(api: kube.Api, number: int) -> Any:
    """A watch as the monitor opens it: from its list's version on, over a connection that it has."""
    query = {"fieldSelector": _selector(number)}
    version = api.ask("/api/v1/pods", query | {"resourceVersion": "0"})["metadata"]["resourceVersion"]
    query |= {
        "resourceVersion": version,
        "watch": "true",
        "allowWatchBookmarks": "true",
        "timeoutSeconds": "300",
    }
    return lambda: api.open("/api/v1/pods", query, read=330)


def _status(server: Server, nodes: range) -> int:
    """Changes one word of the status of each pod of the nodes."""
    stamp, numbers = f"{time.time():.6f}", range(nodes.start * A_NODE, nodes.stop * A_NODE)

    def change(number: int) -> None:
        path = f"{PODS}/training-job-{number}/status"
        server.admin.ask(path, method="PATCH", body={"status": {"message": stamp}}, content_type=MERGE)

    _each(numbers, change)
    return len(numbers)


def _fan_out(server: Server, nodes: int = 20, each: int = 20) -> dict[str, Any]:
    """A change of a pod without watches, beside `each` watches of each of `nodes` others, and under them.

    So many watches of one node make what one costs visible; the monitor has one.
    """
    watched, others = range(nodes), range(nodes, 2 * nodes)
    found = {"change of a pod, no watch": server.cheapest(lambda: _status(server, others))}
    ready = [_watch(server.api(), number % nodes) for number in range(nodes * each)]
    server.settle()
    opened: list[Any] = []

    def start() -> int:
        _each(range(len(ready)), lambda i: opened.append(ready[i]()))
        return len(ready)

    try:
        found["watch opened"] = server.cost(start)
        server.settle()
        turns = [
            [server.cost(lambda at=at: _status(server, at)) for at in (others, watched)] for _ in range(5)
        ]
        beside, under = (min(found, key=lambda f: sum(f.values())) for found in zip(*turns, strict=True))
        found[f"change of a pod, {len(ready)} watches of other nodes"] = beside
        found[f"change of a pod, {each} watches of its node"] = under
        line = next(opened[0].stream(amt=None, decode_content=False)).split(b"\n")[0]
        more = {name: round(max(0.0, under[name] - beside[name]) / each, 4) for name in under}
        found["event of a watch"] = {"bytes": len(line), **more}
    finally:
        for stream in opened:
            stream.close()
    return found


def _others(server: Server) -> dict[str, Any]:
    """The keeper's two objects, an Event and its renewal."""
    admin, ca = server.admin, "x" * 1600
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "tls"}}
    path = f"/api/v1/namespaces/{SPACE}/secrets"
    admin.ask(
        path, method="POST", body={**secret, "stringData": {"tls.crt": ca, "tls.key": ca, "ca.crt": ca}}
    )
    hook = {
        "name": "w.example.com",
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
        "clientConfig": {"service": {"name": "s", "namespace": SPACE}},
    }
    group = "admissionregistration.k8s.io/v1"
    hooks = f"/apis/{group}/mutatingwebhookconfigurations"
    body = {"apiVersion": group, "kind": "MutatingWebhookConfiguration", "metadata": {"name": "w"}}
    admin.ask(hooks, method="POST", body={**body, "webhooks": [hook]})
    about = {"apiVersion": "v1", "kind": "Pod", "namespace": SPACE, "name": "training-job-0", "uid": "u"}
    events = f"/api/v1/namespaces/{SPACE}/events"
    event = {"apiVersion": "v1", "kind": "Event", "involvedObject": about, "type": "Warning"}
    event |= {"reason": "GPUMemoryUncapped", "message": "x" * 160, "count": 1}

    def make(api: kube.Api, i: int) -> int:
        named = {**event, "metadata": {"name": f"e.{i}", "namespace": SPACE}}
        return _read(api, events, method="POST", body=named)

    def renew(api: kube.Api, i: int) -> int:
        change = {"count": 2, "lastTimestamp": "2026-12-01T00:00:00Z"}
        return _read(api, f"{events}/e.{i % 300}", method="PATCH", body=change, content_type=MERGE)

    return {
        "secret": server.requests(300, lambda api, _: _read(api, f"{path}/tls")),
        "webhook configuration": server.requests(300, lambda api, _: _read(api, f"{hooks}/w")),
        "event made": server.requests(300, make),
        "event renewed": server.requests(300, renew),
    }


def costs() -> dict[str, Any]:
    """Name of an operation -> bytes of its answer, processor ms of the servers."""
    found: dict[str, Any] = {}
    with up() as server:
        found["version"] = server.version()
        found |= kubelet.watches(server.cluster)
        # Nothing may tidy the made-up nodes away.
        for name in ("kcm", "scheduler"):
            server.cluster.control.running[name].stop()
        have = 0
        for size in SIZES:
            _grow(server, have, size)
            have = size
            server.settle()
            found |= _lists(server, size)
        found |= _nodes(server)
        found |= _others(server)
        server.settle()
        found |= _fan_out(server)
    return found
