"""The dashboard's own queries, an alert and HAMi's queries against a real Prometheus.

It scrapes a real monitor, with regions and the simulated GPU, and a real webhook.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from charting import BINARIES, CHART, NO_HELM
from dashboard_scene import CARD, HELD, LIMIT, NODE, Scene, scene
from monitor_pods import uid
from prometheus_server import why_not
from region_files import MIB

DASHBOARD = json.loads((CHART / "files" / "dashboard.json").read_text())
ASKING = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
Found = list[tuple[dict[str, str], float]]


@pytest.fixture(scope="module")
def live(sim_dir: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """Everything, scraped until the last of the tenants is seen."""
    reason = why_not() or ("" if BINARIES else NO_HELM)
    if reason:
        pytest.skip(reason)
    with scene(tmp_path_factory.mktemp("live"), sim_dir) as made:
        yield made


def expression(title: str, letter: str = "A", namespace: str = ".*", node: str = ".*") -> str:
    """A panel's query as Grafana sends it."""
    (panel,) = (panel for panel in ASKING if panel["title"] == title)
    (target,) = (target for target in panel["targets"] if target["refId"] == letter)
    words = {"namespace": namespace, "node": node, "__rate_interval": "20s"}
    asked: str = target["expr"]
    for name, value in words.items():
        asked = asked.replace(f"${name}", value)
    return asked


def by(found: Found, *labels: str) -> dict[Any, float]:
    """Values by one label, or by several."""
    keyed = [(tuple(each.get(label, "") for label in labels), value) for each, value in found]
    assert len({key for key, _ in keyed}) == len(keyed), found
    return {key if len(labels) > 1 else key[0]: value for key, value in keyed}


@pytest.mark.parametrize("panel", ASKING, ids=lambda panel: panel["title"])
def test_panel_shows_something(live: Scene, panel: dict[str, Any]) -> None:
    """Every query of every panel is taken by Prometheus and returns series with finite values."""
    for target in panel["targets"]:
        asked = expression(panel["title"], target["refId"])
        found = live.until(lambda asked=asked: live.ask(asked), asked)
        assert all(value == value and abs(value) != float("inf") for _, value in found), asked
        named = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        assert all(named <= labels.keys() for labels, _ in found), asked


@pytest.mark.parametrize(
    ("title", "value"),
    [
        ("Tenants", 6),
        ("Uncapped", 2),
        ("Limit mismatches", 1),
        ("Tampered", 1),
        ("Bypass", 0),
        ("Near limit", 1),
        ("Nodes not well", 0),
    ],
)
def test_figures_are_those_that_were_put_in(live: Scene, title: str, value: float) -> None:
    """Six tenants: held, near, tampered and mismatched, not injected, opted out, unreadable."""
    assert [found for _, found in live.ask(expression(title))] == [value]


def test_states_and_reasons_are_told_apart(live: Scene) -> None:
    """Each tenant is counted in its state, the uncapped ones by reason too."""
    states = by(live.ask(expression("Tenants by state")), "state")
    assert states == {"enforced": 3, "uncapped": 2, "unreadable": 1}
    reasons = by(live.ask(expression("Uncapped containers by reason")), "reason")
    assert {key: value for key, value in reasons.items() if value} == {"not_injected": 1, "opted_out": 1}


def test_problems_name_the_tenant(live: Scene) -> None:
    """The table has a line for each thing that is wrong, and none for the tenant that is held."""
    found = by(live.ask(expression("What is wrong, by tenant")), "pod", "problem")
    assert set(found) == {
        ("pod-3", "tampered"),
        ("pod-3", "limit mismatch"),
        ("pod-4", "uncapped: not_injected"),
        ("pod-5", "uncapped: opted_out"),
        ("pod-6", "unreadable"),
    }


def test_memory_of_tenants_is_exact(live: Scene) -> None:
    """Used, limit and share of the table are the regions' bytes; the nearest to its limit comes first."""
    used = by(live.ask(expression("Used and limit", "A")), "pod")
    assert used == {"pod-1": HELD, "pod-2": LIMIT - 10 * MIB, "pod-3": HELD}
    limits = by(live.ask(expression("Used and limit", "B")), "pod")
    assert limits == {"pod-1": LIMIT, "pod-2": LIMIT, "pod-3": 2 * LIMIT}
    shares = by(live.ask(expression("Used and limit", "C")), "pod")
    assert shares == {pod: used[pod] / limits[pod] for pod in used}
    nearest = by(live.ask(expression("Nearest to their limit")), "pod")
    assert max(nearest, key=nearest.__getitem__) == "pod-2"
    contexts, modules, data = (
        live.ask(expression("What the used bytes are", letter))[0][1] for letter in "ABC"
    )
    assert contexts + modules + data == sum(used.values())


def test_devices_are_those_of_the_driver(live: Scene) -> None:
    """Total, limits, ledger and the driver's count; what a program outside holds is the difference."""
    total, limits, charged, driver = (
        by(live.ask(expression("Given out, charged, in use", letter)), "device_uuid")[live.uuid]
        for letter in "ABCD"
    )
    assert (total, limits, charged) == (CARD, 4 * LIMIT, 2 * HELD + LIMIT - 10 * MIB)
    assert driver > 12 * 1024 * MIB
    less = by(live.ask(expression("Driver's count less the ledger")), "device_uuid")
    assert less == {live.uuid: driver - charged}
    table = [by(live.ask(expression("Devices", letter)), "device_uuid")[live.uuid] for letter in "ABC"]
    assert table == [total, limits, driver]


