"""ctypes client of the CUDA driver and NVML, for tests that run in processes of their own.

Every call returns the raw result as an int, or (result, value, ...) when it has outputs; `ok()` unwraps
such an answer and raises on a failure. Works on the simulated GPU and on a real one: libraries come from
the loader's path.

    from simclient import *
    init(0)                      # cuInit, primary context of device 0 made current
    p = ok(alloc(3 << 20))       # -> pointer; CudaError on failure
    expect(2, alloc(1 << 60))    # AssertionError unless the result is 2
    ok(free(p))

Pools, mappings, arrays, modules, streams and graphs are in simclient_calls and come with this module.
"""

from __future__ import annotations

import ctypes as C
from typing import Any

MIB = 1 << 20
GIB = 1 << 30
SUCCESS, INVALID_VALUE, OOM, NOT_INITIALIZED = 0, 1, 2, 3
NO_DEVICE, INVALID_DEVICE, INVALID_CONTEXT, NOT_FOUND = 100, 101, 201, 500
NOT_PERMITTED, NOT_SUPPORTED = 800, 801

u32, i32, u64, size_t, ptr = C.c_uint, C.c_int, C.c_uint64, C.c_size_t, C.c_void_p

cu = C.CDLL("libcuda.so.1")


class CudaError(RuntimeError):
    """A driver call failed; `.code` is the CUresult."""

    def __init__(self, code: int, what: str = "") -> None:
        super().__init__(f"CUDA error {code} {what}".strip())
        self.code = code


def call(name: str, *args: Any) -> int:
    """Calls an exported driver function; ints are passed as 64-bit, byref() and ctypes values as they are."""
    fn = getattr(cu, name)
    return int(fn(*(C.c_uint64(a) if isinstance(a, int) and not isinstance(a, bool) else a for a in args)))


def ok(answer: Any) -> Any:
    """The value of an answer (None, one value or a tuple); raises CudaError if the call failed."""
    if isinstance(answer, int):
        if answer:
            raise CudaError(answer)
        return None
    if answer[0]:
        raise CudaError(answer[0])
    return answer[1] if len(answer) == 2 else answer[1:]


def expect(result: int, answer: Any) -> None:
    """Asserts the raw result of an answer."""
    got = answer if isinstance(answer, int) else answer[0]
    assert got == result, f"expected result {result}, got {got}"


def out(kind: Any, name: str, *args: Any, first: bool = True) -> tuple[int, Any]:
    """Calls `name` with one output before (or after) the other arguments."""
    v = kind()
    given = (C.byref(v), *args) if first else (*args, C.byref(v))
    return call(name, *given), v.value


def has(name: str) -> bool:
    """Whether dlsym finds the name."""
    return hasattr(cu, name)


# --- start and contexts


def cu_init(flags: int = 0) -> int:
    return call("cuInit", flags)


def retain(dev: int = 0) -> tuple[int, int]:
    return out(ptr, "cuDevicePrimaryCtxRetain", dev)


def set_current(ctx: int | None) -> int:
    return call("cuCtxSetCurrent", ptr(ctx))


def init(dev: int = 0) -> int:
    """cuInit, then the primary context of `dev` is retained and made current; returns the context."""
    ok(cu_init())
    ctx = ok(retain(dev))
    ok(set_current(ctx))
    return int(ctx)


def release(dev: int = 0) -> int:
    return call("cuDevicePrimaryCtxRelease_v2", dev)


def ctx_create(dev: int = 0, flags: int = 0, version: str = "_v2") -> tuple[int, int]:
    """cuCtxCreate of version "" (v1), "_v2", "_v3" or "_v4"."""
    extra = {"": (), "_v2": (), "_v3": (ptr(None), 0), "_v4": (ptr(None),)}[version]
    return out(ptr, "cuCtxCreate" + version, *extra, flags, dev)


def ctx_destroy(ctx: int) -> int:
    return call("cuCtxDestroy_v2", ptr(ctx))


def current() -> tuple[int, int]:
    return out(ptr, "cuCtxGetCurrent")


def ctx_device() -> tuple[int, int]:
    return out(i32, "cuCtxGetDevice")


def set_limit(limit: int, value: int) -> int:
    return call("cuCtxSetLimit", limit, value)


def synchronize() -> int:
    return call("cuCtxSynchronize")


# --- devices


def device_count() -> tuple[int, int]:
    return out(i32, "cuDeviceGetCount")


def total_mem(dev: int = 0) -> tuple[int, int]:
    return out(size_t, "cuDeviceTotalMem_v2", dev)


def device_name(dev: int = 0) -> str:
    buf = C.create_string_buffer(128)
    ok(call("cuDeviceGetName", buf, 128, dev))
    return buf.value.decode()


