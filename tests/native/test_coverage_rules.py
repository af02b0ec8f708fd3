"""The rules by which functions with a memory effect are passed on, each against the driver's own figure.

`charged` in a client is what the quota holds, `held` what the simulated driver holds for it: a rule that lets
memory through unseen fails here.
"""

from __future__ import annotations

import pytest
from conftest import ROOT, RunClient, SimEnv

START = """
from simclient import *
import os
init(0)
def charged():
    return nvml_memory()[3]
def held():
    return sim_process_used(os.getpid())
def unchanged(what, call):
    before = charged(), held()
    call()
    assert (charged(), held()) == before, (what, before, (charged(), held()))
"""


def _run(run_client: RunClient, env: dict[str, str], code: str) -> str:
    done = run_client(START + code, env)
    assert done.stderr == ""
    return done.stdout


GRAPHS = """
class PoolProps(C.Structure):
    _fields_ = [("type", u32), ("handles", u32), ("location", u32), ("device", u32), ("security", ptr),
                ("size", size_t), ("usage", C.c_ushort), ("reserved", C.c_ubyte * 54)]
class AllocNode(C.Structure):
    _fields_ = [("pool", PoolProps), ("access", ptr), ("accesses", size_t), ("bytes", size_t), ("at", u64)]
graph, node, instance, stream, child = ptr(), ptr(), ptr(), ptr(), ptr()
ok(call("cuStreamCreate", C.byref(stream), u32(1)))
def launch():
    ok(call("cuGraphLaunch", instance, stream))
    ok(call("cuStreamSynchronize", stream))
"""

CASES = {
    "node": """
ok(call("cuGraphCreate", C.byref(graph), u32(0)))
p = AllocNode(pool=PoolProps(type=1, location=1), bytes=300 << 20)
add = C.byref(node), graph, None, size_t(0), C.byref(p)
unchanged("add", lambda: ok(call("cuGraphAddMemAllocNode", *add)))
""",
    "capture": """
p = u64()
def capture():
    ok(call("cuStreamBeginCapture_v2", stream, u32(2)))
    ok(call("cuMemAllocAsync", C.byref(p), size_t(300 << 20), stream))
    ok(call("cuStreamEndCapture", stream, C.byref(graph)))
unchanged("capture", capture)
""",
}


@pytest.mark.parametrize("case", CASES)
def test_memory_nodes_and_captures_are_charged_at_the_launch(
    sim_env: SimEnv, run_client: RunClient, case: str
) -> None:
    """Adding, capturing and instantiating take nothing; the launch is charged what it takes (B007)."""
    code = f"""
{GRAPHS}
{CASES[case]}
unchanged("instantiate", lambda: ok(call("cuGraphInstantiateWithFlags", C.byref(instance), graph, u64(0))))
before = held()
launch()
print(held() - before >> 20, charged() == held())
"""
    assert _run(run_client, sim_env(preload=True, limit="4g"), code) == "320 True\n"


def test_managed_memory_is_charged_once_however_it_moves(sim_env: SimEnv, run_client: RunClient) -> None:
    """Hints, prefetches and writes move pages that were charged in full when allocated (B044)."""
    code = """
p, before = u64(), charged()
size = 512 << 20
ok(call("cuMemAllocManaged", C.byref(p), size_t(size), u32(1)))
print(charged() - before >> 20)
full = charged()
for name, arguments in {
    "cuMemAdvise": (p, size_t(size), u32(3), u32(0)),
    "cuMemPrefetchAsync": (p, size_t(size), u32(0), None),
    "cuMemPrefetchAsync_ptsz": (p, size_t(size), u32(0), None),
    "cuMemsetD8_v2": (p, C.c_ubyte(1), size_t(size)),
    "cuMemAdvise_v2": (p, size_t(size), u32(3), u64(1)),
    "cuMemPrefetchAsync_v2": (p, size_t(size), u64(1), u32(0), None),
}.items():
    call(name, *arguments)
    assert charged() == full, name
assert alloc(600 << 20)[0] == OOM
ok(free(p.value))
print(charged() == before)
"""
    assert _run(run_client, sim_env(preload=True, limit="1g"), code) == "512\nTrue\n"


