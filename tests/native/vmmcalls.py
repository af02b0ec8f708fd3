"""Calls of virtual memory management, arrays and imports for clients, beside those of simclient."""

from __future__ import annotations

import ctypes as C
import os
from typing import Any

from simclient import MIB, call, i32, mem_info, ok, out, ptr, sim_process_used, size_t, u32, u64

DEVICE, HOST, HOST_NUMA = 1, 2, 3
POSIX_FD = 1
LAYERED, CUBEMAP, SPARSE, DEFERRED = 1, 4, 0x40, 0x80
UINT8, HALF, FLOAT, BC1 = 1, 0x10, 0x20, 0x91


class Prop(C.Structure):
    _fields_ = [
        ("type", i32),
        ("handle_types", i32),
        ("location", i32),
        ("id", i32),
        ("win32", ptr),
        ("flags", C.c_ubyte * 8),
    ]


class Descriptor(C.Structure):
    _fields_ = [("width", size_t), ("height", size_t), ("format", i32), ("channels", u32)]


class Descriptor3(C.Structure):
    _fields_ = [
        ("width", size_t),
        ("height", size_t),
        ("depth", size_t),
        ("format", i32),
        ("channels", u32),
        ("flags", u32),
    ]


class Descriptor3v1(C.Structure):
    _fields_ = [
        ("width", u32),
        ("height", u32),
        ("depth", u32),
        ("format", i32),
        ("channels", u32),
        ("flags", u32),
    ]


class External(C.Structure):
    _fields_ = [
        ("type", i32),
        ("padding", i32),
        ("fd", i32),
        ("rest", C.c_ubyte * 12),
        ("size", C.c_ulonglong),
        ("flags", u32),
        ("reserved", u32 * 16),
    ]


class MapInfo(C.Structure):
    """CUarrayMapInfo with the sparse-level form of the subresource."""

    _fields_ = [
        ("resource_type", i32),
        ("resource", u64),
        ("subresource_type", i32),
        ("padding", i32),
        ("level", u32),
        ("layer", u32),
        ("x", u32),
        ("y", u32),
        ("z", u32),
        ("width", u32),
        ("height", u32),
        ("depth", u32),
        ("operation", i32),
        ("handle_type", i32),
        ("handle", u64),
        ("offset", u64),
        ("devices", u32),
        ("flags", u32),
        ("reserved", u32 * 2),
    ]


class McProp(C.Structure):
    _fields_ = [("devices", u32), ("size", size_t), ("handle_types", u64), ("flags", u64)]


def used() -> int:
    """What the quota counts for this container on the current context's device."""
    free, total = ok(mem_info())
    return int(total - free)


def truth(index: int = 0) -> int:
    """What the simulated driver holds for this process."""
    return sim_process_used(os.getpid(), index)


def same(index: int = 0) -> int:
    """The quota's figure, which must be the driver's."""
    assert used() == truth(index), (used() / MIB, truth(index) / MIB)
    return used()


def create(size: int, location: int = DEVICE, dev: int = 0, share: bool = False) -> tuple[int, int]:
    prop = Prop(type=1, location=location, id=dev, handle_types=POSIX_FD if share else 0)
    return out(u64, "cuMemCreate", size, C.byref(prop), 0)


def reserve(size: int) -> tuple[int, int]:
    return out(u64, "cuMemAddressReserve", size, 0, 0, 0)


def map_at(address: int, size: int, handle: int) -> int:
    return call("cuMemMap", address, size, 0, handle, 0)


def unmap(address: int, size: int) -> int:
    return call("cuMemUnmap", address, size)


def release_handle(handle: int) -> int:
    return call("cuMemRelease", handle)


def retain_handle(address: int) -> tuple[int, int]:
    return out(u64, "cuMemRetainAllocationHandle", address)


def export_fd(handle: int) -> tuple[int, int]:
    return out(i32, "cuMemExportToShareableHandle", handle, POSIX_FD, 0)


def import_fd(fd: int) -> tuple[int, int]:
    return out(u64, "cuMemImportFromShareableHandle", ptr(fd), POSIX_FD)


def array(width: int, height: int = 0, kind: int = FLOAT, channels: int = 1) -> tuple[int, int]:
    return out(ptr, "cuArrayCreate_v2", C.byref(Descriptor(width, height, kind, channels)))


def array3(w: int, h: int, d: int, flags: int = 0, kind: int = FLOAT, channels: int = 1) -> tuple[int, int]:
    return out(ptr, "cuArray3DCreate_v2", C.byref(Descriptor3(w, h, d, kind, channels, flags)))


def array_destroy(handle: int) -> int:
    return call("cuArrayDestroy", ptr(handle))


def mipmap(w: int, h: int, levels: int, d: int = 0, flags: int = 0, kind: int = FLOAT) -> tuple[int, int]:
    return out(
        ptr, "cuMipmappedArrayCreate", C.byref(Descriptor3(w, h, d, kind, 1, flags)), levels, first=True
    )


def mipmap_destroy(handle: int) -> int:
    return call("cuMipmappedArrayDestroy", ptr(handle))


def import_external(fd: int, size: int) -> tuple[int, int]:
    return out(ptr, "cuImportExternalMemory", C.byref(External(type=1, fd=fd, size=size)))


def destroy_external(handle: int) -> int:
    return call("cuDestroyExternalMemory", ptr(handle))


def map_tile(resource: int, x: int, handle: int, suffix: str = "") -> int:
    """Maps a tile at column `x`; handle 0 unmaps it."""
    info = MapInfo(resource=resource, x=x, width=64, height=64, depth=1, devices=1, handle=handle)
    info.operation = 1 if handle else 2
    return call("cuMemMapArrayAsync" + suffix, C.byref(info), 1, ptr(None))


def multicast(size: int, devices: int = 1) -> tuple[int, int]:
    return out(u64, "cuMulticastCreate", C.byref(McProp(devices=devices, size=size)))


def fault(spec: str) -> dict[str, Any]:
    """Environment that makes a driver call fail."""
    return {"SIMGPU_FAULTS": spec}
