"""Stream-ordered allocations are charged by what their pools reserve, on the simulated GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import RunClient, SimEnv

USE = """
from simclient import *
from poolcalls import *
ctx = init(0)
s = stream()
base()
"""


def _run(run_client: RunClient, env: dict[str, str], code: str) -> str:
    done = run_client(USE + code, env)
    assert done.stderr == ""
    return str(done.stdout)


@pytest.mark.parametrize("pool", ["default_pool()", "ok(pool_create())"])
@pytest.mark.parametrize("version", ["", "_ptsz"])
def test_a_pool_is_charged_in_steps(sim_env: SimEnv, run_client: RunClient, pool: str, version: str) -> None:
    """What a pool reserves is charged, not what was asked, until a synchronisation gives it back (B003)."""
    code = f"""
p = {pool}
for size, step in [(1, 32), (MIB, 32), (31 * MIB, 32), (32 * MIB, 32), (33 * MIB, 64), (100 * MIB, 128)]:
    at = ok(from_pool(size, p, s, "{version}"))
    assert same() == step == attribute_of(p) // MIB
    ok(free_async(at, s, "{version}"))
    assert same() == step
    ok(sync(s))
    assert same() == 0
"""
    _run(run_client, sim_env(preload=True, limit="1g"), code)


def test_a_growing_pool_is_charged_what_it_grew(sim_env: SimEnv, run_client: RunClient) -> None:
    """A pool that is not empty is charged the difference only, also where pieces share a step (B003)."""
    code = """
for size, held in [(20, 32), (10, 32), (10, 64), (100, 160), (28, 192), (65, 256)]:
    ok(alloc_async(size * MIB, s))
    assert same() == held, size
"""
    _run(run_client, sim_env(preload=True, limit="1g"), code)


def test_pool_allocations_end_at_the_limit(sim_env: SimEnv, run_client: RunClient) -> None:
    """RMM's way: create a pool, allocate, free; a real result each time, and 2 past the limit (B003)."""
    code = """
p = ok(pool_create())
at = ok(from_pool(256 * MIB, p, s))
assert same() == 256
out_pointer = u64(7)
assert call("cuMemAllocFromPoolAsync", C.byref(out_pointer), 8 * GIB, ptr(p), ptr(s)) == OOM
assert out_pointer.value == 7 and same() == 256
ok(free_async(at, s)); ok(sync(s))
assert same() == 0
ok(pool_destroy(p))
"""
    _run(run_client, sim_env(preload=True, limit="1g"), "import ctypes as C\n" + code)


@pytest.mark.parametrize("size", [1, 20, 33, 200])
def test_the_default_pool_never_passes_the_limit(sim_env: SimEnv, run_client: RunClient, size: int) -> None:
    """With a release threshold that keeps everything, allocations stop at the limit (B005)."""
    code = f"""
import os
size, limit = {size} * MIB, 2048 * MIB
ok(threshold(default_pool(), 2**64 - 1))
held = []
while True:
    result, at = alloc_async(size, s)
    if result:
        break
    held.append(at)
assert result == OOM
used = sim_process_used(os.getpid())
assert limit - max(size + STEP, 2 * STEP) < used <= limit, used / MIB
total = same()
for at in held:
    ok(free_async(at, s))
ok(sync(s))
assert same() == total
ok(trim(default_pool(), 3 * STEP))
assert same() == 96
ok(trim(default_pool()))
assert same() == 0
"""
    _run(run_client, sim_env(preload=True, limit="2g"), code)


def test_a_refusal_does_not_reach_the_driver(sim_env: SimEnv, run_client: RunClient, tmp_path: Path) -> None:
    """What cannot fit is answered without the driver, and counted as a refusal (B005)."""
    log = tmp_path / "calls"
    code = """
for _ in range(3):
    assert alloc_async(8 * GIB, s) == (OOM, 0)
    assert alloc_async(2**64 - 1, s) == (OOM, 0)
assert refusals() == 6 and same() == 0
"""
    _run(run_client, sim_env(preload=True, limit="1g", SIMGPU_LOG=str(log)), code)
    assert not [line for line in log.read_text().splitlines() if " cuMemAllocAsync " in line]


def test_kept_memory_makes_room_for_others(sim_env: SimEnv, run_client: RunClient) -> None:
    """Unused memory of a pool is trimmed before a plain allocation is refused (B005)."""
    code = """
ok(threshold(default_pool(), 2**64 - 1))
at = ok(alloc_async(700 * MIB, s))
expect(OOM, alloc(500 * MIB))
ok(free_async(at, s)); ok(sync(s))
assert same() == 704
p = ok(alloc(500 * MIB))
assert same() == 500
ok(free(p))
assert same() == 0
"""
    _run(run_client, sim_env(preload=True, limit="1g"), code)


def test_reserved_memory_is_used_when_the_quota_is_full(sim_env: SimEnv, run_client: RunClient) -> None:
    """A request that the pool can serve from what it holds is granted at a full quota."""
    code = """
ok(threshold(default_pool(), 2**64 - 1))
a = ok(alloc_async(20 * MIB, s))
room = ok(mem_info())[0]
ok(alloc(room - room % (2 * MIB)))
b = ok(alloc_async(10 * MIB, s))
full = same()
assert alloc_async(10 * MIB, s) == (OOM, 0)
assert same() == full
ok(free_async(a, s)); ok(sync(s))
c = ok(alloc_async(19 * MIB, s))
assert same() == full
"""
    _run(run_client, sim_env(preload=True, limit="1g"), code)


