"""A read-only view of a container's region file (native/core/region.h), of ours or of HAMi-core.

A tenant can write to its file, so it is never mapped (a file cut short would kill the reader) and never
believed: the header, the used slots and a few words of the extension are read once each, bounded in
bytes and time, and every word that is a count or an index is checked.

Layouts: 1.2 with our extension, HAMi-core's 1.2 and 1.1. Every other file is refused with a `Why`.

Readings race with writers. In our files each figure is one word, so a sum is that of some moment
between two charges; the columns of a process (context, module, data) may be one charge apart from its
total. In HAMi-core's files a slot is read again while its sequence word is odd or moves, a few times:
a writer may have been killed in between, so the last reading then stands.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import struct
import time
from collections.abc import Iterator
from pathlib import Path

from isolator._core import ffi, lib
from isolator.region_model import Device, Process, Region, RegionError, Why

__all__ = ["Device", "Process", "Region", "RegionError", "Why", "open_file", "read", "read_descriptor"]

# No card holds as much; 2^44, what a 64-bit underflow becomes in MiB, does not pass.
PLAUSIBLE_BYTES = 1 << 43
_PLAUSIBLE_COUNT = 1 << 53
# Sizes of HAMi-core's files, each with and without the byte that its creator writes behind the end.
_OLD_SIZES = {804680, 804681, 1197896, 1197897}
_PLAIN_SIZES = {lib.VGPU_HAMI_SIZE, lib.VGPU_HAMI_SIZE + 1}
_TRANSITIONAL_SIZES = {2008984, 2008985}
_SLOTS_AT_ONCE = 32
_STABLE_TRIES = 8
# Processor time, which a busy node does not use up: a tenant may pile up file locks, and a probe walks all.
_BUDGET_S = 0.02

_UUID = re.compile(
    rb"(?:GPU-|MIG-(?:GPU-)?)[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}(?:/\d{1,3}){0,2}"
)
# struct flock of 64-bit Linux: type, whence, start, length, pid.
_FLOCK = struct.Struct("hhqqi4x")


def _at(kind: str, field: str) -> int:
    return int(ffi.offsetof(f"struct vgpu_{kind}", field))


_DEVICES = int(lib.VGPU_MAX_DEVICES)
_EXT = int(lib.VGPU_EXT_OFFSET)
_HEAD_SIZE = _at("hami_region", "procs")
_TAIL = _at("hami_region", "proc_num")
_TAIL_SIZE = _at("hami_region", "sem_postinit") - _TAIL
_EXT_SIZE = _at("ext", "spare3")
_SLOT_SIZE = int(ffi.sizeof("struct vgpu_hami_slot"))
_MEMORY_SIZE = int(ffi.sizeof("struct vgpu_hami_memory"))
_UTIL_SIZE = int(ffi.sizeof("struct vgpu_hami_util"))
_UUIDS = _at("hami_region", "uuids")
_USED, _UTIL = _at("hami_slot", "used"), _at("hami_slot", "device_util") + _at("hami_util", "sm_util")
_STATUS, _SEQLOCK = _at("hami_slot", "status"), _at("hami_slot", "seqlock")
_SLOT_LOCK = _EXT + _at("ext", "slot_lock")

_HEAD = struct.Struct("<iII")
_I32 = struct.Struct("<i")
_U64 = struct.Struct("<Q")
_MEMORY = struct.Struct("<5Q")
_ARRAY = struct.Struct(f"<{_DEVICES}Q")
_EXT_HEAD = struct.Struct("<IIQ")
_EXT_STATE = struct.Struct("<III")
_DEVICE_NUM, _LIMIT, _SM_LIMIT = (_at("hami_region", name) for name in ("device_num", "limit", "sm_limit"))
_LAST_KERNEL = _at("hami_region", "last_kernel_time") - _TAIL
_STATE, _CREATED = _at("ext", "state"), _at("ext", "created_ns")
_EXT_ARRAYS = tuple(
    _at("ext", name) for name in ("refused", "refused_last_ns", "refused_bytes", "ghost", "peak")
)
_NO_ARRAYS = ((0,) * _DEVICES,) * len(_EXT_ARRAYS)
_UUID_LEN, _MOST_SLOTS = int(lib.VGPU_UUID_LEN), int(lib.VGPU_MAX_SLOTS)
_REGION_SIZE, _HAMI_SIZE = int(lib.VGPU_REGION_SIZE), int(lib.VGPU_HAMI_SIZE)
_LIVE, _DEAD = int(lib.VGPU_SLOT_LIVE), int(lib.VGPU_SLOT_DEAD)


def _pread(descriptor: int, size: int, offset: int) -> bytes:
    """Exactly `size` bytes; the file was long enough a moment ago."""
    raw = os.pread(descriptor, size, offset)
    if len(raw) != size:
        raise RegionError(Why.CHANGING, f"it was cut short while it was read, at byte {offset + len(raw)}")
    return raw


def open_file(name: str | Path, directory: int | None = None) -> int:
    """A descriptor of a regular file, to read; `directory` is the open folder that `name` is in.

    Never follows a link and never opens what is not a regular file (a FIFO would block, a device could
    react). Raises RegionError or OSError.
    """
    flags = os.O_PATH | os.O_CLOEXEC | os.O_NOFOLLOW
    handle = os.open(name, flags, dir_fd=directory)
    try:
        mode = os.fstat(handle).st_mode
        if stat.S_ISLNK(mode):
            raise OSError(40, os.strerror(40), os.fspath(name))  # ELOOP, as O_NOFOLLOW alone says
        if not stat.S_ISREG(mode):
            raise RegionError(Why.NOT_REGULAR, f"{name} is not a regular file")
        return os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    finally:
        os.close(handle)


def read(path: str | Path) -> Region:
    """Reads one region file.

    Raises RegionError (a ContractError) when it is not a region of a version this package knows, OSError
    when it cannot be opened. Symbolic links are not followed.
    """
    try:
        descriptor = open_file(path)
        try:
            return read_descriptor(descriptor)
        finally:
            os.close(descriptor)
    except RegionError as error:
        raise RegionError(error.why, f"{path}: {error}") from error


def read_descriptor(descriptor: int, budget: float = _BUDGET_S) -> Region:
    """As `read`, of an open descriptor, which stays open; `budget`: most seconds of processor time."""
    end = time.thread_time() + min(budget, _BUDGET_S)
    size = os.fstat(descriptor).st_size
    if size == 0:
        raise RegionError(Why.EMPTY, "the file is empty: nobody has set a region up in it yet")
    # The last word that a maker stores is looked at first.
    ext = os.pread(descriptor, _EXT_SIZE, _EXT) if size == _REGION_SIZE else b""
    head = os.pread(descriptor, _HEAD_SIZE, 0)
    minor = _judge(size, head, ext)
    tail = _pread(descriptor, _TAIL_SIZE, _TAIL)
    extended = bool(ext)
    devices = _U64.unpack_from(head, _DEVICE_NUM)[0]
    slots = _I32.unpack_from(tail, 0)[0]
    if devices > _DEVICES or not 0 <= slots <= _MOST_SLOTS:
        raise RegionError(Why.BAD_COUNT, f"{devices} devices and {slots} slots cannot be")
    live = list(_live_slots(descriptor, slots, extended, minor, end))
    uuids = [_uuid(head, index) for index in range(devices)]
    last = _U64.unpack_from(tail, _LAST_KERNEL)[0]
    state, reason, flags = _EXT_STATE.unpack_from(ext, _STATE) if ext else (0, 0, 0)
    created = _U64.unpack_from(ext, _CREATED)[0] / 1e9 if ext else None
    sums = _Sums(head, ext, live)
    return Region(
        devices=tuple(sums.device(index, uuid) for index, uuid in enumerate(uuids) if uuid),
        processes=tuple(
            Process(slot, _I32.unpack_from(raw, 0)[0], tuple(_total(raw, i) for i in range(devices)))
            for slot, raw in live
        ),
        extended=extended,
        state=state,
        flags=flags,
        version=f"1.{minor}",
        created=created,
        last_kernel_time=float(last) if 0 < last < 1 << 40 else None,
        refuse_reason=reason,
        invalid_uuids=sum(not uuid for uuid in uuids),
    )


def _judge(size: int, head: bytes, ext: bytes) -> int:
    """The minor version of a file that can be read; RegionError for every other one."""
    if len(head) < _HEAD.size:
        raise RegionError(Why.TRUNCATED, f"{size} bytes are no region")
    magic, major, minor = _HEAD.unpack_from(head)
    if magic == 0:
        raise RegionError(Why.UNFINISHED, "its maker has not finished it")
    if magic != lib.VGPU_HAMI_MAGIC:
        raise RegionError(Why.NOT_REGION, "it does not begin as a region does")
    if size in _OLD_SIZES:
        raise RegionError(Why.OLD_LAYOUT, "a region of HAMi-core of 2024, without a version")
    if size < _HAMI_SIZE:
        raise RegionError(Why.TRUNCATED, f"{size} of {_HAMI_SIZE} bytes")
    if size > _REGION_SIZE:
        raise RegionError(Why.TOO_BIG, f"{size} bytes are more than any region has")
    if size in _TRANSITIONAL_SIZES:
        raise RegionError(Why.TRANSITIONAL, "a region of HAMi-core of March 2026, which says 1.1 and is not")
    if major != lib.VGPU_HAMI_MAJOR or minor not in (1, lib.VGPU_HAMI_MINOR):
        raise RegionError(Why.VERSION, f"a region of version {major}.{minor}, which is not known here")
    if len(head) < _HEAD_SIZE or (ext and len(ext) < _EXT_SIZE):
        raise RegionError(Why.CHANGING, "it was cut short while it was read")
    if size in _PLAIN_SIZES:
        return int(minor)
    found, version, length = _EXT_HEAD.unpack_from(ext) if ext else (0, 0, 0)
    if found == 0:
        raise RegionError(Why.UNFINISHED, "its maker has not finished it")
    if found != lib.VGPU_EXT_MAGIC:
        raise RegionError(Why.NOT_REGION, "what follows HAMi-core's part is not ours")
    if version != lib.VGPU_EXT_VERSION or length != lib.VGPU_EXT_SIZE:
        raise RegionError(Why.VERSION, f"an extension of version {version}, which is not known here")
    return int(minor)


def _live_slots(
    descriptor: int, count: int, extended: bool, minor: int, end: float
) -> Iterator[tuple[int, bytes]]:
    for first in range(0, count, _SLOTS_AT_ONCE):
        number = min(_SLOTS_AT_ONCE, count - first)
        start = _HEAD_SIZE + first * _SLOT_SIZE
        chunk = _pread(descriptor, number * _SLOT_SIZE, start)
        for i in range(number):
            at = i * _SLOT_SIZE
            (pid,), (status,) = _I32.unpack_from(chunk, at), _I32.unpack_from(chunk, at + _STATUS)
            if status == _DEAD or pid <= 0:
                continue
            if time.thread_time() > end:
                raise RegionError(Why.SLOW, "its slots take too much processor time")
            if extended:
                if status == _LIVE and _locked(descriptor, first + i):
                    yield first + i, chunk[at : at + _SLOT_SIZE]
            else:
                raw = chunk[at : at + _SLOT_SIZE]
                yield first + i, _stable(descriptor, raw, start + at) if minor > 1 else raw


def _locked(descriptor: int, slot: int) -> bool:
    """Whether somebody holds the slot's lock byte: the slot's process is alive."""
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, _SLOT_LOCK + slot, 1, 0)
    answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, asked)
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)


def _stable(descriptor: int, raw: bytes, at: int) -> bytes:
    """The slot at byte `at`, read while nobody wrote it, where that can be had in a few tries."""
    for _ in range(_STABLE_TRIES):
        before = _U64.unpack_from(raw, _SEQLOCK)[0]
        if before % 2 == 0 and before == _U64.unpack(_pread(descriptor, 8, at + _SEQLOCK))[0]:
            break
        raw = _pread(descriptor, _SLOT_SIZE, at)
    return raw


def _uuid(head: bytes, index: int) -> str:
    """The device's UUID, empty when it is not one."""
    start = _UUIDS + index * _UUID_LEN
    raw = head[start : start + _UUID_LEN].split(b"\0", 1)[0]
    return raw.decode("ascii") if _UUID.fullmatch(raw) else ""


