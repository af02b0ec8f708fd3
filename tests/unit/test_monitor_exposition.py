"""The text of a scrape is the library's to the byte, written once a scan for all who ask."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from region_files import RegionFile, Spec, folder, pod, uuid

from isolator.monitor import metrics, view
from isolator.monitor.collector import MonitorCollector
from isolator.monitor.discovery import scan
from isolator.monitor.exposition import Exposition
from isolator.monitor.model import Snapshot

FORMATS = (
    "",
    "text/plain;version=0.0.4",
    "text/plain;version=1.0.0;escaping=allow-utf-8",
    "text/plain;version=1.0.0;escaping=underscores",
    "text/plain;version=1.0.0;escaping=dots",
    "application/openmetrics-text;version=1.0.0;escaping=values",
    "application/openmetrics-text",
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8",
    # As Prometheus 3 asks.
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=1.0.0;"
    "escaping=allow-utf-8;q=0.5,application/openmetrics-text;version=0.0.1;q=0.4,*/*;q=0.2",
)
WORDS = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=12)
FIGURES = st.floats() | st.integers(-(1 << 70), 1 << 70)
SERIES = st.dictionaries(st.tuples(WORDS, WORDS), FIGURES, max_size=6)


class _Source(Collector):
    """Gives what it was last told to."""

    def __init__(self) -> None:
        self.families: list[Metric] = []
        self.hold: threading.Barrier | None = None

    def collect(self) -> Iterable[Metric]:
        if self.hold is not None:
            self.hold.wait(10)
        return self.families


def _families(series: dict[tuple[str, str], float]) -> list[Metric]:
    gauge = GaugeMetricFamily("a_gauge", 'Says \\ "this"\nand that.', labels=("one", "Two"))
    counter = CounterMetricFamily("a_counter_total", "Counts.", labels=("z", "b"))
    single = GaugeMetricFamily("single", "Has no label.")
    for labels, value in series.items():
        gauge.add_metric(labels, value)
        counter.add_metric(labels, value)
        single.samples = []
        single.add_metric((), value)
    return [family for family in (gauge, counter, single) if family.samples]


def _said(accept: str, source: Collector) -> tuple[bytes, str]:
    """What the library alone says."""
    encode, kind = choose_encoder(accept)
    return encode(source), kind  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(st.lists(SERIES, min_size=1, max_size=4))
def test_every_scan_is_written_as_the_library_writes_it(scans: list[dict[tuple[str, str], float]]) -> None:
    """Whatever labels and figures hold, and whichever series come, stay and go: the same bytes."""
    source = _Source()
    exposition = Exposition(source)
    for series in scans:
        source.families = _families(series)
        for accept in FORMATS:
            assert exposition.answer(accept) == _said(accept, source)


def test_the_whole_table_is_written_as_the_library_writes_it(tmp_path: Path) -> None:
    """All rows of the metric table, HAMi's old ones among them, from region files of two devices."""
    mount, found = tmp_path, pod()
    with RegionFile(folder(mount) / "usage.cache", Spec(uuids=[uuid(0), uuid(1)], refused=3)):
        made = Snapshot("n", 12.5, caches=scan(mount).caches, pods={found.uid: found}, verdicts=())
    collector = MonitorCollector(lambda: made, update_interval=3600, legacy=True)
    exposition = Exposition(collector)
    for accept in FORMATS:
        assert exposition.answer(accept) == _said(accept, collector)
    assert exposition.answer("")[0].count(b"hami_vgpu_memory_used_bytes{") == 2


def test_a_row_names_its_labels_in_one_order(tmp_path: Path) -> None:
    """A series is known by the values of its labels, so a row's samples must name them alike."""
    mount, found = tmp_path, pod()
    with RegionFile(folder(mount) / "usage.cache", Spec(uuids=[uuid(0), uuid(1)], refused=3)):
        made = Snapshot("n", 12.5, caches=scan(mount).caches, pods={found.uid: found}, verdicts=())
    shown = view.make(made, {})
    for row in metrics.table(True):
        assert len({tuple(labels) for labels, _ in row.read(shown)}) <= 1, row.name


def test_families_are_written_once_for_all_who_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty scrapers at once, within one scan and again after it, cost one text each time."""
    source = _Source()
    exposition = Exposition(source)
    written: list[int] = []
    write = exposition._write
    monkeypatch.setattr(exposition, "_write", lambda *given: (written.append(1), write(*given))[1])
    for wave in (1, 2):
        source.families = _families({("a", "b"): wave})
        source.hold = threading.Barrier(20)
        with ThreadPoolExecutor(20) as pool:
            texts = list(pool.map(lambda _: exposition.answer("")[0], range(20)))
        assert len(written) == wave
        assert set(texts) == {texts[0]} and f'one="a"}} {wave}.0' in texts[0].decode()


def test_what_is_gone_is_forgotten() -> None:
    """Nothing of a series that is no longer served is kept: the memory follows the node, not its history."""
    source = _Source()
    exposition = Exposition(source)
    for number in range(50):
        source.families = _families({(f"pod-{number}", "x"): 1.0})
        exposition.answer("")
    assert sum(len(heads) for heads in exposition._heads.values()) == 3
    for number in range(50):
        exposition.answer(f"application/openmetrics-text;version=1.0.{number}")
    assert len(exposition._texts) <= 4
