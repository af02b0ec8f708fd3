"""The larger families of calls for simclient: pools, mappings, sharing, arrays, modules, streams.

Programs import them through simclient. The conventions are the same: the raw result, or (result, value, ...).
"""

from __future__ import annotations

import ctypes as C

from simclient import call, i32, out, ptr, size_t, u32, u64

DEVICE, HOST = 1, 2  # CUmemLocationType
FD = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
STACK, FIFO, HEAP = 0, 1, 2  # CUlimit


# --- pools


class PoolProps(C.Structure):
    _fields_ = [
        ("type", u32),
        ("handles", u32),
        ("where", u32),
        ("id", i32),
        ("win32", ptr),
        ("max", size_t),
        ("usage", C.c_ushort),
        ("reserved", C.c_ubyte * 54),
    ]


def pool_create(dev: int = 0, handles: int = 0, where: int = DEVICE, max_size: int = 0) -> tuple[int, int]:
    props = PoolProps(type=1, handles=handles, where=where, id=dev, max=max_size)
    pool = ptr()
    return call("cuMemPoolCreate", C.byref(pool), C.byref(props)), pool.value or 0


def pool_destroy(pool: int) -> int:
    return call("cuMemPoolDestroy", ptr(pool))


def pool_trim(pool: int, keep: int = 0) -> int:
    return call("cuMemPoolTrimTo", ptr(pool), keep)


def pool_attr(pool: int, name: str) -> tuple[int, int]:
    """threshold, reserved, reserved_high, used or used_high."""
    which = ("threshold", "reserved", "reserved_high", "used", "used_high").index(name) + 4
    v = u64()
    return call("cuMemPoolGetAttribute", ptr(pool), u32(which), C.byref(v)), v.value


def pool_threshold(pool: int, value: int) -> int:
    return call("cuMemPoolSetAttribute", ptr(pool), u32(4), C.byref(u64(value)))


def default_pool(dev: int = 0) -> tuple[int, int]:
    return out(ptr, "cuDeviceGetDefaultMemPool", dev)


def current_pool(dev: int = 0) -> tuple[int, int]:
    return out(ptr, "cuDeviceGetMemPool", dev)


def set_pool(pool: int, dev: int = 0) -> int:
    return call("cuDeviceSetMemPool", dev, ptr(pool))


def alloc_async(size: int, stream: int = 0) -> tuple[int, int]:
    return out(u64, "cuMemAllocAsync", size, ptr(stream))


def alloc_from(pool: int, size: int, stream: int = 0) -> tuple[int, int]:
    return out(u64, "cuMemAllocFromPoolAsync", size, ptr(pool), ptr(stream))


def free_async(p: int, stream: int = 0) -> int:
    return call("cuMemFreeAsync", p, ptr(stream))


# --- streams and events


def stream_create(flags: int = 1) -> tuple[int, int]:
    return out(ptr, "cuStreamCreate", flags)


def stream_destroy(stream: int) -> int:
    return call("cuStreamDestroy_v2", ptr(stream))


def stream_sync(stream: int = 0) -> int:
    return call("cuStreamSynchronize", ptr(stream))


def capture_begin(stream: int, mode: int = 0) -> int:
    return call("cuStreamBeginCapture_v2", ptr(stream), mode)


def capture_end(stream: int) -> tuple[int, int]:
    return out(ptr, "cuStreamEndCapture", ptr(stream), first=False)


def capture_status(stream: int) -> tuple[int, int]:
    return out(i32, "cuStreamIsCapturing", ptr(stream), first=False)


# --- mappings


class AllocProp(C.Structure):
    _fields_ = [
        ("type", u32),
        ("handles", u32),
        ("where", u32),
        ("id", i32),
        ("win32", ptr),
        ("flags", C.c_ubyte * 8),
    ]


def mem_create(size: int, dev: int = 0, handles: int = 0, where: int = DEVICE) -> tuple[int, int]:
    prop = AllocProp(type=1, handles=handles, where=where, id=dev)
    h = u64()
    return call("cuMemCreate", C.byref(h), size, C.byref(prop), 0), h.value


def mem_release(handle: int) -> int:
    return call("cuMemRelease", handle)


def reserve(size: int) -> tuple[int, int]:
    return out(u64, "cuMemAddressReserve", size, 0, 0, 0)


def address_free(p: int, size: int) -> int:
    return call("cuMemAddressFree", p, size)


def mem_map(p: int, size: int, handle: int, offset: int = 0) -> int:
    return call("cuMemMap", p, size, offset, handle, 0)


