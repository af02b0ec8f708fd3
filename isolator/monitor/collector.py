"""Scans at scrape time and hands the table's metrics to prometheus_client."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from isolator.monitor import metrics
from isolator.monitor.model import Snapshot
from isolator.monitor.shared import SharedScan
from isolator.monitor.view import View


class MonitorCollector(Collector):
    """All series of this node, from `scan`, which others may ask too.

    Where the scan fails, the series about the monitor itself are all that is served, with kai_isolator_up 0.
    The families are made once a scan.
    """

    def __init__(
        self,
        snapshot: Callable[[], Snapshot],
        update_interval: float = 5.0,
        legacy: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scan = SharedScan(snapshot, update_interval, clock)
        self._rows = metrics.table(legacy)
        self._lock = threading.Lock()
        self._families: list[Metric] = []
        self._shown: View | None = None

    def describe(self) -> Iterable[Metric]:
        """Nothing: registering must not scan the node."""
        return []

    def collect(self) -> Iterable[Metric]:
        """The families, in the order of the table; those without a series are left out."""
        shown = self.scan.view()
        with self._lock:
            if shown is not self._shown:
                try:
                    self._families = self._read(shown)
                except Exception:
                    self._families = self._read(self.scan.broken())
                self._shown = shown
            return self._families

    def _read(self, shown: View) -> list[Metric]:
        return [family for row in self._rows if (family := row.family(shown)).samples]
