"""What a running process is: its format, its loader, its C library, and what it has loaded."""

from __future__ import annotations

import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path

from isolator import names
from isolator.doctor.inside import PROC, read_file
from isolator.libsync.elf import MACHINES

_GLIBC = re.compile(rb"GNU C Library [^\0\n]{0,200}?version (\d+)\.(\d+)")
_LIBC = re.compile(r"/libc(?:-\d+\.\d+)?\.so(?:\.6)?$")
_HEADER = 1 << 16
_PT_INTERP = 3


@dataclass(frozen=True)
class Program:
    """The executable of a process. `loader` is the path it names, None where it is static."""

    bits: int
    machine: str
    loader: str | None

    @property
    def is_musl(self) -> bool:
        """Whether its loader is musl's."""
        return self.loader is not None and "musl" in self.loader


def parse(raw: bytes) -> Program | None:
    """Reads the beginning of an executable; None where it is no ELF file with its headers there."""
    if raw[:4] != b"\x7fELF" or len(raw) < 64 or raw[5] not in (1, 2):
        return None
    order = "<" if raw[5] == 1 else ">"
    bits = 64 if raw[4] == 2 else 32
    machine = struct.unpack_from(f"{order}H", raw, 18)[0]
    table = struct.unpack_from(f"{order}Q" if bits == 64 else f"{order}I", raw, 32 if bits == 64 else 28)[0]
    size, count = struct.unpack_from(f"{order}HH", raw, 54 if bits == 64 else 42)
    loader = None
    for index in range(min(count, 128)):
        at = table + index * size
        form = f"{order}IIQQQQ" if bits == 64 else f"{order}IIIII"
        if at + struct.calcsize(form) > len(raw):
            return None
        fields = struct.unpack_from(form, raw, at)
        if fields[0] == _PT_INTERP:
            offset, length = (fields[2], fields[5]) if bits == 64 else (fields[1], fields[4])
            loader = raw[offset : offset + min(length, 4096)].rstrip(b"\0").decode("utf-8", "replace")
    return Program(bits, MACHINES.get(machine, f"machine {machine}"), loader)


@dataclass(frozen=True)
class Running:
    """One process: its program (None: unreadable) and the files it has mapped."""

    pid: int
    command: str
    parent: int
    program: Program | None
    mapped: tuple[str, ...]
    devices: bool

    @property
    def library(self) -> str | None:
        """Our library, where it is mapped."""
        return next((path for path in self.mapped if _named(path) == names.LIBRARY_FILE), None)

    @property
    def uses_gpu(self) -> bool:
        """Whether it has the driver loaded or a device open."""
        return self.devices or any(
            path.startswith("/dev/nvidia") or _named(path).startswith("libcuda.so") for path in self.mapped
        )

    @property
    def libc(self) -> str | None:
        """Path of its C library."""
        return next((path for path in self.mapped if _LIBC.search(path)), None)


def _named(path: str) -> str:
    return os.path.basename(path.removesuffix(" (deleted)"))


def look(pid: int, proc: Path = PROC) -> Running:
    """Raises OSError where the process is gone or may not be looked at."""
    place = proc / str(pid)
    text = read_file(place / "maps", 4 << 20).decode("utf-8", "replace")
    mapped = dict.fromkeys(line[line.index("/") :] for line in text.splitlines() if "/" in line)
    try:
        program = parse(read_file(place / "exe", _HEADER))
    except OSError:
        program = None
    status = (place / "stat").read_text("utf-8", "replace")
    command, rest = status[status.index("(") + 1 : status.rindex(")")], status[status.rindex(")") + 2 :]
    return Running(pid, command, int(rest.split()[1]), program, tuple(mapped), _has_device(place))


def _has_device(place: Path) -> bool:
    try:
        opened = os.listdir(place / "fd")[:1024]
    except OSError:
        return False
    for number in opened:
        try:
            if os.readlink(place / "fd" / number).startswith("/dev/nvidia"):
                return True
        except OSError:
            continue
    return False


def glibc_version(raw: bytes) -> tuple[int, int] | None:
    """The version that a libc.so.6 of bytes `raw` states; None where it is not glibc."""
    found = _GLIBC.search(raw)
    return (int(found[1]), int(found[2])) if found else None
