"""Launches: the local memory of kernels is charged before it is taken, and nothing else slows a launch."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from conftest import RunClient, SimEnv

USE = """
from simclient import *
from contextcalls import *
CONTEXT = 106_954_752
def launches():
    return call("simgpu_launches")
SYMBOLS = ["cuLaunchKernel", "cuLaunchCooperativeKernel"]
SYMBOLS += [symbol + "_ptsz" for symbol in SYMBOLS]
class Config(C.Structure):
    _fields_ = [("sizes", C.c_uint * 6), ("shared", C.c_uint), ("stream", ptr)]
    _fields_ += [("attrs", ptr), ("count", C.c_uint)]
def launch_ex(handle, stream=0, symbol="cuLaunchKernelEx"):
    config = Config(sizes=(C.c_uint * 6)(1, 1, 1, 1, 1, 1), stream=stream)
    return call(symbol, C.byref(config), ptr(handle), ptr(None), ptr(None))
"""


def _run(run_client: RunClient, env: dict[str, str], code: str) -> None:
    done = run_client(USE + code, env)
    assert done.stderr == ""


def test_local_memory_is_charged_at_the_first_launch(sim_env: SimEnv, run_client: RunClient) -> None:
    """A kernel's frames come with its first launch, once, and stay for smaller ones (B001)."""
    _run(
        run_client,
        sim_env(preload=True, limit="1g"),
        """
init()
module = ok(module_load(image("kernel small", "kernel big local=8192", "kernel bigger local=16384")))
small, big, bigger = (ok(function(module, name)) for name in ("small", "big", "bigger"))
ok(launch(small))
assert same() == CONTEXT
ok(launch(big))
grown = same()
assert grown > CONTEXT + 250 * MIB
for f in (big, small, big):
    ok(launch(f))
assert same() == grown
ok(launch(bigger))
most = same()
assert most > grown + 250 * MIB
ok(launch(big))
assert same() == most
assert launches() == 7
""",
    )


@pytest.mark.parametrize("which", range(8))
def test_a_kernel_that_does_not_fit_is_not_launched(
    sim_env: SimEnv, run_client: RunClient, which: int
) -> None:
    """By every launching call, a kernel whose frames pass the quota is refused (B001, B011)."""
    _run(
        run_client,
        sim_env(preload=True, limit="512m"),
        f"""
init()
module = ok(module_load(image("kernel ok", "kernel big local=65536")))
library = ok(library_load(image("kernel big local=65536")))
big = ok(function(module, "big"))
class Params(C.Structure):
    _fields_ = [("f", ptr), ("sizes", C.c_uint * 6), ("shared", C.c_uint), ("stream", ptr), ("params", ptr)]
def multi(f):
    one = Params(f=f, sizes=(C.c_uint * 6)(1, 1, 1, 1, 1, 1))
    return call("cuLaunchCooperativeKernelMultiDevice", C.byref(one), C.c_uint(1), C.c_uint(0))
ways = [lambda f, s=s: launch(f, 0, s) for s in SYMBOLS]
ways += [lambda f, s=s: launch_ex(f, 0, s) for s in ("cuLaunchKernelEx", "cuLaunchKernelEx_ptsz")]
ways += [multi, lambda f: call("cuLaunch", ptr(f))]
way = ways[{which}]
for f in (big, ok(kernel(library, "big")) if {which} < 6 else big):
    expect(OOM, way(f))
    expect(OOM, way(f))
assert launches() == 0 and same() == CONTEXT
ok(way(ok(function(module, "ok"))))
expect(OOM, way(big))
assert launches() == 1 and same() == CONTEXT
""",
    )


def test_frames_are_charged_in_the_launching_context(sim_env: SimEnv, run_client: RunClient) -> None:
    """Each context has frames of its own; the stream tells which one launches (B045)."""
    _run(
        run_client,
        sim_env(preload=True, limit="2g", SIMGPU_COUNT="2"),
        """
start()
library = ok(library_load(image("kernel k local=8192")))
contexts = [ok(ctx_create(dev)) for dev in (0, 0, 1)]
k = ok(kernel(library, "k"))
def charge():
    return [same(0), same(1)]
assert charge() == [2 * CONTEXT, CONTEXT]
ok(launch(k))
frames = same(1) - CONTEXT
assert frames > 250 * MIB and charge() == [2 * CONTEXT, CONTEXT + frames]
ok(set_current(contexts[0]))
stream = ok(stream_create())
ok(launch(k))
assert charge() == [2 * CONTEXT + frames, CONTEXT + frames]
ok(set_current(contexts[1]))
ok(launch(k, stream))
assert charge() == [2 * CONTEXT + frames, CONTEXT + frames]
ok(launch(k))
assert charge() == [2 * CONTEXT + 2 * frames, CONTEXT + frames]
for _ in range(100):
    ok(launch(k))
assert charge() == [2 * CONTEXT + 2 * frames, CONTEXT + frames]
ok(ctx_destroy(contexts[0]))
assert charge() == [CONTEXT + frames, CONTEXT + frames]
""",
    )


