"""Whom NVML lists in a container with a quota: its own processes, with what they are charged."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from conftest import RunClient, SimEnv

HOLD = """
from simclient import *
import os, sys
init(0)
ok(alloc(int(sys.argv[1]) << 20))
print(os.getpid(), sim_process_used(os.getpid()), flush=True)
input()
"""

LISTS = """
from simclient import *
import json
n, h = nvml(), nvml_handle()
class V1(C.Structure):
    _fields_ = [("pid", u32), ("bytes", u64)]
class Detail(C.Structure):
    _fields_ = [("pid", u32), ("bytes", u64), ("gi", u32), ("ci", u32), ("protected", u64)]
class Details(C.Structure):
    _fields_ = [("version", u32), ("mode", u32), ("count", u32), ("rows", C.POINTER(Detail))]
def listed(name, kind):
    rows, count = (kind * 64)(), u32(64)
    r = getattr(n, name)(h, C.byref(count), rows)
    return [r, {row.pid: row.bytes for row in rows[: count.value]}]
def detail(mode=0, room=64):
    rows = (Detail * 64)()
    d = Details(version=C.sizeof(Details) | 1 << 24, mode=mode, count=room, rows=rows)
    r = n.nvmlDeviceGetRunningProcessDetailList(h, C.byref(d))
    return [r, {row.pid: row.bytes for row in rows[: d.count if r == 0 else 0]}, d.count]
def room(name, entries):
    rows, count = (ProcessInfo * 64)(), u32(entries)
    r = getattr(n, name)(h, C.byref(count), rows if entries else None)
    return [r, count.value]
compute = "nvmlDeviceGetComputeRunningProcesses"
"""


@contextmanager
def _holding(env: dict[str, str], mib: int) -> Iterator[tuple[subprocess.Popen[str], int, int]]:
    """A process that holds memory: the process, its pid and the simulator's figure for it."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(mib)], env=env, stdin=-1, stdout=-1, text=True
    )
    assert process.stdout
    try:
        pid, used = map(int, process.stdout.readline().split())
        yield process, pid, used
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("host_ids", ["0", "1"])
def test_lists_this_containers_processes_alone(sim_env: SimEnv, run_client: RunClient, host_ids: str) -> None:
    """Of three processes on the card two are ours: those, by our pids, with their bytes (B123, B125)."""
    ours = sim_env(preload=True, limit="4g", SIMGPU_NVML_HOSTPIDS=host_ids)
    with _holding(ours, 600) as (_, p1, b1), _holding(ours, 300) as (_, p2, b2), _holding(sim_env(), 900):
        code = (
            LISTS
            + """
newer = [listed(compute + version, ProcessInfo) for version in ("_v2", "_v3")]
print(json.dumps([listed(compute, V1), *newer, detail()[:2], nvml_memory()[3]]))
"""
        )
        *lists, used = json.loads(run_client(code, ours).stdout)
    assert lists == [[0, {str(p1): b1, str(p2): b2}]] * 4
    assert used == b1 + b2


def test_the_size_protocol_is_the_drivers(sim_env: SimEnv, run_client: RunClient) -> None:
    """Too little room answers INSUFFICIENT_SIZE and the count; an empty list needs no room (B123)."""
    ours = sim_env(preload=True, limit="4g")
    code = (
        LISTS
        + """
name = compute + "_v3"
others = [room(f"nvmlDeviceGet{kind}RunningProcesses_v3", 5) for kind in ("Graphics", "MPSCompute")]
print([room(name, 0), room(name, 1), room(name, 2), detail(room=1)[::2], detail(mode=7)[0], *others])
"""
    )
    assert run_client(code, ours).stdout == "[[0, 0], [0, 0], [0, 0], [0, 0], 2, [0, 0], [0, 0]]\n"
    with _holding(ours, 100), _holding(ours, 100), _holding(sim_env(), 100):
        shown = run_client(code, ours).stdout
    assert shown == "[[7, 2], [7, 2], [0, 2], [7, 2], 2, [0, 0], [0, 0]]\n"