LAZY = """
library, kernel, function, count = ptr(), ptr(), ptr(), u32()
image = b"//simgpu\\nglobal data 67108864\\nkernel work local=0\\n"
ok(call("cuLibraryLoadData", C.byref(library), image, None, None, u32(0), None, None, u32(0)))
def get():
    ok(call("cuLibraryGetKernel", C.byref(kernel), library, b"work"))
def enumerate():
    ok(call("cuLibraryEnumerateKernels", C.byref(kernel), u32(1), library))
def module():
    module = ptr()
    ok(call("cuModuleLoadData", C.byref(module), image))
    ok(call("cuModuleEnumerateFunctions", C.byref(kernel), u32(1), module))
def launch():
    ok(call("cuLaunchKernel", kernel, *[u32(1)] * 6, u32(0), None, None, None))
class KernelNode(C.Structure):
    _fields_ = [("function", ptr), ("sizes", u32 * 7), ("arguments", ptr), ("extra", ptr), ("kernel", ptr),
                ("context", ptr)]
def graph():
    get()
    graph, node, instance = ptr(), ptr(), ptr()
    p = KernelNode(sizes=(1, 1, 1, 1, 1, 1, 0), kernel=kernel)
    ok(call("cuGraphCreate", C.byref(graph), u32(0)))
    ok(call("cuGraphAddKernelNode_v2", C.byref(node), graph, None, size_t(0), C.byref(p)))
    ok(call("cuGraphInstantiateWithFlags", C.byref(instance), graph, u64(0)))
    ok(call("cuGraphLaunch", instance, None))
def load():
    get()
    ok(call("cuKernelGetFunction", C.byref(function), kernel))
    ok(call("cuFuncLoad", function))
"""


@pytest.mark.parametrize("find", ["get", "enumerate", "graph", "load"])
def test_a_lazy_image_is_charged_whatever_call_loads_it(
    sim_env: SimEnv, run_client: RunClient, find: str
) -> None:
    """However a kernel was found, after its first launch the charge is the driver's figure (B121)."""
    code = f"""
{LAZY}
before = held()
{find}()
launch()
synchronize()
print(held() - before >> 20, charged() == held())
"""
    assert _run(run_client, sim_env(preload=True, limit="2g"), code) == "64 True\n"


@pytest.mark.parametrize("find", ["get", "enumerate", "module"])
def test_local_memory_is_refused_however_the_kernel_was_found(
    sim_env: SimEnv, run_client: RunClient, find: str
) -> None:
    """A kernel whose local memory does not fit is not launched, also when it was only enumerated (B001)."""
    code = f"""
{LAZY.replace("local=0", "local=65536")}
{find}()
r = call("cuLaunchKernel", kernel, *[u32(1)] * 6, u32(0), None, None, None)
print(r, charged() <= 1 << 30, held() <= 1 << 30)
"""
    assert _run(run_client, sim_env(preload=True, limit="1g"), code) == "2 True True\n"


def test_interop_calls_take_no_memory_of_their_own(sim_env: SimEnv, run_client: RunClient) -> None:
    """Graphics interop is the driver's: same answers as without the shim, and no charge moves (B086)."""
    listed = (ROOT / "tests" / "data" / "coverage_cuda.tsv").read_text().splitlines()
    names = [line.split("\t")[0] for line in listed if "test_interop_calls" in line]
    code = f"""
zeros = [C.c_uint64(0)] * 10
answers = {{}}
def all():
    for name in {names!r}:
        answers[name] = getattr(cu, name)(*zeros)
unchanged("interop", all)
print(answers)
"""
    assert len(names) > 40
    bare = _run(run_client, sim_env(), code.replace('unchanged("interop", all)', "all()"))
    assert _run(run_client, sim_env(preload=True, limit="1g"), code) == bare


def test_an_exported_handle_takes_nothing_and_keeps_the_charge(
    sim_env: SimEnv, run_client: RunClient
) -> None:
    """Asking for a handle to share changes neither charge nor memory (B057)."""
    code = """
class PoolProps(C.Structure):
    _fields_ = [("type", u32), ("handles", u32), ("location", u32), ("device", u32), ("rest", C.c_ubyte * 80)]
p, q, pool, fd = u64(ok(alloc(64 << 20))), u64(), ptr(), i32()
props = PoolProps(type=1, handles=1, location=1)
ok(call("cuMemPoolCreate", C.byref(pool), C.byref(props)))
ok(call("cuMemAllocFromPoolAsync", C.byref(q), size_t(32 << 20), pool, None))
room = (C.c_ubyte * 64)()
unchanged("ipc", lambda: ok(call("cuIpcGetMemHandle", room, p)))
unchanged("pool", lambda: ok(call("cuMemPoolExportToShareableHandle", C.byref(fd), pool, u32(1), u64(0))))
unchanged("pointer", lambda: ok(call("cuMemPoolExportPointer", room, q)))
range = C.byref(fd), p, size_t(64 << 20), u32(1), u64(0)
unchanged("range", lambda: call("cuMemGetHandleForAddressRange", *range))
print(charged() == held())
"""
    assert _run(run_client, sim_env(preload=True, limit="1g"), code) == "True\n"


