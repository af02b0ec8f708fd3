"""Is the library loaded into the container's programs, and if not, why?"""

from __future__ import annotations

import contextlib
import os
import stat

from isolator import names
from isolator.doctor import program
from isolator.doctor.container import Carried, listed, ours
from isolator.doctor.program import Running
from isolator.doctor.report import Report
from isolator.errors import ContractError
from isolator.libsync import elf, files


def preload(report: Report, carried: Carried) -> str | None:
    """Judges the preload file; answers the path of the library that the loader is told, None without one."""
    report.check("preload file")
    library, path = carried.library, names.PRELOAD_FILE
    named = listed(carried.preload or "")
    told = ours(named) or carried.by_environment
    if told is None:
        seen = "there is none" if carried.preload is None else "it is empty"
        seen = f"it names {' '.join(named)}" if named else seen
        report.find("preload_missing", path, seen, file=path, library=library)
        return None
    if told != library and carried.library_mount and carried.inside.stat(told) is None:
        seen = f"it names {told}, and the library is at {library}"
        report.find("preload_missing", path, seen, file=path, library=library)
        return None
    return told


def library(report: Report, carried: Carried, path: str) -> elf.Elf | None:
    """Judges the library at `path`; None where the loader cannot take it. Raises OSError."""
    report.check("library")
    inside = carried.inside
    found = inside.stat(path)
    if found is None or not stat.S_ISREG(found.st_mode):
        report.find(
            "library_missing", path, "nothing is there" if found is None else "it is no file", library=path
        )
        return None
    closed = inside.closed_to(path, 4)
    if closed:
        report.find("library_unreadable", path, closed, library=path)
        return None
    if os.statvfs(inside.at(path)).f_flag & os.ST_NOEXEC:
        report.find("library_noexec", path, "its file system is mounted noexec")
        return None
    try:
        parsed = elf.read(inside.read(path, files.LARGEST))
    except PermissionError:
        report.find("library_unreadable", path, f"it cannot be opened by uid {os.geteuid()}", library=path)
        return None
    except ContractError as error:
        report.find("library_damaged", path, str(error))
        return None
    machine = os.uname().machine
    if parsed.machine != machine:
        seen = f"built for {parsed.machine}, and this machine is {machine}"
        report.find("library_foreign_arch", path, seen)
        return None
    return parsed


def programs(report: Report, carried: Carried, told: str | None, parsed: elf.Elf | None) -> None:
    """Judges the processes: the one asked for, those that use the GPU, and a PID 1 that has no child.

    `told` and `parsed` are None where the loader has nothing to load: then a program that could be preloaded
    is not the fault.
    """
    running = _running(report, carried)
    if running is None:
        return
    target = os.getpid() if carried.inside.pid is None else carried.inside.pid
    parents = {found.parent for pid, found in running.items() if pid not in _own_line(running)}
    for pid, found in running.items():
        first = pid == min(running) and pid not in parents
        if not (pid == target or found.uses_gpu or first) or found.library:
            continue
        _judge(report, carried, found, told if parsed else None, parsed)


def _running(report: Report, carried: Carried) -> dict[int, Running] | None:
    inside = carried.inside
    target = os.getpid() if inside.pid is None else inside.pid
    running: dict[int, Running] = {}
    try:
        running[target] = program.look(target)
        report.check(f"program of {inside.name}")
    except OSError as error:
        report.skip(
            f"program of {inside.name}", f"{error.strerror}: run as root (kubectl debug: docs/doctor.md)"
        )
        return None
    for pid in inside.neighbours():
        try:
            running.setdefault(pid, program.look(pid))
        except ProcessLookupError:
            continue
        except OSError:
            inside.hidden += 1
    if inside.hidden:
        report.skip(f"{inside.hidden} processes of other users", "they may not be looked at: run as root")
    return running


def _own_line(running: dict[int, Running]) -> set[int]:
    """This process and those that started it: what they run is no tenant's program."""
    line: set[int] = set()
    pid = os.getpid()
    while pid in running and pid not in line:
        line.add(pid)
        pid = running[pid].parent
    return line


def _judge(
    report: Report, carried: Carried, found: Running, told: str | None, parsed: elf.Elf | None
) -> None:
    subject = f"PID {found.pid} ({found.command})"
    kind = found.program
    if kind is None:
        report.skip(f"program of {subject}", "its executable cannot be read")
        return
    machine = os.uname().machine
    if kind.bits != 64 or kind.machine != machine:
        seen = f"a {kind.bits}-bit program for {kind.machine}; the library is for {machine}"
        report.find("program_foreign_arch", subject, seen)
    elif kind.loader is None and not found.libc and not _musl_mapped(found):
        report.find("program_static", subject, "it names no loader")
    elif kind.is_musl or _musl_mapped(found):
        loader = kind.loader or "musl"
        report.find("program_musl", subject, f"its loader is {loader}", loader=loader)
    elif told is not None and parsed is not None:
        version = _glibc(carried, found)
        if version and parsed.glibc and version < parsed.glibc:
            have, floor = (".".join(map(str, each)) for each in (version, parsed.glibc))
            report.find("glibc_too_old", subject, f"glibc {have}, and the library needs {floor}", floor=floor)
        else:
            report.find(
                "not_intercepting", subject, f"{told} is preloaded, and this process does not have it"
            )


def _musl_mapped(found: Running) -> bool:
    return any("/ld-musl-" in path or "/libc.musl-" in path for path in found.mapped)


def _glibc(carried: Carried, found: Running) -> tuple[int, int] | None:
    """The version of the C library that the process has mapped."""
    if found.libc is None:
        return None
    with contextlib.suppress(OSError):
        return program.glibc_version(carried.inside.read(found.libc, 8 << 20))
    return None
