"""Graph memory, local memory of graphs, and stream capture on the simulated card: rows of an H200."""

from __future__ import annotations

import pytest
from conftest import SimEnv
from simgpu_ask import ask

HEAD = """
def build(*sizes, order="par", keep=False):
    "A graph that allocates the MiB given and frees each: all at first, or one after the other."
    g, last = ok(graph_create()), ()
    todo = []
    for n in sizes:
        node, p = ok(graph_alloc(g, int(n * MIB), *last))
        if not keep: todo.append((node, p))
        if order == "seq": last = (ok(graph_free(g, p, node)),); todo.pop()
    for node, p in todo: ok(graph_free(g, p, node))
    return g
reserved = lambda: ok(graph_reserved()) >> 20
"""


@pytest.fixture
def h200(sim_env: SimEnv) -> dict[str, str]:
    """One simulated H200."""
    return sim_env(SIMGPU_MODEL="H200")


def test_graph_memory_comes_with_the_launch_and_goes_with_a_trim(h200: dict[str, str]) -> None:
    """512 MiB: nothing when added or instantiated, kept by every destruction, given back by a trim."""
    code = (
        HEAD
        + """
init(); g = ok(graph_create()); a, (node, p) = grown(graph_alloc, g, 512 * MIB)
b, e = grown(graph_instantiate, g); early = address_range(p)[0]; c = grow(graph_launch, e)
say(a, b, early, c, reserved(), ok(address_range(p))[1] >> 20, graph_launch(e), graph_instantiate(g)[0])
say(grow(graph_trim), grow(free, p), free(p), grow(exec_destroy, e), grow(graph_destroy, g), grow(graph_trim))
say(reserved(), sim_live_objects())
"""
    )
    assert ask(h200, code) == [[0, 0, 500, 512, 512, 512, 1, 801], [0, 0, 1, 0, 0, -512], [0, 1]]


@pytest.mark.parametrize(
    ("sizes", "order", "mib"),
    [
        ("1e-6", "par", 32), ("33", "par", 64), ("100", "par", 128), ("300, 200", "seq", 320),
        ("200, 200", "seq", 224), ("200, 300", "seq", 544), ("200, 300", "par", 544),
        ("*[1] * 16", "par", 32), ("*[1] * 16", "seq", 32), ("*[10] * 16", "par", 160), ("40, 40, 40", "par",
            128),
    ],
)  # fmt: skip
def test_graphs_reserve_by_their_layout(h200: dict[str, str], sizes: str, order: str, mib: int) -> None:
    """Later allocations reuse what is freed before them; small ones share 32 MiB pages."""
    code = (
        HEAD
        + f"""
init(); e = ok(graph_instantiate(build({sizes}, order="{order}")))
say(grow(graph_launch, e), reserved(), grow(graph_launch, e), grow(graph_trim))
"""
    )
    assert ask(h200, code) == [mib, mib, 0, -mib]


def test_graphs_that_free_share_one_reservation(h200: dict[str, str]) -> None:
    """Two of 512 MiB take 512 together; those left unfreed add up; an upload takes it already."""
    code = (
        HEAD
        + """
init(); a, b = (ok(graph_instantiate(build(512))) for _ in "ab")
say(grow(graph_upload, a), grow(graph_launch, a), grow(graph_launch, b), grow(graph_trim), grow(graph_launch,
    a))
ok(graph_trim()); c, d = (ok(graph_instantiate(build(256, keep=True))) for _ in "cd")
say(grow(graph_launch, c), grow(graph_launch, d), grow(exec_destroy, c), grow(graph_trim))
auto = ok(graph_instantiate(build(512, keep=True), 1))
say(grow(graph_launch, auto), grow(graph_launch, auto))
"""
    )
    assert ask(h200, code) == [[512, 0, 0, -512, 512], [256, 256, 0, 0], [512, 0]]


def test_a_full_card_refuses_the_launch(h200: dict[str, str]) -> None:
    """Graph memory that does not fit is out of memory at launch, and costs nothing."""
    code = (
        HEAD
        + """
init(); e = ok(graph_instantiate(build(512))); p = ok(alloc(mem_info()[1] - 256 * MIB))
say(graph_launch(e), graph_upload(e), reserved(), free(p), graph_launch(e))
"""
    )
    assert ask(h200, code) == [2, 2, 0, 0, 0]


