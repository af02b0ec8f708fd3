"""The driver through ctypes, for small tenants that say `from cuda import *`."""

from __future__ import annotations

import ctypes as C
import os
import sys
import time

MIB = 1 << 20
cu = C.CDLL("libcuda.so.1")


def start() -> int:
    """cuInit and a current primary context; the first code that is not 0."""
    device, context = C.c_int(), C.c_void_p()
    code = cu.cuInit(0) or cu.cuDeviceGet(C.byref(device), 0)
    code = code or cu.cuDevicePrimaryCtxRetain(C.byref(context), device)
    return code or cu.cuCtxSetCurrent(context)


def alloc(mib: int) -> int:
    """The code of cuMemAlloc."""
    return cu.cuMemAlloc_v2(C.byref(C.c_uint64()), C.c_size_t(mib * MIB))


def fill(step: int = 64, patience: float = 0.1) -> int:
    """MiB that could be had in steps, until refused for `patience` s: that long the dead may keep theirs."""
    got, last = 0, time.monotonic()
    while time.monotonic() - last <= patience:
        if alloc(step) == 0:
            got, last = got + step, time.monotonic()
    return got


def info() -> tuple[int, int]:
    """MiB used and in all, as cuMemGetInfo says."""
    free, total = C.c_size_t(), C.c_size_t()
    assert cu.cuMemGetInfo_v2(C.byref(free), C.byref(total)) == 0
    return (total.value - free.value) // MIB, total.value // MIB


def say(*what: object) -> None:
    """A line at once."""
    print(*what, flush=True)


def hold() -> None:
    """Waits for the end of standard input."""
    sys.stdin.read()


def in_child(work) -> int:
    """Runs it in a forked child; the child's exit status."""
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
