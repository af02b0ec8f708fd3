"""Virtual memory management: physical memory by handle, held by references and mappings."""

from __future__ import annotations

import pytest
from conftest import RunClient, SimEnv

USE = """
from simclient import *
from vmmcalls import *
ctx = init(0)
base = same()
"""


def _run(run_client: RunClient, env: dict[str, str], code: str) -> None:
    done = run_client(USE + code, env)
    assert done.stderr == ""


def test_creation_is_charged_and_refused_at_the_limit(sim_env: SimEnv, run_client: RunClient) -> None:
    """Each 2 MiB handle is charged when it is made; the first that does not fit is refused (B001, B002)."""
    _run(
        run_client,
        sim_env(preload=True, limit="1g"),
        """
fits = (1024 * MIB - base) // (2 * MIB)
for n in range(fits):
    ok(create(2 * MIB))
    if n % 64 == 0:
        assert same() == base + (n + 1) * 2 * MIB
prop = Prop(type=1, location=DEVICE)
handle = u64(7)
assert call("cuMemCreate", C.byref(handle), 2 * MIB, C.byref(prop), 0) == OOM and handle.value == 7
assert same() == base + fits * 2 * MIB
""",
    )


def test_memory_is_held_until_the_last_handle_and_mapping(sim_env: SimEnv, run_client: RunClient) -> None:
    """Releasing a mapped handle gives nothing back; the unmapping does (B048)."""
    _run(
        run_client,
        sim_env(preload=True, limit="1g"),
        """
room = 1024 * MIB - base
size = room // 2 // (2 * MIB) * 2 * MIB + 2 * MIB
va = ok(reserve(2 * size))
h = ok(create(size))
ok(map_at(va, size, h))
ok(release_handle(h))
assert same() == base + size
expect(OOM, create(size))
ok(unmap(va, size))
assert same() == base
h = ok(create(size))
ok(map_at(va, size, h))
ok(unmap(va, size))
assert same() == base + size
ok(release_handle(h))
assert same() == base
""",
    )


def test_a_retained_handle_needs_a_second_release(sim_env: SimEnv, run_client: RunClient) -> None:
    """A handle retained by address, also inside a mapping, is one more reference (B048)."""
    _run(
        run_client,
        sim_env(preload=True, limit="1g"),
        """
va = ok(reserve(64 * MIB))
h = ok(create(64 * MIB))
ok(map_at(va, 64 * MIB, h))
again = ok(retain_handle(va + 8 * MIB))
ok(unmap(va, 64 * MIB))
ok(release_handle(h))
assert same() == base + 64 * MIB
ok(release_handle(again))
assert same() == base
h = ok(create(64 * MIB))
ok(map_at(va, 64 * MIB, h))
ok(release_handle(h))
again = ok(retain_handle(va))
ok(unmap(va, 64 * MIB))
assert same() == base + 64 * MIB
ok(release_handle(again))
assert same() == base
""",
    )


def test_one_unmapping_may_span_several_mappings(sim_env: SimEnv, run_client: RunClient) -> None:
    """Neighbours and one handle mapped twice come off together; part of a mapping changes nothing (B048)."""
    _run(
        run_client,
        sim_env(preload=True, limit="2g"),
        """
va = ok(reserve(1024 * MIB))
handles = [ok(create(8 * MIB)) for _ in range(20)]
for n, h in enumerate(handles):
    ok(map_at(va + n * 8 * MIB, 8 * MIB, h))
ok(map_at(va + 160 * MIB, 8 * MIB, handles[0]))
for h in handles:
    ok(release_handle(h))
assert same() == base + 160 * MIB
assert unmap(va, 4 * MIB) != 0
assert same() == base + 160 * MIB
ok(unmap(va, 160 * MIB))
assert same() == base + 8 * MIB
ok(unmap(va + 160 * MIB, 8 * MIB))
assert same() == base
""",
    )


def test_only_device_memory_of_the_named_device_is_charged(sim_env: SimEnv, run_client: RunClient) -> None:
    """Host memory is free, the device is the request's, and no context is needed (B064, B065)."""
    code = """
from simclient import *
from vmmcalls import *
import threading
ok(cu_init())
assert create(4 * MIB, dev=2)[0] == INVALID_DEVICE
assert create(4 * MIB, dev=-1)[0] == INVALID_DEVICE
h = ok(create(64 * MIB, dev=1))
for location in (HOST, HOST_NUMA):
    r, host = create(512 * MIB, location=location)
    assert r in (0, NOT_SUPPORTED), r
    if r == 0:
        ok(release_handle(host))
expect(OOM, create(300 * MIB, dev=1))
def bare():
    expect(INVALID_CONTEXT, array(16, 16))
    ok(release_handle(ok(create(2 * MIB, dev=0))))
thread = threading.Thread(target=bare)
thread.start()
thread.join()
assert (truth(0), truth(1)) == (0, 64 * MIB)
init(1)
assert used() == truth(1) == 64 * MIB + TOTAL_CONTEXT
init(0)
assert used() == truth(0) == TOTAL_CONTEXT
ok(release_handle(h))
init(1)
assert used() == truth(1) == TOTAL_CONTEXT
""".replace("TOTAL_CONTEXT", "106954752")
    env = sim_env(preload=True, limit="320m", SIMGPU_COUNT="2")
    assert run_client(code, env).stderr == ""


