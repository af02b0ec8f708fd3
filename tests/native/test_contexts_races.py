"""Contexts under faults, threads and several devices."""

from __future__ import annotations

import pytest
from conftest import RunClient, SimEnv

USE = """
from simclient import *
from contextcalls import *
CONTEXT = 106_954_752
"""

# Driver calls that the bodies of contexts make themselves or pass on.
CALLS = [
    "cuDeviceGetAttribute",
    "cuDevicePrimaryCtxGetState",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxReset_v2",
    "cuCtxCreate_v2",
    "cuCtxDestroy_v2",
    "cuCtxGetDevice",
    "cuCtxGetCurrent",
]


def _run(run_client: RunClient, env: dict[str, str], code: str) -> None:
    done = run_client(USE + code, env)
    assert done.stderr == ""


@pytest.mark.parametrize("name", CALLS)
def test_each_failing_driver_call_leaves_the_charge_right(
    sim_env: SimEnv, run_client: RunClient, name: str
) -> None:
    """Whichever driver call fails, first to fourth time, the charge ends as what the device holds (B046)."""
    code = """
start()
seen = []
contexts = []
for _ in range(2):
    seen.append(retain()[0])
    r, ctx = ctx_create()
    seen.append(r)
    if r == 0:
        contexts.append(ctx)
        alloc(5 * MIB)
same_or_more = used() >= sim_device_used()
assert same_or_more, (used(), sim_device_used())
for ctx in contexts:
    if ctx_destroy(ctx):
        ok(ctx_destroy(ctx))
for _ in range(6):
    release()
reset(); reset()
assert sim_device_used() == 0
assert used() == 0, used()
"""
    for nth in range(1, 5):
        _run(run_client, sim_env(preload=True, limit="1g", SIMGPU_FAULTS=f"{name}:{nth}:999"), code)


def test_each_device_gets_its_own_back(sim_env: SimEnv, run_client: RunClient) -> None:
    """Contexts and allocations end on the device they were made on, whatever is current (B045)."""
    _run(
        run_client,
        sim_env(preload=True, limit="1g", SIMGPU_COUNT="3"),
        """
start()
contexts = []
for dev in range(3):
    contexts.append(ok(ctx_create(dev)))
    ok(alloc((dev + 1) * 20 * MIB))
for dev in range(3):
    assert same(dev) == CONTEXT + (dev + 1) * 20 * MIB
ok(set_current(contexts[0]))
ok(ctx_destroy(contexts[2]))
assert [same(dev) - CONTEXT for dev in range(2)] == [20 * MIB, 40 * MIB] and same(2) == 0
ok(retain(1))
ok(release(1))
ok(ctx_destroy(contexts[1]))
assert same(0) == CONTEXT + 20 * MIB and same(1) == 0
""",
    )


def test_addresses_of_a_dying_context_may_be_reused(sim_env: SimEnv, run_client: RunClient) -> None:
    """Threads destroy full contexts while others allocate: every byte is charged once (B051)."""
    _run(
        run_client,
        sim_env(preload=True, limit="4g"),
        """
start()
import random
def work(i):
    mine = random.Random(i)
    for _ in range(12):
        ctx = ok(ctx_create())
        live = [ok(alloc(mine.choice([300, 70_000, 1_600_000, 3 * MIB]))) for _ in range(40)]
        for p in live[: mine.randrange(40)]:
            ok(free(p))
        ok(ctx_destroy(ctx))
together(6, work)
assert same() == 0
""",
    )


def test_a_context_with_many_allocations_ends(sim_env: SimEnv, run_client: RunClient) -> None:
    """20,000 allocations go with their context, and those of another context stay (B051)."""
    _run(
        run_client,
        sim_env(preload=True, limit="8g"),
        """
init()
kept = [ok(alloc(4096)) for _ in range(1000)]
before = same()
ctx = ok(ctx_create())
for _ in range(20_000):
    ok(alloc(4096))
ok(ctx_destroy(ctx))
assert same() == before
for p in kept:
    ok(free(p))
assert same() == CONTEXT
""",
    )


def test_attach_and_detach_count(sim_env: SimEnv, run_client: RunClient) -> None:
    """A created context goes with its last detach (B053)."""
    _run(
        run_client,
        sim_env(preload=True, limit="1g"),
        """
start()
ctx = ok(ctx_create())
assert ok(out(ptr, "cuCtxAttach", 0)) == ctx
ok(call("cuCtxDetach", ptr(ctx)))
assert same() == CONTEXT
ok(call("cuCtxDetach", ptr(ctx)))
assert same() == 0
""",
    )


def test_two_tenants_processes_share_the_measured_size(sim_env: SimEnv, run_client: RunClient) -> None:
    """The second process of a container charges what the first one measured, so that both just fit (B001)."""
    env = sim_env(preload=True, limit="210m")
    _run(
        run_client,
        env,
        """
import subprocess, sys, time
init()
assert same() == CONTEXT
second = "from simclient import *; init(); expect(OOM, alloc(64 * MIB))"
assert subprocess.run([sys.executable, "-c", second]).returncode == 0
time.sleep(0.1)  # the dead are looked for every 50 ms
assert same() == CONTEXT
ok(alloc(100 * MIB))
third = "from simclient import *; ok(cu_init()); expect(OOM, retain())"
assert subprocess.run([sys.executable, "-c", third]).returncode == 0
""",
    )