def test_nodes_and_webhook(live: Scene) -> None:
    """Health, the library's version, and what the webhook did with the pods it was sent."""
    for letter in "ABCD":
        assert by(live.ask(expression("Health", letter)), "node") == {NODE: 1}
    assert by(live.ask(expression("Versions")), "version", "sha256") == {("1.2.0", "ab" * 32): 1}
    rates = by(live.ask(expression("Admissions")), "action")
    assert rates["inject"] > 0 and rates["skip"] > 0
    assert 0 < live.ask(expression("Latency"))[0][1] <= 3
    left = live.ask(expression("Certificate ends in"))[0][1]
    checked = live.ask(expression("Health", "E"))[0][1]
    assert 0 <= checked < 300
    assert left == pytest.approx(365 * 86400, rel=0.01)


def test_variables_narrow(live: Scene) -> None:
    """One namespace shows its tenants alone, several theirs, and another node nothing."""
    one = by(live.ask(expression("Used", namespace="other")), "pod")
    assert set(one) == {"pod-2"}
    assert len(live.ask(expression("Used", namespace="(other|team)"))) == 3
    assert live.ask(expression("Used", node="nowhere")) == []
    assert [value for _, value in live.ask(expression("Uncapped", node="nowhere"))] == [0]
    for each in DASHBOARD["templating"]["list"][1:]:
        (name, label) = re.findall(r"\((\w+), (\w+)\)", each["definition"])[0]
        values = live.server.get(f"label/{label}/values", **{"match[]": name})
        assert values == {"node": [NODE], "namespace": ["other", "team"]}[label]


def test_refusals_ring(live: Scene) -> None:
    """A tenant that is refused again and again: the panel counts, and the real alert names it."""
    live.refuse(uid(1))
    panel = expression("Refusals, 1 h")
    live.until(lambda: live.ask(panel)[0][1] >= 3, "the refusals to be counted")
    (alert,) = live.until(
        lambda: [
            each
            for each in live.server.get("alerts")["alerts"]
            if each["labels"]["alertname"] == "GPUMemoryRefusals" and each["state"] == "firing"
        ],
        "the alert to fire",
    )
    assert (alert["labels"]["namespace"], alert["labels"]["pod"]) == ("team", "pod-1")
    assert alert["annotations"]["description"].endswith("Run: isolator doctor --pod team/pod-1")
    pending = {each["labels"]["alertname"] for each in live.server.get("alerts")["alerts"]}
    assert pending >= {"GPUMemoryTampered", "GPUMemoryUncapped", "GPUMemoryLedgerBelowDriver"}
    assert not pending & {"GPUMemoryNVMLDown", "GPUMemoryLibraryStale", "GPUMemoryWebhookAbsent"}


def test_rules_are_taken(live: Scene) -> None:
    """Prometheus evaluates every rule without an error."""
    rules = [rule for group in live.server.get("rules")["groups"] for rule in group["rules"]]
    assert len(rules) == 26
    live.until(
        lambda: {r["health"] for g in live.server.get("rules")["groups"] for r in g["rules"]} == {"ok"},
        "every rule to be evaluated",
    )


HAMI = {
    "hami_gpu_memory_limit_bytes": CARD,
    "hami_gpu_memory_allocated_bytes": 4 * LIMIT,
    "hami_gpu_shared_count": 3,
    "hami_gpu_core_limit_ratio": 100,
    "hami_gpu_core_allocated_ratio": 0,
    "hami_node_gpu_overview": 4 * LIMIT,
    "hami_node_gpu_memory_allocated_ratio": 4 * LIMIT / CARD,
    "GPUDeviceMemoryLimit": CARD,
    "GPUDeviceMemoryAllocated": 4 * LIMIT,
    "GPUDeviceSharedNum": 3,
    "GPUDeviceCoreLimit": 100,
    "GPUDeviceCoreAllocated": 0,
    "nodeGPUOverview": 4 * LIMIT,
    "nodeGPUMemoryPercentage": 4 * LIMIT / CARD,
    "sum by (node) (hami_gpu_memory_allocated_bytes) / sum by (node) (hami_gpu_memory_limit_bytes)": 4
    * LIMIT
    / CARD,
    "sum(vGPUPodsDeviceAllocated)": 4 * LIMIT,
    "sum(vGPUMemoryAllocated)": 4 * LIMIT,
    "sum(hami_vgpu_memory_allocated_bytes)": 4 * LIMIT,
    "sum(vGPU_device_memory_limit_in_bytes)": 4 * LIMIT,
    "sum(hami_container_device_memory_bytes)": 2 * HELD + LIMIT - 10 * MIB,
    "max(vGPUMemoryPercentage)": 2 * LIMIT / CARD,
    "sum(vGPUCorePercentage)": 0,
    "count(topk(10, hami_vgpu_memory_used_bytes / hami_vgpu_memory_limit_bytes))": 3,
}


@pytest.mark.parametrize("asked", HAMI)
def test_hami_s_dashboards_fill(live: Scene, asked: str) -> None:
    """What HAMi's dashboards and the page of its scheduler's metrics ask for is there, with our figures."""
    of_card = (
        asked
        if "(" in asked
        else f'{asked}{{{"device_uuid" if asked[0] == "h" else "deviceuuid"}="{live.uuid}"}}'
    )
    found = live.until(lambda: live.ask(of_card), of_card)
    assert [value for _, value in found] == [pytest.approx(HAMI[asked])]


def test_hami_s_host_panels_join(live: Scene) -> None:
    """Its host panels join the device's figures with the node's devices, on the UUID."""
    joined = f'and on (device_uuid) hami_gpu_memory_limit_bytes{{node="{NODE}"}}'
    for name in ("memory_used_bytes", "utilization_ratio", "temperature_celsius"):
        assert len(live.ask(f"hami_host_gpu_{name} {joined}")) >= 1, name
    nodes = live.server.get("label/node/values", **{"match[]": "hami_gpu_memory_limit_bytes"})
    assert nodes == [NODE]
