"""What a shared library asks of the machine and the C library, read from its bytes.

A pure reader: every offset is checked against the file's length, so that a truncated or foreign file is an
error with a sentence and never a wrong answer. 64-bit little-endian files only; others are refused.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from isolator.errors import ContractError

MACHINES: Final = {62: "x86_64", 183: "aarch64", 3: "i386", 40: "arm", 243: "riscv", 21: "ppc64", 22: "s390"}
GLIBC_FLOOR: Final = (2, 17)
"""The oldest glibc of a tenant's image that the product promises to run with."""
LIBC_PARTS: Final = re.compile(r"(libc|libdl|libpthread|librt|libm|ld-linux[-a-z0-9_]*)\.so\.[0-9]+")
"""All a preloaded library may need: a missing one ends every program of a container with 127."""

_HEADER: Final = struct.Struct("<16sHHIQQQIHHHHHH")
_PROGRAM: Final = struct.Struct("<IIQQQQQQ")
_DYNAMIC: Final = struct.Struct("<qQ")
_VERNEED: Final = struct.Struct("<HHIII")
_VERNAUX: Final = struct.Struct("<IHHII")
_TYPES: Final = {1: "relocatable object", 2: "program", 3: "shared library", 4: "core dump"}
_PT_LOAD, _PT_DYNAMIC, _ET_DYN = 1, 2, 3
_DT_NEEDED, _DT_STRTAB, _DT_STRSZ, _DT_SONAME = 1, 5, 10, 14
_DT_VERNEED, _DT_VERNEEDNUM = 0x6FFFFFFE, 0x6FFFFFFF
# More than any library has: a bound on the work that a crafted file can ask for.
_MOST: Final = 1024
_GLIBC: Final = re.compile(r"GLIBC_(\d+)\.(\d+)(?:\.\d+)?")


@dataclass(frozen=True)
class Elf:
    """One 64-bit ELF file. `glibc` is the newest GLIBC_x.y it asks for, None where it asks for none."""

    machine: str
    type: int
    soname: str | None
    needed: tuple[str, ...]
    glibc: tuple[int, int] | None