def test_a_lowered_stack_limit_is_charged_again(sim_env: SimEnv, run_client: RunClient) -> None:
    """After the limit took a kernel's frames away, its next launch takes and charges them anew (B001)."""
    _run(
        run_client,
        sim_env(preload=True, limit="1g"),
        """
init()
k = ok(function(ok(module_load(image("kernel k local=16384"))), "k"))
ok(launch(k))
grown = same()
assert limit(STACK) == 16384
ok(set_limit(STACK, 1024))
assert same() == CONTEXT
p = ok(alloc(600 * MIB))
expect(OOM, launch(k))
assert same() == CONTEXT + 600 * MIB
ok(free(p))
ok(launch(k))
assert same() == grown
ok(set_limit(STACK, 16384))
assert same() == grown
""",
    )


def test_threads_that_launch_at_once_charge_frames_once(sim_env: SimEnv, run_client: RunClient) -> None:
    """16 threads launch a kernel with large frames for the first time at once: one growth (B055)."""
    _run(
        run_client,
        sim_env(preload=True, limit="700m"),
        """
start()
for _ in range(15):
    ctx = init()
    k = ok(function(ok(module_load(image("kernel k local=8192"))), "k"))
    def work(i):
        ok(set_current(ctx))
        ok(launch(k))
    together(16, work)
    assert same() > CONTEXT + 250 * MIB
    ok(release())
    assert same() == 0
""",
    )


def test_a_kernels_heap_is_found_at_its_launch(sim_env: SimEnv, run_client: RunClient) -> None:
    """The device heap comes with a launch; what was charged ahead for it is not charged twice (B001)."""
    _run(
        run_client,
        sim_env(preload=True, limit="2g"),
        """
init()
ok(set_limit(HEAP, 512 * MIB))
ahead = used() - CONTEXT
module = ok(module_load(image("kernel k heap=1", "kernel other")))
ok(launch(ok(function(module, "k"))))
assert same() >= CONTEXT + 512 * MIB
for _ in range(3):
    ok(launch(ok(function(module, "other"))))
same()
ok(reset())
assert same() == 0
""",
    )


def test_nothing_is_charged_for_a_captured_launch(sim_env: SimEnv, run_client: RunClient) -> None:
    """A launch into a capture runs nothing: it is neither charged nor refused, nor spoils it (B001)."""
    _run(
        run_client,
        sim_env(preload=True, limit="512m"),
        """
init()
k = ok(function(ok(module_load(image("kernel k local=65536"))), "k"))
stream = ok(stream_create(1))
ok(call("cuStreamBeginCapture_v2", ptr(stream), C.c_uint(0)))
before = used()
ok(launch(k, stream))
assert used() == before and launches() == 0
graph = ok(out(ptr, "cuStreamEndCapture", ptr(stream), first=False))
expect(OOM, launch(k, stream))
""",
    )


LINKED = """
#include <stdio.h>
int cuLaunchKernel(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *,
                   void **, void **);
int cuLaunchKernelEx(const void *, void *, void **, void **);
int main(void) {
    printf("%d ", cuLaunchKernel(0, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0));
    printf("%d\\n", cuLaunchKernelEx(0, 0, 0, 0));
    return 0;
}
"""


def test_launches_before_and_without_a_driver(
    sim_env: SimEnv, libvgpu: Path, run_client: RunClient, tmp_path: Path
) -> None:
    """A launch as the first call, or one that an old driver lacks, has a clear answer (B020, B029)."""
    (tmp_path / "linked.c").write_text(LINKED)
    program = tmp_path / "linked"
    subprocess.run(["gcc", "-o", program, tmp_path / "linked.c", libvgpu], check=True)
    env = sim_env(preload=True, limit="512m")
    sim = env["LD_LIBRARY_PATH"]

    def answers(libraries: str) -> str:
        here = dict(env, LD_LIBRARY_PATH=libraries)
        return subprocess.run([program], env=here, capture_output=True, text=True, check=True).stdout

    assert answers(sim) == "3 3\n"
    assert answers(f"{sim}/old:{sim}") == "3 500\n"
    assert answers(str(tmp_path)) == "100 100\n"


def test_a_launch_is_a_test_and_a_jump(libvgpu: Path) -> None:
    """The entries of launches save nothing, call nothing and leave the caller's stack alone (D14)."""

    def tool(*command: str) -> list[str]:
        done = subprocess.run([*command, str(libvgpu)], capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    symbols = {line.split()[2]: int(line.split()[0], 16) for line in tool("nm", "-D", "--defined-only")}
    for name in (name for name in symbols if name.startswith("cuLaunch")):
        at = symbols[name]
        part = (f"--start-address={at}", f"--stop-address={at + 28}")
        listing = tool("objdump", "-d", "--no-show-raw-insn", *part)
        steps = [line.split("\t")[1].split()[0] for line in listing if "\t" in line]
        steps = [step for step in steps if step not in ("endbr64", "hint", "bti")]
        assert steps[:3] in (["testl", "jne", "jmp"], ["adrp", "ldr", "tst"]), (name, steps)