def test_bad_requests_get_the_drivers_answer(sim_env: SimEnv, run_client: RunClient) -> None:
    """What the driver refuses by itself is answered alike with and without the library, uncharged."""
    code = """
from simclient import *
from vmmcalls import *
prop = Prop(type=1, location=DEVICE)
print(call("cuMemCreate", C.byref(u64()), 2 * MIB, C.byref(prop), 0))
init(0)
before = truth()
print(call("cuMemCreate", ptr(None), 2 * MIB, C.byref(prop), 0))
print(call("cuMemCreate", C.byref(u64()), 0, C.byref(prop), 0))
print(call("cuMemCreate", C.byref(u64()), 3 * MIB + 1, C.byref(prop), 0))
print(call("cuMemCreate", C.byref(u64()), 2 * MIB, ptr(None), 0))
print(release_handle(12345), map_at(2 * MIB, 2 * MIB, 12345), unmap(2 * MIB, 2 * MIB))
print(retain_handle(4096)[0], call("cuMemRetainAllocationHandle", ptr(None), 4096))
h = ok(create(2 * MIB))
print(release_handle(h), release_handle(h))
assert truth() == before
"""
    bare = run_client(code, sim_env()).stdout
    env = sim_env(preload=True, limit="1g")
    shimmed = run_client(code + "assert used() == truth()\n", env)
    assert shimmed.stdout == bare
    assert shimmed.stderr == ""


@pytest.mark.parametrize("name", ["cuMemCreate", "cuMemMap", "cuMemUnmap", "cuMemRelease"])
def test_a_failing_driver_call_changes_no_charge(sim_env: SimEnv, run_client: RunClient, name: str) -> None:
    """Whatever call fails once, its result is passed on and quota and driver agree after it (B046, B054)."""
    code = """
va = ok(reserve(64 * MIB))
def step(action):
    result, value = action(), 0
    if isinstance(result, tuple):
        result, value = result
    same()
    failed.append(result)
    if result:
        assert result == 999, result
        result = action()
        result, value = result if isinstance(result, tuple) else (result, 0)
    ok(result)
    same()
    return value
failed = []
h = step(lambda: create(64 * MIB))
step(lambda: map_at(va, 64 * MIB, h))
again = step(lambda: retain_handle(va))
step(lambda: release_handle(h))
step(lambda: unmap(va, 64 * MIB))
step(lambda: release_handle(again))
assert same() == base and sum(failed) == 999, failed
"""
    _run(run_client, sim_env(preload=True, limit="1g", SIMGPU_FAULTS=f"{name}:1:999"), code)


def test_a_failing_retain_counts_nothing(sim_env: SimEnv, run_client: RunClient) -> None:
    """A retain that fails leaves the output and the references as they were (B046)."""
    _run(
        run_client,
        sim_env(preload=True, limit="1g", SIMGPU_FAULTS="cuMemRetainAllocationHandle:1:2"),
        """
va = ok(reserve(4 * MIB))
h = ok(create(4 * MIB))
ok(map_at(va, 4 * MIB, h))
out_value = u64(5)
assert call("cuMemRetainAllocationHandle", C.byref(out_value), va) == 2 and out_value.value == 5
ok(unmap(va, 4 * MIB))
ok(release_handle(h))
assert same() == base
""",
    )


def test_threads_give_back_once(sim_env: SimEnv, run_client: RunClient) -> None:
    """Unmapping and releasing at the same moment in two threads gives the memory back exactly once (B048)."""
    _run(
        run_client,
        sim_env(preload=True, limit="1g"),
        """
import threading
va = ok(reserve(64 * MIB))
gate, done = threading.Barrier(2), threading.Barrier(2)
state = {}
def other():
    for _ in range(400):
        gate.wait()
        ok(release_handle(state["h"]))
        done.wait()
thread = threading.Thread(target=other)
thread.start()
for n in range(400):
    state["h"] = ok(create(64 * MIB))
    ok(map_at(va, 64 * MIB, state["h"]))
    gate.wait()
    ok(unmap(va, 64 * MIB))
    done.wait()
    assert used() == truth() == base, n
thread.join()
""",
    )


def test_memory_outlives_its_context(sim_env: SimEnv, run_client: RunClient) -> None:
    """A reset of the primary context keeps physical memory and its charge."""
    _run(
        run_client,
        sim_env(preload=True, limit="1g"),
        """
h = ok(create(64 * MIB))
ok(call("cuDevicePrimaryCtxReset_v2", 0))
ctx = init(0)
assert same() == base + 64 * MIB
ok(release_handle(h))
assert same() == base
""",
    )


def test_access_rights_take_nothing(sim_env: SimEnv, run_client: RunClient) -> None:
    """Reserving addresses and giving access to mapped memory changes no charge (B048)."""
    _run(
        run_client,
        sim_env(preload=True, limit="1g"),
        """
va = ok(reserve(1 << 40))
h = ok(create(64 * MIB))
ok(map_at(va, 64 * MIB, h))
before = same()
class Access(C.Structure):
    _fields_ = [("type", i32), ("id", i32), ("flags", i32)]
ok(call("cuMemSetAccess", va, 64 * MIB, C.byref(Access(DEVICE, 0, 3)), 1))
assert same() == before == base + 64 * MIB
ok(unmap(va, 64 * MIB))
ok(release_handle(h))
ok(call("cuMemAddressFree", va, 1 << 40))
assert same() == base
""",
    )
