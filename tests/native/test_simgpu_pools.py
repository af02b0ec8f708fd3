"""Pools of the simulated card: thresholds, give-backs, life, sharing and shortage, as measured on an H200."""

from __future__ import annotations

import pytest
from conftest import SimEnv
from simgpu_ask import ask


@pytest.fixture
def h200(sim_env: SimEnv) -> dict[str, str]:
    """One simulated H200."""
    return sim_env(SIMGPU_MODEL="H200")


def test_a_threshold_keeps_memory_until_trimmed(h200: dict[str, str]) -> None:
    """300 MiB reserve 320: gone at a sync with the default threshold, kept with a maximal one."""
    code = """
        init(); pool = ok(default_pool()); s = ok(stream_create())
        def cycle():
            p = ok(alloc_async(300 * MIB, s)); held = used() - 518
            ok(free_async(p, s)); ok(stream_sync(s))
            return held, used() - 518
        a = cycle(); ok(pool_threshold(pool, 2**64 - 1)); b = cycle()
        ok(pool_threshold(pool, 64 * MIB)); c = used() - 518
        p = ok(alloc_async(1, s)); ok(free_async(p, s)); ok(stream_sync(s)); d = used() - 518
        ok(pool_trim(pool, 10 * MIB)); e = used() - 518; ok(pool_trim(pool))
        say(a, b, c, d, e, used() - 518)
    """
    assert ask(h200, code) == [[320, 0], [320, 320], 320, 64, 32, 0]


@pytest.mark.parametrize(
    ("call", "gives"),
    [
        ("stream_sync(s)", True),
        ("synchronize()", True),
        ("call('cuEventSynchronize', e)", True),
        ("stream_sync(other)", False),
        ("call('cuStreamQuery', ptr(s))", False),
        ("call('cuEventQuery', e)", False),
        ("alloc(4096)[0]", False),
        ("mem_info()[0]", False),
        ("pool_trim(pool, 128 * MIB)", False),
    ],
)
def test_only_a_synchronisation_of_the_freeing_stream_gives_back(
    h200: dict[str, str], call: str, gives: bool
) -> None:
    """Which calls make an unused pool lose its 128 MiB."""
    code = f"""
        init(); s, other, e = ok(stream_create()), ok(stream_create()), ptr(); pool = ok(default_pool())
        ok(call("cuEventCreate", C.byref(e), u32(0)))
        p = ok(alloc_async(100 * MIB, s)); ok(free_async(p, s)); ok(call("cuEventRecord", e, ptr(s)))
        ok({call}); say(ok(pool_attr(pool, "reserved")) >> 20)
    """
    assert ask(h200, code) == (0 if gives else 128)


def test_a_plain_free_of_a_pool_pointer_gives_back_at_once(h200: dict[str, str]) -> None:
    """cuMemFree synchronises, and leaves the used figure as it was (B047)."""
    code = """
        init(); p = ok(alloc_async(100 * MIB)); pool = ok(default_pool())
        say(grow(free, p), ok(pool_attr(pool, "reserved")), ok(pool_attr(pool, "used")) >> 20)
    """
    assert ask(h200, code) == [-128, 0, 100]


def test_a_stream_ordered_free_of_plain_memory_waits_for_the_stream(h200: dict[str, str]) -> None:
    """The address is dead at once, the bytes go back with the synchronisation (B047)."""
    code = """
        init(); s = ok(stream_create()); p = ok(alloc(4 * MIB)); q = ok(alloc(4096))
        say(grow(free_async, p, s), free(p), free_async(p, s), grow(free_async, q, s), grow(stream_sync, s))
    """
    assert ask(h200, code) == [0, 1, 1, 0, -6]


def test_a_destroyed_pool_lives_until_its_last_allocation(h200: dict[str, str]) -> None:
    """Destroying takes the handle away; the memory follows its frees, and the default pool cannot go."""
    code = """
        init(); pool = ok(pool_create()); ok(set_pool(pool))
        a, b = ok(alloc_async(100 * MIB)), ok(alloc_async(100 * MIB)); held = used() - 518
        gone = grow(pool_destroy, pool); back = ok(current_pool()) == ok(default_pool())
        say(held, gone, back, pool_attr(pool, "used")[0], alloc_from(pool, 1)[0],
            pool_destroy(ok(default_pool())))
        ok(free_async(b)); one = grow(stream_sync); ok(free_async(a))
        say(one, grow(stream_sync), sim_live_objects())
    """
    # The context, and the default pool that was asked for.
    assert ask(h200, code) == [[224, 0, True, 1, 1, 1], [-96, -128, 2]]


def test_each_device_has_a_default_and_a_current_pool(sim_env: SimEnv) -> None:
    """cuMemAllocAsync takes from the current pool of the stream's device."""
    code = """
        init(0); pool = ok(pool_create(0)); ok(set_pool(pool))
        say(ok(default_pool(0)) != ok(default_pool(1)), ok(current_pool(0)) == pool, set_pool(pool, 1))
        p = ok(alloc_async(1)); owner = ptr(); ok(call("cuPointerGetAttribute", C.byref(owner), u32(17), p))
        where = i32(); ok(call("cuPointerGetAttribute", C.byref(where), u32(9), p))
        init(1); ok(alloc_async(100 * MIB))
        say(owner.value == pool, where.value, [sim_process_used(me, d) - 106954752 >> 20 for d in (0, 1)])
    """
    assert ask(sim_env(SIMGPU_COUNT="2"), code) == [[True, True, 1], [True, 0, [32, 128]]]


def test_a_limited_pool_refuses_beyond_its_pages(h200: dict[str, str]) -> None:
    """maxSize 50 MiB is 64 in pages: 40 and 20 fit, 40 more do not."""
    code = """
        init(); pool = ok(pool_create(max_size=50 * MIB))
        say([alloc_from(pool, n * MIB)[0] for n in (40, 20, 40)])
    """
    assert ask(h200, code) == [0, 0, 2]


def test_a_shortage_takes_unused_pool_memory_first(h200: dict[str, str]) -> None:
    """cuMemAlloc that would fail trims kept pools and succeeds."""
    code = """
        init(); pool = ok(default_pool()); ok(pool_threshold(pool, 2**64 - 1))
        ok(free_async(ok(alloc_async(8 * GIB)))); ok(stream_sync()); ok(alloc(mem_info()[1] - GIB))
        kept = ok(pool_attr(pool, "reserved")) >> 30
        say(kept, alloc(4 * GIB)[0], ok(pool_attr(pool, "reserved")), alloc(16 * GIB)[0])
    """
    assert ask(h200, code) == [8, 0, 0, 2]


def test_pools_outlive_contexts(h200: dict[str, str]) -> None:
    """A reset gives back plain memory, not pools or handles; with a new context they show again."""
    code = """
        ctx = init(); ok(mem_create(64 * MIB)); ok(alloc_async(256 * MIB)); ok(alloc(32 * MIB))
        a = used() - 518; ok(call("cuDevicePrimaryCtxReset_v2", 0)); listed = me in nvml_processes()
        ok(retain())
        say(a, listed, nvml_processes()[me] - (518 << 20) >> 20)
    """
    assert ask(h200, code) == [352, False, 320]


def test_host_pools_take_no_device_memory(h200: dict[str, str]) -> None:
    """A pool on the host counts its reserve, not the device's."""
    code = """
        init(); pool = ok(pool_create(where=HOST)); more = grow(alloc_from, pool, 64 * MIB)
        say(more, ok(pool_attr(pool, "reserved")) >> 20)
    """
    assert ask(h200, code) == [0, 64]
