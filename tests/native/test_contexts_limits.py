"""What a context takes beyond its first size: stacks, heaps and streams."""

from __future__ import annotations

import pytest
from conftest import RunClient, SimEnv

USE = """
from simclient import *
from contextcalls import *
CONTEXT = 106_954_752
"""


def _run(run_client: RunClient, env: dict[str, str], code: str) -> None:
    done = run_client(USE + code, env)
    assert done.stderr == ""


def test_a_stack_limit_is_charged_and_refused(sim_env: SimEnv, run_client: RunClient) -> None:
    """A stack limit takes its frames at once; one that does not fit is refused and changes nothing (B001)."""
    _run(
        run_client,
        sim_env(preload=True, limit="1g"),
        """
init()
assert same() == CONTEXT
ok(set_limit(STACK, 16 * 1024))
big = same()
assert big > CONTEXT + 500 * MIB
expect(OOM, set_limit(STACK, 64 * 1024))
assert limit(STACK) == 16 * 1024 and same() == big
expect(OOM, alloc(400 * MIB))
ok(set_limit(STACK, 2048))
assert same() < CONTEXT + 50 * MIB
ok(alloc(400 * MIB))
ok(reset())
assert same() == 0
""",
    )


def test_each_context_has_frames_of_its_own(sim_env: SimEnv, run_client: RunClient) -> None:
    """A second context's stack limit is charged anew, and goes with it (B053)."""
    _run(
        run_client,
        sim_env(preload=True, limit="2g"),
        """
first = init()
ok(set_limit(STACK, 8 * 1024))
one = same()
second = ok(ctx_create())
ok(set_limit(STACK, 8 * 1024))
assert same() == 2 * one
ok(ctx_destroy(second))
assert same() == one
ok(release())
assert same() == 0
""",
    )


def test_a_heap_limit_is_charged_ahead(sim_env: SimEnv, run_client: RunClient) -> None:
    """A device heap comes with a launch that nobody can refuse, so it is charged when it is set (B001)."""
    _run(
        run_client,
        sim_env(preload=True, limit="1g"),
        """
init()
was = limit(HEAP)
ok(set_limit(HEAP, 512 * MIB))
assert used() == CONTEXT + 512 * MIB - was and sim_device_used() == CONTEXT
expect(OOM, set_limit(HEAP, 2048 * MIB))
expect(OOM, alloc(500 * MIB))
assert limit(HEAP) == 512 * MIB
ok(set_limit(HEAP, 256 * MIB))
assert used() == CONTEXT + 256 * MIB - was
ok(alloc(500 * MIB))
ok(set_limit(FIFO, 64 * MIB))
assert used() == CONTEXT + 256 * MIB - was + 500 * MIB
other = ok(ctx_create())
ok(set_limit(HEAP, 50 * MIB))
ok(ctx_destroy(other))
assert used() == CONTEXT + 256 * MIB - was + 500 * MIB
ok(reset())
assert same() == 0
""",
    )


def test_ten_thousand_streams_stay_under_the_limit(sim_env: SimEnv, run_client: RunClient) -> None:
    """Streams are charged as they come, and refused when the quota is full (B001)."""
    _run(
        run_client,
        sim_env(preload=True, limit="300m"),
        """
init()
made = 0
while True:
    result, stream = stream_create()
    assert sim_device_used() <= 300 * MIB
    if result:
        break
    made += 1
    assert made < 10_000
assert result == OOM and made > 200, made
assert used() <= 300 * MIB and used() >= sim_device_used()
""",
    )


def test_streams_made_and_destroyed_cost_nothing_more(sim_env: SimEnv, run_client: RunClient) -> None:
    """The memory of destroyed streams is reused, with and without NVML's help (B051)."""
    code = """
init()
streams = [ok(stream_create()) for _ in range(20)]
for stream in streams:
    ok(stream_destroy(stream))
before = used()
for _ in range(3000):
    ok(stream_destroy(ok(stream_create(1))))
assert used() <= before
ok(reset())
assert used() == 0
"""
    _run(run_client, sim_env(preload=True, limit="300m"), code)
    blind = "nvmlDeviceGetComputeRunningProcesses_v3:*:3"
    _run(run_client, sim_env(preload=True, limit="300m", SIMGPU_FAULTS=blind), code)


@pytest.mark.parametrize("name", ["cuStreamCreate", "cuCtxSetLimit", "cuCtxGetLimit", "cuCtxGetDevice"])
def test_failing_limits_and_streams_leave_the_charge_right(
    sim_env: SimEnv, run_client: RunClient, name: str
) -> None:
    """Whichever driver call fails, the charge is not less than what the device holds (B046)."""
    code = """
init()
for _ in range(3):
    stream_create()
    set_limit(STACK, 4096)
    set_limit(HEAP, 64 * MIB)
    set_limit(STACK, 2048)
    set_limit(HEAP, 8 * MIB)
for _ in range(40):
    stream_create()
assert sim_device_used() <= used() <= sim_device_used() + 32 * MIB, (used(), sim_device_used())
while release() == 0:
    pass
assert same() == 0
"""
    for nth in range(1, 6):
        _run(run_client, sim_env(preload=True, limit="1g", SIMGPU_FAULTS=f"{name}:{nth}:999"), code)
