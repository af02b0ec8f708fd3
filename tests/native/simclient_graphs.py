"""Graph calls for simclient, which imports them. The conventions are the same."""

from __future__ import annotations

import ctypes as C
from typing import Any

from simclient import call, out, ptr, size_t, u32, u64
from simclient_calls import DEVICE, PoolProps


class AllocNode(C.Structure):
    _fields_ = [("props", PoolProps), ("access", ptr), ("n", size_t), ("bytes", size_t), ("p", u64)]


def graph_create() -> tuple[int, int]:
    return out(ptr, "cuGraphCreate", 0)


def _deps(deps: tuple[int, ...]) -> tuple[Any, int]:
    return (ptr * max(len(deps), 1))(*deps), len(deps)


def graph_alloc(g: int, size: int, *deps: int, dev: int = 0) -> tuple[int, int, int]:
    """(result, node, pointer)."""
    node, p = ptr(), AllocNode(props=PoolProps(type=1, where=DEVICE, id=dev), bytes=size)
    r = call("cuGraphAddMemAllocNode", C.byref(node), ptr(g), *_deps(deps), C.byref(p))
    return r, node.value or 0, p.p


def graph_free(g: int, p: int, *deps: int) -> tuple[int, int]:
    return out(ptr, "cuGraphAddMemFreeNode", ptr(g), *_deps(deps), p)


def graph_instantiate(g: int, flags: int = 0) -> tuple[int, int]:
    return out(ptr, "cuGraphInstantiateWithFlags", ptr(g), flags)


def graph_launch(e: int, stream: int = 0) -> int:
    return call("cuGraphLaunch", ptr(e), ptr(stream))


def graph_upload(e: int, stream: int = 0) -> int:
    return call("cuGraphUpload", ptr(e), ptr(stream))


def graph_destroy(g: int) -> int:
    return call("cuGraphDestroy", ptr(g))


def exec_destroy(e: int) -> int:
    return call("cuGraphExecDestroy", ptr(e))


def graph_trim(dev: int = 0) -> int:
    return call("cuDeviceGraphMemTrim", dev)


def graph_reserved(dev: int = 0) -> tuple[int, int]:
    v = u64()
    return call("cuDeviceGetGraphMemAttribute", dev, u32(2), C.byref(v)), v.value
