"""Arrays: charged by what the driver takes for them, whatever their shape."""

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


SHAPES = """
makers = [
    lambda: array(65536), lambda: array(1025, 1025), lambda: array(700, 700), lambda: array(3, 60000),
    lambda: array(100000, 3), lambda: array(520, 512), lambda: array(2000, 3000, channels=4),
    lambda: array(3001, 2001, UINT8), lambda: array(1000, 1000, HALF, 2), lambda: array(2048, 2048, BC1, 4),
    lambda: array3(100, 100, 100), lambda: array3(200, 300, 50), lambda: array3(512, 512, 64),
    lambda: array3(256, 256, 10, LAYERED), lambda: array3(1000, 1000, 7, LAYERED),
    lambda: array3(256, 256, 6, CUBEMAP), lambda: array3(256, 256, 12, CUBEMAP | LAYERED),
]
chains = [
    lambda: mipmap(1024, 1024, 11), lambda: mipmap(4096, 4096, 2), lambda: mipmap(256, 256, 4, 10, LAYERED),
    lambda: mipmap(64, 64, 4, 64),
]
def each(makers, destroy):
    made = []
    for n, make in enumerate(makers):
        r, h = make()
        if r == NOT_SUPPORTED:
            continue
        made.append(ok((r, h)))
        assert used() == truth(), (n, (used() - base) / MIB, (truth() - base) / MIB)
    assert len(made) > len(makers) - 2
    for h in made[::2] + made[1::2]:
        ok(destroy(h))
        assert used() == truth()
    assert used() == base
each(makers, array_destroy)
each(chains, mipmap_destroy)
"""


def test_the_charge_of_every_shape_is_the_drivers(sim_env: SimEnv, run_client: RunClient) -> None:
    """One, two and three dimensions, layers, cube maps and mipmap chains match the driver (B046)."""
    _run(run_client, sim_env(preload=True, limit="2g"), SHAPES)


def test_small_arrays_share_blocks_as_in_the_driver(sim_env: SimEnv, run_client: RunClient) -> None:
    """Hundreds of small arrays cost the blocks they share, and the blocks come back with their last."""
    _run(
        run_client,
        sim_env(preload=True, limit="1g"),
        """
import random
random.seed(7)
live = []
for n in range(600):
    if live and random.random() < 0.4:
        ok(array_destroy(live.pop(random.randrange(len(live)))))
    else:
        live.append(ok(array(random.choice((16, 64, 100, 257, 500)), random.choice((1, 64, 200, 256)))))
    assert used() == truth(), n
for h in live:
    ok(array_destroy(h))
assert same() == base
""",
    )


@pytest.mark.parametrize(
    "make",
    [
        "array(32768, 65536, channels=1)",
        "array3(32768, 65536, 0)",
        "array3(4096, 4096, 128)",
        "array3(16384, 16384, 8, LAYERED)",
        "mipmap(32768, 65536, 1)",
    ],
)
def test_an_array_past_the_quota_is_refused(sim_env: SimEnv, run_client: RunClient, make: str) -> None:
    """Eight GiB through any creating call are refused without reaching the driver, outputs untouched."""
    _run(
        run_client,
        sim_env(preload=True, limit="4147m"),
        f"""
expect(OOM, {make})
assert same() == base
""",
    )


def test_a_small_array_is_refused_when_no_block_fits(sim_env: SimEnv, run_client: RunClient) -> None:
    """At a full quota an array that needs a new block is refused, one that shares a block may pass."""
    _run(
        run_client,
        sim_env(preload=True, limit="1g"),
        """
first = ok(array(64, 64))
free_now, _ = ok(mem_info())
filler = ok(create(free_now // (2 * MIB) * 2 * MIB))
results = {array(400, 400)[0] for _ in range(6)}
assert results <= {0, OOM} and OOM in results
assert used() <= 1024 * MIB and truth() <= 1024 * MIB
ok(array_destroy(first))
""",
    )


def test_sparse_and_deferred_arrays_take_nothing(sim_env: SimEnv, run_client: RunClient) -> None:
    """What gets its memory later is granted at any size and charged for nothing."""
    _run(
        run_client,
        sim_env(preload=True, limit="320m"),
        """
a = ok(array3(16384, 16384, 0, SPARSE))
b = ok(array3(16384, 16384, 0, DEFERRED))
c = ok(mipmap(16384, 16384, 3, 0, SPARSE))
assert same() == base
ok(array_destroy(a)); ok(array_destroy(b)); ok(mipmap_destroy(c))
assert same() == base
""",
    )


def test_without_the_drivers_answer_the_estimate_is_never_too_low(
    sim_env: SimEnv, run_client: RunClient
) -> None:
    """Where the size cannot be asked the charge follows from the descriptor and settles (B046)."""
    faults = "cuArrayGetMemoryRequirements:*:999,cuMipmappedArrayGetMemoryRequirements:*:999"
    _run(run_client, sim_env(preload=True, limit="2g", SIMGPU_FAULTS=faults), SHAPES)


