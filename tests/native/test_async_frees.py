"""Plain allocations freed in stream order stay charged until their stream is done, on the simulated GPU."""

from __future__ import annotations

import pytest
from conftest import RunClient, SimEnv

USE = """
import os, threading
from simclient import *
from poolcalls import *
ctx = init(0)
s, other = stream(), stream()
base()
"""


def _run(run_client: RunClient, env: dict[str, str], code: str) -> None:
    done = run_client(USE + code, env)
    assert done.stderr == ""


WAYS = {
    "stream": "ok(sync(s))",
    "context": "ok(synchronize())",
    "event": "e = ok(out(ptr, 'cuEventCreate', 0)); ok(call('cuEventRecord', ptr(e), ptr(s)));"
    " ok(call('cuEventSynchronize', ptr(e)))",
}


@pytest.mark.parametrize("how", WAYS)
def test_the_charge_goes_when_the_memory_does(sim_env: SimEnv, run_client: RunClient, how: str) -> None:
    """cuMemFreeAsync of a plain pointer gives back at the synchronisation, as the driver does (B047)."""
    code = f"""
p, q = ok(alloc(200 * MIB)), ok(alloc(100 * MIB))
ok(free_async(p, s))
assert same() == 300
ok(free_async(q, s))
assert same() == 300
assert call("cuStreamQuery", ptr(s)) == 0 and same() == 300
{WAYS[how]}
assert same() == 0
"""
    _run(run_client, sim_env(preload=True, limit="1g"), code)


def test_frees_without_a_synchronisation_do_not_pass_the_limit(
    sim_env: SimEnv, run_client: RunClient
) -> None:
    """A program that frees in stream order and never synchronises is held to its quota, and served (B047)."""
    code = """
for i in range(20):
    p = ok(alloc(300 * MIB))
    assert same() <= 900
    ok(free_async(p, *[(s, ""), (other, "_ptsz"), (None, "")][i % 3]))
    assert sim_process_used(os.getpid()) <= 1024 * MIB
ok(alloc(880 * MIB))
assert refusals() <= 20
"""
    _run(run_client, sim_env(preload=True, limit="1g"), code)


def test_a_busy_stream_keeps_its_charge(sim_env: SimEnv, run_client: RunClient) -> None:
    """While the stream has work to do nothing is given back, so what does not fit is refused (B047)."""
    code = """
ok(free_async(ok(alloc(600 * MIB)), s))
expect(OOM, alloc(600 * MIB))
assert same() == 600
ok(sync(s))
assert same() == 0
ok(alloc(600 * MIB))
"""
    # Not ready, as far as the library can see while it is asked for memory.
    env = sim_env(preload=True, limit="1g", SIMGPU_FAULTS="cuStreamQuery:1:600")
    _run(run_client, env, code)


def test_a_destroyed_stream_is_settled(sim_env: SimEnv, run_client: RunClient) -> None:
    """The end of a stream or of its context ends what it kept (B047)."""
    code = """
def counted():
    result, left, total = mem_info()
    return total - left - sim_process_used(os.getpid())
before = counted()
ok(free_async(ok(alloc(300 * MIB)), s))
ok(call("cuStreamDestroy_v2", ptr(s)))
ok(synchronize())
assert charged() == 0 and counted() <= before
c = ok(ctx_create())
ok(free_async(ok(alloc(300 * MIB))))
assert charged() == 300 * MIB
ok(ctx_destroy(c))
ok(set_current(ctx))
assert charged() == 0
ok(alloc(700 * MIB))
"""
    _run(run_client, sim_env(preload=True, limit="1g"), code)


def test_the_threads_own_stream_is_asked_by_that_thread(sim_env: SimEnv, run_client: RunClient) -> None:
    """Memory freed in a thread's own stream comes back when that thread, or the context, synchronises."""
    code = """
def work(finish):
    ok(set_current(ctx))
    ok(free_async(ok(alloc(200 * MIB)), None, "_ptsz"))
    if finish:
        ok(call("cuStreamSynchronize_ptsz", ptr(None)))
for finish, left in ((True, 0), (False, 200)):
    t = threading.Thread(target=work, args=(finish,))
    t.start(); t.join()
    assert charged() == left * MIB
ok(synchronize())
assert charged() == 0
"""
    _run(run_client, sim_env(preload=True, limit="1g"), code)
