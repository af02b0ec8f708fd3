"""The simulated driver: exports, look-ups, start, contexts, answers to wrong use; figures from an H200."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from conftest import RunClient, SimEnv
from simgpu_ask import ask, source

DATA = Path(__file__).resolve().parent.parent / "data"
T4_CONTEXT = 106_954_752
H200_CONTEXT = 518 << 20


def exported(library: str) -> list[str]:
    """The names a real driver exports."""
    return re.findall(r"^(?:cu|nvml)\w+", (DATA / f"{library}-580.159-symbols.txt").read_text(), re.M)


def recorded() -> list[tuple[str, int, int, str]]:
    """(name, version, flags, symbol) of each recorded answer of cuGetProcAddress."""
    rows = []
    for line in (DATA / "cuGetProcAddress-580.159.txt").read_text().splitlines():
        name, _, answers = line.partition(" ")
        for version, flags, symbol in re.findall(r"(\d+)/(\d):(\S+)", answers):
            if not line.startswith("#"):
                exact = symbol.removeprefix("OTHER=")
                exact = exact if exact != symbol else name + symbol.replace("base", "")
                rows.append((name, int(version), int(flags), exact))
    return rows


@pytest.mark.parametrize(("library", "count"), [("libcuda", 682), ("libnvidia-ml", 404)])
def test_every_name_of_the_driver_is_exported(
    sim_env: SimEnv, run_client: RunClient, library: str, count: int
) -> None:
    """All 682 cu* and 404 nvml* names are found by dlsym."""
    code = source("h = C.CDLL(sys.argv[1]); say([n for n in json.load(sys.stdin) if not hasattr(h, n)])")
    names = exported(library)
    done = run_client(code, sim_env(), f"{library}.so.1", input=json.dumps(names))
    assert (len(names), done.stdout) == (count, "[]\n")


def test_get_proc_address_answers_as_recorded(sim_env: SimEnv, run_client: RunClient) -> None:
    """Each recorded (name, version, flags) gives the very address of the recorded export."""
    code = source("""
        for name, v, f, symbol in json.load(sys.stdin):
            if proc_address(name, v, f) != (0, dlsym_address(symbol), 0): print(name, v, f, symbol)
    """)
    assert len(recorded()) == 114
    assert run_client(code, sim_env(), input=json.dumps(recorded())).stdout == ""


def test_get_proc_address_tells_unknown_names_from_young_ones(sim_env: SimEnv) -> None:
    """No such name, a suffixed name, and versions below the first: NULL with status 1 and 2."""
    code = """
        say(proc_address("cuNoSuchThing"), proc_address("cuCtxCreate_v4"),
            proc_address("cuMemAllocAsync", 11010), proc_address("cuMemAlloc", 1000))
    """
    assert ask(sim_env(), code) == [[0, None, 1], [0, None, 1], [0, None, 2], [0, None, 2]]


def test_an_older_driver_hides_younger_names(sim_env: SimEnv) -> None:
    """SIMGPU_DRIVER and SIMGPU_HIDE take names out of cuGetProcAddress (B020)."""
    code = """
        v = i32(); ok(call("cuDriverGetVersion", C.byref(v)))
        say(v.value, proc_address("cuLibraryLoadData")[1:], proc_address("cuGetProcAddress", 12000)[2],
            proc_address("cuMemAlloc")[1] == dlsym_address("cuMemAlloc"))
    """
    answers = ask(sim_env(SIMGPU_DRIVER="11040", SIMGPU_HIDE="cuMemAlloc_v2"), code)
    assert answers == [11040, [None, 1], 0, True]


def test_the_old_build_lacks_younger_exports(sim_env: SimEnv, sim_dir: Path) -> None:
    """A CUDA 11.1 driver has no look-up function, pools, libraries or graph memory, and allocates (B020)."""
    code = """
        young = ("cuGetProcAddress cuGetProcAddress_v2 cuMemAllocAsync cuMemPoolCreate cuLibraryLoadData "
                 "cuGraphAddMemAllocNode cuGreenCtxCreate cuStreamGetDevice cuCtxCreate_v3").split()
        v = i32(); ok(call("cuDriverGetVersion", C.byref(v)))
        init(); say([n for n in young if has(n)], v.value, has("cuMemCreate"), free(ok(alloc(4096))))
    """
    env = sim_env()
    env["LD_LIBRARY_PATH"] = f"{sim_dir / 'old'}:{sim_dir}"
    assert ask(env, code) == [[], 11010, True, 0]


def test_the_lab_figure_appears_exactly(sim_env: SimEnv) -> None:
    """A T4 with one context and 3 GiB shows 3,328,180,224 bytes in each view."""
    code = """
        init(); ok(alloc(3 * GIB))
        m = ok(nvml_memory_v2())
        say(device_name(), sim_device_used(), used(mib=False), nvml_processes()[me], m.used)
    """
    assert ask(sim_env(), code) == ["Tesla T4", *[3_328_180_224] * 4]


@pytest.mark.parametrize(
    ("model", "nvml_mib", "cuda_bytes", "context"),
    [
        ("T4", 15_360, 15_828_320_256, T4_CONTEXT),
        ("H200", 143_771, 143_155 << 20, H200_CONTEXT),
        ("A100", 81_920, 81_152 << 20, 420 << 20),
    ],
)
def test_models_have_their_sizes(
    sim_env: SimEnv, model: str, nvml_mib: int, cuda_bytes: int, context: int
) -> None:
    """NVML's total, CUDA's total and the context are the model's, and the views agree."""
    code = """
        init(); r, spare, total = mem_info(); m = ok(nvml_memory_v2())
        say(m.total >> 20, total, ok(total_mem()), total - spare, m.total - m.reserved - m.free, m.used)
    """
    expected = [nvml_mib, cuda_bytes, cuda_bytes, context, context, context]
    assert ask(sim_env(SIMGPU_MODEL=model), code) == expected