PEER = """
from simclient import *
import array, os, socket
init(0)
link = socket.socket(fileno=int(os.environ["LINK"]))
data, ancillary, _, _ = link.recvmsg(64, 64)
fd = array.array("i", ancillary[0][2])[0]
pool, q = ptr(), u64()
ok(call("cuMemPoolImportFromShareableHandle", C.byref(pool), ptr(fd), u32(1), u64(0)))
ok(call("cuMemPoolImportPointer", C.byref(q), pool, data))
print(nvml_processes().get(os.getpid()) == sim_process_used(os.getpid()), flush=True)
link.send(b"x")
link.recv(1)
"""


def test_a_pool_of_another_process_is_charged_there(sim_env: SimEnv, run_client: RunClient) -> None:
    """An imported pool and a pointer into it add nothing to the importer's charge (B057)."""
    code = f"""
import array, socket, subprocess, sys
class PoolProps(C.Structure):
    _fields_ = [("type", u32), ("handles", u32), ("location", u32), ("device", u32), ("rest", C.c_ubyte * 80)]
q, pool, fd, room = u64(), ptr(), i32(), (C.c_ubyte * 64)()
props = PoolProps(type=1, handles=1, location=1)
ok(call("cuMemPoolCreate", C.byref(pool), C.byref(props)))
ok(call("cuMemAllocFromPoolAsync", C.byref(q), size_t(256 << 20), pool, None))
ok(call("cuMemPoolExportToShareableHandle", C.byref(fd), pool, u32(1), u64(0)))
ok(call("cuMemPoolExportPointer", room, q))
alone = charged()
ours, theirs = socket.socketpair()
env = dict(os.environ, LINK=str(theirs.fileno()))
peer = subprocess.Popen([sys.executable, "-c", {PEER!r}], env=env, pass_fds=[theirs.fileno()], stdout=-1)
ours.sendmsg([bytes(room)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd.value]))])
ours.recv(1)
both = charged()
ours.send(b"x")
print(peer.communicate()[0].decode().strip(), both - alone == 106954752)
"""
    assert _run(run_client, sim_env(preload=True, limit="1g"), code) == "True True\n"


def test_events_take_no_device_memory(sim_env: SimEnv, run_client: RunClient) -> None:
    """Four thousand events move neither charge nor memory, as measured on a real card (B121)."""
    code = """
def many():
    events = [ptr() for _ in range(4096)]
    for event in events:
        ok(call("cuEventCreate", C.byref(event), u32(0)))
    for event in events:
        ok(call("cuEventDestroy_v2", event))
unchanged("events", many)
"""
    _run(run_client, sim_env(preload=True, limit="1g"), code)


def test_checkpoint_calls_leave_the_charge(sim_env: SimEnv, run_client: RunClient) -> None:
    """A process that is put aside and restored keeps its charge all the time (B044)."""
    code = """
ok(alloc(256 << 20))
def aside():
    for name in ("Lock", "Checkpoint", "Restore", "Unlock"):
        call("cuCheckpointProcess" + name, i32(os.getpid()), None)
unchanged("checkpoint", aside)
"""
    _run(run_client, sim_env(preload=True, limit="1g"), code)


def test_what_no_row_covers_is_settled_by_the_drivers_figure(sim_env: SimEnv, run_client: RunClient) -> None:
    """Memory taken past every hook is charged with the next context, image or stream (B009, B086)."""
    code = """
import re, subprocess
line = next(line for line in open("/proc/self/maps") if line.rstrip().endswith("/libcuda.so.1"))
path, base = line.split()[-1], int(line.split("-")[0], 16)
symbols = subprocess.run(["nm", "-D", path], capture_output=True, text=True).stdout
offset = int(re.search(r"^(\\w+) T cuMemAlloc_v2$", symbols, re.MULTILINE).group(1), 16)
past = C.CFUNCTYPE(C.c_int, C.POINTER(u64), size_t)(base + offset)
p = u64()
ok(past(C.byref(p), 300 << 20))
unseen = held() - charged() >> 20
ok(ctx_create())
print(unseen, charged() == held(), alloc(600 << 20)[0])
"""
    assert _run(run_client, sim_env(preload=True, limit="1g"), code) == "300 True 2\n"
