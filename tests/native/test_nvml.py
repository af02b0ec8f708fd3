"""What NVML says of memory in a container with a quota."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from conftest import RunClient, SimEnv

LIMIT = 4147 << 20
CARD = 15360 << 20

READ = """
from simclient import *
import json
def figures(index=0):
    r1, total, free, used = nvml_memory(index)
    r2, m = nvml_memory_v2(index)
    return [r1, total, free, used, r2, m.total, m.free, m.used, m.reserved]
"""
SHOW = READ + "print(json.dumps(figures()))"


def _read(run_client: RunClient, env: dict[str, str], code: str = SHOW) -> list[int]:
    done = run_client(code, env)
    assert done.stderr == ""
    return [int(word) for word in done.stdout.strip("[]\n").split(",")]


def test_shows_the_limit_before_any_cuda_process(
    sim_env: SimEnv, run_client: RunClient, tmp_path: Path
) -> None:
    """A tool that only looks sees the quota, takes no slot and makes no region file (B129)."""
    figures = _read(run_client, sim_env(preload=True, limit="4147m"))
    assert figures == [0, LIMIT, LIMIT, 0, 0, LIMIT, LIMIT, 0, 0]
    assert not (tmp_path / "usage.cache").exists()


def test_a_tool_that_asks_for_days_takes_no_more_each_time(sim_env: SimEnv, run_client: RunClient) -> None:
    """A looker without a region keeps one record, and sees the region of a process that comes later."""
    code = (
        READ
        + """
import os, subprocess, sys
def maps():
    return sum(1 for _ in open("/proc/self/maps")), int(open("/proc/self/statm").read().split()[0]) // 256
figures()
before = maps()
for _ in range(200):
    figures()
after = maps()
assert after == before, (before, after)
child = "from simclient import *; init(0); ok(alloc(1 << 30)); print(flush=True); input()"
other = subprocess.Popen([sys.executable, "-c", child], stdin=-1, stdout=-1)
other.stdout.readline()
print(figures()[3] >= 1 << 30)
other.communicate(b"\\n")
print(figures()[3])
"""
    )
    assert run_client(code, sim_env(preload=True, limit="4g")).stdout == "True\n0\n"


def test_nvidia_smi_shows_the_quota(sim_env: SimEnv, sim_dir: Path, run_client: RunClient) -> None:
    """The table and the queries of nvidia-smi give the quota as the card's memory (B129)."""
    code = f"""
import subprocess
smi = {str(sim_dir / "nvidia-smi")!r}
print(subprocess.run([smi], capture_output=True, text=True).stdout)
query = "--query-gpu=memory.total,memory.used,memory.free"
print(subprocess.run([smi, query, "--format=csv,noheader,nounits"], capture_output=True, text=True).stdout)
"""
    shown = run_client(code, sim_env(preload=True, limit="4147m")).stdout
    assert "0MiB / 4147MiB" in shown
    assert "4147, 0, 4147" in shown


def test_every_surface_gives_the_same_bytes(sim_env: SimEnv, run_client: RunClient) -> None:
    """CUDA's and NVML's figures agree to the byte before and after an allocation (B120, B121)."""
    code = (
        READ
        + """
init(0)
for step in range(2):
    r, free, total = mem_info()
    one = figures()
    assert one[0] == one[4] == r == 0
    assert one[1] == one[5] == total == ok(total_mem()) == 4147 << 20, (one, total)
    assert one[2] == one[6] == free, (one, free)
    assert one[3] == one[7] == total - free and one[8] == 0, one
    ok(alloc(1 << 30))
print(one[7] - (1 << 30) >= 0, sim_process_used(__import__("os").getpid()) - (1 << 30) == one[7])
"""
    )
    assert run_client(code, sim_env(preload=True, limit="4147m")).stdout == "True True\n"


