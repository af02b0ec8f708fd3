"""Contexts: charged when made, given back when the last reference goes."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from conftest import RunClient, SimEnv

# One context of the simulated T4.
CONTEXT = 106_954_752
# Offsets in the region file, from region.h.
EXT = 2_031_616
CONTEXT_BYTES = EXT + 512
STATE = EXT + 64
UNSETTLED = 2

USE = """
from simclient import *
from contextcalls import *
CONTEXT = 106_954_752
"""


def _run(run_client: RunClient, env: dict[str, str], code: str) -> None:
    done = run_client(USE + code, env)
    assert done.stderr == ""


def _word(tmp_path: Path, offset: int, size: str = "<Q") -> int:
    region = (tmp_path / "usage.cache").read_bytes()
    return int(struct.unpack_from(size, region, offset)[0])


def test_the_primary_context_is_charged_once(sim_env: SimEnv, run_client: RunClient, tmp_path: Path) -> None:
    """Three retains are one charge, which goes with the third release and comes back after (B053)."""
    _run(
        run_client,
        sim_env(preload=True, limit="1g"),
        """
start()
assert same() == 0
for _ in range(3):
    ok(retain())
    assert same() == CONTEXT
for _ in range(2):
    ok(release())
    assert same() == CONTEXT
ok(release())
assert same() == 0
expect(INVALID_CONTEXT, release())
assert same() == 0
ok(retain())
assert same() == CONTEXT
""",
    )
    assert _word(tmp_path, CONTEXT_BYTES) == CONTEXT


def test_a_reset_drops_the_charge_once(sim_env: SimEnv, run_client: RunClient) -> None:
    """A reset gives the context and its allocations back; the next retain is charged once (B053)."""
    _run(
        run_client,
        sim_env(preload=True, limit="1g"),
        """
init()
for size in (1000, 200 * MIB, 3 * MIB):
    ok(alloc(size))
assert same() > CONTEXT + 200 * MIB
ok(reset())
assert same() == 0
ok(retain())
assert same() == CONTEXT
ok(release())
assert same() == (CONTEXT if is_active() else 0)
while release() == 0:
    pass
assert not is_active() and same() == 0
""",
    )


def test_a_failing_driver_changes_no_charge(sim_env: SimEnv, run_client: RunClient) -> None:
    """A retain, create, release, reset or destroy that the driver fails leaves the charge alone (B054)."""
    faults = (
        "cuDevicePrimaryCtxRetain:1:2,cuDevicePrimaryCtxRelease_v2:1:999,cuDevicePrimaryCtxReset_v2:1:999,"
        "cuCtxCreate_v2:1:2,cuCtxDestroy_v2:1:999"
    )
    _run(
        run_client,
        sim_env(preload=True, limit="1g", SIMGPU_FAULTS=faults),
        """
start()
expect(OOM, retain())
assert same() == 0
ok(set_current(ok(retain())))
p = ok(alloc(64 * MIB))
before = same()
expect(999, release())
assert same() == before
expect(999, reset())
assert same() == before
ok(free(p))
assert same() == before - 64 * MIB
expect(OOM, ctx_create())
assert same() == before - 64 * MIB
ctx = ok(ctx_create())
p = ok(alloc(10 * MIB))
expect(999, ctx_destroy(ctx))
assert same() == before - 54 * MIB + CONTEXT
ok(free(p))
ok(ctx_destroy(ctx))
assert same() == before - 64 * MIB
""",
    )


def test_threads_that_retain_at_once_are_charged_once(sim_env: SimEnv, run_client: RunClient) -> None:
    """32 threads retain the same primary context at once, over and over: one charge (B055)."""
    _run(
        run_client,
        sim_env(preload=True, limit="300m"),
        """
start()
for round in range(40):
    together(32, lambda i: ok(retain()))
    assert same() == CONTEXT
    together(32, lambda i: ok(release()))
    assert same() == 0
""",
    )


@pytest.mark.parametrize("version", ["_v2", "_v3", "_v4"])
def test_created_contexts_are_charged_each(sim_env: SimEnv, run_client: RunClient, version: str) -> None:
    """Every created context is charged, and goes with all that was allocated in it (B053)."""
    _run(
        run_client,
        sim_env(preload=True, limit="1g"),
        f"""