def test_estimates_stay_where_nvml_does_not_help(sim_env: SimEnv, run_client: RunClient) -> None:
    """Without NVML's figure the charge is at least what the driver holds, and all of it comes back."""
    code = """
makers = [lambda: array(64, 64), lambda: array(257, 257), lambda: array(1025, 1025),
          lambda: array3(100, 100, 9)]
made = []
start = truth()
for n in range(40):
    made.append(ok(makers[n % 4]()))
    assert used() - base >= truth() - start - 2 * MIB, n
for h in made:
    ok(array_destroy(h))
assert used() == base and truth() == start
"""
    env = sim_env(preload=True, limit="2g", SIMGPU_FAULTS="nvmlDeviceGetComputeRunningProcesses_v3:*:999")
    start = USE.replace("base = same()", "base = used()")
    done = run_client(start + code, env)
    assert done.stderr == ""


@pytest.mark.parametrize("name", ["cuArrayCreate_v2", "cuArray3DCreate_v2", "cuMipmappedArrayCreate"])
@pytest.mark.parametrize("nth", [1, 2])
def test_a_failing_creation_gives_the_charge_back(
    sim_env: SimEnv, run_client: RunClient, name: str, nth: int
) -> None:
    """Each call to the driver fails once in turn: quota and driver agree after each (B046)."""
    _run(
        run_client,
        sim_env(preload=True, limit="1g", SIMGPU_FAULTS=f"{name}:{nth}:999"),
        """
cases = [(lambda: array(1000, 1000), array_destroy), (lambda: array(64, 64), array_destroy),
         (lambda: array3(64, 64, 64), array_destroy), (lambda: mipmap(512, 512, 3), mipmap_destroy)]
for make, destroy in cases:
    for _ in range(3):
        r, h = make()
        assert r in (0, 999), r
        assert used() == truth()
        if r == 0:
            ok(destroy(h))
            assert used() == truth()
assert same() == base
""",
    )


@pytest.mark.parametrize("name", ["cuArrayDestroy", "cuMipmappedArrayDestroy"])
def test_a_failing_destruction_keeps_the_charge(sim_env: SimEnv, run_client: RunClient, name: str) -> None:
    """An array whose destruction failed is still there, and still charged (B046, B054)."""
    _run(
        run_client,
        sim_env(preload=True, limit="1g", SIMGPU_FAULTS=f"{name}:*:999"),
        """
a = ok(array(1000, 1000))
b = ok(array(64, 64))
c = ok(mipmap(1024, 1024, 2))
held = same()
assert held > base
results = [array_destroy(a), array_destroy(b), mipmap_destroy(c)]
assert sum(results) in (999, 1998)
assert same() > base
""",
    )


def test_bad_descriptors_get_the_drivers_answer(sim_env: SimEnv, run_client: RunClient) -> None:
    """A malformed descriptor or handle is answered alike with and without the library."""
    code = """
from simclient import *
from vmmcalls import *
init(0)
before = truth()
print(array(0, 0)[0], array(64, 64, 0x7777)[0], array(64, 64, FLOAT, 3)[0])
print(array3(1 << 40, 1 << 40, 1 << 40)[0])
print(call("cuArrayCreate_v2", ptr(None), C.byref(Descriptor(64, 64, FLOAT, 1))))
print(call("cuArrayCreate_v2", C.byref(ptr()), ptr(None)))
print(mipmap(64, 64, 0)[0], array_destroy(0), array_destroy(12345), mipmap_destroy(12345))
assert truth() == before
"""
    bare = run_client(code, sim_env()).stdout
    shimmed = run_client(code + "assert used() == truth()\n", sim_env(preload=True, limit="1g"))
    assert shimmed.stdout == bare
    assert shimmed.stderr == ""


def test_threads_leave_the_drivers_figure(sim_env: SimEnv, run_client: RunClient) -> None:
    """Arrays and allocations made and destroyed by threads end where they began (B051)."""
    _run(
        run_client,
        sim_env(preload=True, limit="1g"),
        """
import random, threading
def work(seed):
    ok(set_current(ctx))
    choose = random.Random(seed)
    live = []
    for _ in range(150):
        kind = choose.randrange(3)
        if live and choose.random() < 0.45:
            h, destroy = live.pop(choose.randrange(len(live)))
            ok(destroy(h))
        elif kind == 0:
            live.append((ok(array(choose.choice((16, 100, 257)), 64)), array_destroy))
        elif kind == 1:
            live.append((ok(array3(choose.choice((300, 1024, 1500)), 700, 0)), array_destroy))
        else:
            live.append((ok(alloc(choose.randrange(1, 3 * MIB))), free))
        assert truth() <= 1024 * MIB
    for h, destroy in live:
        ok(destroy(h))
threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert truth() == base
ok(array_destroy(ok(array(64, 64))))
assert same() == base
""",
    )
