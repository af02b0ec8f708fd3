"""Modules, local memory, limits, streams and green contexts of the simulated card: rows of an H200."""

from __future__ import annotations

import pytest
from conftest import SimEnv
from simgpu_ask import ask

PTX = r"""
.version 7.0
.target sm_70
.address_size 64
.extern .func (.param .b32 r) vprintf(.param .b64 f, .param .b64 a);
.global .align 1 .b8 gbuf[67108864];
.visible .global .align 4 .u32 counter;
.visible .entry noop() { ret; }
.visible .entry deep(.param .u64 p) {
  .local .align 4 .b8 __local_depot[16384];
  .reg .b64 %SP; ld.local.u32 %r1, [%SP]; ret;
}
.visible .entry talk() { call.uni (r), vprintf, (f, a); ret; }
"""


@pytest.fixture
def h200(sim_env: SimEnv) -> dict[str, str]:
    """One simulated H200."""
    return sim_env(SIMGPU_MODEL="H200")


@pytest.mark.parametrize(
    ("size", "mib"),
    [
        (512, 0), (1024, 0), (1040, 4), (1536, 132), (2048, 264), (2064, 268), (3072, 528), (4096, 792),
        (5008, 1026), (8192, 1848), (12000, 2830), (16384, 3960), (32768, 8184), (65536, 16632),
    ],
)  # fmt: skip
def test_a_first_launch_takes_local_memory(h200: dict[str, str], size: int, mib: int) -> None:
    """SMs x threads x bytes beyond 1 KiB, in granules; kept, and the stack limit then says so."""
    code = f"""
        init(); f = ok(function(ok(module_load(image("kernel k local={size}"))), "k")); v = size_t()
        more = grow(launch, f), grow(launch, f); ok(call("cuCtxGetLimit", C.byref(v), u32(STACK)))
        say(more, max({size}, 1024) == v.value)
    """
    assert ask(h200, code) == [[mib, 0], True]


