"""Green contexts: parts of a device that share the memory of its primary context."""

from __future__ import annotations

import pytest
from conftest import RunClient, SimEnv

USE = """
from simclient import *
from contextcalls import *
CONTEXT = 106_954_752
def green(dev=0):
    part, desc = C.create_string_buffer(1024), ptr()
    ok(call("cuDeviceGetDevResource", dev, part, C.c_int(1)))
    ok(call("cuDevResourceGenerateDesc", C.byref(desc), part, C.c_uint(1)))
    return out(ptr, "cuGreenCtxCreate", desc, dev, C.c_uint(1))
def context_of(handle):
    return ok(out(ptr, "cuCtxFromGreenCtx", ptr(handle)))
def green_destroy(handle):
    return call("cuGreenCtxDestroy", ptr(handle))
"""


def _run(run_client: RunClient, env: dict[str, str], code: str) -> None:
    done = run_client(USE + code, env)
    assert done.stderr == ""


def test_a_green_context_is_charged_with_its_primary(sim_env: SimEnv, run_client: RunClient) -> None:
    """The first green context makes the primary one, further ones add little, the last ends it (B053)."""
    _run(
        run_client,
        sim_env(preload=True, limit="1g"),
        """
start()
first = ok(green())
assert is_active() and same() > CONTEXT
one = same()
second = ok(green())
assert one < same() < one + 8 * MIB
ok(set_current(context_of(first)))
p = ok(alloc(100 * MIB))
both = same()
ok(green_destroy(second))
assert same() <= both
ok(green_destroy(first))
assert not is_active() and same() == 0
init()
assert same() == CONTEXT
""",
    )


def test_memory_of_a_green_context_outlives_it(sim_env: SimEnv, run_client: RunClient) -> None:
    """A retained primary context keeps what green ones allocated; its end gives that back (B053)."""
    _run(
        run_client,
        sim_env(preload=True, limit="1g"),
        """
primary = init()
handle = ok(green())
ok(set_current(context_of(handle)))
p = ok(alloc(100 * MIB))
q = ok(alloc(50 * MIB))
ok(set_current(primary))
ok(green_destroy(handle))
assert same() >= CONTEXT + 150 * MIB
ok(free(p))
assert same() < CONTEXT + 150 * MIB
ok(release())
assert same() == 0
""",
    )


def test_a_green_context_that_does_not_fit_is_refused(sim_env: SimEnv, run_client: RunClient) -> None:
    """A green context is refused like another, and leaves no primary behind (B001)."""
    _run(
        run_client,
        sim_env(preload=True, limit="104m"),
        """
start()
for _ in range(3):
    expect(OOM, green())
    assert not is_active() and same() == 0
init()
assert same() == CONTEXT
expect(OOM, green())
assert same() == CONTEXT and is_active()
""",
    )


def test_green_contexts_share_their_frames(sim_env: SimEnv, run_client: RunClient) -> None:
    """Local memory is the primary context's: launches in other parts take nothing more (B001)."""
    _run(
        run_client,
        sim_env(preload=True, limit="600m"),
        """
primary = init()
parts = [ok(green()) for _ in range(3)]
library = ok(library_load(image("kernel k local=8192")))
k = ok(kernel(library, "k"))
before = same()
ok(set_current(context_of(parts[0])))
ok(launch(k))
grown = same()
assert grown > before + 250 * MIB
for context in (context_of(parts[1]), primary, context_of(parts[2])):
    ok(set_current(context))
    ok(launch(k))
    assert same() == grown
""",
    )


@pytest.mark.parametrize("name", ["cuGreenCtxCreate", "cuGreenCtxDestroy", "cuCtxFromGreenCtx"])
def test_failing_calls_leave_the_charge_right(sim_env: SimEnv, run_client: RunClient, name: str) -> None:
    """Whichever of these calls fails, the charge ends as what the device holds (B046)."""
    code = """
start()
made = []
for _ in range(3):
    r, handle = green()
    if r == 0:
        made.append(handle)
        out(ptr, "cuCtxFromGreenCtx", ptr(handle))
    same()
for handle in made:
    if green_destroy(handle):
        same()
        ok(green_destroy(handle))
assert not is_active() and same() == 0
"""
    for nth in range(1, 4):
        _run(run_client, sim_env(preload=True, limit="1g", SIMGPU_FAULTS=f"{name}:{nth}:999"), code)
