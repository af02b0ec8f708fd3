"""Which device a pool is charged to, and pools that are not charged, on the simulated GPU."""

from __future__ import annotations

from conftest import RunClient, SimEnv

USE = """
import ctypes as C
from simclient import *
from poolcalls import *
"""
TWO = """
ok(cu_init())
ctx = [ok(retain(d)) for d in (0, 1)]
streams = []
for c in ctx:
    ok(set_current(c)); streams.append(stream())
base(0); base(1)
"""
ONE = """
ctx = init(0)
s = stream()
base()
"""


def _run(run_client: RunClient, env: dict[str, str], code: str) -> None:
    done = run_client(USE + code, env)
    assert done.stderr == ""


def test_the_streams_device_is_charged_and_given_back(sim_env: SimEnv, run_client: RunClient) -> None:
    """The device is the stream's and the pool's, whatever context is current (B045)."""
    code = """
ok(set_current(ctx[0]))
at = ok(alloc_async(100 * MIB, streams[1]))
assert (same(0), same(1)) == (0, 128)
p = ok(pool_create(1))
more = ok(from_pool(64 * MIB, p, streams[1]))
assert (same(0), same(1)) == (0, 192)
null = ok(alloc_async(MIB))
assert (same(0), same(1)) == (32, 192)
ok(free_async(at, streams[1])); ok(free_async(more, streams[1])); ok(sync(streams[1]))
assert (same(0), same(1)) == (32, 0)
ok(set_current(ctx[1]))
ok(free(null))
assert (same(0), same(1)) == (0, 0)
ok(set_current(ctx[0]))
assert alloc_async(1100 * MIB, streams[1]) == (OOM, 0)
assert refusals(0) == 0 and refusals(1) == 1
"""
    _run(run_client, sim_env(preload=True, limit="1g", SIMGPU_COUNT="2"), TWO + code)


def test_limits_differ_by_device(sim_env: SimEnv, run_client: RunClient) -> None:
    """A pool ends at the limit of its own device (B045)."""
    env = sim_env(
        preload=True,
        SIMGPU_COUNT="2",
        CUDA_DEVICE_MEMORY_LIMIT_0="1g",
        CUDA_DEVICE_MEMORY_LIMIT_1="3g",
    )
    code = """
ok(set_current(ctx[0]))
assert alloc_async(2048 * MIB, streams[0]) == (OOM, 0)
ok(alloc_async(2048 * MIB, streams[1]))
assert (same(0), same(1)) == (0, 2048)
"""
    _run(run_client, env, TWO + code)


def test_the_current_pool_follows_the_program(sim_env: SimEnv, run_client: RunClient) -> None:
    """cuMemAllocAsync is charged to the pool that was set last, and to the default pool after it went."""
    code = """
def held(p):
    return attribute_of(p) // MIB
mine, d = ok(pool_create()), default_pool()
ok(alloc_async(MIB, s))
ok(set_pool(0, mine))
at = ok(alloc_async(40 * MIB, s))
assert (held(d), held(mine), same()) == (32, 64, 96)
location = (i32 * 2)(DEVICE, 0)
ok(call("cuMemSetMemPool", C.byref(location), PINNED, ptr(d)))
ok(alloc_async(32 * MIB, s))
assert (held(d), held(mine), same()) == (64, 64, 128)
ok(set_pool(0, mine))
ok(free_async(at, s)); ok(sync(s))
ok(pool_destroy(mine))
ok(alloc_async(64 * MIB, s))
assert (held(d), same()) == (128, 128)
"""
    _run(run_client, sim_env(preload=True, limit="1g"), ONE + code)


def test_a_destroyed_pool_stays_charged_for_its_live_memory(sim_env: SimEnv, run_client: RunClient) -> None:
    """Memory of a destroyed pool counts until its pointers are freed; a new pool starts at nothing."""
    code = """
import os
def used():
    return ok(mem_info())[1] - ok(mem_info())[0]
def truth():
    return sim_process_used(os.getpid())
start = used() - truth()
p = ok(pool_create())
a, b = [ok(from_pool(100 * MIB, p, s)) for _ in range(2)]
ok(free_async(b, s)); ok(sync(s))
assert same() == 128
ok(pool_destroy(p))
assert used() - truth() == start and truth() - charged() > 100 * MIB
assert alloc_async(950 * MIB, s) == (OOM, 0)
q = ok(pool_create())
at = ok(from_pool(MIB, q, s))
assert charged() == attribute_of(q) == 32 * MIB
ok(free_async(at, s)); ok(sync(s))
ok(free_async(a, s)); ok(sync(s))
ok(alloc_async(800 * MIB, s))
"""
    _run(run_client, sim_env(preload=True, limit="1g"), ONE + code)


def test_host_pools_are_not_charged(sim_env: SimEnv, run_client: RunClient) -> None:
    """A pool of host memory passes at a full quota and changes nothing (B064)."""
    code = """
p = ok(pool_create(location=HOST))
ok(from_pool(2048 * MIB, p, s))
assert same() == 0
"""
    _run(run_client, sim_env(preload=True, limit="1g"), ONE + code)


def test_managed_pools_are_charged_what_they_reserve(sim_env: SimEnv, run_client: RunClient) -> None:
    """NVML does not show managed memory of a process, so its pool is charged by what it reserves."""
    code = """
p = ok(pool_create(kind=MANAGED))
at = ok(from_pool(64 * MIB, p, s))
assert charged() == attribute_of(p) == 64 * MIB
assert from_pool(1024 * MIB, p, s) == (OOM, 0)
ok(free_async(at, s)); ok(sync(s))
assert charged() == attribute_of(p) == 0
"""
    _run(run_client, sim_env(preload=True, limit="1g"), ONE + code)


def test_an_imported_pool_is_charged_to_its_exporter_once(sim_env: SimEnv, run_client: RunClient) -> None:
    """Opening a shared pool and its pointer, twice or once, charges nobody again (B057)."""
    code = """
import os, subprocess, sys
p = ok(pool_create(handles=POSIX_FD))
at = ok(from_pool(600 * MIB, p, s))
fd = ok(out(i32, "cuMemPoolExportToShareableHandle", ptr(p), POSIX_FD, 0, first=True))
token = (C.c_ubyte * 64)()
ok(call("cuMemPoolExportPointer", C.byref(token), at))
peer = '''
import ctypes as C, sys
from simclient import *
from poolcalls import *
init(0)
token = (C.c_ubyte * 64)(*bytes.fromhex(sys.argv[2]))
for _ in range(2):
    p = ok(out(ptr, "cuMemPoolImportFromShareableHandle", ptr(int(sys.argv[1])), POSIX_FD, 0))
    at = ok(out(u64, "cuMemPoolImportPointer", ptr(p), C.byref(token)))
    assert charged() == 608 * MIB
    expect(INVALID_VALUE, from_pool(MIB, p))
    ok(free_async(at)); ok(synchronize())
    ok(pool_destroy(p))
    assert charged() == 608 * MIB
'''
os.set_inheritable(fd, True)
subprocess.run([sys.executable, "-c", peer, str(fd), bytes(token).hex()], check=True, close_fds=False)
assert charged() == 608 * MIB
ok(free_async(at, s)); ok(sync(s))
assert charged() == 0
"""
    _run(run_client, sim_env(preload=True, limit="1g"), ONE + code)
