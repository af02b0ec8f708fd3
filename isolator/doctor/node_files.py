"""What libsync keeps on a node: the mount, its report, the library, the preload file, the caches' folder."""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from isolator import names
from isolator.doctor import inside
from isolator.doctor.report import Report
from isolator.errors import ContractError
from isolator.libsync import elf, files, install
from isolator.libsync import status as libsync
from isolator.monitor.words import LIBRARY_OLD_S

_MAPS = "import sys; sys.stdout.write(open('/proc/self/maps').read())"
_OURS = (names.LIBSYNC_STATUS, names.VERSIONS_DIRECTORY, names.CONTAINERS_DIRECTORY, names.LIBRARY_FILE)


def mount(report: Report, path: Path, in_pod: bool) -> bool:
    """Judges the folder itself; False where there is nothing more to look at. `in_pod`: through a pod's
    mount, which may be read-only. Raises OSError."""
    report.check("mount")
    if not path.is_dir():
        report.find("mount_missing", str(path), "no such folder", mount=path)
        return False
    if not any((path / name).exists() for name in _OURS):
        report.find("mount_missing", str(path), "nothing of ours is in it", mount=path)
        return False
    flags = os.statvfs(path).f_flag
    if flags & os.ST_NOEXEC:
        report.find(
            "mount_noexec", str(path), "it is mounted noexec: no container can load the library from it"
        )
    if flags & os.ST_RDONLY and (not in_pod or _all_read_only(path)):
        report.find("mount_readonly", str(path), "its file system is read-only")
    return True


def _all_read_only(path: Path) -> bool:
    """Whether the file system is, not just the mount we see it through."""
    real = os.path.realpath(path)
    mounts = [
        m for m in inside.Inside().mounts if real == m.point or real.startswith(m.point.rstrip("/") + "/")
    ]
    deepest = max(mounts, key=lambda mount: len(mount.point), default=None)
    return deepest is not None and "ro" in deepest.super_options


def installer(report: Report, path: Path) -> dict[str, Any]:
    """Judges libsync's report and answers it, empty without one. Raises OSError."""
    report.check(names.LIBSYNC_STATUS)
    with files.folder(path) as opened:
        found = _told(opened)
    shown = str(path / names.LIBSYNC_STATUS)
    if not found:
        there = (path / names.LIBSYNC_STATUS).exists()
        seen = "it cannot be read, or its form is not known" if there else "there is none"
        report.find("libsync_absent", shown, seen)
        return {}
    if not found.get("ready"):
        report.find("libsync_not_ready", shown, str(found.get("problem") or "it names no cause"))
    verified = found.get("verified_at")
    age = time.time() - verified if isinstance(verified, int | float) else None
    if found.get("ready") and (age is None or age > LIBRARY_OLD_S):
        seen = "it never looked" if age is None else f"the last look was {age / 60:.0f} minutes ago"
        report.find("libsync_stale", shown, seen)
    return found


def _told(folder: int) -> dict[str, Any]:
    """libsync's report in the open folder; empty where another thing is there. Raises PermissionError."""
    try:
        return libsync.read(folder)
    except PermissionError:
        raise
    except (OSError, RecursionError):
        return {}


def library(report: Report, path: Path, told: dict[str, Any]) -> bool:
    """Judges <mount>/libvgpu.so; whether it is sound. Raises OSError."""
    report.check("library")
    place = path / names.LIBRARY_FILE
    try:
        raw = inside.read_file(place, files.LARGEST)
    except FileNotFoundError:
        report.find("node_library_missing", str(place), "nothing is there", library=place)
        return False
    except PermissionError:
        raise
    except OSError:
        report.find("node_library_missing", str(place), "it is no file", library=place)
        return False
    machine = os.uname().machine
    try:
        found = elf.read(raw)
        if found.machine != machine:
            seen = f"built for {found.machine}, and this node is {machine}"
            report.find("node_library_foreign_arch", str(place), seen)
            return False
        elf.check(raw, machine)
    except ContractError as error:
        report.find("node_library_damaged", str(place), str(error))
        return False
    expected = told.get("library_sha256")
    if isinstance(expected, str) and hashlib.sha256(raw).hexdigest() != expected:
        seen = f"its SHA-256 is not {expected[:12]}..., which libsync installed"
        report.find("node_library_differs", str(place), seen, library=place)
        return False
    return True


def loads(report: Report, path: Path, patience: float) -> None:
    """Preloads the library into a child, as into each program of a container, for `patience` seconds.

    Raises OSError.
    """
    place = path / names.LIBRARY_FILE
    owner = os.stat(place)
    if owner.st_uid not in (0, os.geteuid()) or stat.S_IMODE(owner.st_mode) & 0o022:
        report.skip("loading the library", "others than root may write to it, so it is not run")
        return
    environment = {"LD_PRELOAD": str(place)}
    command = [sys.executable, "-I", "-S", "-c", _MAPS]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=patience)
    except subprocess.TimeoutExpired:
        report.skip("loading the library", f"the child does not end within {patience:g} s")
        return
    report.check("loading the library")
    if str(os.path.realpath(place)) not in done.stdout:
        said = done.stderr.strip().splitlines()
        report.find(
            "node_library_refused", str(place), said[0] if said else f"status {done.returncode}, no word"
        )


def preload(report: Report, path: Path) -> None:
    """Judges <mount>/ld.so.preload, which is mounted into containers. Raises OSError."""
    report.check("preload file")
    place = path / names.PRELOAD_KEY
    expected = install.preload_content(path).split()
    try:
        found = inside.read_file(place).split()
    except FileNotFoundError:
        report.find("node_preload_wrong", str(place), "there is none")
        return
    except PermissionError:
        raise
    except OSError as error:
        report.find("node_preload_wrong", str(place), f"it cannot be read: {error.strerror}")
        return
    if found != expected:
        shown = b" ".join(found).decode("utf-8", "replace")
        seen = f"it says {shown!r}, and the library is {path / names.LIBRARY_FILE}"
        report.find("node_preload_wrong", str(place), seen)


def containers(report: Report, path: Path) -> None:
    """Judges the folder in which each container's cache folder is made. Raises OSError."""
    report.check("folder of the caches")
    place = path / names.CONTAINERS_DIRECTORY
    try:
        found = os.lstat(place)
    except FileNotFoundError:
        report.find("containers_wrong", str(place), "there is none")
        return
    if not stat.S_ISDIR(found.st_mode):
        report.find("containers_wrong", str(place), "it is no folder")
    elif stat.S_IMODE(found.st_mode) != install.CONTAINERS_MODE:
        report.find("containers_wrong", str(place), f"its mode is {stat.S_IMODE(found.st_mode):o}")