def mem_unmap(p: int, size: int) -> int:
    return call("cuMemUnmap", p, size)


def mem_retain(p: int) -> tuple[int, int]:
    return out(u64, "cuMemRetainAllocationHandle", p)


def export_fd(handle: int) -> tuple[int, int]:
    fd = i32(-1)
    return call("cuMemExportToShareableHandle", C.byref(fd), handle, u32(FD), 0), fd.value


def import_fd(fd: int) -> tuple[int, int]:
    h = u64()
    return call("cuMemImportFromShareableHandle", C.byref(h), ptr(fd), u32(FD)), h.value


def pool_export(pool: int) -> tuple[int, int]:
    fd = i32(-1)
    return call("cuMemPoolExportToShareableHandle", C.byref(fd), ptr(pool), u32(FD), 0), fd.value


def pool_import(fd: int) -> tuple[int, int]:
    pool = ptr()
    return call("cuMemPoolImportFromShareableHandle", C.byref(pool), ptr(fd), u32(FD), 0), pool.value or 0


def pointer_export(p: int) -> tuple[int, bytes]:
    data = C.create_string_buffer(64)
    return call("cuMemPoolExportPointer", data, p), data.raw


def pointer_import(pool: int, data: bytes) -> tuple[int, int]:
    return out(u64, "cuMemPoolImportPointer", ptr(pool), C.create_string_buffer(data, 64))


class IpcHandle(C.Structure):
    _fields_ = [("raw", C.c_ubyte * 64)]


def ipc_get(p: int) -> tuple[int, bytes]:
    h = IpcHandle()
    return call("cuIpcGetMemHandle", C.byref(h), p), bytes(h.raw)


def ipc_open(raw: bytes) -> tuple[int, int]:
    h, p = IpcHandle((C.c_ubyte * 64)(*raw)), u64()
    return call("cuIpcOpenMemHandle_v2", C.byref(p), h, u32(1)), p.value


def ipc_close(p: int) -> int:
    return call("cuIpcCloseMemHandle", p)


# --- arrays


class Array3D(C.Structure):
    _fields_ = [
        ("width", size_t),
        ("height", size_t),
        ("depth", size_t),
        ("format", u32),
        ("channels", u32),
        ("flags", u32),
    ]


def array3d(w: int, h: int = 0, d: int = 0, fmt: int = 0x20, ch: int = 1, flags: int = 0) -> tuple[int, int]:
    return out(ptr, "cuArray3DCreate_v2", C.byref(Array3D(w, h, d, fmt, ch, flags)))


def array_destroy(a: int) -> int:
    return call("cuArrayDestroy", ptr(a))


def mipmap(
    w: int, h: int, d: int, levels: int, fmt: int = 0x20, ch: int = 1, flags: int = 0
) -> tuple[int, int]:
    return out(ptr, "cuMipmappedArrayCreate", C.byref(Array3D(w, h, d, fmt, ch, flags)), levels)


def mipmap_destroy(m: int) -> int:
    return call("cuMipmappedArrayDestroy", ptr(m))


# --- modules and launches


def image(*lines: str) -> bytes:
    """A simulated image: image("kernel k local=4096", "global g 1048576")."""
    return "\n".join(("//simgpu", *lines, "")).encode()


def module_load(data: bytes) -> tuple[int, int]:
    return out(ptr, "cuModuleLoadData", C.c_char_p(data))


def module_unload(m: int) -> int:
    return call("cuModuleUnload", ptr(m))


def function(m: int, name: str) -> tuple[int, int]:
    return out(ptr, "cuModuleGetFunction", ptr(m), name.encode())


def module_global(m: int, name: str) -> tuple[int, int, int]:
    p, n = u64(), size_t()
    return call("cuModuleGetGlobal_v2", C.byref(p), C.byref(n), ptr(m), name.encode()), p.value, n.value


def library_load(data: bytes) -> tuple[int, int]:
    none = ptr(None)
    return out(ptr, "cuLibraryLoadData", C.c_char_p(data), none, none, u32(0), none, none, u32(0))


def library_unload(lib: int) -> int:
    return call("cuLibraryUnload", ptr(lib))


def kernel(lib: int, name: str) -> tuple[int, int]:
    return out(ptr, "cuLibraryGetKernel", ptr(lib), name.encode())


def launch(f: int, stream: int = 0, grid: int = 1, block: int = 32) -> int:
    one, none = u32(1), ptr(None)
    return call(
        "cuLaunchKernel", ptr(f), u32(grid), one, one, u32(block), one, one, u32(0), ptr(stream), none, none
    )
