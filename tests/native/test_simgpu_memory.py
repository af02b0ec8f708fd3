"""The simulated card's own ledger of linear memory and pools: the measured rows of an H200."""

from __future__ import annotations

import pytest
from conftest import SimEnv
from simgpu_ask import ask

MIB = 1 << 20


@pytest.fixture
def h200(sim_env: SimEnv) -> dict[str, str]:
    """One simulated H200."""
    return sim_env(SIMGPU_MODEL="H200")


def test_large_requests_take_whole_granules(h200: dict[str, str]) -> None:
    """400 of 1.1 MiB take 800 MiB, 400 of 2 MiB + 1 byte 1,600."""
    code = """
        init()
        a, ps = grown(lambda: (0, [ok(alloc(int(1.1 * MIB))) for _ in range(400)]))
        b = grow(lambda: [ok(alloc(2 * MIB + 1)) for _ in range(400)] and 0)
        say(a, b, grow(lambda: [ok(free(p)) for p in ps] and 0))
    """
    assert ask(h200, code) == [800, 1600, -800]


@pytest.mark.parametrize("size", [1, 512, 4096, 65536, 768 << 10, 1 << 20])
def test_pieces_share_blocks_that_addresses_tell(h200: dict[str, str], size: int) -> None:
    """Growth is 2 MiB x distinct address >> 21, and no piece crosses a block; 512-byte alignment."""
    code = f"""
        init(); size, n = {size}, max(3, min(600, {64 * MIB} // {size}))
        more, ps = grown(lambda: (0, [ok(alloc(size)) for _ in range(n)]))
        blocks = {{p >> 21 for p in ps}}
        say(more == 2 * len(blocks), all(p >> 21 == p + size - 1 >> 21 for p in ps),
            all(p % 512 == 0 for p in ps), len(set(ps)) == n)
        for p in ps: ok(free(p))
        say(used() - 518, sim_live_objects())
    """
    assert ask(h200, code) == [[True] * 4, [0, 1]]


def test_a_block_goes_back_with_its_last_piece(h200: dict[str, str]) -> None:
    """One of 32 pieces of 64 KiB left in each of 125 blocks still holds 250 MiB."""
    code = """
        init(); ps = [ok(alloc(64 << 10)) for _ in range(4000)]; kept = {}
        for p in ps:
            if kept.setdefault(p >> 21, p) != p: ok(free(p))
        half = used() - 518
        for p in kept.values(): ok(free(p))
        say(half, used() - 518)
    """
    assert ask(h200, code) == [250, 0]


def test_pieces_use_what_a_larger_one_leaves(h200: dict[str, str]) -> None:
    """Requests up to 2 MiB share blocks with each other; above that the tail stays private."""
    code = """
        init()
        say([grow(alloc, n) for n in
             (MIB + 1, MIB - 4096, 512 << 10, 3 * MIB + 4096, 300 << 10, 2 * MIB)])
    """
    assert ask(h200, code) == [2, 0, 2, 4, 0, 2]


def test_random_use_keeps_the_ledger_exact(h200: dict[str, str]) -> None:
    """After each of 3,000 random steps the footprint is 2 MiB x the blocks that live memory covers."""
    code = """
        import random
        random.seed(7); init(); live = {}; bad = 0
        for step in range(3000):
            if live and random.random() < .48:
                p = random.choice(list(live)); ok(free(p)); del live[p]
            else:
                size = int(2 ** random.uniform(0, 25)); p = ok(alloc(size)); live[p] = size
            if step % 20 == 0:
                blocks = {b for p, n in live.items() for b in range(p >> 21, (p + n - 1 >> 21) + 1)}
                bad += used() - 518 != 2 * len(blocks)
                spans = sorted(live.items())
                bad += any(p + n > q for (p, n), (q, _) in zip(spans, spans[1:]))
        for p in live: ok(free(p))
        say(bad, used() - 518, sim_live_objects())
    """
    assert ask(h200, code) == [0, 0, 1]


def test_a_freed_address_is_the_next_to_be_used(h200: dict[str, str]) -> None:
    """Address reuse is immediate, so that a ledger that forgets late is caught."""
    code = """
        init(); p = ok(alloc(8 * MIB)); ok(free(p)); q = ok(alloc(8 * MIB)); say(p == q)
    """
    assert ask(h200, code) is True


