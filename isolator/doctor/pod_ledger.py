"""The library's figures held against NVML's, where NVML can be asked past the library."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping

from isolator import names
from isolator.doctor import nvml, program
from isolator.doctor.container import Carried
from isolator.doctor.inside import PROC, environment_of
from isolator.doctor.pod_limit import Limit, of_environment
from isolator.doctor.report import Report
from isolator.errors import UnavailableError
from isolator.monitor.model import NvmlDevice
from isolator.monitor.words import MIB, size
from isolator.region import Device, Region

SLACK = 64 * MIB
"""Bytes that the driver's figure may run ahead: a process between a call and its charge."""
_WHAT = "ledger against NVML"
_DRIVERS = "the driver's own limit (NvFractions, MPS), or correct the node's label nvidia.com/gpu.memory"


def judge(report: Report, carried: Carried, found: Region | None, limit: Limit, patience: float) -> None:
    """Compares by device what the processes hold and what is charged, and the two limits.

    NVML is waited for `patience` seconds.
    """
    cards = _ask(report, patience)
    if cards:
        pids = set(carried.inside.neighbours())
        known = {device.uuid: device.used for device in found.devices} if found is not None else {}
        listed = [_compare(report, card, pids, known.get(card.uuid, 0)) for card in cards.values()]
        if any(listed) or found is None or not found.processes:
            report.check(_WHAT)
        else:
            report.skip(_WHAT, "NVML lists no process of this container under its own number")
    for device in found.devices if found is not None and found.processes else ():
        own = limit.of(device.index)
        card = cards.get(device.uuid)
        if own and 0 < device.limit < own:
            _lower(report, carried, device, own, card.memory_total if card is not None else None)


def _ask(report: Report, patience: float) -> Mapping[str, NvmlDevice]:
    """NVML's devices by UUID; empty where it cannot be asked."""
    try:
        if program.look(os.getpid()).library:
            why = "NVML answers this process through the library: ask from kubectl debug, or on the node"
            report.skip(_WHAT, why)
            return {}
        return {card.uuid: card for card in nvml.ask(patience).devices}
    except (OSError, UnavailableError) as error:
        report.skip(_WHAT, error)
        return {}


def _compare(report: Report, card: NvmlDevice, pids: set[int], charged: int) -> bool:
    """Whether NVML lists a process of the container on this card."""
    own = [process for process in card.processes if process.pid in pids]
    held = sum(process.used or 0 for process in own)
    if held > charged + SLACK:
        shown = ", ".join(str(process.pid) for process in own[:8])
        seen = f"NVML counts {size(held)} of PID {shown}, and {size(charged)} are charged"
        report.find("ledger_below_nvml", card.uuid, seen)
    return bool(own)


def _lower(report: Report, carried: Carried, device: Device, own: int, total: int | None) -> None:
    """A recorded limit below ours: the library takes the lower of ours, a program's, and the card's total."""
    subject = f"device {device.index}"
    seen = f"{size(device.limit)} hold in place of {size(own)}"
    if total is not None and total + MIB < own:
        seen += f": NVML shows {size(total)} in all"
    elif total is None and not _lowered(carried, device):
        seen += ": the driver shows no more, or a program lowered it after its start (inferred)"
    else:
        name = names.ENV_MEMORY_LIMIT
        report.find("limit_below_file", subject, f"{seen}: a program lowered its own", variable=name)
        return
    report.find("driver_limit_active", subject, seen, what=_DRIVERS)


def _lowered(carried: Carried, device: Device) -> bool:
    """Whether a process of the container was started with that limit."""
    for pid in carried.inside.neighbours():
        with contextlib.suppress(OSError):
            given = of_environment(environment_of(PROC / str(pid)))
            if given.get(device.index, given.get(-1)) == device.limit:
                return True
    return False
