"""Writes region files by the numbers of the contract, not by the reader's own header."""

from __future__ import annotations

import fcntl
import os
import struct
from dataclasses import dataclass, field
from pathlib import Path

from isolator.monitor.model import Container, PodView

MIB = 1 << 20
MAGIC = 19920718
HAMI_SIZE, TRANSITIONAL_SIZE, OUR_SIZE = 2008952, 2008984, 2183168
V0_SIZE, FIRST_SIZE = 1197896, 804680
SLOTS, SLOT_SIZE, TAIL, EXT = 1856, 1960, 2008896, 2031616
EXT_MAGIC, SLOT_LOCK = 0x4952414B, EXT + 149376
UID = "0f9e8d7c-1111-2222-3333-444455556666"


def uuid(index: int = 0, prefix: str = "GPU") -> str:
    """A valid UUID."""
    return f"{prefix}-864f41ea-375a-4f49-ea86-{index:012x}"


@dataclass
class Slot:
    """One process: bytes of context, module and data on each device."""

    pid: int = 7
    context: int = 102 * MIB
    module: int = 0
    data: int = 1024 * MIB
    status: int = 1
    seqlock: int = 0
    sm_util: int = 0
    total: int | None = None
    alive: bool = True


@dataclass
class Spec:
    """What a file is to say."""

    ours: bool = True
    version: tuple[int, int] = (1, 2)
    uuids: list[str] = field(default_factory=lambda: [uuid()])
    limit: int = 4147 * MIB
    sm_limit: int = 0
    slots: list[Slot] = field(default_factory=lambda: [Slot()])
    last_kernel: int = 0
    refused: int = 0
    refused_ns: int = 0
    refused_bytes: int = 0
    ghost: int = 0
    peak: int = 0
    state: int = 1
    flags: int = 0
    created_ns: int = 1_700_000_000_000_000_000


class RegionFile:
    """A region file that is kept open: what it holds, and the lives of its slots."""

    def __init__(self, path: Path, spec: Spec | None = None) -> None:
        self.path, self.spec = path, spec or Spec()
        path.parent.mkdir(parents=True, exist_ok=True)
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        os.truncate(self.descriptor, OUR_SIZE if self.spec.ours else HAMI_SIZE + 1)
        self._fill()

    def put(self, at: int, form: str, *values: int) -> None:
        """Packs values at an offset."""
        os.pwrite(self.descriptor, struct.pack(f"<{form}", *values), at)

    def close(self) -> None:
        """Ends the lives of all slots."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1

    def __enter__(self) -> RegionFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _fill(self) -> None:
        spec = self.spec
        self.put(0, "iII", MAGIC, *spec.version)
        self.put(56, "Q", len(spec.uuids))
        for index, text in enumerate(spec.uuids[:16]):
            os.pwrite(self.descriptor, text.encode("latin-1")[:96].ljust(96, b"\0"), 64 + index * 96)
            self.put(1600 + index * 8, "Q", spec.limit)
            self.put(1728 + index * 8, "Q", spec.sm_limit)
        for number, slot in enumerate(spec.slots):
            self.slot(number, slot)
        self.put(TAIL, "iiii", len(spec.slots), 1, 2, 1)
        self.put(TAIL + 16, "Q", spec.last_kernel)
        if spec.ours:
            self._extension()

    def slot(self, number: int, slot: Slot) -> None:
        """Writes one slot; a live one of ours holds its lock."""
        at = SLOTS + number * SLOT_SIZE
        self.put(at, "ii", slot.pid, 0)
        total = slot.context + slot.module + slot.data if slot.total is None else slot.total
        for index in range(min(16, len(self.spec.uuids))):
            self.put(at + 8 + index * 64, "5Q", slot.context, slot.module, slot.data, 0, total)
            self.put(at + 1160 + index * 48 + 16, "Q", slot.sm_util)
        self.put(at + 1928, "iiQ", slot.status, 0, slot.seqlock)
        if self.spec.ours and slot.alive:
            lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, SLOT_LOCK + number, 1, 0)
            fcntl.fcntl(self.descriptor, fcntl.F_OFD_SETLK, lock)

    def _extension(self) -> None:
        spec = self.spec
        self.put(EXT, "IIQQQ", EXT_MAGIC, 1, 151552, 1, spec.created_ns)
        self.put(EXT + 64, "III", spec.state, 0, spec.flags)
        for index in range(min(16, len(spec.uuids))):
            for column, value in enumerate((spec.refused, spec.refused_ns, spec.refused_bytes)):
                self.put(EXT + 128 + column * 128 + index * 8, "Q", value)
            self.put(EXT + 640 + index * 8, "Q", spec.ghost)
            self.put(EXT + 768 + index * 8, "Q", spec.peak)


def folder(mount: Path, uid: str = UID, container: str = "main") -> Path:
    """The container's folder, made."""
    made = mount / "containers" / f"{uid}_{container}"
    made.mkdir(parents=True, exist_ok=True)
    return made


def pod(uid: str = UID, *containers: str, name: str = "", live: bool = True, running: bool = True) -> PodView:
    """A pod whose containers all run or all do not."""
    named = name or f"pod-{uid[:8]}"
    parts = tuple(
        Container("team", named, uid, c, running=running, fraction=True) for c in containers or ("main",)
    )
    return PodView("team", named, uid, parts, live=live)