def test_a_request_that_the_pool_cannot_serve_is_undone(sim_env: SimEnv, run_client: RunClient) -> None:
    """Where the unused memory lies in pieces the pool grows, is refused, and shrinks again at once (B005)."""
    code = """
ok(threshold(default_pool(), 2**64 - 1))
held = [ok(alloc_async(20 * MIB, s)) for _ in range(20)]
for at in held[::2]:
    ok(free_async(at, s))
ok(sync(s))
room = ok(mem_info())[0]
ok(alloc(room - room % (2 * MIB)))
full = same()
for size in (19, 10):
    ok(free_async(ok(alloc_async(size * MIB, s)), s))
for n in range(3):
    assert alloc_async(100 * MIB, s) == (OOM, 0)
    assert same() <= full and refusals() > n
assert alloc_async(1, s)[0] == 0
assert same() <= full
"""
    _run(run_client, sim_env(preload=True, limit="1g"), code)


def test_another_process_gets_what_a_pool_gave_back(
    sim_env: SimEnv, run_client: RunClient, tmp_path: Path
) -> None:
    """Memory that a synchronisation returned is free for the other processes of the container at once."""
    code = """
import subprocess, sys
at = ok(alloc_async(700 * MIB, s))
other = [sys.executable, "-c", "from simclient import *; init(0); print(alloc(600 * MIB)[0])"]
def ask():
    return int(subprocess.run(other, capture_output=True, text=True, check=True).stdout)
assert ask() == OOM
ok(free_async(at, s))
{how}
assert ask() == 0
"""
    ways = {
        "stream": "ok(sync(s))",
        "context": "ok(synchronize())",
        "event": "e = ok(out(ptr, 'cuEventCreate', 0)); ok(call('cuEventRecord', ptr(e), ptr(s)));"
        " ok(call('cuEventSynchronize', ptr(e)))",
    }
    for how in ways.values():
        _run(run_client, sim_env(preload=True, limit="1g"), code.replace("{how}", how))


def test_a_pool_pointer_freed_at_once_is_given_back(sim_env: SimEnv, run_client: RunClient) -> None:
    """cuMemFree of a stream-ordered pointer, and the other way round, leave no charge (B047)."""
    code = """
at = ok(alloc_async(100 * MIB, s))
ok(free(at))
assert same() == 0
p = ok(alloc(100 * MIB))
ok(free_async(p, s)); ok(sync(s))
assert same() == 0
assert free(0) == 0 and free_async(0, s) == 0
assert free(0x1234000) == INVALID_VALUE and free_async(0x1234000, s) == INVALID_VALUE
assert free(at) == INVALID_VALUE and free_async(at, s) == INVALID_VALUE
assert same() == 0
"""
    _run(run_client, sim_env(preload=True, limit="1g"), code)


def test_bad_requests_get_the_drivers_answer(sim_env: SimEnv, run_client: RunClient) -> None:
    """A request the driver refuses itself keeps its answer, with and without the library (B047)."""
    code = """
p = default_pool()
print(call("cuMemAllocAsync", ptr(None), MIB, ptr(s)), alloc_async(0, s), from_pool(0, p, s))
print(call("cuMemPoolCreate", ptr(None), ptr(None)), pool_destroy(p), trim(p))
set_current(None)
print(alloc_async(MIB), from_pool(MIB, p))
"""
    bare = run_client(USE.replace("base()", "") + code, sim_env())
    assert _run(run_client, sim_env(preload=True, limit="1g"), code) == bare.stdout


def test_a_pool_destroyed_with_frees_pending_is_charged_until_they_are_done(
    sim_env: SimEnv, run_client: RunClient
) -> None:
    """What a destroyed pool had freed in stream order goes, with its charge, at the synchronise (B047)."""
    code = """
pool = ok(pool_create())
pointers = [ok(from_pool(40 * MIB, pool, s)) for _ in range(4)]
assert same() == 160
for p in pointers: ok(free_async(p, s))
ok(pool_destroy(pool))
held = sim_process_used(os.getpid())
result, left, total = mem_info()
assert total - left >= held
ok(sync(s))
assert sim_process_used(os.getpid()) == held - 160 * MIB
result, left, total = mem_info()
assert total - left == held - 160 * MIB
"""
    _run(run_client, sim_env(preload=True, limit="1g"), code)


def test_a_destroyed_pool_is_given_back_whichever_stream_is_done_first(
    sim_env: SimEnv, run_client: RunClient
) -> None:
    """The synchronise of another stream does not end the search for what a destroyed pool held (B047)."""
    code = """
import subprocess, sys
LOOK = [sys.executable, "-c", "from simclient import *; print(nvml_memory()[3])"]
other = stream()
ok(synchronize()); mem_info()
before = subprocess.check_output(LOOK)
pool = ok(pool_create())
ok(free_async(ok(from_pool(40 * MIB, pool, s)), s))
ok(pool_destroy(pool))
ok(sync(other)); ok(sync(other))
ok(sync(s))
assert subprocess.check_output(LOOK) == before
"""
    _run(run_client, sim_env(preload=True, limit="1g"), code)
