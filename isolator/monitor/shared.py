"""One scan of the node for all who ask: metrics, the status document and the page."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable

from isolator.monitor.model import Snapshot
from isolator.monitor.readings import SOURCES
from isolator.monitor.view import View, make

_LOG = logging.getLogger(__name__)


class SharedScan:
    """The node's View.

    `snapshot` makes one scan and names in it what failed; should it raise, the View is not `up` and the next
    question tries again. An answer younger than `interval` seconds is given again, and questions that come
    while a scan runs share it: all of them get the same object.
    """

    def __init__(
        self,
        snapshot: Callable[[], Snapshot],
        interval: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._snapshot, self._interval, self._clock = snapshot, interval, clock
        self._lock = threading.Lock()
        self._view = View(Snapshot("", 0.0), up=False)
        self._scanned: float | None = None
        self._scans = 0
        self._errors: Counter[str] = Counter()

    def view(self) -> View:
        """What the node is like, from a scan of now or of at most `interval` seconds ago; never raises."""
        seen = self._scans
        with self._lock:
            if self._scans == seen and not self._fresh():
                self._view = self._scan()
                self._scanned = self._clock()
                self._scans += 1
            return self._view

    def broken(self) -> View:
        """A View that says only that one could not be shown; called where an exception is handled."""
        if not self._errors["snapshot"]:
            _LOG.exception("the scan of this node failed; logged once")
        self._errors["snapshot"] += 1
        return View(Snapshot("", time.time()), errors=self._errors, up=False)

    def _fresh(self) -> bool:
        return self._scanned is not None and self._clock() - self._scanned < self._interval

    def _scan(self) -> View:
        try:
            found = self._snapshot()
            self._errors.update(name if name in SOURCES else "snapshot" for name in found.failed)
            return make(found, self._errors)
        except Exception:  # whatever it was, the next question tries again, and this answer says so
            return self.broken()
