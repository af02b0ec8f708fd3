"""NVML's answer, asked once, never waited for beyond a given time."""

from __future__ import annotations

import logging
import time

from isolator.errors import UnavailableError
from isolator.monitor.model import NvmlView
from isolator.monitor.nvml import Nvml

_STEP = 0.005


class _Words(logging.Handler):
    """Keeps what the monitor's reader would log: here the report says it."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.said = self.said or record.getMessage().rpartition(" s: ")[2]


def ask(patience: float) -> NvmlView:
    """What NVML says within `patience` seconds; its thread is left behind where it hangs.

    Raises UnavailableError with the reason.
    """
    words, log = _Words(), logging.getLogger("isolator.monitor.nvml")
    log.addHandler(words)
    log.propagate = False
    nvml = Nvml(interval=3600.0)
    nvml.start()
    until = time.monotonic() + patience
    try:
        while time.monotonic() < until:
            view = nvml.view()
            if view.up:
                return view
            if words.said:
                raise UnavailableError(words.said)
            time.sleep(_STEP)
        raise UnavailableError(f"NVML does not answer within {patience:g} s")
    finally:
        nvml.stop(0.0)
        log.removeHandler(words)
        log.propagate = True
