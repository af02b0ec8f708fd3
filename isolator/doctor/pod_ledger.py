"""The library's ledger held against NVML's figures, where NVML can be asked past the library."""

from __future__ import annotations

import os

from isolator.doctor import nvml, pod_driver, program
from isolator.doctor.container import Carried
from isolator.doctor.pod_limit import Limit, mib
from isolator.doctor.report import Report
from isolator.errors import UnavailableError
from isolator.monitor.model import NvmlDevice
from isolator.region import Region

SLACK = 64 << 20
"""Bytes that the driver's figure may run ahead: a process between a call and its charge."""
PATIENCE = 0.5
_WHAT = "ledger against NVML"


def judge(report: Report, carried: Carried, found: Region | None, limit: Limit) -> None:
    """Compares by device what the container's processes hold and what is charged."""
    try:
        if program.look(os.getpid()).library:
            why = "NVML answers this process through the library: ask from kubectl debug, or on the node"
            report.skip(_WHAT, why)
            return
        view = nvml.ask(PATIENCE)
        pids = set(carried.inside.neighbours())
    except (OSError, UnavailableError) as error:
        report.skip(_WHAT, error)
        return
    known = {device.uuid: device for device in found.devices} if found is not None else {}
    seen = False
    for card in view.devices:
        device = known.get(card.uuid)
        if device is not None and card.memory_total:
            pod_driver.below_card(report, limit, device.index, card.memory_total)
        seen |= _compare(report, card, pids, device.used if device is not None else 0)
    if seen or found is None or not found.processes:
        report.check(_WHAT)
    else:
        report.skip(_WHAT, "NVML lists no process of this container under its own number")


def _compare(report: Report, card: NvmlDevice, pids: set[int], charged: int) -> bool:
    """Whether NVML lists a process of the container on this card."""
    own = [process for process in card.processes if process.pid in pids]
    held = sum(process.used or 0 for process in own)
    if held > charged + SLACK:
        shown = ", ".join(str(process.pid) for process in own[:8])
        seen = f"NVML counts {mib(held)} of PID {shown}, and {mib(charged)} are charged"
        report.find("ledger_below_nvml", card.uuid, seen)
    return bool(own)