def test_a_card_smaller_than_the_limit_is_the_total(sim_env: SimEnv, run_client: RunClient) -> None:
    """A limit of twice the card shows the card, and free is what others really left (B119)."""
    neighbour = "from simclient import *; init(0); ok(alloc(8 << 30)); print(1, flush=True); input()"
    code = (
        READ
        + """
import os, subprocess, sys
bare = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
other = subprocess.Popen([sys.executable, "-c", os.environ["NEIGHBOUR"]], env=bare, stdin=-1, stdout=-1)
other.stdout.readline()
one = figures()
other.communicate(b"\\n")
print(json.dumps(one))
"""
    )
    figures = _read(run_client, sim_env(preload=True, limit="30720m", NEIGHBOUR=neighbour), code)
    assert figures[1] == figures[5] == CARD
    assert figures[2] == figures[6] < CARD - (8 << 30)
    assert figures[3] == figures[7] == 0
    assert figures[5] == figures[6] + figures[7] + figures[8]


def test_use_above_the_limit_leaves_nothing_free(
    sim_env: SimEnv, run_client: RunClient, tmp_path: Path
) -> None:
    """When the quota shrinks below what is held, free is 0 on every surface and nothing fails (B117)."""
    code = (
        READ
        + """
init(0)
ok(alloc(1 << 30))
with open(os.environ["CUDA_DEVICE_MEMORY_SHARED_CACHE"], "r+b") as region:
    region.seek(1600)
    region.write((512 << 20).to_bytes(8, "little"))
print(json.dumps([*figures(), *mem_info()]))
"""
    ).replace("import json", "import json, os")
    figures = _read(run_client, sim_env(preload=True, limit="2g"), code)
    total, used = 512 << 20, figures[3]
    assert used > 1 << 30
    assert figures == [0, total, 0, used, 0, total, 0, used, 0, 0, 0, total]
    region = (tmp_path / "usage.cache").read_bytes()
    assert struct.unpack_from("<Q", region, 1600) == (total,)


def test_without_a_limit_nothing_is_changed(sim_env: SimEnv, run_client: RunClient) -> None:
    """Preloaded by hand with no limit asked for, the figures are the driver's own."""
    bare = _read(run_client, sim_env())
    assert bare[1] == CARD
    assert _read(run_client, sim_env(preload=True)) == bare


ERRORS = """
from simclient import *
import ctypes as C
n = C.CDLL("libnvidia-ml.so.1")
h, m, m2, c = ptr(), Memory(), Memory2(), u32(4)
calls = {
    "v1": lambda: n.nvmlDeviceGetMemoryInfo(h, C.byref(m)),
    "v1 null": lambda: n.nvmlDeviceGetMemoryInfo(h, None),
    "v2 version": lambda: n.nvmlDeviceGetMemoryInfo_v2(h, C.byref(m2)),
    "v2 null": lambda: n.nvmlDeviceGetMemoryInfo_v2(h, None),
    "protected": lambda: n.nvmlDeviceGetConfComputeProtectedMemoryUsage(h, C.byref(m)),
    "list": lambda: n.nvmlDeviceGetComputeRunningProcesses_v3(h, None, None),
    "graphics": lambda: n.nvmlDeviceGetGraphicsRunningProcesses_v3(h, C.byref(c), None),
    "detail null": lambda: n.nvmlDeviceGetRunningProcessDetailList(h, None),
    "utilisation": lambda: n.nvmlDeviceGetProcessUtilization(h, None, None, 0),
    "utilisation null": lambda: n.nvmlDeviceGetProcessesUtilizationInfo(h, None),
}
def results():
    return {name: call() for name, call in calls.items()}
print(results())
n.nvmlInit_v2()
print(results())
n.nvmlDeviceGetHandleByIndex_v2(0, C.byref(h))
print(results())
n.nvmlShutdown()
print(results())
"""


def test_errors_are_the_drivers_own(sim_env: SimEnv, run_client: RunClient) -> None:
    """Before init, without a device, with null outputs and after shutdown: as without the shim (B096)."""
    bare = run_client(ERRORS, sim_env())
    assert "'v1': 1," in bare.stdout
    shimmed = run_client(ERRORS, sim_env(preload=True, limit="1g"))
    assert (shimmed.stdout, shimmed.stderr) == (bare.stdout, bare.stderr)