@pytest.mark.parametrize(
    ("limit", "mib"), [(512, -132), (1025, 4), (2049, 268), (10_000, 2314), (16_384, 3960), (65_536, 16_632)]
)
def test_the_stack_limit_takes_local_memory_at_once(h200: dict[str, str], limit: int, mib: int) -> None:
    """16 KiB take 3,960 MiB; going back to 1 KiB gives them back; values are rounded up to 16."""
    code = f"""
        init(); v = size_t(); more = grow(set_limit, STACK, {limit})
        ok(call("cuCtxGetLimit", C.byref(v), u32(STACK)))
        say(more, v.value, grow(set_limit, STACK, 1024))
    """
    assert ask(h200, code) == [mib, (limit + 15) // 16 * 16, -mib]


def test_local_memory_is_the_larger_of_kernel_and_limit_and_per_context(h200: dict[str, str]) -> None:
    """A set limit covers smaller kernels; another context starts at 1 KiB; a lowered limit grows again."""
    code = """
        m = image("kernel a local=4096", "kernel b local=16384")
        init(); mod = ok(module_load(m)); a, b = (ok(function(mod, n)) for n in "ab")
        first = [grow(set_limit, STACK, 8192), grow(launch, a), grow(launch, b), grow(launch, a)]
        low = [grow(set_limit, STACK, 4096), grow(set_limit, STACK, 1024), grow(launch, b)]
        ctx = ok(ctx_create()); f = ok(function(ok(module_load(m)), "b"))
        say(first, low, grow(launch, f), grow(ctx_destroy, ctx))
    """
    assert ask(h200, code) == [[1848, 0, 2112, 0], [-3168, -792, 3960], 3960, -518 - 3960]


def test_globals_come_with_a_module_and_go_with_it(h200: dict[str, str]) -> None:
    """256 MiB at once with lazy loading too; small ones fit what the context has to spare."""
    code = """
        init(); more, m = grown(module_load, image("global big 268435456", "global small 64"))
        _, p, n = module_global(m, "big")
        say(more, n, p % (2 * MIB), module_global(m, "small")[2], module_global(m, "none")[0], free(p))
        say(grow(module_unload, m),
            grow(lambda: [ok(module_load(image("global s 4096"))) for _ in range(40)] and 0))
    """
    assert ask(h200, code) == [[256, 268435456, 0, 64, 500, 1], [-256, 0]]


def test_ptx_is_read_for_globals_kernels_and_locals(h200: dict[str, str]) -> None:
    """Names, sizes, local bytes and the use of printf come from real PTX; other bytes are no image."""
    code = f"""
        init(); more, m = grown(module_load, {PTX.encode()!r}); size = i32()
        deep = ok(function(m, "deep")); ok(call("cuFuncGetAttribute", C.byref(size), u32(3), ptr(deep)))
        say(more, module_global(m, "gbuf")[2], module_global(m, "counter")[2], size.value,
            grow(launch, ok(function(m, "noop"))), grow(launch, deep), function(m, "nope")[0])
        say(module_load(b"\\x7fELF\\x02")[0], module_load(b"hello")[0])
    """
    assert ask(h200, code) == [[128, 67108864, 4, 16384, 0, 3960, 500], [200, 218]]


def test_printf_and_malloc_take_runtime_memory(h200: dict[str, str]) -> None:
    """64 MiB and 138 at the first such image whatever the limits; the heap at the first launch; kept."""
    code = """
        talk, heap = image("kernel p printf=1"), image("kernel m heap=1")
        init(); ok(set_limit(FIFO, 256 * MIB)); ok(set_limit(HEAP, 512 * MIB)); nothing = used() - 518
        m = ok(module_load(heap)); a = used() - 518; b = grow(launch, ok(function(m, "m")))
        c, t = grown(module_load, talk)
        say(nothing, a, b, c, grow(module_load, talk), grow(module_unload, t), set_limit(FIFO, MIB),
            set_limit(HEAP, MIB))
        ctx = ok(ctx_create()); a = grow(module_load, talk); b = grow(module_load, heap)
        say(a, b, grow(ctx_destroy, ctx))
    """
    assert ask(h200, code) == [[0, 138, 514, 2, 0, 0, 1, 1], [64, 76, -518 - 140]]


def test_lazy_libraries_load_at_first_use_in_each_context(h200: dict[str, str]) -> None:
    """Loading, kernels and their attributes take nothing; functions, globals and launches do."""
    code = """
        code = image("global g 67108864", "kernel k"); init()
        more, lib = grown(library_load, code); k = ok(kernel(lib, "k"))
        n, f, p, b = i32(), ptr(), u64(), size_t()
        quiet = grow(call, "cuKernelGetAttribute", C.byref(n), u32(3), ptr(k), i32(0))
        first = grow(launch, k), grow(call, "cuKernelGetFunction", C.byref(f), ptr(k))
        ctx = ok(ctx_create())
        other = grow(call, "cuLibraryGetGlobal", C.byref(p), C.byref(b), ptr(lib), b"g")
        say(more, quiet, first, other, grow(library_unload, lib), launch(k))
        say(call("cuFuncGetAttribute", C.byref(n), u32(3), ptr(k)), call("cuKernelGetFunction", C.byref(f),
            f))
    """
    assert ask(h200, code) == [[0, 0, [64, 0], 64, -128, 400], [400, 400]]


def test_eager_libraries_load_with_contexts(h200: dict[str, str]) -> None:
    """CUDA_MODULE_LOADING=EAGER: with the library, and with each later context."""
    code = """
        ok(cu_init()); code = image("global g 67108864", "kernel k"); a, lib = grown(library_load, code)
        ctx = init(); b = used(); c, other = grown(library_load, code); d, two = grown(ctx_create)
        say(a, b, c, d, grow(ctx_destroy, two), grow(library_unload, lib))
    """
    assert ask({**h200, "CUDA_MODULE_LOADING": "EAGER"}, code) == [0, 582, 64, 646, -646, -64]


def test_streams_take_two_mib_now_and_then(h200: dict[str, str]) -> None:
    """64 take 34 MiB, 128 take 70; kept for new ones until the context ends. Events take nothing."""
    code = """
        init(); many = lambda n: grown(lambda: (0, [ok(stream_create()) for _ in range(n)]))
        a, one = many(1); b, more = many(63); c, rest = many(64)
        gone = grow(lambda: [ok(stream_destroy(s)) for s in one + more + rest] and 0); again = many(64)[0]
        e = grow(lambda: [ok(call("cuEventCreate", C.byref(ptr()), u32(0))) for _ in range(999)] and 0)
        say(a, b, c, gone, again, e, grow(release))
    """
    assert ask(h200, code) == [0, 34, 36, 0, 0, 0, -518 - 70]


def test_green_contexts_live_on_the_primary(h200: dict[str, str]) -> None:
    """The first activates the primary and takes 6 MiB more, each further 4; the last gives all back."""
    code = """
        ok(cu_init()); buf = (C.c_ubyte * 1024)(); ok(call("cuDeviceGetDevResource", 0, buf, u32(1)))
        desc = ptr(); ok(call("cuDevResourceGenerateDesc", C.byref(desc), buf, u32(1)))
        green = lambda: out(ptr, "cuGreenCtxCreate", desc, 0, u32(1))
        a, g = grown(green); b, h = grown(green); ctx = ok(out(ptr, "cuCtxFromGreenCtx", ptr(g)))
        ok(set_current(ctx))
        c = grow(alloc, 4 * MIB); k = ok(function(ok(module_load(image("kernel k local=65536"))), "k"))
        say(a, b, c, ok(ctx_device()), ok(current()) == ctx, grow(launch, k), ctx_destroy(ctx))
        say(grow(call, "cuGreenCtxDestroy", ptr(g)), grow(call, "cuGreenCtxDestroy", ptr(h)), alloc(1)[0])
    """
    answers = ask(h200, code)
    assert answers == [[524, 4, 4, 0, True, 16632, 201], [0, -524 - 4 - 4 - 16632, 709]]


def test_launches_check_their_arguments(h200: dict[str, str]) -> None:
    """Wrong handles and shapes are refused; good launches are counted."""
    code = """
        init(); f = ok(function(ok(module_load(image("kernel k"))), "k"))
        say(launch(f), launch(f, grid=0), launch(f, block=1025), launch(12345), launch(f, stream=999),
            int(cu.simgpu_launches()))
    """
    assert ask(h200, code) == [0, 1, 1, 400, 400, 1]
