"""What a program with several contexts does to the account: launches, streams and questions across them."""

from __future__ import annotations

import resource

from conftest import RunClient, SimEnv

USE = """
from simclient import *
from contextcalls import reset, same
first = init(0)
second = ok(ctx_create())
def use(ctx): ok(set_current(ctx))
"""
BIG = 'image("kernel k", "global g 268435456", "// .global .align 4 .b8 g[268435456];")'


def test_a_library_that_a_foreign_stream_loads_is_charged_before(
    sim_env: SimEnv, run_client: RunClient
) -> None:
    """A kernel launched into another context's stream loads its library there, within the quota."""
    code = f"""
lib = ok(library_load({BIG}))
use(first)
stream = ok(stream_create())
use(second)
k = ok(kernel(lib, "k"))
ok(launch(k))
held = same()
for _ in range(1100):
    ok(launch(k))
k = ok(kernel(lib, "k"))
expect(OOM, launch(k, stream))
assert same() == held
"""
    assert run_client(USE + code, sim_env(preload=True, limit="600m")).stderr == ""


def test_a_large_library_is_waited_for_however_long(sim_env: SimEnv, run_client: RunClient) -> None:
    """A kernel that is first launched after thousands of others has its library charged before."""
    code = f"""
small = ok(module_load(image("kernel z")))
z = ok(function(small, "z"))
lib = ok(library_load({BIG}))
k = ok(kernel(lib, "k"))
rest = ok(alloc(mem_info()[1] // MIB // 2 * 2 * MIB - 100 * MIB))
for _ in range(3000):
    ok(launch(z))
expect(OOM, launch(k))
ok(free(rest))
ok(launch(k))
same()
"""
    assert run_client(USE + code, sim_env(preload=True, limit="1g")).stderr == ""


def test_a_captured_launch_has_its_library_charged(sim_env: SimEnv, run_client: RunClient) -> None:
    """A library that comes with the first captured launch of its kernel is within the quota."""
    code = f"""
use(first)
small = ok(module_load(image("kernel z")))
lib = ok(library_load({BIG}))
k = ok(kernel(lib, "k"))
stream = ok(stream_create())
ok(launch(ok(function(small, "z"))))
rest = ok(alloc(mem_info()[1] // MIB // 2 * 2 * MIB - 100 * MIB))
held = same()
ok(capture_begin(stream))
expect(OOM, launch(k, stream))
ok(graph_destroy(ok(capture_end(stream))))
assert same() == held
ok(free(rest))
ok(capture_begin(stream))
ok(launch(k, stream))
ok(graph_launch(ok(graph_instantiate(ok(capture_end(stream)))), stream))
assert same() > 256 * MIB
"""
    assert run_client(USE + code, sim_env(preload=True, limit="1g")).stderr == ""


def test_local_memory_grows_in_the_functions_own_context(sim_env: SimEnv, run_client: RunClient) -> None:
    """A function is launched in its module's context, wherever it was looked up: that context grows."""
    code = """
ok(set_limit(0, 8192))
use(first)
ok(set_limit(0, 8192))
use(second)
ok(set_limit(0, 1024))
module = ok(module_load(image("kernel k local=8192")))
use(first)
f = ok(function(module, "k"))
held = same()
rest = ok(alloc(mem_info()[1] // MIB // 2 * 2 * MIB - 100 * MIB))
expect(OOM, launch(f))
ok(free(rest))
assert same() == held
ok(launch(f))
assert same() > held + 200 * MIB
"""
    assert run_client(USE + code, sim_env(preload=True, limit="2g")).stderr == ""


def test_streams_of_another_context_find_nothing_to_use_again(sim_env: SimEnv, run_client: RunClient) -> None:
    """What destroyed streams left stays in their context: streams of another one are charged anew."""
    code = """
for stream in [ok(stream_create()) for _ in range(64)]:
    ok(stream_destroy(stream))
held = same()
use(first)
for _ in range(64):
    ok(stream_create())
    assert sim_device_used() <= mem_info()[2] - mem_info()[1]
assert same() > held
"""
    assert run_client(USE + code, sim_env(preload=True, limit="1g")).stderr == ""


def test_streams_of_a_dead_context_leave_nothing_to_use_again(sim_env: SimEnv, run_client: RunClient) -> None:
    """When a context goes, so does what its destroyed streams left for the next."""
    code = """
for stream in [ok(stream_create()) for _ in range(64)]:
    ok(stream_destroy(stream))
ok(ctx_destroy(second))
use(first)
for _ in range(64):
    ok(stream_create())
    assert sim_device_used() <= mem_info()[2] - mem_info()[1]
"""
    assert run_client(USE + code, sim_env(preload=True, limit="1g")).stderr == ""


def test_the_card_is_never_shown_for_the_quota(sim_env: SimEnv, run_client: RunClient) -> None:
    """Where the driver does not say whose memory it told, the program gets that error, not the card."""
    code = """
answers = [mem_info() for _ in range(20)]
assert {a[0] for a in answers} == {0, 999}
assert {a[2] for a in answers if a[0] == 0} == {1 << 30}
"""
    faults = ",".join(f"cuCtxGetDevice:{n}:999" for n in range(8, 12))
    assert run_client(USE + code, sim_env(preload=True, limit="1g", SIMGPU_FAULTS=faults)).stderr == ""


def test_a_request_that_no_card_holds_keeps_the_account(sim_env: SimEnv, run_client: RunClient) -> None:
    """On a device without a limit of its own an absurd request leaves what is charged as it was."""
    code = """
from isolator import region
import os
init(0)
ok(alloc(300 * MIB))
def charged(): return region.read(os.environ["CUDA_DEVICE_MEMORY_SHARED_CACHE"]).devices[0].used
before = charged()
assert before > 300 * MIB
for size in (1 << 44, 1 << 63, (1 << 64) - 1):
    expect(OOM, alloc(size))
    assert charged() == before
"""
    env = sim_env(preload=True, SIMGPU_COUNT="2", CUDA_DEVICE_MEMORY_LIMIT_1="1g")
    assert run_client("from simclient import *\n" + code, env).stderr == ""


def test_a_limit_on_file_sizes_is_an_error_and_no_signal(sim_env: SimEnv, run_client: RunClient) -> None:
    """A program that may not write files as large as the region is refused CUDA, not killed."""
    code = """
from simclient import *
import signal
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # which Python ignores
expect(NOT_PERMITTED, cu_init())
"""
    env = sim_env(preload=True, limit="1g")
    run_client("from simclient import *; ok(cu_init())", sim_env())  # the simulated GPU has its file by now

    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    done = run_client(code, env, preexec_fn=small_files)
    assert "File too large" in done.stderr
