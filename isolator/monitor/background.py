"""What the monitor does whether or not anybody scrapes it: Events, and a fresh look at the node's label."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, Protocol

from isolator.monitor import grants
from isolator.monitor.events import Reporter
from isolator.monitor.model import Snapshot
from isolator.monitor.worker import Worker

log = logging.getLogger(__name__)

EVERY: Final = 15.0
"""Seconds between two passes."""


class NodeSource(Protocol):
    """What podwatch.PodWatch is to this module."""

    @property
    def label(self) -> str | None:
        """Raw text of the node's memory label; None without one."""

    def refresh_node(self) -> None:
        """Reads the node's label, rate-limited."""


class Background(Worker):
    """A thread that takes a snapshot every `every` seconds and acts on it. No reporter: no Events."""

    def __init__(
        self,
        snapshot: Callable[[], Snapshot],
        node: NodeSource,
        reporter: Reporter | None,
        every: float = EVERY,
    ) -> None:
        super().__init__("background")
        self._snapshot, self._node, self._reporter, self._every = snapshot, node, reporter, every

    def _run(self) -> None:
        while not self._stop.wait(self._every):
            try:
                self.once()
            except Exception:  # the thread must outlive one bad pass
                log.exception("a background pass failed")

    def once(self) -> None:
        """One pass: a label that is missing or contradicts a limit is read anew before Events say so."""
        snapshot = self._snapshot()
        verdicts = snapshot.verdicts or ()
        if any(v.mismatch for v in verdicts) or (verdicts and snapshot.node_gpu_memory_mib is None):
            self._node.refresh_node()
            if grants.card_mib(self._node.label) != snapshot.node_gpu_memory_mib:
                snapshot = self._snapshot()
        if self._reporter is not None and snapshot.verdicts is not None:
            self._reporter.report(snapshot)
