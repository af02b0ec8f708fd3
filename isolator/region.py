"""A read-only view of a container's region file (native/core/region.h).

A tenant can write to its file, so it is never mapped (a file cut short would kill the reader) and never
believed: it is read once, bounded, and every word that is a count or an index is checked.
"""

from __future__ import annotations

import fcntl
import os
import stat
import struct
from dataclasses import dataclass
from pathlib import Path

from isolator._core import ffi, lib
from isolator.errors import ContractError

# struct flock of 64-bit Linux: type, whence, start, length, pid.
_FLOCK = struct.Struct("hhqqi4x")


@dataclass(frozen=True)
class Device:
    """One device of a container: its UUID, and bytes."""

    index: int
    uuid: str
    limit: int
    used: int
    context: int
    data: int
    refused: int


@dataclass(frozen=True)
class Process:
    """One live process: its id in the container's PID namespace, and bytes by device index."""

    slot: int
    pid: int
    used: tuple[int, ...]


@dataclass(frozen=True)
class Region:
    """What one region file says. `extended` is false for a file of HAMi-core, which has no refusals."""

    devices: tuple[Device, ...]
    processes: tuple[Process, ...]
    extended: bool
    state: int
    flags: int


def _live(descriptor: int, slot: int) -> bool:
    """Whether somebody holds the slot's lock byte: the slot's process is alive."""
    start = lib.VGPU_EXT_OFFSET + ffi.offsetof("struct vgpu_ext", "slot_lock") + slot
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, 1, 0)
    answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, asked)
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)


def _read(descriptor: int, path: Path) -> bytes:
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise ContractError(f"{path} is not a regular file")
    data = os.pread(descriptor, lib.VGPU_REGION_SIZE, 0)
    if len(data) < lib.VGPU_HAMI_SIZE:
        raise ContractError(f"{path} is no region file: {len(data)} bytes")
    return data


def _text(raw: bytes) -> str:
    return raw.split(b"\0", 1)[0].decode("ascii", "replace")


def read(path: str | Path) -> Region:
    """Reads one region file.

    Raises ContractError when it is not a region of a version this package knows, OSError when it cannot
    be opened. Symbolic links are not followed.
    """
    where = Path(path)
    descriptor = os.open(where, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        data = _read(descriptor, where)
        region = ffi.from_buffer("struct vgpu_hami_region *", data[: lib.VGPU_HAMI_SIZE])
        if region.initialized_flag != lib.VGPU_HAMI_MAGIC or region.major_version != lib.VGPU_HAMI_MAJOR:
            raise ContractError(f"{where} is no region file, or of another version")
        ext = None
        if len(data) >= lib.VGPU_REGION_SIZE:
            found = ffi.from_buffer("struct vgpu_ext *", data[lib.VGPU_EXT_OFFSET : lib.VGPU_REGION_SIZE])
            if found.magic == lib.VGPU_EXT_MAGIC and found.version == lib.VGPU_EXT_VERSION:
                ext = found
        slots = [
            slot
            for slot in range(max(0, min(region.proc_num, lib.VGPU_MAX_SLOTS)))
            if region.procs[slot].status == lib.VGPU_SLOT_LIVE and (ext is None or _live(descriptor, slot))
        ]
    finally:
        os.close(descriptor)
    devices = range(min(region.device_num, lib.VGPU_MAX_DEVICES))
    return Region(
        devices=tuple(_device(region, ext, slots, index) for index in devices),
        processes=tuple(
            Process(s, region.procs[s].pid, tuple(region.procs[s].used[i].total for i in devices))
            for s in slots
        ),
        extended=ext is not None,
        state=ext.state if ext is not None else lib.VGPU_STATE_UNKNOWN,
        flags=ext.flags if ext is not None else 0,
    )


def _device(region: ffi.CData, ext: ffi.CData | None, slots: list[int], index: int) -> Device:
    columns = [region.procs[slot].used[index] for slot in slots]
    return Device(
        index=index,
        uuid=_text(ffi.buffer(region.uuids[index])[:]),
        limit=region.limit[index],
        used=sum(column.total for column in columns) + (ext.ghost[index] if ext is not None else 0),
        context=sum(column.context_size for column in columns),
        data=sum(column.data_size for column in columns),
        refused=ext.refused[index] if ext is not None else 0,
    )
