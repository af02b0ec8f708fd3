"""Memory nodes of graphs are charged from their first launch until a trim, on the simulated GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import RunClient, SimEnv

USE = """
import ctypes as C
from simclient import *
from poolcalls import *
ctx = init(0)
s, P = stream(), '_ptsz'
base()
"""


def _run(run_client: RunClient, env: dict[str, str], code: str) -> None:
    done = run_client(USE + code, env)
    assert done.stderr == ""


INSTANTIATE = {
    "v1": 'ok(out(ptr, "cuGraphInstantiate", ptr(g), ptr(None), ptr(None), 0))',
    "v2": 'ok(out(ptr, "cuGraphInstantiate_v2", ptr(g), ptr(None), ptr(None), 0))',
    "flags": "ok(instantiate(g))",
    "params": 'ok(out(ptr, "cuGraphInstantiateWithParams", ptr(g), C.byref(InstantiateParams())))',
    "params_ptsz": 'ok(out(ptr, "cuGraphInstantiateWithParams_ptsz", ptr(g), C.byref(InstantiateParams())))',
}


@pytest.mark.parametrize("way", INSTANTIATE)
@pytest.mark.parametrize("start", ["launch(e, s)", "launch(e, s, P)", "upload(e, s)", "upload(e, s, P)"])
def test_a_memory_node_is_charged_from_launch_to_trim(
    sim_env: SimEnv, run_client: RunClient, way: str, start: str
) -> None:
    """Nothing when added or instantiated, its steps at the first launch, kept until the trim (B007)."""
    code = f"""
g, at = graph_of(100 * MIB)
e = {INSTANTIATE[way]}
assert same() == 0
ok({start})
assert same() == 128
ok(launch(e, s)); ok(sync(s))
assert same() == 128
ok(exec_destroy(e)); ok(call("cuGraphDestroy", ptr(g)))
assert same() == 128
ok(graph_trim())
assert same() == 0
"""
    _run(run_client, sim_env(preload=True, limit="1g"), code)


@pytest.mark.parametrize("flags", [0, 1])
def test_graphs_that_keep_memory_end_at_the_limit(sim_env: SimEnv, run_client: RunClient, flags: int) -> None:
    """Eight graphs of one allocation each: launches past the limit are refused, frees succeed (B007)."""
    code = f"""
made = each(8, lambda _: graph_of(64 * MIB, free=False))
execs = [ok(instantiate(g, {flags})) for g, _ in made]
results = [launch(e, s) for e in execs]
assert results == [0] * 2 + [OOM] * 6, results
assert same() == 128 and refusals() == 6
ok(sync(s))
for at in [at for (_, at), r in zip(made, results) if r == 0]:
    ok(free(at))
assert same() == 128
ok(graph_trim())
assert same() == 0
ok(launch(execs[7], s))
assert same() == 64
"""
    _run(run_client, sim_env(preload=True, limit="256m"), code)


def test_a_refused_launch_does_not_reach_the_driver(
    sim_env: SimEnv, run_client: RunClient, tmp_path: Path
) -> None:
    """A graph with one allocation larger than the quota is neither launched nor uploaded (B007)."""
    log = tmp_path / "calls"
    code = """
g, at = graph_of(8 * GIB)
e = ok(instantiate(g))
assert launch(e, s) == OOM and upload(e, s) == OOM and same() == 0
"""
    _run(run_client, sim_env(preload=True, limit="1g", SIMGPU_LOG=str(log)), code)
    calls = log.read_text()
    assert " cuGraphInstantiateWithFlags " in calls
    assert " cuGraphLaunch " not in calls and " cuGraphUpload " not in calls


def test_graphs_share_what_they_free(sim_env: SimEnv, run_client: RunClient) -> None:
    """Graphs that free inside use one reservation in turn; it is charged once (B007)."""
    code = """
execs = each(4, lambda _: ok(instantiate(graph_of(512 * MIB)[0])))
for _ in range(3):
    for e in execs:
        ok(launch(e, s))
        assert same() == 512
"""
    _run(run_client, sim_env(preload=True, limit="1g"), code)


def test_nodes_that_follow_each_other_need_not_all_fit(sim_env: SimEnv, run_client: RunClient) -> None:
    """A graph whose allocations use the same memory one after another is granted what it really takes."""
    code = """
g = graph_new()
before = None
for size in (600, 500, 400):
    node, at = ok(add_alloc(g, size * MIB, before))
    before = ok(add_free(g, at, node))
