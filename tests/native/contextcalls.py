"""What tests of contexts, images and launches share: the quota against the simulator's truth."""

from __future__ import annotations

import threading
from collections.abc import Callable

from simclient import (
    C,
    call,
    cu_init,
    nvml_memory,
    ok,
    out,
    ptr,
    sim_device_used,
    size_t,
)

STACK, FIFO, HEAP = 0, 1, 2


def used(index: int = 0) -> int:
    """Bytes that the container is charged on a device, as NVML shows them."""
    return int(nvml_memory(index)[3])


def same(index: int = 0) -> int:
    """The charge, which must be what the simulated device really holds."""
    charged, truth = used(index), sim_device_used(index)
    assert charged == truth, f"charged {charged}, device holds {truth}"
    return charged


def start() -> None:
    """cuInit without a context."""
    ok(cu_init())


def reset(dev: int = 0) -> int:
    return call("cuDevicePrimaryCtxReset_v2", dev)


def is_active(dev: int = 0) -> bool:
    flags, active = C.c_uint(), C.c_int()
    ok(call("cuDevicePrimaryCtxGetState", dev, C.byref(flags), C.byref(active)))
    return bool(active.value)


def limit(which: int) -> int:
    return int(ok(out(size_t, "cuCtxGetLimit", which)))


def stream_create(flags: int = 0) -> tuple[int, int]:
    return out(ptr, "cuStreamCreate", flags)


def stream_destroy(stream: int) -> int:
    return call("cuStreamDestroy_v2", ptr(stream))


def together(count: int, work: Callable[[int], None]) -> None:
    """Runs `work(i)` in `count` threads that start at once; the first failure is raised."""
    barrier, failures = threading.Barrier(count), []

    def one(i: int) -> None:
        try:
            barrier.wait()
            work(i)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


# --- images and launches; an image of the simulator is text: "global x 67108864", "kernel k local=4096"


def image(*lines: str) -> C.c_char_p:
    return C.c_char_p(("//simgpu\n" + "\n".join(lines) + "\n").encode())


def module_load(source: C.c_char_p) -> tuple[int, int]:
    return out(ptr, "cuModuleLoadData", source)


def module_unload(module: int) -> int:
    return call("cuModuleUnload", ptr(module))


def function(module: int, name: str) -> tuple[int, int]:
    return out(ptr, "cuModuleGetFunction", ptr(module), C.c_char_p(name.encode()))


def library_load(source: C.c_char_p) -> tuple[int, int]:
    nothing = ptr(None)
    return out(ptr, "cuLibraryLoadData", source, nothing, nothing, 0, nothing, nothing, 0)


def library_unload(library: int) -> int:
    return call("cuLibraryUnload", ptr(library))


def kernel(library: int, name: str) -> tuple[int, int]:
    return out(ptr, "cuLibraryGetKernel", ptr(library), C.c_char_p(name.encode()))


def kernel_function(handle: int) -> tuple[int, int]:
    return out(ptr, "cuKernelGetFunction", ptr(handle))


def library_global(library: int, name: str) -> tuple[int, int]:
    return out(C.c_uint64, "cuLibraryGetGlobal", ptr(None), ptr(library), C.c_char_p(name.encode()))


def launch(handle: int, stream: int = 0, symbol: str = "cuLaunchKernel") -> int:
    sizes = (C.c_uint(1),) * 6
    more = (ptr(None), ptr(None)) if "Cooperative" not in symbol else (ptr(None),)
    return call(symbol, ptr(handle), *sizes, C.c_uint(0), ptr(stream), *more)
