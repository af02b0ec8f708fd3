"""Public reports about what a program is answered: a full card, outputs, contexts, signals, ranks."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import RunClient, SimEnv

HOLD = """
from simclient import *
import os, sys
init(0)
share, granted = int(os.environ.get("SHARE", "0")), 0
pointers = [ok(alloc(mem_info()[2] * share // 100))] if share else []
while not share and granted < 10240:
    result, pointer = alloc(256 << 20)
    if result:
        break
    pointers.append(pointer)
    granted += 256
print(granted, nvml_memory()[3] - sim_process_used(os.getpid()), mem_info()[2] >> 20, flush=True)
input()
print(alloc(64 << 20)[0] if share else free(pointers.pop()) or alloc(256 << 20)[0])
"""


def _start(env: dict[str, str]) -> tuple[subprocess.Popen[str], list[int]]:
    process = subprocess.Popen([sys.executable, "-c", HOLD], env=env, stdin=-1, stdout=-1, text=True)
    assert process.stdout
    return process, [int(word) for word in process.stdout.readline().split()]


def _containers(sim_env: SimEnv, tmp_path: Path, **more: str) -> list[dict[str, str]]:
    regions = (str(tmp_path / f"container{number}.cache") for number in range(2))
    return [sim_env(preload=True, CUDA_DEVICE_MEMORY_SHARED_CACHE=region, **more) for region in regions]


def test_a_card_sold_twice_ends_in_the_drivers_own_answer(sim_env: SimEnv, tmp_path: Path) -> None:
    """Below its limit a tenant may meet a full card: nothing stays charged, the other works on (B014)."""
    first, second = _containers(sim_env, tmp_path, CUDA_DEVICE_MEMORY_LIMIT="12g")
    p1, (granted1, drift1, _) = _start(first)
    p2, (granted2, drift2, _) = _start(second)
    assert granted1 == 10240
    assert 4096 <= granted2 < 5120
    assert (drift1, drift2) == (0, 0)
    assert p2.communicate("\n")[0] == "0\n"
    assert p1.communicate("\n")[0] == "0\n"


def test_a_share_of_the_shown_memory_fits_the_slice(sim_env: SimEnv, tmp_path: Path) -> None:
    """Two programs that take 75 % of what they are shown run on one card and have memory left (B130)."""
    first, second = _containers(sim_env, tmp_path, CUDA_DEVICE_MEMORY_LIMIT="7g", SHARE="75")
    p1, (_, _, total1) = _start(first)
    p2, (_, _, total2) = _start(second)
    assert (total1, total2) == (7168, 7168)
    assert [process.communicate("\n")[0] for process in (p1, p2)] == ["0\n", "0\n"]


REFUSALS = """
from simclient import *
init(0)
huge, mark = 2 << 30, 0x5a5a5a5a5a5a5a5a
p, q, s, pool = u64(mark), u64(mark), u64(mark), ptr()
class Props(C.Structure):
    _fields_ = [("type", u32), ("handles", u32), ("location", u32), ("device", u32), ("rest", C.c_ubyte * 80)]
props, prop = Props(type=1, location=1), (u32 * 8)(1, 0, 1, 0)
flat = (u64 * 3)(32768, 32768, 0x20 | 1 << 32)
deep = (u64 * 5)(1024, 1024, 1024, 0x20 | 1 << 32, 0)
ok(call("cuMemPoolCreate", C.byref(pool), C.byref(props)))
calls = {
    "cuMemAlloc_v2": (C.byref(p), huge),
    "cuMemAllocPitch_v2": (C.byref(p), C.byref(q), 65536, 65536, 4),
    "cuMemAllocManaged": (C.byref(p), huge, u32(1)),
    "cuMemAllocAsync": (C.byref(p), huge, None),
    "cuMemAllocAsync_ptsz": (C.byref(p), huge, None),
    "cuMemAllocFromPoolAsync": (C.byref(p), huge, pool, None),
    "cuMemAllocFromPoolAsync_ptsz": (C.byref(p), huge, pool, None),
    "cuMemCreate": (C.byref(p), huge, prop, 0),
    "cuArrayCreate_v2": (C.byref(p), flat),
    "cuArray3DCreate_v2": (C.byref(p), deep),
    "cuMipmappedArrayCreate": (C.byref(p), deep, u32(3)),
    "cuCtxSetLimit": (u32(0), 64 << 10),
    "cuModuleLoadData": (C.byref(p), b"//simgpu\\nglobal data 2147483648\\n"),
}
answers = {name: call(name, *arguments) for name, arguments in calls.items()}
ok(alloc((1 << 30) - mem_info()[2] + mem_info()[1] - (8 << 20)))
answers["cuCtxCreate_v2"] = call("cuCtxCreate_v2", C.byref(p), u32(0), 0)
wrong = {name: answer for name, answer in answers.items() if answer != 2}
print(wrong, p.value == q.value == mark, len(answers))
"""


def test_every_refusal_is_out_of_memory_and_writes_nothing(sim_env: SimEnv, run_client: RunClient) -> None:
    """Past the limit each allocating call answers 2 and leaves its outputs as they were (B098)."""
    done = run_client(REFUSALS, sim_env(preload=True, limit="1g"))
    assert (done.stdout, done.stderr) == ("{} True 14\n", "")


def test_a_pitched_request_is_charged_what_the_driver_pads(sim_env: SimEnv, run_client: RunClient) -> None:
    """Rows of one byte take a pitch each: refused by pitch x height, with nothing left behind (B012)."""
    code = """
from simclient import *
import os
init(0)
before = nvml_memory()[3]
print(alloc_pitch(1, 1 << 20)[0], nvml_memory()[3] - before, sim_process_used(os.getpid()) - before)
r, p, pitch = alloc_pitch(1, 1 << 18)
print(r, (nvml_memory()[3] - before) // pitch == 1 << 18, sim_process_used(os.getpid()) == nvml_memory()[3])
"""
    assert run_client(code, sim_env(preload=True, limit="384m")).stdout == "2 0 0\n0 True True\n"


def test_null_outputs_of_reports_are_the_drivers_affair(sim_env: SimEnv, run_client: RunClient) -> None:
    """Sizes asked for with one or both outputs null: the driver's answer and figure, no crash (B096)."""
    code = """
from simclient import *
init(0)
f, t = size_t(), size_t()
print(call("cuMemGetInfo_v2", None, C.byref(t)), t.value > 0, call("cuMemGetInfo_v2", C.byref(f), None),
      call("cuMemGetInfo_v2", None, None), call("cuDeviceTotalMem_v2", None, u32(0)),
      call("cuDeviceTotalMem_v2", C.byref(t), u32(99)), call("cuMemAlloc_v2", None, size_t(1)), alloc(0)[0],
      call("cuDevicePrimaryCtxRetain", None, u32(0)), retain(99)[0])
"""
    bare = run_client(code, sim_env())
    shimmed = run_client(code, sim_env(preload=True, limit="1g"))
    assert (shimmed.stdout, shimmed.stderr) == (bare.stdout, "")


FAULTY = """
from simclient import *
import os
name, arguments = os.environ["NAME"], eval(os.environ["ARGUMENTS"])
ok(cu_init())
ctx = ok(retain(0))
ok(set_current(ctx))
before = nvml_memory()[3]
mark = 0x5a5a5a5a5a5a5a5a
p, q = u64(mark), u64(mark)
print(call(name, *arguments(p, q)), p.value == q.value == mark, nvml_memory()[3] - before)
"""

FAILING = {
    "cuMemAlloc_v2": "lambda p, q: (C.byref(p), 1 << 20)",
    "cuMemAllocPitch_v2": "lambda p, q: (C.byref(p), C.byref(q), 1000, 1000, 4)",
    "cuMemAllocManaged": "lambda p, q: (C.byref(p), 1 << 20, u32(1))",
    "cuMemAllocAsync": "lambda p, q: (C.byref(p), 1 << 20, None)",
    "cuMemCreate": "lambda p, q: (C.byref(p), 2 << 20, (u32 * 8)(1, 0, 1, 0), 0)",
    "cuArrayCreate_v2": "lambda p, q: (C.byref(p), (u64 * 3)(64, 64, 0x20 | 1 << 32))",
    "cuMemGetInfo_v2": "lambda p, q: (C.byref(p), C.byref(q))",
    "cuDeviceTotalMem_v2": "lambda p, q: (C.byref(p), u32(0))",
    "cuCtxCreate_v2": "lambda p, q: (C.byref(p), u32(0), u32(0))",
    "cuStreamCreate": "lambda p, q: (C.byref(p), u32(0))",
    "cuModuleLoadData": "lambda p, q: (C.byref(p), b'//simgpu\\n')",
}


@pytest.mark.parametrize("name", FAILING)
def test_outputs_of_a_failed_call_are_not_read(sim_env: SimEnv, run_client: RunClient, name: str) -> None:
    """A driver that fails without writing outputs: its result, nothing charged or read (B046, B100)."""
    env = sim_env(
        preload=True,
        limit="1g",
        LIBCUDA_LOG_LEVEL="4",
        SIMGPU_FAULTS=f"{name}:*:719",
        NAME=name,
        ARGUMENTS=FAILING[name],
    )
    assert run_client(FAULTY, env).stdout == "719 True 0\n"


def test_the_shim_makes_and_sets_no_context(sim_env: SimEnv, run_client: RunClient, tmp_path: Path) -> None:
    """Start and first allocations: the driver sees only the program's own context calls (B101)."""
    log = tmp_path / "log"
    code = "from simclient import *; init(0); ok(alloc(1 << 20)); mem_info(); nvml_memory()"
    run_client(code, sim_env(preload=True, limit="1g", SIMGPU_LOG=str(log)))
    calls = [line.split()[2] for line in log.read_text().splitlines()]
    of_contexts = [name for name in calls if "Ctx" in name and "Get" not in name]
    assert of_contexts == ["cuDevicePrimaryCtxRetain", "cuCtxSetCurrent"]


def test_device_attributes_pass_unchanged(sim_env: SimEnv, run_client: RunClient) -> None:
    """Virtual memory support and every other attribute are the driver's; only memory totals differ (B104)."""
    code = """
from simclient import *
init(0)
print([attribute(number) for number in range(1, 150)], device_name(), total_mem()[0])
"""
    bare = run_client(code, sim_env()).stdout
    assert run_client(code, sim_env(preload=True, limit="1g")).stdout == bare


def test_signals_interrupt_nothing(sim_env: SimEnv) -> None:
    """Four processes under a 1 ms timer without SA_RESTART allocate up to the limit: no error (B039)."""
    code = """
from simclient import *
import signal, time
hits = []
signal.signal(signal.SIGALRM, lambda *_: hits.append(1))
signal.siginterrupt(signal.SIGALRM, True)
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
init(0)
wrong, end = set(), time.monotonic() + 3
while time.monotonic() < end:
    r, p = alloc(300 << 20)
    wrong.add(r)
    if r == 0:
        wrong.add(free(p))
signal.setitimer(signal.ITIMER_REAL, 0)
print(sorted(wrong - {2}), len(hits) > 100)
"""
    env = sim_env(preload=True, limit="1g")
    processes = [
        subprocess.Popen([sys.executable, "-c", code], env=env, stdout=-1, stderr=-1) for _ in range(4)
    ]
    assert [process.communicate() for process in processes] == [(b"[0] True\n", b"")] * 4


def test_no_lock_is_held_while_the_driver_works(sim_env: SimEnv, run_client: RunClient) -> None:
    """While one thread waits in a slow cuMemCreate, others allocate, import and ask for memory (B170)."""
    code = """
from simclient import *
from vmmcalls import create
import threading, time
init(0)
slow = threading.Thread(target=lambda: ok(create(2 << 20)))
start = time.monotonic()
slow.start()
time.sleep(0.1)
for _ in range(100):
    ok(free(ok(alloc(2 << 20))))
    mem_info()
print(time.monotonic() - start < 1.0, slow.is_alive())
slow.join()
"""
    env = sim_env(preload=True, limit="1g", SIMGPU_DELAY="cuMemCreate:2000000")
    assert run_client(code, env).stdout == "True True\n"


RANK = """
from simclient import *
from vmmcalls import *
import os, socket, array
rank, peer = int(os.environ["RANK"]), socket.socket(fileno=int(os.environ["LINK"]))
ok(cu_init())
early = ok(create(64 << 20, dev=rank, share=True))
ok(set_current(ok(retain(rank))))
peer.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [ok(export_fd(early))]))])
fd = array.array("i", peer.recvmsg(8, 64)[1][0][2])[0]
theirs = ok(import_fd(fd))
for handle in (early, theirs):
    va = ok(reserve(64 << 20))
    ok(map_at(va, 64 << 20, handle))
mine = [nvml_memory(index)[3] for index in range(2)]
peer.send(b"y")
peer.recv(1)
print(mine[rank] >= 64 << 20, alloc(2 << 30)[0], nvml_memory(rank)[1] >> 20)
"""


def test_two_ranks_share_buffers_across_devices(sim_env: SimEnv) -> None:
    """Ranks that create memory before any context and import each other's run (B066, B171)."""
    links = socket.socketpair()
    processes = []
    for rank, link in enumerate(links):
        env = sim_env(preload=True, limit="1g", SIMGPU_COUNT="2", RANK=str(rank), LINK=str(link.fileno()))
        command = [sys.executable, "-c", RANK]
        processes.append(
            subprocess.Popen(command, env=env, pass_fds=[link.fileno()], stdout=-1, stderr=-1, text=True)
        )
    for link in links:
        link.close()
    assert [process.communicate(timeout=30) for process in processes] == [("True 2 1024\n", "")] * 2
