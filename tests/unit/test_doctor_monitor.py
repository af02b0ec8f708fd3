"""`isolator doctor node` in front of a running monitor: its document and the doctor's judgement fit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import monitor_pods as made
import pytest
from libsync_node import Node
from monitor_apiserver import ApiServer
from monitor_process import Monitor
from region_files import EXT, RegionFile, Spec

from isolator.doctor import node
from isolator.doctor.report import Report


@pytest.fixture
def api() -> Iterator[ApiServer]:
    """A small API server with one node."""
    with ApiServer() as server:
        yield server


@pytest.fixture
def monitor(
    api: ApiServer, tmp_path: Path, sim_env: Callable[..., dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Monitor]:
    """A monitor with the simulated card, on a node that libsync has installed."""
    Node(tmp_path).agent().run_once()
    running = Monitor(api, tmp_path, sim_env(preload=False))
    monkeypatch.setattr(made, "MOUNT", str(running.mount))
    yield running
    running.process.kill()
    running.process.wait()


def _until(monitor: Monitor, ids: set[str]) -> Report:
    """The report once these causes are found, and no other."""
    end = time.monotonic() + 30
    while True:
        report = node.examine(monitor.mount, monitor.url, patience=20)
        found = {finding.cause.id for finding in report.findings}
        if found == ids and not report.unchecked:
            return report
        assert time.monotonic() < end, (list(report.lines()), monitor.log())
        time.sleep(0.05)


def test_a_node_is_judged_by_its_own_monitor(api: ApiServer, monitor: Monitor) -> None:
    """A sound node with a capped tenant is silent; an uncapped one and an altered cache file are named."""
    folder = monitor.mount / "containers" / f"{made.uid(1)}_main"
    with RegionFile(folder / "usage.cache", Spec()) as cache:
        api.put(made.pod(1))
        assert _until(monitor, set()).exit_status == 0
        api.put(made.pod(2, injected=False, annotations={"gpu-memory": "4096"}))
        report = _until(monitor, {"tenant_uncapped"})
        assert report.findings[0].subject == "team/pod-2/main"
        assert (report.exit_status, report.cpu_seconds <= 0.5) == (54, True)
        api.delete(made.uid(2))
        cache.put(EXT + 72, "I", 1)
        report = _until(monitor, {"tenant_wrong"})
        assert "somebody wrote into its cache file" in report.findings[0].detail


def test_a_label_in_bytes_is_seen_through_the_monitor(
    api: ApiServer, tmp_path: Path, sim_env: Callable[..., dict[str, str]]
) -> None:
    """The raw text of the node's label comes to the doctor (KAI's limit would be far above the card)."""
    api.labels["nvidia.com/gpu.memory"] = "16106127360"
    Node(tmp_path).agent().run_once()
    running = Monitor(api, tmp_path, sim_env(preload=False))
    try:
        report = _until(running, {"label_bytes"})
        assert (report.exit_status, "16106127360" in report.findings[0].detail) == (53, True)
    finally:
        running.process.kill()
        running.process.wait()
