"""Small pieces share blocks of 2 MiB: what of them is freed in stream order, on the simulated GPU."""

from __future__ import annotations

import pytest
from conftest import RunClient, SimEnv

USE = """
import os, random, threading
from simclient import *
from poolcalls import *
ctx = init(0)
s, other = stream(), stream()
streams = [stream() for _ in range(8)]
base()
K = 1 << 10
"""


def _run(run_client: RunClient, env: dict[str, str], code: str) -> None:
    done = run_client(USE + code, env)
    assert done.stderr == ""


def test_a_piece_freed_in_stream_order_keeps_its_block(sim_env: SimEnv, run_client: RunClient) -> None:
    """The block stays charged until the stream is done, whatever is freed at once meanwhile (B047)."""
    code = """
p, q = ok(alloc(64 * K)), ok(alloc(64 * K))
assert p >> 21 == q >> 21 and same() == 2
ok(free_async(p, s))
ok(free(q))
assert same() == 2
ok(sync(s))
assert same() == 0
"""
    _run(run_client, sim_env(preload=True, limit="1g"), code)


@pytest.mark.parametrize("first", ["s", "other"])
def test_pieces_freed_in_two_streams_wait_for_both(
    sim_env: SimEnv, run_client: RunClient, first: str
) -> None:
    """A block whose pieces were freed in two streams is charged as long as the driver holds it (B047)."""
    code = f"""
p, q = ok(alloc(64 * K)), ok(alloc(64 * K))
ok(free_async(p, s)); ok(free_async(q, other))
assert same() == 2
ok(sync({first}))
same()
ok(sync({"other" if first == "s" else "s"}))
assert same() == 0
"""
    _run(run_client, sim_env(preload=True, limit="1g"), code)


def test_the_edges_of_large_ones_wait_too(sim_env: SimEnv, run_client: RunClient) -> None:
    """An allocation that shares its last block with a small one keeps it until the stream is done (B047)."""
    code = """
large = ok(alloc(3 * MIB))
small = [ok(alloc(200 * K)) for _ in range(20)]
held = same()
ok(free_async(large, s))
assert same() == held
ok(sync(s))
left = same()
assert left <= held
for p in small: ok(free(p))
assert same() == 0
"""
    _run(run_client, sim_env(preload=True, limit="1g"), code)


def test_a_context_ends_with_pieces_under_way(sim_env: SimEnv, run_client: RunClient) -> None:
    """A context ends with its blocks; those of the next at the same address count anew (B053)."""
    code = """
for _ in range(3):
    c = ok(ctx_create())
    t = stream()
    pieces = [ok(alloc(100 * K)) for _ in range(40)]
    for p in pieces[::2]: ok(free_async(p, t))
    ok(ctx_destroy(c))
    ok(set_current(ctx))
    assert charged() == 0 == same()
p = ok(alloc(100 * K))
assert same() == 2
ok(free(p))
assert same() == 0
"""
    _run(run_client, sim_env(preload=True, limit="2g"), code)


def test_a_failed_free_keeps_the_count(sim_env: SimEnv, run_client: RunClient) -> None:
    """A free that the driver refuses, of a pointer gone or inside a piece, changes nothing."""
    code = """
p, q = ok(alloc(64 * K)), ok(alloc(64 * K))
expect(INVALID_VALUE, free(p + 512))
ok(free(p))
expect(INVALID_VALUE, free(p))
assert same() == 2
ok(free(q))
assert same() == 0
"""
    _run(run_client, sim_env(preload=True, limit="1g"), code)


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_frees(sim_env: SimEnv, run_client: RunClient, seed: int) -> None:
    """Whatever the order of pieces, frees and synchronisations, what is held is charged (B047)."""
    code = f"""
chance, live = random.Random({seed}), []
for step in range(1500):
    pick = chance.random()
    if pick < 0.5 or not live:
        live.append(ok(alloc(chance.choice([1, 64, 200, 700, 1024, 1500, 2048, 3000]) * K)))
    elif pick < 0.7:
        ok(free(live.pop(chance.randrange(len(live)))))
    elif pick < 0.95:
        ok(free_async(live.pop(chance.randrange(len(live))), chance.choice(streams)))
    else:
        ok(sync(chance.choice(streams)))
    if len(live) > 200:
        ok(free(live.pop()))
    if step % 50 == 0:
        same()
for p in live: ok(free(p))
ok(synchronize())
assert same() == 0
"""
    _run(run_client, sim_env(preload=True, limit="4g"), code)


def test_threads_share_blocks(sim_env: SimEnv, run_client: RunClient) -> None:
    """Eight threads that allocate and free pieces of the same blocks leave nothing behind (B051)."""
    code = """
def work(seed):
    ok(set_current(ctx))
    chance, live, mine = random.Random(seed), [], streams[seed]
    for _ in range(600):
        if chance.random() < 0.5 or not live:
            live.append(ok(alloc(chance.choice([1, 64, 200, 700]) * K)))
        elif chance.random() < 0.5:
            ok(free(live.pop(chance.randrange(len(live)))))
        else:
            ok(free_async(live.pop(chance.randrange(len(live))), mine))
        if chance.random() < 0.02: ok(sync(mine))
    for p in live: ok(free_async(p, mine))
    ok(sync(mine))
threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
for t in threads: t.start()
for t in threads: t.join()
ok(synchronize())
assert same() == 0
"""
    _run(run_client, sim_env(preload=True, limit="4g"), code)
