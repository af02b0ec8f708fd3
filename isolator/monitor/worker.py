"""A thread of the monitor's: what its parts that work whether or not anybody scrapes have in common."""

from __future__ import annotations

import threading


class Worker:
    """Runs `_run`, which ends soon after `_stop` is set, in a thread of its own."""

    def __init__(self, name: str) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _run(self) -> None:
        raise NotImplementedError

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self, timeout: float = 1.0) -> None:
        """Ends the thread; one that waits for the API or hangs in the driver is left behind."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout)
