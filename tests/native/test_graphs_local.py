"""Local memory of kernels in graphs, and graphs when a driver call fails, on the simulated GPU."""

from __future__ import annotations

import pytest
from conftest import RunClient, SimEnv

USE = """
import ctypes as C, os
from simclient import *
from poolcalls import *

class Kernel(C.Structure):
    _fields_ = [("func", ptr), ("dims", u32 * 6), ("shared", u32), ("params", ptr), ("extra", ptr),
                ("kern", ptr), ("ctx", ptr)]

class Node(C.Structure):
    _fields_ = [("type", i32), ("reserved", i32 * 3), ("kernel", Kernel), ("rest", C.c_ubyte * 256)]

def kernel(function):
    return Kernel(func=function, dims=(u32 * 6)(*[1] * 6))

def add_kernel(graph, function):
    k = kernel(function)
    node = ptr()
    ok(call("cuGraphAddKernelNode_v2", C.byref(node), ptr(graph), ptr(None), 0, C.byref(k)))
    return node.value

def figures():
    result, left, total = mem_info()
    return (total - left) // MIB, sim_process_used(os.getpid()) // MIB

def equal():
    charged_now, held = figures()
    assert charged_now == held, (charged_now, held)
    return held

ctx = init(0)
image = C.create_string_buffer(
    b"//simgpu\\nkernel small local=0\\nkernel big local=4096\\nkernel huge local=262144\\n")
module = ok(out(ptr, "cuModuleLoadData", image))
small, big, huge = [ok(out(ptr, "cuModuleGetFunction", ptr(module), n)) for n in (b"small", b"big", b"huge")]
start = equal()
"""


def _run(run_client: RunClient, env: dict[str, str], code: str) -> None:
    done = run_client(USE + code, env)
    assert done.stderr == ""


@pytest.mark.parametrize("child", [False, True])
def test_a_graph_takes_local_memory_when_instantiated(
    sim_env: SimEnv, run_client: RunClient, child: bool
) -> None:
    """The largest kernel's local memory is charged at instantiation, in a child graph too, once (B183)."""
    code = f"""
g = graph_new()
add_kernel(g, small); add_kernel(g, big)
if {child}:
    inner, g = g, graph_new()
    ok(call("cuGraphAddChildGraphNode", C.byref(ptr()), ptr(g), ptr(None), 0, ptr(inner)))
e = ok(instantiate(g))
grown = equal() - start
assert 100 < grown < 140, grown
ok(launch(e)); ok(synchronize())
again = ok(instantiate(g)) if not {child} else e
assert equal() - start == grown
assert refusals() == 0
"""
    _run(run_client, sim_env(preload=True, limit="2g"), code)


def test_a_graph_whose_local_memory_does_not_fit_is_refused(sim_env: SimEnv, run_client: RunClient) -> None:
    """Instantiation and change of a node are refused where local memory passes the limit (B183)."""
    code = """
g = graph_new()
add_kernel(g, huge)
e = ptr(7)
assert call("cuGraphInstantiateWithFlags", C.byref(e), ptr(g), 0) == OOM and e.value == 7
assert equal() == start
g = graph_new()
node = add_kernel(g, small)
e = ok(instantiate(g))
k = kernel(huge)
assert call("cuGraphExecKernelNodeSetParams_v2", ptr(e), ptr(node), C.byref(k)) == OOM
assert call("cuGraphExecKernelNodeSetParams", ptr(e), ptr(node), C.byref(k)) == OOM
n = Node(kernel=k)
assert call("cuGraphExecNodeSetParams", ptr(e), ptr(node), C.byref(n)) == OOM
assert equal() == start
ok(launch(e))
k = kernel(big)
ok(call("cuGraphExecKernelNodeSetParams_v2", ptr(e), ptr(node), C.byref(k)))
assert 100 < equal() - start < 140
"""
    _run(run_client, sim_env(preload=True, limit="2g"), code)


def test_an_updated_graph_takes_local_memory_at_its_launch(sim_env: SimEnv, run_client: RunClient) -> None:
    """A graph updated to a larger kernel is charged, and refused, when it is launched (B183)."""
    code = """
def single(function):
    g = graph_new()
    add_kernel(g, function)
    return g
e = ok(instantiate(single(small)))
info = (u64 * 3)()
ok(call("cuGraphExecUpdate_v2", ptr(e), ptr(single(big)), C.byref(info)))
ok(launch(e)); ok(synchronize())
assert 100 < equal() - start < 140
ok(set_limit(0, 1024))
assert equal() == start
ok(launch(e))
assert 100 < equal() - start < 140
ok(call("cuGraphExecUpdate_v2", ptr(e), ptr(single(huge)), C.byref(info)))
held = equal()
assert launch(e) == OOM and equal() == held
"""
    _run(run_client, sim_env(preload=True, limit="2g"), code)


ASKED = [
    "cuGraphGetNodes",
    "cuGraphNodeGetType",
    "cuGraphMemAllocNodeGetParams",
    "cuGraphKernelNodeGetParams_v2",
    "cuDeviceGetGraphMemAttribute",
    "cuGraphInstantiateWithFlags",
    "cuGraphUpload",
    "cuGraphLaunch",
    "cuGraphExecDestroy",
    "cuDeviceGraphMemTrim",
]


@pytest.mark.parametrize("nth", [1, 2, 3, "*"])
@pytest.mark.parametrize("name", ASKED)
def test_a_failing_call_leaves_no_graph_memory_uncounted(
    sim_env: SimEnv, run_client: RunClient, name: str, nth: int | str
) -> None:
    """Each driver call of a graph body fails in turn: what the graphs hold is charged (B046)."""
    code = """
def used():
    result, left, total = mem_info()
    return total - left
seen = {0}
def noted(answer):
    seen.add(answer if isinstance(answer, int) else answer[0])
    return answer
for size in (100, 300, 600, 3000):
    g, at = graph_of(size * MIB)
    add_kernel(g, small)
    result, e = noted(instantiate(g))
    if result == 0:
        noted(launch(e)); noted(upload(e)); noted(launch(e))
        noted(exec_destroy(e))
        assert blind or sim_process_used(os.getpid()) <= used() + 2 * MIB
noted(graph_trim())
assert seen <= {0, 2, 999}, seen
for _ in range(2):
    held, counted = sim_process_used(os.getpid()), used()
assert blind or held <= counted + 2 * MIB and counted - held < 4 * MIB, (held, counted)
"""
    env = sim_env(preload=True, limit="1g", SIMGPU_FAULTS=f"{name}:{nth}:999")
    # Where the driver never tells what graphs hold, the nodes' sizes stay charged.
    blind = nth == "*" and name == "cuDeviceGetGraphMemAttribute"
    _run(run_client, env, f"blind = {blind}" + code)
