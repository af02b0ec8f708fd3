"""Images of modules and libraries: charged when they come to the device."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import RunClient, SimEnv

USE = """
from simclient import *
from contextcalls import *
CONTEXT = 106_954_752
PTX = b'''//
.version 8.0
.target sm_75
.address_size 64
.visible .global .align 4 .b8 big[%d];
.visible .entry k(.param .u64 .ptr .global .align 4 p) { ret; }
'''
"""


def _run(run_client: RunClient, env: dict[str, str], code: str) -> None:
    done = run_client(USE + code, env)
    assert done.stderr == ""


@pytest.mark.parametrize(
    "source",
    ['image("global big 268435456", "kernel k")', "C.c_char_p(PTX % 268435456)"],
    ids=["unknown", "ptx"],
)
def test_a_module_is_charged_until_it_is_unloaded(
    sim_env: SimEnv, run_client: RunClient, source: str
) -> None:
    """Global variables are charged with the load and given back with the unload (B001)."""
    _run(
        run_client,
        sim_env(preload=True, limit="512m"),
        f"""
init()
source = {source}
one = ok(module_load(source))
assert same() == CONTEXT + 256 * MIB
module = ptr(7)
assert call("cuModuleLoadData", C.byref(module), source) == OOM and module.value == 7
assert same() == CONTEXT + 256 * MIB
ok(launch(ok(function(one, "k"))))
ok(module_unload(one))
assert same() == CONTEXT
ok(module_unload(ok(module_load(source))))
ok(alloc(300 * MIB))
expect(OOM, module_load(source))
assert same() == CONTEXT + 300 * MIB
""",
    )


def test_every_way_to_load_a_module_is_charged(
    sim_env: SimEnv, run_client: RunClient, tmp_path: Path
) -> None:
    """From memory, with options, as a fat binary and from a file, each image is charged or refused (B001)."""
    (tmp_path / "image").write_text("//simgpu\nglobal big 268435456\nkernel k\n")
    _run(
        run_client,
        sim_env(preload=True, limit="512m"),
        f"""
init()
source = image("global big 268435456", "kernel k")
path = C.c_char_p({str(tmp_path / "image")!r}.encode())
nothing = ptr(None)
ways = [
    lambda: out(ptr, "cuModuleLoadData", source),
    lambda: out(ptr, "cuModuleLoadDataEx", source, 0, nothing, nothing),
    lambda: out(ptr, "cuModuleLoadFatBinary", source),
    lambda: out(ptr, "cuModuleLoad", path),
]
for way in ways:
    module = ok(way())
    assert same() == CONTEXT + 256 * MIB
    for other in ways:
        expect(OOM, other())
    ok(module_unload(module))
    assert same() == CONTEXT
""",
    )


def test_a_library_is_charged_where_it_is_first_used(sim_env: SimEnv, run_client: RunClient) -> None:
    """Lazily: nothing with the load, all with a context's first function, global or launch (B001)."""
    _run(
        run_client,
        sim_env(preload=True, limit="1g"),
        """
first = init()
uses = [
    lambda library: kernel_function(ok(kernel(library, "k"))),
    lambda library: library_global(library, "big"),
    lambda library: out(ptr, "cuLibraryGetModule", ptr(library)),
    lambda library: launch(ok(kernel(library, "k"))),
]
for use in uses:
    library = ok(library_load(image("global big 268435456", "kernel k")))
    ok(kernel(library, "k"))
    assert same() == CONTEXT
    ok(use(library))
    assert same() == CONTEXT + 256 * MIB
    for again in uses:
        ok(again(library))
    assert same() == CONTEXT + 256 * MIB
    second = ok(ctx_create())
    assert same() == 2 * CONTEXT + 256 * MIB
    ok(use(library))
    assert same() == 2 * CONTEXT + 512 * MIB
    ok(ctx_destroy(second))
    ok(set_current(first))
    assert same() == CONTEXT + 256 * MIB
    ok(library_unload(library))
    assert same() == CONTEXT
""",
    )