def test_pitch_is_rounded_to_512(h200: dict[str, str]) -> None:
    """Widths 1, 513, 1000 and 1025 get 512, 1024, 1024 and 1536; the memory is pitch x height (B012)."""
    code = """
        init(); pitches = [ok(alloc_pitch(w, 10))[1] for w in (1, 513, 1000, 1025)]
        before = used(); p, pitch = ok(alloc_pitch(5000, 3001))
        say(pitches, pitch, ok(address_range(p))[1], used() - before)
    """
    assert ask(h200, code) == [[512, 1024, 1024, 1536], 5120, 15_365_120, 16]


def test_out_of_memory_is_clean_and_exact(h200: dict[str, str]) -> None:
    """A full card refuses with 2; what was freed can be taken again to the last granule."""
    code = """
        init(); spare = mem_info()[1] >> 21 << 21; p = ok(alloc(spare))
        full = [alloc(4096)[0], mem_create(2 * MIB)[0], array3d(64, 64)[0], stream_create()[0],
                alloc_async(1)[0], ctx_create()[0], set_limit(STACK, 2048),
                module_load(image("global g 2097152"))[0]]
        say(stream_create()[0], full, mem_info()[1] < 2 * MIB); ok(free(p)); say(ok(alloc(spare)) > 0)
    """
    # The first stream takes nothing; a second one does.
    assert ask(h200, code) == [[2, [2, 2, 2, 0, 2, 2, 2, 2], True], True]


def test_host_and_managed_memory_are_not_the_process_own(h200: dict[str, str]) -> None:
    """Pinned memory is none of the device's; managed memory is when touched, and never the process's."""
    code = """
        init(); h, m = ptr(), u64()
        ok(call("cuMemHostAlloc", C.byref(h), GIB, u32(0)))
        ok(call("cuMemAllocManaged", C.byref(m), 512 * MIB, u32(1)))
        seen = lambda: (used() - 518, (sim_device_used() >> 20) - 518)
        untouched = seen(); ok(call("cuMemsetD8_v2", m, u32(0), 512 * MIB)); touched = seen()
        ok(call("cuMemPrefetchAsync", m, 512 * MIB, i32(-1), ptr())); back = seen()
        ok(call("cuMemPrefetchAsync", m, 100 * MIB, i32(0), ptr())); part = seen(); ok(free(m.value))
        say(untouched, touched, back, part, seen())
    """
    assert ask(h200, code) == [[0, 0], [0, 512], [0, 0], [0, 100], [0, 0]]


@pytest.mark.parametrize(
    ("size", "mib"),
    [
        (1, 32),
        (1 << 20, 32),
        (31 << 20, 32),
        (32 << 20, 32),
        (33 << 20, 64),
        (100 << 20, 128),
        (1 << 30, 1024),
    ],
)
@pytest.mark.parametrize("own", [False, True])
def test_pools_grow_in_steps_of_32(h200: dict[str, str], size: int, mib: int, own: bool) -> None:
    """An empty pool reserves the next multiple of 32 MiB; reserved equals the footprint; all back on sync."""
    code = f"""
        init(); s = ok(stream_create()); pool = ok(pool_create()) if {own} else ok(default_pool())
        more, p = grown(alloc_from, pool, {size}, s)
        attrs = [ok(pool_attr(pool, n)) for n in ("reserved", "used", "reserved_high")]
        freed = grow(free_async, p, s); synced = grow(stream_sync, s)
        say(more, attrs, freed, synced, ok(pool_attr(pool, "reserved")), ok(pool_attr(pool, "used")))
    """
    assert ask(h200, code) == [mib, [mib * MIB, size, mib * MIB], 0, -mib, 0, 0]


def test_pools_fill_holes_and_back_only_what_is_missing(h200: dict[str, str]) -> None:
    """The measured series of one pool: 20, 10, 10, 100, 28, 65 MiB, 100 x 700 KiB, free 100, 90, 200."""
    code = """
        init(); s = ok(stream_create()); pool = ok(pool_create()); seen = []
        def step(size):
            p = ok(alloc_from(pool, size, s)); seen.append(ok(pool_attr(pool, "reserved")) >> 20); return p
        ps = [step(n * MIB) for n in (20, 10, 10, 100, 28, 65)]
        for _ in range(100): last = step(700 << 10)
        seen[6:] = seen[-1:]
        ok(free_async(ps[3], s)); ok(stream_sync(s)); seen.append(ok(pool_attr(pool, "reserved")) >> 20)
        step(90 * MIB); step(200 * MIB); say(seen, used() - 518)
    """
    assert ask(h200, code) == [[32, 32, 64, 160, 192, 256, 320, 256, 320, 512], 512]
