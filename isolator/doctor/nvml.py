"""NVML's answer, asked once, never waited for beyond a given time."""

from __future__ import annotations

import logging
import time

from isolator.errors import UnavailableError
from isolator.monitor.model import NvmlView
from isolator.monitor.nvml import Nvml

_STEP = 0.005


def ask(patience: float) -> NvmlView:
    """What NVML says within `patience` seconds; its thread is left behind where it hangs.

    Raises UnavailableError with the reason.
    """
    log = logging.getLogger(Nvml.__module__)
    level = log.level
    log.setLevel(logging.CRITICAL)  # what it would log, the report says
    nvml = Nvml(interval=3600.0)
    nvml.start()
    until = time.monotonic() + patience
    try:
        while time.monotonic() < until:
            view = nvml.view()
            if view.up:
                return view
            if nvml.problem:
                raise UnavailableError(nvml.problem)
            time.sleep(_STEP)
        raise UnavailableError(f"NVML does not answer within {patience:g} s")
    finally:
        nvml.stop(0.0)
        log.setLevel(level)