def test_a_known_image_is_refused_at_its_first_use(sim_env: SimEnv, run_client: RunClient) -> None:
    """Where a library's size can be told from its text, a use that does not fit is refused (B001)."""
    _run(
        run_client,
        sim_env(preload=True, limit="256m"),
        """
init()
library = ok(library_load(C.c_char_p(PTX % 268435456)))
k = ok(kernel(library, "k"))
for answer in (kernel_function(k), library_global(library, "big"), launch(k), launch(k)):
    expect(OOM, answer)
    assert same() == CONTEXT
assert call("simgpu_launches") == 0
ok(library_unload(library))
""",
    )


def test_an_eager_library_is_charged_everywhere(sim_env: SimEnv, run_client: RunClient) -> None:
    """Eagerly: a library comes to every context with its load, and to new ones as well (B001)."""
    _run(
        run_client,
        sim_env(preload=True, limit="1g", CUDA_MODULE_LOADING="EAGER"),
        """
init()
ok(ctx_create())
source = image("global big 134217728", "kernel k")
library = ok(library_load(source))
assert same() == 2 * (CONTEXT + 128 * MIB)
third = ok(ctx_create())
assert same() == 3 * (CONTEXT + 128 * MIB)
expect(OOM, library_load(source))
expect(OOM, library_load(image("global big 536870912")))
assert same() == 3 * (CONTEXT + 128 * MIB)
ok(ctx_destroy(third))
ok(library_unload(library))
assert same() == 2 * CONTEXT
""",
    )


def test_images_end_with_their_context(sim_env: SimEnv, run_client: RunClient) -> None:
    """A context's end gives its images back, also where NVML says nothing (B053)."""
    code = """
init()
other = ok(ctx_create())
before = used()
ok(module_load(C.c_char_p(PTX % 67108864)))
library = ok(library_load(C.c_char_p(PTX % 67108864)))
ok(library_global(library, "big"))
assert used() >= before + 128 * MIB
ok(ctx_destroy(other))
assert used() <= before
ok(reset())
assert used() == 0
"""
    _run(run_client, sim_env(preload=True, limit="1g"), code)
    blind = "nvmlDeviceGetComputeRunningProcesses_v3:*:3"
    _run(run_client, sim_env(preload=True, limit="1g", SIMGPU_FAULTS=blind), code)


CALLS = [
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuModuleGetFunction",
    "cuLibraryLoadData",
    "cuLibraryUnload",
    "cuLibraryGetKernel",
    "cuLibraryGetGlobal",
    "cuKernelGetFunction",
    "cuFuncGetAttribute",
    "cuKernelGetAttribute",
    "cuModuleGetLoadingMode",
    "cuCtxGetDevice",
    "cuLaunchKernel",
    "cuStreamIsCapturing",
    "cuStreamGetCtx",
]


@pytest.mark.parametrize("name", CALLS)
def test_each_failing_driver_call_leaves_the_charge_right(
    sim_env: SimEnv, run_client: RunClient, name: str
) -> None:
    """Whichever driver call of these fails, the charge ends as what the device holds (B046)."""
    code = """
init()
s = stream_create()[1] or 0
for _ in range(2):
    r, module = module_load(C.c_char_p(PTX % 67108864))
    if r == 0:
        launch(function(module, "k")[1] or 0, s)
    r2, library = library_load(C.c_char_p(PTX % 33554432))
    if r2 == 0:
        k = kernel(library, "k")[1] or 0
        launch(k, s)
        kernel_function(k)
        library_global(library, "big")
    assert used() >= sim_device_used() - 2 * MIB, (used(), sim_device_used())
    if r2 == 0 and library_unload(library):
        ok(library_unload(library))
    if r == 0 and module_unload(module):
        ok(module_unload(module))
assert used() <= CONTEXT + 4 * MIB, used()
ok(reset())
assert same() == 0
"""
    for nth in range(1, 4):
        _run(run_client, sim_env(preload=True, limit="1g", SIMGPU_FAULTS=f"{name}:{nth}:999"), code)
