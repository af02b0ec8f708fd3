"""The control plane of tests/cluster, and what an operation costs it."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import child
from harness import Cluster, why_not
from kubernetes.client.configuration import Configuration

from bench.scaling.podobjects import SPACE
from isolator import kube

INDEX = int(os.environ.get("CLUSTER_INDEX", "4"))
IDLE_S = 6
RIGHTS = [
    {"apiGroups": [""], "resources": ["pods", "secrets"], "verbs": ["get", "list", "watch", "create"]},
    {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get"]},
    {"apiGroups": [""], "resources": ["events"], "verbs": ["create", "patch"]},
    {
        "apiGroups": ["admissionregistration.k8s.io"],
        "resources": ["mutatingwebhookconfigurations"],
        "verbs": ["get"],
    },
]


class Server:
    """The control plane under measurement. `idle`: processor seconds a second that each takes of itself."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.pids = {name: cluster.control.running[name].pid for name in ("kube-apiserver", "etcd")}
        self.idle = {name: 0.0 for name in self.pids}
        self.admin = kube.Api(cluster.client().configuration)
        token = cluster.kubectl("create", "token", "monitor", f"--namespace={SPACE}").strip()
        self.settings = Configuration(host=cluster.control.server)
        self.settings.ssl_ca_cert = str(cluster.control.ca.path)
        self.settings.proxy = None
        self.settings.api_key = {"authorization": f"Bearer {token}"}

    def api(self) -> kube.Api:
        """The service account's access, with connections of its own."""
        return kube.Api(self.settings)

    def version(self) -> str:
        """Kubernetes' version."""
        return str(self.admin.ask("/version")["gitVersion"])

    def _spent(self) -> dict[str, float]:
        return {name: child.processor(pid) for name, pid in self.pids.items()}

    def settle(self) -> None:
        """Measures what the servers do of themselves, processor seconds a second."""
        before = self._spent()
        time.sleep(IDLE_S)
        self.idle = {name: (spent - before[name]) / IDLE_S for name, spent in self._spent().items()}

    def cost(self, work: Callable[[], int]) -> dict[str, float]:
        """Processor ms of each server for one of the operations that `work` makes and counts."""
        before, began = self._spent(), time.monotonic()
        count = work()
        after, took = self._spent(), time.monotonic() - began
        spent = {name: after[name] - before[name] - self.idle[name] * took for name in after}
        return {f"{name} ms": round(max(0.0, seconds) / count * 1e3, 4) for name, seconds in spent.items()}

    def cheapest(self, work: Callable[[], int], times: int = 3) -> dict[str, float]:
        """The lowest of several figures: other programs of this machine only add to one."""
        return min((self.cost(work) for _ in range(times)), key=lambda found: sum(found.values()))

    def requests(self, count: int, ask: Callable[[kube.Api, int], int], threads: int = 4) -> dict[str, float]:
        """The cost of one of `count` requests, and its answer's bytes (their mean)."""
        sizes: list[int] = []
        apis = [self.api() for _ in range(threads)]
        for api in apis:
            api.ask("/version")

        def run(first: int) -> None:
            sizes.extend(ask(apis[first], next(numbers)) for _ in range(first, count, threads))

        def work() -> int:
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(run, range(threads)))
            return count

        numbers = itertools.count()
        found = self.cheapest(work)
        return {"bytes": round(sum(sizes) / len(sizes)), **found}


@contextmanager
def up() -> Iterator[Server]:
    """A control plane, one real node, and the account that the monitor would have."""
    reason = why_not()
    if reason:
        raise SystemExit(f"bench: {reason}")
    cluster = Cluster(index=INDEX, nodes=1)
    cluster.up()
    try:
        cluster.kubectl("create", "namespace", SPACE)
        cluster.wait_account(SPACE)
        cluster.kubectl("create", "serviceaccount", "monitor", f"--namespace={SPACE}")
        role = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "rules": RIGHTS}
        cluster.apply({**role, "metadata": {"name": "bench"}})
        account = f"--serviceaccount={SPACE}:monitor"
        cluster.kubectl("create", "clusterrolebinding", "bench", "--clusterrole=bench", account)
        yield Server(cluster)
    finally:
        cluster.down()
