"""Stream-ordered allocations inside stream captures, on the simulated GPU."""

from __future__ import annotations

import pytest
from conftest import RunClient, SimEnv

USE = """
import ctypes as C
from simclient import *
from poolcalls import *
ctx = init(0)
s, other = stream(), stream()
before = ok(alloc_async(MIB, other))
base()
"""
FULL = """
room = ok(mem_info())[0]
ok(alloc(room - room % (2 * MIB)))
full = same()
"""


def _run(run_client: RunClient, env: dict[str, str], code: str) -> None:
    done = run_client(USE + code, env)
    assert done.stderr == ""


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_a_captured_allocation_takes_nothing(sim_env: SimEnv, run_client: RunClient, mode: int) -> None:
    """An allocation that becomes a graph node is not charged and leaves the capture valid (B172)."""
    code = f"""
ok(capture_begin(s, {mode}))
at = ok(alloc_async(64 * MIB, s))
more = ok(from_pool(512 * MIB, default_pool(), s))
ok(free_async(at, s)); ok(free_async(more, s))
result, graph = capture_end(s)
assert result == 0 and graph and same() == 32
"""
    _run(run_client, sim_env(preload=True, limit="1g"), code)


@pytest.mark.parametrize("size", [1, 64, 4096])
def test_a_captured_allocation_is_granted_at_a_full_quota(
    sim_env: SimEnv, run_client: RunClient, size: int
) -> None:
    """A capture takes no memory, so a full quota is no reason to refuse it; the launch is (B172)."""
    code = f"""
ok(capture_begin(s))
at = ok(alloc_async({size} * MIB, s))
ok(free_async(at, s))
result, graph = capture_end(s)
assert result == 0 and graph and same() == full and refusals() == 0
assert alloc_async({size} * MIB + 64 * MIB, s) == (OOM, 0)
"""
    _run(run_client, sim_env(preload=True, limit="1g"), FULL + code)


@pytest.mark.parametrize(
    "act",
    [
        "alloc_async(MIB, other)",
        "from_pool(MIB, default_pool(), other)",
        "free_async(before, other)",
        "trim(default_pool())",
        "pool_create()",
        "alloc(2 * MIB)",
    ],
)
def test_the_library_asks_nothing_that_spoils_a_capture(
    sim_env: SimEnv, run_client: RunClient, act: str
) -> None:
    """Calls beside a capture answer, and end it, exactly as without the library (B172)."""
    code = f"""
for mode in (0, 1, 2):
    ok(capture_begin(s, mode))
    at = ok(alloc_async(MIB, s))
    ok(free_async(at, s))
    answer = {act}
    print(mode, answer if isinstance(answer, int) else answer[0], capture_end(s)[0])
"""
    bare = run_client(USE.replace("base()", "") + code, sim_env())
    done = run_client(USE + code, sim_env(preload=True, limit="1g"))
    assert (done.stdout, done.stderr) == (bare.stdout, "")


def test_refusals_and_reports_leave_a_capture_valid(sim_env: SimEnv, run_client: RunClient) -> None:
    """Trimming pools for a refusal, and cuMemGetInfo, are harmless to a capture of the same thread (B172)."""
    code = """
ok(threshold(default_pool(), 2**64 - 1))
at = ok(alloc_async(512 * MIB, other)); ok(free_async(at, other)); ok(sync(other))
ok(capture_begin(s))
ok(mem_info())
h = u64()
class Prop(C.Structure):
    _fields_ = [("type", i32), ("handles", i32), ("where", i32), ("id", i32), ("rest", u64 * 2)]
prop = Prop(type=1, where=1)
assert call("cuMemCreate", C.byref(h), 4096 * MIB, C.byref(prop), 0) == OOM
ok(call("cuMemCreate", C.byref(h), 700 * MIB, C.byref(prop), 0))
result, graph = capture_end(s)
assert result == 0
"""
    _run(run_client, sim_env(preload=True, limit="1g"), code)
