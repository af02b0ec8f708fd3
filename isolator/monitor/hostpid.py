"""Which container a process of the host belongs to, by its control group (only with monitor.hostPID).

The kubelet and the runtimes name groups in a few ways, of which each holds a pod's UID, a container's id or
both: made by cgroupfs (pod<uid>/<id>) or by systemd (kubepods-pod<u_i_d>.slice/<runtime>-<id>.scope), in
version 1 (one line a controller) or 2, relative to the reader's own group or not.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_POD: Final = re.compile(
    r"(?:^|[-/])pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})(?:\.slice)?$"
)
_CONTAINER: Final = re.compile(r"^(?:[a-z][a-z-]*-)?([0-9a-f]{64})(?:\.scope)?$")
_READ_BYTES: Final = 1 << 16


@dataclass(frozen=True)
class Owner:
    """A container of a pod; the UID is None where the group's name holds the container's id alone."""

    pod_uid: str | None
    container_id: str


def parse(text: str) -> Owner | None:
    """The owner that the lines of a /proc/<pid>/cgroup name; None for a process outside containers.

    The outermost names count: whatever groups a tenant makes lie below its own.
    """
    for line in text.splitlines():
        uid = None
        # A runtime set to systemd under a kubelet set to cgroupfs joins the names by colons.
        for part in line.split(":", 2)[-1].replace(":", "/").split("/"):
            if uid is None and (pod := _POD.search(part)):
                uid = pod[1].replace("_", "-")
            elif container := _CONTAINER.match(part):
                return Owner(uid, container[1])
    return None


def owner(pid: int, proc: Path = Path("/proc")) -> Owner | None:
    """The container that process `pid` of the host runs in; None where it is gone or in none."""
    try:
        descriptor = os.open(proc / str(pid) / "cgroup", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return parse(os.read(descriptor, _READ_BYTES).decode("ascii", "replace"))
    except OSError:
        return None
    finally:
        os.close(descriptor)