@pytest.mark.parametrize("version", ["_v2", "_v3", "_v4"])
def test_each_context_takes_its_size_and_gives_all_back(sim_env: SimEnv, version: str) -> None:
    """cuInit takes nothing; a context 518 MiB on an H200, given back with all that lives in it."""
    code = f"""
        ok(cu_init()); first = grow(retain); more, ctx = grown(ctx_create, 0, 0, "{version}")
        held = grow(alloc, 64 * MIB)
        say(first, more, held, grow(ctx_destroy, ctx), grow(release), used())
    """
    assert ask(sim_env(SIMGPU_MODEL="H200"), code) == [518, 518, 64, -582, -518, 0]


def test_a_reset_primary_context_keeps_its_count_and_handle(sim_env: SimEnv) -> None:
    """After a reset calls answer CONTEXT_IS_DESTROYED until the same handle is retained again."""
    code = """
        ctx = init(); p = ok(alloc(64 * MIB)); ok(call("cuDevicePrimaryCtxReset_v2", 0))
        say(used(), free(p), set_current(ctx), alloc(4096)[0], ok(retain()) == ctx, alloc(4096)[0])
        say(release(), alloc(4096)[0], release(), alloc(4096)[0], release())
    """
    assert ask(sim_env(), code) == [[0, 709, 0, 709, True, 0], [0, 0, 0, 709, 201]]


def test_wrong_use_is_answered_as_measured(sim_env: SimEnv) -> None:
    """Before cuInit, without a context, wrong pointers and twice freed ones (B029, B047, B065, B096)."""
    code = """
        calls = (alloc(1), free(0), mem_info(), total_mem(), device_count(), ctx_device(), retain())
        say([a if isinstance(a, int) else a[0] for a in calls])
        ok(cu_init())
        managed = call("cuMemAllocManaged", C.byref(u64()), 4096, 1)
        calls = (alloc(9), mem_info(), ctx_device(), alloc_async(9), mem_create(2 * MIB), managed, free(0))
        say([a if isinstance(a, int) else a[0] for a in calls])
        init(); p, q, a = ok(alloc(3 * MIB)), ok(alloc(4096)), ok(alloc_async(4096))
        say(alloc(0)[0], alloc_async(0), call("cuMemAlloc_v2", None, 4096), retain(9)[0])
        say(free(p + 512), free(q + 512), free(p), free(p), free(q), free(q), free(12345))
        say(free(a), free(a), free_async(a))
    """
    assert ask(sim_env(), code) == [
        [3] * 7,
        [201, 201, 201, 201, 0, 201, 0],
        [1, [0, 0], 1, 101],
        [1, 1, 0, 1, 0, 1, 1],
        [0, 1, 1],
    ]


@pytest.mark.parametrize(
    ("v1", "expected"),
    [(None, [201, False, 999, 2, 0, 2**32 - 1]), ("1", [0, True, 0, 0, 0, 2**32 - 1])],
)
def test_32_bit_calls_need_a_context_of_their_own(
    sim_env: SimEnv, v1: str | None, expected: list[object]
) -> None:
    """A large card refuses CUDA 2's context and its calls find none; SIMGPU_V1 brings them back."""
    code = """
        init(); p, total = u32(), u32(); r = call("cuMemAlloc", C.byref(p), u32(3 * MIB))
        say(r, 0 < p.value, call("cuMemFree", p), ctx_create(version="")[0],
            call("cuDeviceTotalMem", C.byref(total), 0), total.value)
    """
    assert ask(sim_env(SIMGPU_V1=v1), code) == expected


def test_invented_names_reach_the_driver(sim_env: SimEnv) -> None:
    """Names of a driver to come are exported and callable (B010)."""
    code = """
        init(); say(call("cuMemAlloc_v9", C.byref(u64()), 4096), has("cuFoo_v9"), has("cuBar_v9"))
    """
    assert ask(sim_env(), code) == [0, True, True]


def test_variants_are_exports_of_their_own(sim_env: SimEnv, run_client: RunClient) -> None:
    """No two names share an address, so that a look-up by address is never ambiguous."""
    code = source("names = json.load(sys.stdin); say(len({dlsym_address(n) for n in names}))")
    names = exported("libcuda")
    assert run_client(code, sim_env(), input=json.dumps(names)).stdout == f"{len(names)}\n"


def test_a_driver_that_looks_itself_up_reaches_itself(sim_env: SimEnv) -> None:
    """cuInit finds its own cuInit through dlsym on its own handle (B023)."""
    assert ask(sim_env(SIMGPU_SELFLOOKUP="1"), "say(cu_init())") == 0


def test_a_free_in_stream_order_ends_with_its_context(sim_env: SimEnv, run_client: RunClient) -> None:
    """After a reset the next owner of an address keeps it: the stream of the old free is gone."""
    code = """
from simclient import *
init(0)
s = ok(stream_create())
ok(free_async(ok(alloc(700 * MIB)), s))
ok(call("cuDevicePrimaryCtxReset_v2", 0))
init(0)
before = sim_device_used()
p = ok(alloc(700 * MIB))
ok(call("cuCtxSynchronize"))
assert sim_device_used() - before == 700 * MIB
"""
    assert run_client(code, sim_env()).stderr == ""