start()
first = ok(ctx_create(0, 0, "{version}"))
assert same() == CONTEXT
ok(alloc(30 * MIB)); ok(alloc(100)); ok(alloc(1536 * 1024))
inside = same()
second = ok(ctx_create(0, 0, "{version}"))
keep = ok(alloc(7 * MIB))
assert same() == inside + CONTEXT + 8 * MIB
ok(ctx_destroy(first))
assert same() == CONTEXT + 8 * MIB
ok(free(keep))
ok(ctx_destroy(second))
assert same() == 0
""",
    )


def test_a_context_that_does_not_fit_is_refused(sim_env: SimEnv, run_client: RunClient) -> None:
    """A context larger than what is left is refused, its handle untouched, and nothing stays (B001)."""
    _run(
        run_client,
        sim_env(preload=True, limit="250m"),
        """
start()
first = ok(ctx_create())
ok(alloc(60 * MIB))
before = same()
handle = ptr(7)
assert call("cuCtxCreate_v2", C.byref(handle), 0, 0) == OOM and handle.value == 7
assert call("cuDevicePrimaryCtxRetain", C.byref(handle), 0) == OOM and handle.value == 7
assert not is_active() and same() == before
assert ok(current()) == first
ok(ctx_destroy(first))
init()
assert same() == CONTEXT
""",
    )


@pytest.mark.parametrize("how", ["ok(ctx_create())", "init()"])
def test_a_wrong_estimate_is_undone(sim_env: SimEnv, run_client: RunClient, tmp_path: Path, how: str) -> None:
    """A context that proves larger than its estimate and the quota is undone and refused (B046)."""
    env = sim_env(preload=True, limit="128m")
    _run(run_client, env, "init()")
    with (tmp_path / "usage.cache").open("r+b") as region:
        region.seek(CONTEXT_BYTES)
        region.write(struct.pack("<Q", 4 << 20))
    _run(
        run_client,
        sim_env(preload=True, limit="100m"),
        f"""
start()
try:
    {how}
except CudaError as error:
    assert error.code == OOM
else:
    raise AssertionError("granted")
assert ok(current()) is None and not is_active() and same() == 0
""",
    )


def test_a_small_quota_holds_a_context_that_nobody_measured(sim_env: SimEnv, run_client: RunClient) -> None:
    """The first context of a container fits a quota between its true size and the table's estimate (B001)."""
    _run(run_client, sim_env(preload=True, limit="110m"), "init()\nassert same() == CONTEXT")


def test_without_nvml_the_estimate_stays(sim_env: SimEnv, run_client: RunClient, tmp_path: Path) -> None:
    """Where NVML lists no processes the estimates are charged, given back, and so marked (B125)."""
    faults = "nvmlDeviceGetComputeRunningProcesses_v3:*:3"
    _run(
        run_client,
        sim_env(preload=True, limit="1g", SIMGPU_FAULTS=faults),
        """
start()
ok(retain())
estimate = used()
assert estimate >= CONTEXT
ctx = ok(ctx_create())
assert used() == 2 * estimate
ok(alloc(10 * MIB))
ok(ctx_destroy(ctx))
assert used() == estimate
ok(release())
assert used() == 0
""",
    )
    assert _word(tmp_path, STATE, "<I") == UNSETTLED
    assert _word(tmp_path, CONTEXT_BYTES) == 0


def test_calls_before_cuinit_are_the_drivers(sim_env: SimEnv, run_client: RunClient) -> None:
    """Before cuInit, or for no device, the answer is the driver's own and leaves no mark (B029)."""
    _run(
        run_client,
        sim_env(preload=True, limit="1g"),
        """
for answer in (retain(), ctx_create(), release(), reset()):
    expect(NOT_INITIALIZED, answer)
start()
for dev in (7, 100, 2**31 - 1):
    expect(INVALID_DEVICE, retain(dev))
    expect(INVALID_DEVICE, ctx_create(dev))
assert call("cuDevicePrimaryCtxRetain", ptr(None), 0) == INVALID_VALUE
assert call("cuCtxCreate_v2", ptr(None), 0, 0) == INVALID_VALUE
assert same() == 0
init()
assert same() == CONTEXT
""",
    )
