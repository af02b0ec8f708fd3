"""Contexts that came to be without any call of ours, as a runtime with private entry points makes them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from conftest import RunClient, SimEnv

NAMES = (
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease_v2",
    "cuCtxCreate_v2",
    "cuCtxDestroy_v2",
    "cuCtxPopCurrent_v2",
)

USE = """
import sys
from simclient import *
from contextcalls import *
CONTEXT = 106_954_752
offsets = dict(pair.split("=") for pair in sys.argv[1:])
def direct(name, *args):
    base = next(int(line.split("-")[0], 16) for line in open("/proc/self/maps") if "libcuda.so.1" in line)
    return C.CFUNCTYPE(C.c_int, *(C.c_uint64,) * len(args))(base + int(offsets[name], 16))(*args)
start()
context = ptr()
"""


def _run(run_client: RunClient, env: dict[str, str], sim_dir: Path, code: str) -> None:
    command = ["nm", "-D", "--defined-only", str(sim_dir / "libcuda.so.1")]
    rows = [row.split() for row in subprocess.check_output(command, text=True).splitlines()]
    offsets = [f"{row[2]}={row[0]}" for row in rows if row[2] in NAMES]
    done = run_client(USE + code, env, *offsets)
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("make", "end"),
    [
        ('direct("cuDevicePrimaryCtxRetain", C.addressof(context), 0)', "release()"),
        ('direct("cuCtxCreate_v2", C.addressof(context), 0, 0)', "ctx_destroy(context.value)"),
    ],
    ids=["primary", "created"],
)
def test_an_unseen_context_is_charged_at_the_first_call(
    sim_env: SimEnv, run_client: RunClient, sim_dir: Path, make: str, end: str
) -> None:
    """An unseen context is charged when something is first done in it, and ends like others (B001)."""
    code = f"""
{make}
ok(set_current(context.value))
assert used() == 0 and sim_device_used() == CONTEXT
p = ok(alloc(10 * MIB))
assert used() >= CONTEXT + 10 * MIB
ok(launch(ok(function(ok(module_load(image("kernel k"))), "k"))))
ok(ctx_destroy(ok(ctx_create())))
ok(set_current(context.value))
ok({end})
assert used() == 0
"""
    _run(run_client, sim_env(preload=True, limit="1g"), sim_dir, code + "same()")
    blind = "nvmlDeviceGetComputeRunningProcesses_v3:*:3"
    _run(run_client, sim_env(preload=True, limit="1g", SIMGPU_FAULTS=blind), sim_dir, code)


def test_an_unseen_reference_keeps_the_charge(sim_env: SimEnv, run_client: RunClient, sim_dir: Path) -> None:
    """Where somebody else still holds the primary context, our last release gives nothing back (B053)."""
    _run(
        run_client,
        sim_env(preload=True, limit="1g"),
        sim_dir,
        """
init()
p = ok(alloc(100 * MIB))
direct("cuDevicePrimaryCtxRetain", C.addressof(context), 0)
ok(release())
assert same() >= CONTEXT + 100 * MIB
ok(free(p))
assert same() == CONTEXT
direct("cuDevicePrimaryCtxRelease_v2", 0)
init()
assert same() == CONTEXT
ok(release())
assert same() == 0
""",
    )


def test_an_unseen_context_counts_against_the_limit(
    sim_env: SimEnv, run_client: RunClient, sim_dir: Path
) -> None:
    """What an unseen context took is not there for allocations (B001)."""
    _run(
        run_client,
        sim_env(preload=True, limit="300m"),
        sim_dir,
        """
direct("cuDevicePrimaryCtxRetain", C.addressof(context), 0)
ok(set_current(context.value))
expect(OOM, alloc(250 * MIB))
ok(alloc(180 * MIB))
same()
""",
    )


def test_an_unseen_context_is_no_stranger(sim_env: SimEnv, run_client: RunClient, sim_dir: Path) -> None:
    """A context made after an unseen one does not take NVML's figure of ours for another process's (B125)."""
    _run(
        run_client,
        sim_env(preload=True, limit="1g"),
        sim_dir,
        """
direct("cuCtxCreate_v2", C.addressof(context), 0, 0)
init()
assert same() == 2 * CONTEXT
""",
    )


def test_an_address_of_an_unseen_end_serves_again(
    sim_env: SimEnv, run_client: RunClient, sim_dir: Path
) -> None:
    """An address whose context ended unseen is granted and charged when the driver gives it again (B051)."""
    _run(
        run_client,
        sim_env(preload=True, limit="1g"),
        sim_dir,
        """
first = ok(ctx_create())
old = ok(alloc(100 * MIB))
direct("cuCtxDestroy_v2", first)
second = ok(ctx_create())
new = ok(alloc(100 * MIB))
assert old == new and same() == CONTEXT + 100 * MIB
ok(free(new))
ok(ctx_destroy(second))
assert same() == 0
""",
    )


def test_process_ids_of_strangers_do_not_hold_a_charge_up(
    sim_env: SimEnv, run_client: RunClient, sim_dir: Path
) -> None:
    """Where NVML's process ids mean nothing, memory freed while shared delays no request (B125)."""
    _run(
        run_client,
        sim_env(preload=True, limit="1g"),
        sim_dir,
        """
direct("cuCtxCreate_v2", C.addressof(context), 0, 0)
direct("cuCtxPopCurrent_v2", C.addressof(context))
ok(ctx_create())
p = ok(alloc(10 * MIB))
ok(ipc_get(p))
ok(free(p))
ok(alloc(10 * MIB))
""",
    )