def device_uuid(dev: int = 0) -> str:
    """The UUID's 32 hex digits."""
    buf = C.create_string_buffer(16)
    ok(call("cuDeviceGetUuid_v2", buf, dev))
    return buf.raw.hex()


def attribute(attr: int, dev: int = 0) -> tuple[int, int]:
    return out(i32, "cuDeviceGetAttribute", attr, dev)


def mem_info() -> tuple[int, int, int]:
    """(result, free, total)."""
    f, t = size_t(), size_t()
    r = call("cuMemGetInfo_v2", C.byref(f), C.byref(t))
    return r, f.value, t.value


# --- memory


def alloc(size: int) -> tuple[int, int]:
    return out(u64, "cuMemAlloc_v2", size)


def free(p: int) -> int:
    return call("cuMemFree_v2", p)


def alloc_pitch(width: int, height: int, element: int = 4) -> tuple[int, int, int]:
    """(result, pointer, pitch)."""
    p, pitch = u64(), size_t()
    r = call("cuMemAllocPitch_v2", C.byref(p), C.byref(pitch), width, height, element)
    return r, p.value, pitch.value


def address_range(p: int) -> tuple[int, int, int]:
    """(result, base, size)."""
    b, s = u64(), size_t()
    r = call("cuMemGetAddressRange_v2", C.byref(b), C.byref(s), p)
    return r, b.value, s.value


def proc_address(name: str, version: int = 13000, flags: int = 0) -> tuple[int, int | None, int]:
    """(result, address, status) of cuGetProcAddress_v2."""
    p, status = ptr(), i32()
    r = call("cuGetProcAddress_v2", name.encode(), C.byref(p), version, flags, C.byref(status))
    return r, p.value, status.value


def dlsym_address(name: str) -> int | None:
    """What dlsym on the driver's handle answers."""
    return C.cast(getattr(cu, name), ptr).value if has(name) else None


# --- NVML (loaded on first use)


class Memory(C.Structure):
    _fields_ = [("total", u64), ("free", u64), ("used", u64)]


class Memory2(C.Structure):
    _fields_ = [("version", u32), ("total", u64), ("reserved", u64), ("free", u64), ("used", u64)]


class ProcessInfo(C.Structure):
    _fields_ = [("pid", u32), ("bytes", u64), ("gpu_instance", u32), ("compute_instance", u32)]


_nvml: C.CDLL | None = None


def nvml() -> C.CDLL:
    """The library, initialised."""
    global _nvml
    if _nvml is None:
        _nvml = C.CDLL("libnvidia-ml.so.1")
        ok(_nvml.nvmlInit_v2())
    return _nvml


def nvml_handle(index: int = 0) -> C.c_void_p:
    h = ptr()
    ok(nvml().nvmlDeviceGetHandleByIndex_v2(u32(index), C.byref(h)))
    return h


def nvml_memory(index: int = 0, handle: Any = None) -> tuple[int, int, int, int]:
    """(result, total, free, used) of nvmlDeviceGetMemoryInfo; used includes the reserved part."""
    m = Memory()
    r = nvml().nvmlDeviceGetMemoryInfo(handle or nvml_handle(index), C.byref(m))
    return r, m.total, m.free, m.used


def nvml_memory_v2(index: int = 0, handle: Any = None) -> tuple[int, Memory2]:
    m = Memory2(version=C.sizeof(Memory2) | 2 << 24)
    return nvml().nvmlDeviceGetMemoryInfo_v2(handle or nvml_handle(index), C.byref(m)), m


def nvml_processes(index: int = 0, handle: Any = None) -> dict[int, int]:
    """pid -> bytes, by nvmlDeviceGetComputeRunningProcesses_v3."""
    infos, n = (ProcessInfo * 1024)(), u32(1024)
    ok(nvml().nvmlDeviceGetComputeRunningProcesses_v3(handle or nvml_handle(index), C.byref(n), infos))
    return {p.pid: p.bytes for p in infos[: n.value]}


def nvml_uuid(index: int = 0, handle: Any = None) -> str:
    buf = C.create_string_buffer(96)
    ok(nvml().nvmlDeviceGetUUID(handle or nvml_handle(index), buf, u32(96)))
    return buf.value.decode()


# --- the simulator's truth (not on a real GPU)


def sim_device_used(index: int = 0) -> int:
    cu.simgpu_device_used.restype = u64
    return int(cu.simgpu_device_used(index))


def sim_process_used(pid: int, index: int = 0) -> int:
    cu.simgpu_process_used.restype = u64
    return int(cu.simgpu_process_used(pid, index))


def sim_live_objects() -> int:
    cu.simgpu_live_objects.restype = C.c_long
    return int(cu.simgpu_live_objects())


from simclient_calls import *  # noqa: E402, F403  (needs the names above)
from simclient_graphs import *  # noqa: E402, F403