class _Image:
    """The file's bytes, with every access checked."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.loads: list[tuple[int, int, int]] = []

    def unpack(self, form: struct.Struct, at: int) -> tuple[int, ...]:
        if at < 0 or at + form.size > len(self.data):
            raise ContractError(f"truncated: {len(self.data)} bytes, and more are needed at {at}")
        return form.unpack_from(self.data, at)

    def offset(self, address: int) -> int:
        """Where in the file the loaded `address` is."""
        for start, size, at in self.loads:
            if start <= address < start + size:
                return at + address - start
        raise ContractError(f"damaged: nothing is loaded at address {address:#x}")

    def text(self, table: tuple[int, int], index: int) -> str:
        start, size = table
        if not 0 <= index < size:
            raise ContractError(f"damaged: name {index} is outside the string table")
        end = self.data.find(b"\0", start + index, start + size)
        if end < 0:
            raise ContractError(f"damaged: name {index} has no end")
        return self.data[start + index : end].decode("utf-8", "replace")


def read(data: bytes) -> Elf:
    """Reads the file of bytes `data`. Raises ContractError saying what is wrong with it."""
    image = _Image(data)
    if data[:4] != b"\x7fELF":
        raise ContractError("empty" if not data else "not an ELF file")
    if len(data) < 6 or data[4] != 2 or data[5] != 1:
        raise ContractError("not a 64-bit little-endian ELF file")
    header = image.unpack(_HEADER, 0)
    kind, machine, programs, sections = header[1], header[2], header[5], header[6]
    program_size, program_count, section_size, section_count = header[9:13]
    if program_size != _PROGRAM.size:
        raise ContractError(f"damaged: program headers of {program_size} bytes")
    if section_count and sections + section_size * section_count > len(data):
        raise ContractError(f"truncated: {len(data)} bytes, and its section table ends beyond them")
    dynamic = _programs(image, programs, program_count)
    entries = _dynamic(image, dynamic) if dynamic else {}
    names = _strings(image, entries)
    soname = entries.get(_DT_SONAME)
    return Elf(
        machine=MACHINES.get(machine, f"machine {machine}"),
        type=kind,
        soname=image.text(names, soname[0]) if soname else None,
        needed=tuple(image.text(names, index) for index in entries.get(_DT_NEEDED, [])),
        glibc=max(_versions(image, entries, names), default=None),
    )


def _programs(image: _Image, at: int, count: int) -> tuple[int, int] | None:
    """Notes the loaded parts; answers offset and size of the dynamic section, None without one."""
    dynamic = None
    for index in range(min(count, _MOST)):
        kind, _, offset, address, _, size, *_ = image.unpack(_PROGRAM, at + index * _PROGRAM.size)
        if kind in (_PT_LOAD, _PT_DYNAMIC) and offset + size > len(image.data):
            raise ContractError(f"truncated: {len(image.data)} bytes of at least {offset + size}")
        if kind == _PT_LOAD:
            image.loads.append((address, size, offset))
        elif kind == _PT_DYNAMIC:
            dynamic = (offset, size)
    return dynamic


def _dynamic(image: _Image, where: tuple[int, int]) -> dict[int, list[int]]:
    entries: dict[int, list[int]] = {}
    for index in range(min(where[1] // _DYNAMIC.size, _MOST)):
        tag, value = image.unpack(_DYNAMIC, where[0] + index * _DYNAMIC.size)
        if tag == 0:
            break
        entries.setdefault(tag, []).append(value)
    return entries


def _strings(image: _Image, entries: dict[int, list[int]]) -> tuple[int, int]:
    if _DT_STRTAB not in entries or _DT_STRSZ not in entries:
        return (0, 0)
    start, size = image.offset(entries[_DT_STRTAB][0]), entries[_DT_STRSZ][0]
    if start + size > len(image.data):
        raise ContractError("truncated: its string table ends beyond the file")
    return (start, size)


def _versions(
    image: _Image, entries: dict[int, list[int]], names: tuple[int, int]
) -> Iterator[tuple[int, int]]:
    """The GLIBC_x.y that the file asks for."""
    if _DT_VERNEED not in entries:
        return
    at = image.offset(entries[_DT_VERNEED][0])
    for _ in range(min(entries.get(_DT_VERNEEDNUM, [0])[0], _MOST)):
        _, count, _, first, following = image.unpack(_VERNEED, at)
        inner = at + first
        for _ in range(min(count, _MOST)):
            _, _, _, name, step = image.unpack(_VERNAUX, inner)
            found = _GLIBC.fullmatch(image.text(names, name))
            if found:
                yield int(found[1]), int(found[2])
            inner += step
            if not step:
                break
        at += following
        if not following:
            return


def check(data: bytes, machine: str) -> Elf:
    """Whether containers on a node of architecture `machine` can preload the library of bytes `data`.

    Raises ContractError with the reason: not ELF, truncated, another architecture, a program, needs a newer
    glibc than 2.17 or a library that not every image has.
    """
    found = read(data)
    if found.machine != machine:
        raise ContractError(f"built for {found.machine}, but this node is {machine}")
    if found.type != _ET_DYN:
        raise ContractError(f"a {_TYPES.get(found.type, 'file of unknown type')}, not a shared library")
    if found.glibc and found.glibc > GLIBC_FLOOR:
        asked, floor = (".".join(map(str, version)) for version in (found.glibc, GLIBC_FLOOR))
        raise ContractError(
            f"needs GLIBC_{asked}, but tenants may have {floor}: no program would start there"
        )
    foreign = [name for name in found.needed if not LIBC_PARTS.fullmatch(name)]
    if foreign:
        raise ContractError(f"needs {foreign[0]}, which not every image has: no program would start there")
    return found
