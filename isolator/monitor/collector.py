"""Scans at scrape time and hands the table's metrics to prometheus_client."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from isolator.monitor import metrics, view
from isolator.monitor.model import Snapshot
from isolator.monitor.readings import SOURCES

_LOG = logging.getLogger(__name__)


class MonitorCollector(Collector):
    """All series of this node.

    `snapshot` makes one scan and names in it what failed; should it raise, the series about the monitor
    itself are all that is served, with kai_isolator_up 0. An answer younger than `update_interval`
    seconds is served again, and scrapes that come while a scan runs share it.
    """

    def __init__(
        self,
        snapshot: Callable[[], Snapshot],
        update_interval: float = 5.0,
        legacy: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._snapshot = snapshot
        self._interval = update_interval
        self._rows = metrics.table(legacy)
        self._clock = clock
        self._lock = threading.Lock()
        self._families: list[Metric] = []
        self._scanned: float | None = None
        self._scans = 0
        self._errors: Counter[str] = Counter()

    def describe(self) -> Iterable[Metric]:
        """Nothing: registering must not scan the node."""
        return []

    def collect(self) -> Iterable[Metric]:
        """The families, in the order of the table; those without a series are left out."""
        seen = self._scans
        with self._lock:
            if self._scans == seen and not self._fresh():
                self._families = self._scan()
                self._scanned = self._clock()
                self._scans += 1
            return self._families

    def _fresh(self) -> bool:
        return self._scanned is not None and self._clock() - self._scanned < self._interval

    def _scan(self) -> list[Metric]:
        try:
            found = self._snapshot()
            self._errors.update(name if name in SOURCES else "snapshot" for name in found.failed)
            shown = view.make(found, self._errors)
            return self._read(shown)
        except Exception:
            # Whatever it was, the next scrape tries again, and this one says so.
            if not self._errors["snapshot"]:
                _LOG.exception("the scan of this node failed; logged once")
            self._errors["snapshot"] += 1
            return self._read(view.View(Snapshot("", time.time()), errors=self._errors, up=False))

    def _read(self, shown: view.View) -> list[Metric]:
        return [family for row in self._rows if (family := row.family(shown)).samples]