e = ok(instantiate(g))
ok(launch(e, s))
taken = same()
assert 600 <= taken <= 800 and refusals() <= 1
ok(launch(e, s))
assert same() == taken
"""
    _run(run_client, sim_env(preload=True, limit="1g"), code)


def test_an_upload_that_does_not_fit_is_undone(sim_env: SimEnv, run_client: RunClient) -> None:
    """Allocations that are live together and exceed the quota leave nothing behind (B007)."""
    code = """
g = graph_new()
a, at = ok(add_alloc(g, 600 * MIB))
b, other = ok(add_alloc(g, 600 * MIB, a))
ok(add_free(g, at, b)); ok(add_free(g, other, b))
e = ok(instantiate(g))
for _ in range(2):
    assert launch(e, s) == OOM and upload(e, s) == OOM
    assert same() == 0
ok(alloc(700 * MIB))
"""
    _run(run_client, sim_env(preload=True, limit="1g"), code)


@pytest.mark.parametrize("version", ["", "_ptsz"])
def test_instantiation_with_upload_is_charged_at_once(
    sim_env: SimEnv, run_client: RunClient, version: str
) -> None:
    """The upload flag takes the memory at instantiation; past the limit no graph is made (B007)."""
    code = f"""
def make(size):
    g, at = graph_of(size)
    e = ptr(7)
    params = InstantiateParams(flags=UPLOAD, stream=s)
    return call("cuGraphInstantiateWithParams{version}", C.byref(e), ptr(g), C.byref(params)), e.value
result, e = make(200 * MIB)
assert result == 0 and same() == 224
assert make(8 * GIB) == (OOM, 7) and same() == 0
ok(launch(e, s))
assert same() == 224
"""
    _run(run_client, sim_env(preload=True, limit="1g"), code)


def test_a_captured_allocation_is_charged_at_the_launch(sim_env: SimEnv, run_client: RunClient) -> None:
    """Allocations captured from a stream are memory nodes like others (B172)."""
    code = """
ok(capture_begin(s))
at = ok(alloc_async(300 * MIB, s))
ok(free_async(at, s))
g = ok(capture_end(s))
e = ok(instantiate(g))
assert same() == 0
ok(launch(e, s))
assert same() == 320
"""
    _run(run_client, sim_env(preload=True, limit="1g"), code)


def test_idle_graph_memory_makes_room_for_others(sim_env: SimEnv, run_client: RunClient) -> None:
    """Graph memory in no use is trimmed before a plain allocation is refused; the graph takes it again."""
    code = """
e = ok(instantiate(graph_of(600 * MIB)[0]))
ok(launch(e, s)); ok(sync(s))
p = ok(alloc(500 * MIB))
assert same() == 500
assert launch(e, s) == OOM and same() == 500
ok(free(p))
ok(launch(e, s))
assert same() == 608
"""
    _run(run_client, sim_env(preload=True, limit="1g"), code)


def test_the_nodes_device_is_charged(sim_env: SimEnv, run_client: RunClient) -> None:
    """A memory node counts on the device it names, not on that of the launching context (B045)."""
    code = """
ok(retain(1)); base(1)
e = ok(instantiate(graph_of(100 * MIB, device=1)[0]))
ok(launch(e, s))
assert (same(0), same(1)) == (0, 128)
assert launch(ok(instantiate(graph_of(2 * GIB, device=1)[0])), s) == OOM
assert (refusals(0), refusals(1)) == (0, 1)
ok(launch(e, s))
ok(graph_trim(0))
assert (same(0), same(1)) == (0, 128)
ok(graph_trim(1))
assert (same(0), same(1)) == (0, 0)
"""
    _run(run_client, sim_env(preload=True, limit="1g", SIMGPU_COUNT="2"), code)


def test_graphs_without_memory_cost_no_further_call(
    sim_env: SimEnv, run_client: RunClient, tmp_path: Path
) -> None:
    """While no graph has memory nodes a launch is passed on as it is (B172)."""
    log = tmp_path / "calls"
    code = """
g = graph_new()
ok(call("cuGraphAddEmptyNode", C.byref(ptr()), ptr(g), ptr(None), 0))
e, m = ok(instantiate(g)), ok(instantiate(graph_of(MIB)[0]))
ok(launch(m, s)); ok(exec_destroy(m))
ok(launch(e, s))
log = open(os.environ["SIMGPU_LOG"], "a"); log.write("now\\n"); log.flush()
for _ in range(5):
    ok(launch(e, s))
"""
    _run(run_client, sim_env(preload=True, limit="1g", SIMGPU_LOG=str(log)), "import os\n" + code)
    calls = [line.split()[2] for line in log.read_text().split("now\n")[1].splitlines()]
    assert calls[:5] == ["cuGraphLaunch"] * 5 and "cuDeviceGetGraphMemAttribute" not in calls
