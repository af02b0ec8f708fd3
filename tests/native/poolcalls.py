"""Stream-ordered allocations, pools, captures and graphs for clients, beside the calls of simclient."""

from __future__ import annotations

import ctypes as C
import os
from typing import Any

from simclient import MIB, call, i32, ok, out, ptr, sim_process_used, size_t, u64

STEP = 32 * MIB
DEVICE, HOST = 1, 2
PINNED, MANAGED = 1, 2
POSIX_FD = 1
RELEASE_THRESHOLD, RESERVED, USED = 4, 5, 7
GRAPH_USED, GRAPH_RESERVED = 0, 2
UPLOAD, AUTO_FREE = 2, 1


class Props(C.Structure):
    """CUmemPoolProps."""

    _fields_ = [
        ("type", i32),
        ("handle_types", i32),
        ("location", i32),
        ("id", i32),
        ("security", ptr),
        ("max_size", size_t),
        ("usage", C.c_ushort),
        ("reserved", C.c_ubyte * 54),
    ]


class AllocNode(C.Structure):
    """CUDA_MEM_ALLOC_NODE_PARAMS."""

    _fields_ = [
        ("props", Props),
        ("access", ptr),
        ("access_count", size_t),
        ("size", size_t),
        ("pointer", u64),
    ]


class InstantiateParams(C.Structure):
    _fields_ = [("flags", u64), ("stream", ptr), ("error_node", ptr), ("result", i32)]


_base: dict[int, int] = {}


def charged(index: int = 0) -> int:
    """Bytes of data that the region file says are charged on a device, by all processes."""
    from isolator import region

    found = region.read(os.environ["CUDA_DEVICE_MEMORY_SHARED_CACHE"]).devices
    return found[index].data if index < len(found) else 0


def refusals(index: int = 0) -> int:
    from isolator import region

    return region.read(os.environ["CUDA_DEVICE_MEMORY_SHARED_CACHE"]).devices[index].refused


def base(index: int = 0) -> None:
    """From here on `same` compares growth: contexts and streams are not what is tested."""
    _base[index] = sim_process_used(os.getpid(), index) - charged(index)


def same(index: int = 0) -> int:
    """Bytes charged as data, in MiB; they must be what the simulated driver really holds."""
    held = sim_process_used(os.getpid(), index) - _base[index]
    assert charged(index) == held, f"charged {charged(index) / MIB} MiB, held {held / MIB} MiB"
    return held // MIB


def stream(flags: int = 1) -> int:
    return int(ok(out(ptr, "cuStreamCreate", flags)))


def alloc_async(size: int, on: int | None = None, suffix: str = "") -> tuple[int, int]:
    return out(u64, "cuMemAllocAsync" + suffix, size, ptr(on))


def from_pool(size: int, pool: int, on: int | None = None, suffix: str = "") -> tuple[int, int]:
    return out(u64, "cuMemAllocFromPoolAsync" + suffix, size, ptr(pool), ptr(on))


def free_async(pointer: int, on: int | None = None, suffix: str = "") -> int:
    return call("cuMemFreeAsync" + suffix, pointer, ptr(on))


def sync(on: int | None = None) -> int:
    return call("cuStreamSynchronize", ptr(on))


def pool_create(
    device: int = 0, location: int = DEVICE, kind: int = PINNED, handles: int = 0, most: int = 0
) -> tuple[int, int]:
    props = Props(type=kind, location=location, id=device, handle_types=handles, max_size=most)
    return out(ptr, "cuMemPoolCreate", C.byref(props))


def pool_destroy(pool: int) -> int:
    return call("cuMemPoolDestroy", ptr(pool))


def trim(pool: int, keep: int = 0) -> int:
    return call("cuMemPoolTrimTo", ptr(pool), keep)


def default_pool(device: int = 0) -> int:
    return int(ok(out(ptr, "cuDeviceGetDefaultMemPool", device)))


def set_pool(device: int, pool: int) -> int:
    return call("cuDeviceSetMemPool", device, ptr(pool))


def threshold(pool: int, size: int) -> int:
    return call("cuMemPoolSetAttribute", ptr(pool), RELEASE_THRESHOLD, C.byref(u64(size)))


def attribute_of(pool: int, which: int = RESERVED) -> int:
    value = u64()
    ok(call("cuMemPoolGetAttribute", ptr(pool), which, C.byref(value)))
    return value.value


# --- captures and graphs


def capture_begin(on: int, mode: int = 0) -> int:
    return call("cuStreamBeginCapture_v2", ptr(on), mode)


def capture_end(on: int) -> tuple[int, int]:
    graph = ptr()
    return call("cuStreamEndCapture", ptr(on), C.byref(graph)), graph.value or 0


def graph_new() -> int:
    return int(ok(out(ptr, "cuGraphCreate", 0)))


def add_alloc(graph: int, size: int, after: int | None = None, device: int = 0) -> tuple[int, int, int]:
    """(result, node, pointer)."""
    params = AllocNode(size=size, props=Props(type=PINNED, location=DEVICE, id=device))
    node, before = ptr(), ptr(after)
    count = 1 if after else 0
    given = C.byref(before) if after else ptr(None)
    r = call("cuGraphAddMemAllocNode", C.byref(node), ptr(graph), given, count, C.byref(params))
    return r, node.value or 0, params.pointer


def add_free(graph: int, pointer: int, after: int) -> tuple[int, int]:
    before = ptr(after)
    return out(ptr, "cuGraphAddMemFreeNode", ptr(graph), C.byref(before), 1, pointer)


def graph_of(size: int, free: bool = True, device: int = 0) -> tuple[int, int]:
    """A graph of one allocation, freed inside or not; (graph, pointer)."""
    graph = graph_new()
    node, pointer = ok(add_alloc(graph, size, device=device))
    if free:
        ok(add_free(graph, pointer, node))
    return graph, pointer


def instantiate(graph: int, flags: int = 0) -> tuple[int, int]:
    return out(ptr, "cuGraphInstantiateWithFlags", ptr(graph), flags)


def launch(executable: int, on: int | None = None, suffix: str = "") -> int:
    return call("cuGraphLaunch" + suffix, ptr(executable), ptr(on))


def upload(executable: int, on: int | None = None, suffix: str = "") -> int:
    return call("cuGraphUpload" + suffix, ptr(executable), ptr(on))


def exec_destroy(executable: int) -> int:
    return call("cuGraphExecDestroy", ptr(executable))


def graph_trim(device: int = 0) -> int:
    return call("cuDeviceGraphMemTrim", device)


def graph_attribute(which: int = GRAPH_RESERVED, device: int = 0) -> int:
    value = u64()
    ok(call("cuDeviceGetGraphMemAttribute", device, which, C.byref(value)))
    return value.value


def each(count: int, act: Any) -> list[Any]:
    return [act(i) for i in range(count)]
