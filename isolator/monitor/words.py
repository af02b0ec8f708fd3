"""The figures of a status document in a reader's words and order, for the page and for `top`."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Final

from isolator.monitor.document import Document, Tenant, TenantDevice
from isolator.monitor.model import State

MIB: Final = 1 << 20
NEAR: Final = 0.95
"""Share of its limit from which a tenant is near it, as in the alert of docs/metrics.md."""
LIBRARY_OLD_S: Final = 600.0
"""Age at which libsync's last look at the library is old; it looks every 30 s unless told otherwise."""
UNKNOWN: Final = "-"
_TONES: Final[dict[str, str]] = {
    State.ENFORCED: "good",
    State.IDLE: "dim",
    **dict.fromkeys((State.UNCAPPED, State.REFUSED, State.UNREADABLE), "bad"),
}
_FLAGS: Final = (
    ("mismatch", "limit above KAI's grant"),
    ("tampered", "tampered"),
    ("bypass", "bypass"),
    ("sm_unenforced", "SM limit not enforced"),
)


def size(value: int | None) -> str:
    """MiB, as nvidia-smi has them."""
    return UNKNOWN if value is None else f"{value / MIB:.0f} MiB"


def age(seconds: float) -> str:
    """How long ago, in its largest unit."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def clock(when: float) -> str:
    """Date and time, UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(when))


def percent(part: float | None) -> str:
    """A share in whole percent, 100 only where it is reached."""
    if part is None or math.isinf(part):
        return UNKNOWN
    whole = int(part * 100) if part < 1 else round(part * 100)
    return f"{whole} %"


def share(used: int | None, limit: int | None) -> float | None:
    """Part of the limit in use; None where either is not known or there is no limit."""
    return used / limit if used is not None and limit else None


@dataclass(frozen=True)
class Row:
    """A tenant on one of its devices; no device: it has no region, or one without devices."""

    tenant: Tenant
    device: TenantDevice | None
    now: float

    @property
    def share(self) -> float | None:
        """Part of the limit in use."""
        return share(self.device.used, self.device.limit) if self.device else None

    @property
    def peak(self) -> float | None:
        """Part of the limit that was in use at most."""
        return share(self.device.peak, self.device.limit) if self.device else None

    @property
    def limit(self) -> str:
        """The limit; `none` where the region records that there is none."""
        if self.device is None:
            return "none" if self.tenant.state == State.UNCAPPED else size(self.tenant.expected_limit)
        return "none" if self.device.limit == 0 else size(self.device.limit)

    @property
    def refused(self) -> str:
        """Refusals and the age of the last one."""
        device = self.device
        if device is None or device.refused is None:
            return UNKNOWN
        if not device.refused or device.refused_last is None:
            return str(device.refused)
        return f"{device.refused} ({age(self.now - device.refused_last)} ago)"

    @property
    def tone(self) -> str:
        """How its state is shown: `bad` asks for somebody's attention, else `good`, `note` or `dim`."""
        flags = self.tenant.flags
        if flags.mismatch or flags.tampered or flags.bypass:
            return "bad"
        return _TONES.get(self.tenant.state, "note")

    @property
    def state(self) -> str:
        """State, for an uncapped one its kind, and what is wrong besides."""
        tenant = self.tenant
        parts = [f"{tenant.state}: {tenant.uncapped}" if tenant.uncapped else tenant.state]
        parts += [text for name, text in _FLAGS if getattr(tenant.flags, name)]
        return ", ".join(parts)

    @property
    def reason(self) -> str:
        """Why it is not enforced; empty where it is."""
        return "" if self.tenant.state == State.ENFORCED else self.tenant.reason

    @property
    def pressure(self) -> float:
        """What the rows are sorted by: without a limit first, then the part of the limit in use."""
        unlimited = self.device is not None and self.device.limit == 0 and self.device.used
        if self.tenant.state == State.UNCAPPED or unlimited:
            return math.inf
        return self.share if self.share is not None else -1.0


def rows(document: Document) -> list[Row]:
    """Each tenant on each of its devices, the highest pressure first."""
    found = [
        Row(tenant, device, document.node.time)
        for tenant in document.tenants
        for device in (tenant.devices or (None,))
    ]
    return sorted(found, key=lambda row: (-row.pressure, row.tenant.title))