FAULTS = {
    "nvmlDeviceGetUUID:*:999": [0, LIMIT, LIMIT, 0, 0, LIMIT, LIMIT, 0, 0],
    "nvmlDeviceGetIndex:*:999,nvmlDeviceGetMemoryInfo_v2:*:3": [0, CARD, None, None, 3, 0, 0, 0, 0],
    "nvmlDeviceGetMemoryInfo:1:999": [999, 0, 0, 0, 0, LIMIT, LIMIT, 0, 0],
}


@pytest.mark.parametrize("faults", FAULTS)
def test_each_failing_call_of_nvml_is_passed_on(sim_env: SimEnv, run_client: RunClient, faults: str) -> None:
    """A failing figure is the driver's error; without an index the figure is the driver's (B046)."""
    figures = _read(run_client, sim_env(preload=True, limit="4147m", SIMGPU_FAULTS=faults))
    assert [got for got, due in zip(figures, FAULTS[faults], strict=True) if due not in (None, got)] == []


def test_the_limit_holds_when_nvml_fails(sim_env: SimEnv, run_client: RunClient) -> None:
    """NVML that starts to answer 999 is passed on, and allocations stay limited (B126)."""
    code = """
from simclient import *
import time
init(0)
nvml_handle()
time.sleep(1.1)
h = ptr(1)
print(nvml().nvmlDeviceGetMemoryInfo(h, C.byref(Memory())), alloc(1 << 30)[0], ok(alloc(256 << 20)) > 0)
"""
    env = sim_env(preload=True, limit="1g", SIMGPU_NVML_FAIL_AFTER="1")
    assert run_client(code, env).stdout == "999 2 True\n"


def test_works_without_a_memory_figure_of_nvml(sim_env: SimEnv, run_client: RunClient) -> None:
    """Where NVML cannot tell memory (unified machines), CUDA shows the limit and enforces it (B128)."""
    code = """
from simclient import *
init(0)
print(nvml_memory()[0], ok(total_mem()) >> 20, mem_info()[2] >> 20, alloc(2 << 30)[0])
"""
    env = sim_env(preload=True, limit="2048m", SIMGPU_NVML_NO_MEMORY="1")
    assert run_client(code, env).stdout == "3 2048 2048 2\n"


def test_the_bus_window_is_left_alone(sim_env: SimEnv, run_client: RunClient) -> None:
    """BAR1 is the host's figure, the same with and without a quota (B120)."""
    code = """
from simclient import *
bar = (u64 * 3)()
print(nvml().nvmlDeviceGetBAR1MemoryInfo(nvml_handle(), bar), list(bar))
"""
    assert run_client(code, sim_env(preload=True, limit="1g")).stdout == run_client(code, sim_env()).stdout


@pytest.mark.parametrize("order", ["", "reverse"])
def test_limits_by_device_follow_nvmls_order(sim_env: SimEnv, run_client: RunClient, order: str) -> None:
    """CUDA_DEVICE_MEMORY_LIMIT_<i> means NVML's device i, whichever order CUDA has (B059)."""
    code = (
        READ
        + """
ok(cu_init())
limits = {nvml_uuid(i)[4:].replace("-", ""): figures(i)[1] >> 20 for i in range(3)}
cuda = [ok(total_mem(i)) >> 20 == limits[device_uuid(i)] for i in range(3)]
print([figures(i)[1] >> 20 for i in range(3)], cuda)
"""
    )
    more = {"CUDA_DEVICE_MEMORY_LIMIT_1": "2g", "CUDA_DEVICE_MEMORY_LIMIT_2": "3g"}
    env = sim_env(preload=True, limit="1g", SIMGPU_COUNT="3", SIMGPU_CUDA_ORDER=order, **more)
    assert run_client(code, env).stdout == "[1024, 2048, 3072] [True, True, True]\n"
