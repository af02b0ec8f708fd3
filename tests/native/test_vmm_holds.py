"""What holds physical memory besides handles and mappings: tiles of sparse arrays, multicast bindings."""

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


@pytest.mark.parametrize("suffix", ["", "_ptsz"])
def test_a_tile_holds_its_memory(sim_env: SimEnv, run_client: RunClient, suffix: str) -> None:
    """Memory mapped into a sparse array stays charged until it is unmapped and its handle released (B048)."""
    _run(
        run_client,
        sim_env(preload=True, limit="1g"),
        f"""
a = ok(array3(4096, 4096, 0, SPARSE))
assert same() == base
h = ok(create(2 * MIB))
ok(map_tile(a, 0, h, "{suffix}"))
ok(release_handle(h))
assert used() == base + 2 * MIB
ok(map_tile(a, 0, 0, "{suffix}"))
ok(synchronize())
assert used() == base
""",
    )


def test_tiles_go_with_their_array_and_with_what_replaces_them(
    sim_env: SimEnv, run_client: RunClient
) -> None:
    """A tile mapped anew lets go of the old memory, a destroyed array of all of it."""
    _run(
        run_client,
        sim_env(preload=True, limit="1g"),
        """
a = ok(array3(4096, 4096, 0, SPARSE))
for x in range(12):
    h = ok(create(2 * MIB))
    ok(map_tile(a, 256 * x, h))
    ok(release_handle(h))
assert used() == base + 24 * MIB
h = ok(create(2 * MIB))
ok(map_tile(a, 0, h))
ok(release_handle(h))
ok(synchronize())
assert used() == base + 24 * MIB
ok(array_destroy(a))
assert used() == base
""",
    )


def test_a_failing_tile_call_holds_nothing(sim_env: SimEnv, run_client: RunClient) -> None:
    """When the mapping fails the handle alone holds the memory; a failed unmapping keeps it held (B046)."""
    _run(
        run_client,
        sim_env(preload=True, limit="1g", SIMGPU_FAULTS="cuMemMapArrayAsync:1:999,cuMemMapArrayAsync:3:999"),
        """
a = ok(array3(4096, 4096, 0, SPARSE))
h = ok(create(2 * MIB))
expect(999, map_tile(a, 0, h))
ok(release_handle(h))
assert same() == base
h = ok(create(2 * MIB))
ok(map_tile(a, 0, h))
ok(release_handle(h))
expect(999, map_tile(a, 0, 0))
assert used() == base + 2 * MIB
ok(map_tile(a, 0, 0))
ok(synchronize())
assert used() == base
""",
    )


MULTICAST = """
mc = ok(multicast(64 * MIB))
assert same() == base
ok(call("cuMulticastAddDevice", mc, 0))
va = ok(reserve(64 * MIB))
h = ok(create(16 * MIB))
"""


def test_a_multicast_object_takes_nothing_until_memory_is_bound(
    sim_env: SimEnv, run_client: RunClient
) -> None:
    """Memory bound by handle or by address stays charged until it is unbound."""
    _run(
        run_client,
        sim_env(preload=True, limit="1g"),
        MULTICAST
        + """
ok(call("cuMulticastBindMem", mc, 0, h, 0, 16 * MIB, 0))
ok(release_handle(h))
assert same() == base + 16 * MIB
ok(call("cuMulticastUnbind", mc, 0, 0, 16 * MIB))
assert same() == base
h = ok(create(16 * MIB))
ok(map_at(va, 16 * MIB, h))
ok(call("cuMulticastBindAddr", mc, 16 * MIB, va, 16 * MIB, 0))
ok(unmap(va, 16 * MIB))
ok(release_handle(h))
assert same() == base + 16 * MIB
ok(call("cuMulticastUnbind", mc, 0, 16 * MIB, 16 * MIB))
assert same() == base
""",
    )


def test_bindings_go_with_the_multicast_object(sim_env: SimEnv, run_client: RunClient) -> None:
    """The last handle and mapping of the object give back what is bound to it."""
    _run(
        run_client,
        sim_env(preload=True, limit="1g"),
        MULTICAST
        + """
ok(call("cuMulticastBindMem", mc, 0, h, 0, 16 * MIB, 0))
ok(release_handle(h))
ok(map_at(va, 64 * MIB, mc))
ok(release_handle(mc))
assert same() == base + 16 * MIB
ok(unmap(va, 64 * MIB))
assert same() == base
""",
    )


@pytest.mark.parametrize("name", ["cuMulticastCreate", "cuMulticastBindMem", "cuMulticastUnbind"])
def test_a_failing_multicast_call_changes_nothing(sim_env: SimEnv, run_client: RunClient, name: str) -> None:
    """A fault in any multicast call leaves the charge with the handles that hold it (B046)."""
    _run(
        run_client,
        sim_env(preload=True, limit="1g", SIMGPU_FAULTS=f"{name}:1:999"),
        """
r, mc = multicast(64 * MIB)
if r:
    mc = ok(multicast(64 * MIB))
failed = r
ok(call("cuMulticastAddDevice", mc, 0))
h = ok(create(16 * MIB))
r = call("cuMulticastBindMem", mc, 0, h, 0, 16 * MIB, 0)
failed += r
if r:
    ok(release_handle(h))
    assert same() == base
    h = ok(create(16 * MIB))
    ok(call("cuMulticastBindMem", mc, 0, h, 0, 16 * MIB, 0))
ok(release_handle(h))
r = call("cuMulticastUnbind", mc, 0, 0, 16 * MIB)
failed += r
if r:
    assert same() == base + 16 * MIB
    ok(call("cuMulticastUnbind", mc, 0, 0, 16 * MIB))
assert failed == 999 and same() == base
""",
    )
