"""The collector: one scan for many scrapes, and an answer whatever fails."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from region_files import RegionFile, folder, pod

from isolator.monitor import discovery
from isolator.monitor.collector import MonitorCollector
from isolator.monitor.model import Snapshot


class _Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def _lines(collector: MonitorCollector) -> dict[str, float]:
    registry = CollectorRegistry()
    registry.register(collector)
    text = generate_latest(registry).decode()
    return {k: float(v) for k, _, v in (x.rpartition(" ") for x in text.splitlines() if x[0] != "#")}


def test_a_young_answer_is_served_again() -> None:
    """Within the update interval a scrape costs no scan; after it, it does."""
    scans: list[Snapshot] = []
    clock = _Clock()

    def snapshot() -> Snapshot:
        scans.append(Snapshot("n", 0))
        return scans[-1]

    collector = MonitorCollector(snapshot, update_interval=5, clock=clock)
    assert scans == []
    for now, expected in ((100, 1), (104.9, 1), (105, 2), (109, 2), (111, 3)):
        clock.now = now
        collector.collect()
        assert len(scans) == expected


def test_scrapes_at_the_same_time_share_one_scan() -> None:
    """Scrapes that come while a scan runs wait for it and take its answer, without any interval."""
    scans, release, started = 0, threading.Event(), threading.Event()

    def snapshot() -> Snapshot:
        nonlocal scans
        scans += 1
        started.set()
        assert release.wait(10)
        return Snapshot("n", 0)

    collector = MonitorCollector(snapshot, update_interval=0)
    with ThreadPoolExecutor(8) as pool:
        first = pool.submit(collector.collect)
        assert started.wait(10)
        arrived = threading.Barrier(8)

        def scrape() -> object:
            arrived.wait(10)
            return collector.collect()

        others = [pool.submit(scrape) for _ in range(7)]
        arrived.wait(10)
        threading.Timer(0.3, release.set).start()
        assert [list(other.result()) for other in others] == [list(first.result())] * 7  # type: ignore[call-overload]
    assert scans == 1


def test_a_failing_scan_is_an_answer(caplog: pytest.LogCaptureFixture) -> None:
    """A scan that raises leaves up 0 and a count, is logged once, and the next one is tried."""
    answers: list[Snapshot | None] = [None, None, Snapshot("n", 7.0)]

    def snapshot() -> Snapshot:
        answer = answers.pop(0)
        if answer is None:
            raise RuntimeError("no luck")
        return answer

    collector = MonitorCollector(snapshot, update_interval=0)
    with caplog.at_level(logging.ERROR):
        for expected in (1, 2):
            lines = _lines(collector)
            assert lines["kai_isolator_up"] == 0
            assert lines['kai_isolator_source_errors_total{source="snapshot"}'] == expected
            assert "kai_isolator_last_scan_timestamp_seconds" not in lines
            assert any(line.startswith("kai_isolator_build_info") for line in lines)
    assert len(caplog.records) == 1
    lines = _lines(collector)
    assert (lines["kai_isolator_up"], lines["kai_isolator_last_scan_timestamp_seconds"]) == (1, 7.0)


def test_a_source_that_fails_alone_is_counted(tmp_path: Path) -> None:
    """B164: without NVML and without libsync the containers' series are served, and up is 1."""
    with RegionFile(folder(tmp_path) / "usage.cache"):
        caches = discovery.scan(tmp_path).caches
    found = pod()
    made = Snapshot("n", 0, caches=caches, pods={found.uid: found}, failed=frozenset({"nvml", "libsync"}))
    collector = MonitorCollector(lambda: made, update_interval=0)
    _lines(collector)
    lines = _lines(collector)
    assert lines["kai_isolator_up"] == 1
    assert lines['kai_isolator_source_errors_total{source="nvml"}'] == 2
    assert lines['kai_isolator_source_errors_total{source="libsync"}'] == 2
    assert lines['kai_isolator_source_errors_total{source="pods"}'] == 0
    assert sum(line.startswith("hami_vgpu_memory_used_bytes") for line in lines) == 1


def test_an_unknown_source_of_failure_is_not_lost() -> None:
    """A source that the table does not name is counted as the snapshot's own."""
    made = Snapshot("n", 0, failed=frozenset({"moon"}))
    lines = _lines(MonitorCollector(lambda: made))
    assert lines['kai_isolator_source_errors_total{source="snapshot"}'] == 1


def test_caches_that_cannot_be_scanned_are_not_an_empty_node() -> None:
    """With the caches unreadable up is 0 and nothing is counted as skipped; the node's other series stay."""
    made = Snapshot("n", 5.0, pod_watch_up=True, failed=frozenset({"caches"}))
    lines = _lines(MonitorCollector(lambda: made))
    assert lines["kai_isolator_up"] == 0
    assert lines["kai_isolator_pod_watch_up"] == 1
    assert lines['kai_isolator_source_errors_total{source="caches"}'] == 1
    assert not any(line.startswith("kai_isolator_skipped_files") for line in lines)