def test_capture_turns_stream_ordered_memory_into_nodes(h200: dict[str, str]) -> None:
    """Nothing is taken and no pool grows before the launch; the pointer is unknown until then."""
    code = (
        HEAD
        + """
init(); s = ok(stream_create()); pool = ok(default_pool()); ok(capture_begin(s))
p = ok(alloc_async(64 * MIB, s)); q = ok(alloc_from(pool, 8 * MIB, s)); v = i32()
known = call("cuPointerGetAttribute", C.byref(v), u32(9), p); ok(free_async(p, s)); ok(free_async(q, s))
g = ok(capture_end(s)); n = size_t(); ok(call("cuGraphGetNodes", ptr(g), None, C.byref(n)))
e = ok(graph_instantiate(g))
say(known, n.value, used() - 518, grow(graph_launch, e), ok(pool_attr(pool, "reserved")))
"""
    )
    assert ask(h200, code) == [1, 4, 0, 96, 0]


@pytest.mark.parametrize(
    ("call", "result"),
    [
        ("alloc(2 * MIB)[0]", 900), ("alloc(4096)[0]", 900), ("free(p)", 900), ("array3d(64, 64)[0]", 900),
        ("set_limit(STACK, 2048)", 900), ("pool_trim(pool)", 900), ("pool_attr(pool, 'reserved')[0]", 900),
        ("pool_create()[0]", 900), ("call('cuMemHostAlloc', C.byref(ptr()), 4096, u32(0))", 900),
        ("alloc_async(4096, other)[0]", 900), ("stream_sync(s)", 900),
        ("call('cuStreamGetDevice', ptr(s), C.byref(i32()))", 900),
        ("call('cuStreamGetDevice', ptr(other), C.byref(i32()))", 0),
        ("call('cuStreamGetCtx', ptr(s), C.byref(ptr()))", 0), ("mem_info()[0]",
            0), ("mem_create(2 * MIB)[0]", 0),
        ("module_load(image('kernel k'))[0]", 0), ("graph_trim()", 0), ("graph_reserved()[0]", 0),
        ("stream_create()[0]", 0), ("ctx_create()[0]", 0), ("capture_status(s)[0]", 0), ("ctx_device()[0]",
            0),
    ],
)  # fmt: skip
@pytest.mark.parametrize("thread", ["same", "other", "relaxed"])
def test_capture_refuses_what_the_driver_refuses(
    h200: dict[str, str], call: str, result: int, thread: str
) -> None:
    """Unsafe calls are refused and spoil a global capture, from any thread but a relaxed one."""
    code = (
        HEAD
        + f"""
ctx = init(); s, other = ok(stream_create()), ok(stream_create()); p = ok(alloc(4096))
pool = ok(default_pool())
ok(capture_begin(s)); seen = []
def go():
    ok(set_current(ctx))
    if "{thread}" == "relaxed": ok(globals()["call"]("cuThreadExchangeStreamCaptureMode", C.byref(i32(2))))
    seen.append({call})
if "{thread}" == "same": go()
else: t = threading.Thread(target=go); t.start(); t.join()
status = ok(capture_status(s)); say(seen[0], status, capture_end(s)[0])
"""
    )
    of_the_stream = "ptr(s)" in call or call == "stream_sync(s)"
    refused = result == 900 and (thread != "relaxed" or of_the_stream)
    expected = [900, 2, 901] if refused else [0, 1, 0]
    assert ask(h200, code) == expected


def test_the_legacy_stream_meets_a_blocking_capture(h200: dict[str, str]) -> None:
    """Asking whether it captures is IMPLICIT and harmless; work in it spoils the capture."""
    code = (
        HEAD
        + """
init(); s = ok(stream_create(0)); ok(capture_begin(s))
say(capture_status(0)[0], ok(capture_status(s)), alloc_async(4096)[0], ok(capture_status(s)),
    capture_end(s)[0])
"""
    )
    assert ask(h200, code) == [906, 1, 906, 2, 901]


def test_local_memory_of_a_graph_comes_with_the_executable(h200: dict[str, str]) -> None:
    """Nothing at a captured launch, all at instantiation; after a lowered limit again at the launch."""
    code = (
        HEAD
        + """
init(); s = ok(stream_create()); f = ok(function(ok(module_load(image("kernel k local=16384"))), "k"))
ok(capture_begin(s)); a = grow(launch, f, s); g = ok(capture_end(s)); b, e = grown(graph_instantiate, g)
say(a, b, grow(graph_launch, e), grow(set_limit, STACK, 1024), grow(graph_launch, e),
    int(cu.simgpu_launches()))
"""
    )
    assert ask(h200, code) == [0, 3960, 0, -3960, 3960, 2]
