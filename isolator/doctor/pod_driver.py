"""The NVIDIA side of a container: devices, driver, its version, and limits of the driver's own."""

from __future__ import annotations

import errno
import os
import re
from pathlib import PurePosixPath

from isolator.doctor.container import Carried
from isolator.doctor.pod_limit import Limit, parse
from isolator.doctor.report import Report
from isolator.libsync.elf import MACHINES
from isolator.monitor.words import size

DRIVER = "libcuda.so.1"
PINNED = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
_GPU = re.compile(r"nvidia\d+")
_CACHED = re.compile(rb"(/[^\0]{1,400}/libcuda\.so\.1)\0")
_TRIPLETS = tuple(f"{machine}-linux-gnu" for machine in MACHINES.values())
_DEFAULT = ("/lib64", "/usr/lib64", "/lib", "/usr/lib")
_USUAL = (
    "/usr/local/nvidia/lib64",
    "/usr/local/nvidia/lib",
    "/usr/local/cuda/compat",
    "/run/nvidia/driver/usr/lib64",
)
_NEWEST = (
    *((450, 11, 0), (455, 11, 1), (460, 11, 2), (465, 11, 3), (470, 11, 4), (495, 11, 5), (510, 11, 6)),
    *((515, 11, 7), (520, 11, 8), (525, 12, 0), (530, 12, 1), (535, 12, 2), (545, 12, 3), (550, 12, 4)),
    *((555, 12, 5), (560, 12, 6), (565, 12, 7), (570, 12, 8), (575, 12, 9), (580, 13, 0), (590, 13, 1)),
)
"""Branch of the driver and the newest CUDA that it knows, as CUDA's release notes list them."""


def devices(report: Report, carried: Carried) -> None:
    """Judges the device files. Raises OSError."""
    report.check("NVIDIA devices")
    found = carried.inside.listdir("/dev")
    cards = sorted(name for name in found if _GPU.fullmatch(name))
    if "dxg" in found:  # WSL
        return
    if not cards or "nvidiactl" not in found:
        missing = "no /dev/nvidia<n>" if not cards else "no /dev/nvidiactl"
        report.find("no_devices", "/dev", missing)
        return
    if carried.inside.pid is not None:
        return
    try:
        os.close(os.open(f"/dev/{cards[0]}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
    except OSError as error:
        if error.errno == errno.EPERM:
            seen = "it is there, and the container may not open it: a mount alone opens no device"
            report.find("no_devices", f"/dev/{cards[0]}", seen)


def driver(report: Report, carried: Carried) -> str | None:
    """Judges whether a program finds the driver; answers where."""
    report.check("driver library")
    variables = carried.environment or {}
    folders = [
        folder for folder in re.split("[:;]", variables.get("LD_LIBRARY_PATH", "")) if folder[:1] == "/"
    ]
    folders += [f"{base}/{triplet}" for triplet in _TRIPLETS for base in ("/lib", "/usr/lib")]
    folders += _DEFAULT
    places = [f"{folder.rstrip('/')}/{DRIVER}" for folder in folders]
    try:
        cached = carried.inside.read("/etc/ld.so.cache", 4 << 20)
        places += [raw.decode("utf-8", "replace") for raw in _CACHED.findall(cached)]
    except FileNotFoundError:
        pass
    for place in places:
        if _there(carried, place):
            return place
    usual = [folder for folder in _USUAL if _there(carried, f"{folder}/{DRIVER}")]
    seen = "neither in LD_LIBRARY_PATH nor in /etc/ld.so.cache nor in the default folders"
    if usual:
        seen = f"it is in {usual[0]}, where the loader does not look"
    if carried.environment is None:
        report.skip("driver library", "LD_LIBRARY_PATH may not be read: run as root")
    else:
        report.find("no_driver", DRIVER, seen)
    return None


def _there(carried: Carried, path: str) -> bool:
    found = carried.inside.stat(path)
    return found is not None and found.st_size > 0


def version(report: Report, carried: Carried, library: str | None) -> None:
    """Compares the CUDA of the image with the newest that the driver knows; a minor version is no matter."""
    variables = carried.environment or {}
    asked = re.match(r"(\d+)\.(\d+)", variables.get("CUDA_VERSION", ""))
    asked = asked or re.search(r"cuda>=(\d+)\.(\d+)", variables.get("NVIDIA_REQUIRE_CUDA", ""))
    if not asked or library is None or "compat" in PurePosixPath(library).parts:
        return
    known = _newest(carried, library)
    if known is None:
        report.skip("driver version", f"neither /proc/driver/nvidia/version nor the name of {library} tells")
        return
    report.check("driver version")
    if int(asked[1]) > known[0]:
        have = f"{known[0]}.{known[1]}"
        seen = f"the image is of CUDA {asked[1]}.{asked[2]}, and the driver knows {have} at most"
        report.find("driver_too_old", library, seen, have=have)


def _newest(carried: Carried, library: str) -> tuple[int, int] | None:
    """The newest CUDA that the driver knows, by its version."""
    branch = None
    try:
        text = carried.inside.read("/proc/driver/nvidia/version").decode("utf-8", "replace")
        branch = re.search(r"(?:Kernel Module|for \w+) +(\d{3})\.", text)
    except OSError:
        pass
    if branch is None:
        branch = re.search(r"\.so\.(\d{3})\.\d", carried.inside.at(library).resolve().name)
    if branch is None:
        return None
    fitting = [row for row in _NEWEST if row[0] <= int(branch[1])]
    return fitting[-1][1:] if fitting else None


def pinned(report: Report, carried: Carried, limit: Limit) -> None:
    """A limit of MPS below ours: the driver refuses first, and its refusals are not in our figures."""
    text = (carried.environment or {}).get(PINNED)
    if not text:
        return
    report.check("limit of MPS")
    for entry in text.split(","):
        device, _, value = entry.partition("=")
        error, found = parse(value.encode())
        own = limit.of(int(device) if device.strip().isdigit() else 0)
        if not error and own and found < own:
            seen = f"{PINNED} says {size(found)} for device {device}, and the limit is {size(own)}"
            report.find("driver_limit_active", f"${PINNED}", seen, what=PINNED)
