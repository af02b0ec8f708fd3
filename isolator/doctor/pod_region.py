"""The container's cache file: can it be used, and what does it say of the quota?"""

from __future__ import annotations

import errno
import os
import stat
import time
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from isolator import names, region
from isolator._core import lib
from isolator.doctor.container import Carried
from isolator.doctor.pod_limit import Limit
from isolator.doctor.report import Report
from isolator.monitor import enforcement
from isolator.monitor.model import Cache, Container, PodView
from isolator.monitor.words import NEAR, size
from isolator.region import Device, Region, RegionError, Why

RECENT = 300.0
"""Seconds in which a refusal counts as today's trouble."""
_FALLBACK = "/dev/shm/cudevshr.cache"
_LEFT = frozenset({Why.EMPTY, Why.UNFINISHED})
"""What the library makes anew, or brings up to date."""
_REASONS = {
    errno.ENODATA: "no limit where one is required",
    errno.EINVAL: "the limit is malformed, zero or under 64 MiB",
    errno.ERANGE: "the limit is too large",
    errno.EBADF: "the cache file is not one of ours",
    errno.EPROTO: "the cache file has another version",
    errno.EUSERS: "1,024 processes are live",
    errno.E2BIG: "more than 16 devices are visible",
}


def path_of(carried: Carried) -> str:
    """The file that the library uses, by its own order."""
    containers = f"{carried.mount}/{names.CONTAINERS_DIRECTORY}"
    uid, container = carried.value(names.ENV_POD_UID), carried.value(names.ENV_CONTAINER_NAME)
    legacy = f"{uid}_{container}/{names.CACHE_FILE}" if uid and container else None
    if carried.containers_mount:
        if not carried.limit_mount and legacy:
            return f"{containers}/{legacy}"
        return f"{containers}/{names.CACHE_FILE}"
    named = carried.value(names.ENV_SHARED_CACHE)
    if named:
        return named
    mount = carried.value(names.ENV_CONTAINER_VGPU_MOUNT)
    if mount and legacy and carried.inside.stat(mount):
        return f"{mount}/{names.CONTAINERS_DIRECTORY}/{legacy}"
    found = (path for path in (names.DEFAULT_CACHE, _FALLBACK) if carried.inside.stat(path))
    return next(found, names.DEFAULT_CACHE)


def read(report: Report, carried: Carried, path: str) -> Region | None:
    """Judges whether the library can use the file; None where there is none yet, or it cannot."""
    report.check("cache file")
    folder = str(PurePosixPath(path).parent)
    if carried.inside.stat(folder) is None:
        fault: Fault | None = Fault(path, "its folder is not there", f"make {folder}, or recreate the pod")
        found = None
    else:
        # The library follows no link in the file's own place, and neither is it followed here.
        place = carried.inside.at(folder) / PurePosixPath(path).name
        fault = _fault(carried, folder, path, place)
        found = None
        if fault is None and place.exists():
            found, fault = _read(report, path, place)
    if fault is not None:
        report.find("region_unusable", fault.subject, fault.seen, action=fault.action)
    return found


@dataclass(frozen=True)
class Fault:
    """What of the file keeps the library from it, and what to do."""

    subject: str
    seen: str
    action: str


def _fault(carried: Carried, folder: str, path: str, place: Path) -> Fault | None:
    """What is wrong with the file's place, before it is read."""
    try:
        found = os.lstat(place)
    except FileNotFoundError:
        return _cannot_be_made(carried, folder)
    remove = f"remove {path} and start the program again"
    if not stat.S_ISREG(found.st_mode):
        return Fault(path, f"it is {'a link' if stat.S_ISLNK(found.st_mode) else 'no regular file'}", remove)
    closed = carried.inside.closed_to(path, 6)
    if closed:
        return Fault(path, closed, remove)
    if _read_only(place):
        return Fault(path, "it is on a read-only mount", "mount it writable: recreate the pod")
    return None


def _cannot_be_made(carried: Carried, folder: str) -> Fault | None:
    """CUDA was not started yet: no fault, where the file can be made."""
    place = carried.inside.at(folder)
    if _read_only(place):
        return Fault(folder, "it is read-only", "mount it writable: recreate the pod")
    closed = carried.inside.closed_to(folder, 3)
    if closed:
        return Fault(folder, closed, f"let every user write to it: chmod 1777 {folder}")
    space = os.statvfs(place)
    free = space.f_bavail * space.f_frsize
    if free < lib.VGPU_REGION_SIZE or (space.f_files and not space.f_ffree):
        fix = "free disk space or inodes there (on the node, for a cache folder)"
        return Fault(folder, f"no room for the cache file: {free >> 10} KiB free", fix)
    return None


def _read_only(place: Path) -> bool:
    return bool(os.statvfs(place).f_flag & os.ST_RDONLY)


def _read(report: Report, path: str, place: Path) -> tuple[Region | None, Fault | None]:
    """Once more where a writer was met at work."""
    for attempt in (1, 2):
        try:
            return region.read(place), None
        except RegionError as error:
            if error.why in (Why.CHANGING, Why.UNFINISHED) and attempt == 1:
                time.sleep(0.02)
                continue
            if error.why is Why.SLOW:
                report.skip("cache file", error)
            elif error.why not in _LEFT:
                fix = f"remove {path} and start the program again; it is another product's, or damaged"
                return None, Fault(path, f"{error.why}: {str(error).removeprefix(f'{place}: ')}", fix)
    return None, None


def judge(report: Report, path: str, found: Region, limit: Limit, now: float | None = None) -> None:
    """What a readable file says, by the monitor's own judgement."""
    report.check("enforcement")
    container = Container("", "", "", "", injected=True, running=True)
    verdict = enforcement.judge(container, PodView("", ""), Cache("", "", Path(path), found), None)
    if found.extended and found.state == lib.VGPU_STATE_REFUSED:
        _refused(report, path, found)
    if verdict.tampered:
        report.find("tampered", path, "a limit or quota word is not what the library wrote", file=path)
    for device in found.devices:
        own = limit.of(device.index)
        if own and device.limit > own and not verdict.tampered:
            seen = f"{size(device.limit)} hold, and {size(own)} are set"
            report.find("limit_mismatch", f"device {device.index}", seen)
        _pressure(report, device, time.time() if now is None else now)


def _refused(report: Report, path: str, found: Region) -> None:
    """Not where its cause is known already."""
    known = ("limit_missing", "limit_zero", "limit_malformed", "region_unusable")
    if any(finding.cause.id in known for finding in report.findings):
        return
    code = found.refuse_reason
    meaning = _REASONS.get(code, os.strerror(code) if code else "unknown")
    seen = f"errno {code}: {meaning}"
    report.find("refused_start", path, seen, meaning=meaning)


def _pressure(report: Report, device: Device, now: float) -> None:
    if not device.limit:
        return
    share = device.used / device.limit
    subject = f"device {device.index}"
    seen = f"{size(device.used)} of {size(device.limit)} used ({share:.0%})"
    if device.refused:
        age = now - device.refused_last if device.refused_last else None
        when = f", the last {age:.0f} s ago" if age is not None else ""
        seen += f"; {device.refused} refused{when}, of {size(device.refused_bytes)}"
        if age is not None and age <= RECENT:
            report.find(
                "over_limit",
                subject,
                seen,
                largest=f"context {size(device.context)}, data {size(device.data)}",
            )
            return
    if share >= NEAR or device.refused:
        report.find("near_limit", subject, seen)