def _total(raw: bytes, index: int) -> int:
    total = _MEMORY.unpack_from(raw, _USED + index * _MEMORY_SIZE)[4]
    return total if total <= PLAUSIBLE_BYTES else 0


class _Sums:
    """Adds up the words of the live slots, and leaves out those that cannot be."""

    def __init__(self, head: bytes, ext: bytes, live: list[tuple[int, bytes]]) -> None:
        self._live = [raw for _, raw in live]
        self._extended = bool(ext)
        self._limits = _ARRAY.unpack_from(head, _LIMIT)
        self._sm_limits = _ARRAY.unpack_from(head, _SM_LIMIT)
        self._ext = [_ARRAY.unpack_from(ext, at) for at in _EXT_ARRAYS] if ext else _NO_ARRAYS

    def device(self, index: int, uuid: str) -> Device:
        """The device's figures."""
        damaged: set[str] = set()

        def add(name: str, words: list[int]) -> int:
            total = sum(words)
            if total <= PLAUSIBLE_BYTES:
                return total
            damaged.add(name)
            return sum(word for word in words if word <= PLAUSIBLE_BYTES)

        columns = [_MEMORY.unpack_from(raw, _USED + index * _MEMORY_SIZE) for raw in self._live]
        refused, last, asked, ghost, peak = (words[index] for words in self._ext)
        if refused > _PLAUSIBLE_COUNT:
            damaged.add("refused")
            refused = 0
        return Device(
            index=index,
            uuid=uuid,
            limit=add("limit", [self._limits[index]]),
            used=add("used", [*(column[4] for column in columns), ghost]),
            context=add("context", [column[0] for column in columns]),
            module=add("module", [column[1] for column in columns]),
            data=add("data", [column[2] for column in columns]),
            refused=refused,
            refused_last=last / 1e9 if last else None,
            refused_bytes=asked,
            peak=add("peak", [peak]),
            sm_limit=min(100, self._sm_limits[index]),
            sm_util=None if self._extended else self._util(index),
            damaged=frozenset(damaged),
        )

    def _util(self, index: int) -> int:
        """Percent of the device, over all processes; each shows its own part."""
        words = (_U64.unpack_from(raw, _UTIL + index * _UTIL_SIZE)[0] for raw in self._live)
        return int(min(100, sum(min(100, word) for word in words)))
