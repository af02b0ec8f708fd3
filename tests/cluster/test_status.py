"""What an operator sees of a node: `isolator top` in the monitor's pod, its page by the API server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import product as given
import pytest
from harness import Cluster, wait_for
from kai import Kai
from product import NAMESPACE, Product

from isolator import names
from isolator.monitor import document
from isolator.monitor.document import Document, Tenant

TENANT = "kai-hami-lab12-a"
USED, LIMIT = 3328180224, 4147 << 20
RSS_KIB = 96 << 10


@dataclass
class Seen:
    """A node with one tenant that holds 3 GiB, and its monitor's pod."""

    cluster: Cluster
    namespace: str
    pod: dict[str, Any]
    monitor: str

    def top(self, *words: str) -> str:
        """What `isolator top` prints in the monitor's pod, without a terminal."""
        return self.cluster.exec_(self.monitor, ["isolator", "top", *words], namespace=NAMESPACE)

    def get(self, path: str) -> str:
        """An answer of the monitor's by the API server's proxy."""
        place = f"{self.monitor}:{names.MONITOR_PORT}"
        return self.cluster.kubectl("get", f"--raw=/api/v1/namespaces/{NAMESPACE}/pods/{place}/proxy{path}")

    def tenant(self, shown: Document) -> Tenant | None:
        """This test's tenant in a document."""
        own = (self.namespace, TENANT, "main")
        return next((t for t in shown.tenants if (t.namespace, t.pod, t.container) == own), None)


@pytest.fixture(scope="module")
def seen(cluster: Cluster, product: Product, kai: Kai) -> Iterator[Seen]:
    """The node once its monitor shows the tenant's memory."""
    with cluster.space("status-tenants") as namespace:
        hold = ["sh", "-c", "HOLD_SECONDS=100000 exec memory-limit 3072"]
        cluster.apply(given.tenant(TENANT, command=hold), namespace)
        (pod,) = given.wait_running(cluster, TENANT, namespace=namespace, kai=kai)
        (monitor,) = given.component_pods(cluster, names.COMPONENT_MONITOR, pod["spec"]["nodeName"])
        made = Seen(cluster, namespace, pod, monitor["metadata"]["name"])

        def holds() -> bool:
            shown = document.load(made.get(names.STATUS_PATH).encode())
            found = made.tenant(shown)
            charged = found is not None and any(device.used == USED for device in found.devices)
            return charged and any((device.memory_used or 0) >= USED for device in shown.devices)

        wait_for(holds, 60, "ledger and driver to show what the tenant holds", every=0.5)
        yield made
        cluster.delete("pod", TENANT, namespace=namespace)


def test_document_has_the_tenant_the_card_and_the_node(seen: Seen) -> None:
    """The lab's figures to the byte, its pod by name and UID, the card by the driver, a sound node."""
    shown = document.load(seen.top("--json").encode())
    tenant = seen.tenant(shown)
    assert tenant is not None and tenant.uid == seen.pod["metadata"]["uid"]
    assert (tenant.state, tenant.processes, tenant.expected_limit) == ("enforced", 1, LIMIT)
    assert tenant.created is not None and tenant.started is not None
    (device,) = tenant.devices
    assert (device.used, device.limit, device.refused) == (USED, LIMIT, 0)
    assert device.peak is not None and device.peak >= USED
    (card,) = shown.devices
    assert card.memory_total == 15360 << 20 and card.charged is not None and card.charged >= USED
    assert card.memory_used is not None and card.memory_used >= USED
    node = shown.node
    assert (node.name, node.named, node.nvml_up, node.pod_watch_up) == (
        seen.pod["spec"]["nodeName"],
        True,
        True,
        True,
    )
    assert node.library.ready is True and node.memory_label.mib == 15360
    assert [problem for problem in node.problems if TENANT in problem or "container" not in problem] == []


def test_top_prints_a_table_without_a_terminal(seen: Seen) -> None:
    """`kubectl exec` without -t: one table, plain text, names of the pod and of the node."""
    printed = seen.top()
    assert seen.pod["spec"]["nodeName"] in printed and "Tesla T4" in printed
    (line,) = [line for line in printed.splitlines() if f"{seen.namespace}/{TENANT}/main" in line]
    assert re.search(r" 3174 / 4147 .* 76 .* enforced", line)
    assert "\x1b" not in printed and seen.top("--once") != ""


def test_top_without_a_monitor_reads_the_node_itself(seen: Seen) -> None:
    """The monitor's user may read the cache folders; what cannot be reached is one line and status 69."""
    printed = seen.top("--mount", names.DEFAULT_VGPU_MOUNT)
    assert f"{seen.pod['metadata']['uid']}/main" in printed and "3174 / 4147" in printed
    asked = "isolator top --url http://127.0.0.1:1; echo status $?"
    told = seen.cluster.exec_(seen.monitor, ["sh", "-c", f"({asked}) 2>&1"], namespace=NAMESPACE)
    assert told.splitlines()[1:] == ["status 69"] and "no monitor answers" in told


def test_page_by_the_api_server(seen: Seen) -> None:
    """The page has the tenant, its use and its state in words, and the monitor stays within its memory."""
    page = seen.get("/")
    assert f"<strong>{TENANT}</strong>" in page and "3174 MiB / 4147 MiB (76 %)" in page
    assert ">enforced<" in page and "<script" not in page
    status = seen.cluster.exec_(seen.monitor, ["cat", "/proc/1/status"], namespace=NAMESPACE)
    (rss,) = re.findall(r"VmRSS:\s+(\d+) kB", status)
    assert int(rss) <= RSS_KIB
    assert json.loads(seen.get(names.STATUS_PATH))["schema"] == document.SCHEMA