def test_utilisation_is_of_this_containers_processes(sim_env: SimEnv, run_client: RunClient) -> None:
    """Samples of a neighbour's process are left out of both utilisation lists (B123)."""
    code = (
        LISTS
        + """
class Sample(C.Structure):
    _fields_ = [("pid", u32), ("time", u64), ("use", u32 * 4)]
class Info(C.Structure):
    _fields_ = [("time", u64), ("pid", u32), ("use", u32 * 6)]
class Infos(C.Structure):
    _fields_ = [("version", u32), ("count", u32), ("last", u64), ("rows", C.POINTER(Info))]
def samples():
    rows, count = (Sample * 64)(), u32(64)
    r = n.nvmlDeviceGetProcessUtilization(h, rows, C.byref(count), u64(0))
    return [r, [row.pid for row in rows[: count.value]]]
def infos():
    rows = (Info * 64)()
    all = Infos(version=C.sizeof(Infos) | 1 << 24, count=64, rows=rows)
    r = n.nvmlDeviceGetProcessesUtilizationInfo(h, C.byref(all))
    return [r, [row.pid for row in rows[: all.count]]]
print(json.dumps([samples(), infos()]))
"""
    )
    ours = sim_env(preload=True, limit="4g")
    with _holding(sim_env(), 100) as (_, theirs, _used):
        assert theirs in json.loads(run_client(code, sim_env()).stdout)[0][1]
        assert json.loads(run_client(code, ours).stdout) == [[6, []], [6, []]]
        with _holding(ours, 100) as (_, own, _used):
            assert json.loads(run_client(code, ours).stdout) == [[0, [own]], [0, [own]]]


def test_a_killed_process_leaves_the_figures_at_once(sim_env: SimEnv, run_client: RunClient) -> None:
    """After SIGKILL a tool that only looks sees neither the process nor its bytes (B034, B044)."""
    ours = sim_env(preload=True, limit="4g")
    code = LISTS + "print(json.dumps([listed(compute + '_v3', ProcessInfo), nvml_memory()[2:]]))"
    with _holding(ours, 600) as (process, _pid, _used):
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert json.loads(run_client(code, ours).stdout) == [[0, {}], [4 << 30, 0]]


def test_without_a_limit_the_list_is_the_drivers(sim_env: SimEnv, run_client: RunClient) -> None:
    """Preloaded with no limit asked for, every process of the card is listed as the driver does."""
    code = LISTS + "print(json.dumps(listed(compute + '_v3', ProcessInfo)))"
    with _holding(sim_env(), 600) as (_, pid, used):
        assert json.loads(run_client(code, sim_env(preload=True)).stdout) == [0, {str(pid): used}]


@pytest.mark.root
@pytest.mark.skipif(not shutil.which("unshare"), reason="needs unshare")
def test_processes_of_another_pid_namespace_are_left_out(sim_env: SimEnv, run_client: RunClient) -> None:
    """A slot whose pid means somebody else here is counted in the sum and not listed (B123)."""
    ours = sim_env(preload=True, limit="4g")
    probe = subprocess.run(["unshare", "-p", "-f", "--mount-proc", "true"], capture_output=True)
    if probe.returncode:
        pytest.skip("needs the right to make PID namespaces")
    command = ["unshare", "-p", "-f", "--mount-proc", sys.executable, "-c", HOLD, "500"]
    process = subprocess.Popen(command, env=ours, stdin=-1, stdout=-1, text=True)
    assert process.stdout
    try:
        _pid, used = map(int, process.stdout.readline().split())
        code = LISTS + "print(json.dumps([listed(compute + '_v3', ProcessInfo), nvml_memory()[3]]))"
        assert json.loads(run_client(code, ours).stdout) == [[0, {}], used]
    finally:
        process.communicate("\n")
