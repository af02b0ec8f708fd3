"""NVIDIA's tools on a program under a quota, and what they show of the card."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys

import pytest

LIMIT_MIB = 4147
MIB = 1 << 20


def run(command, env, timeout=180):
    """A finished tool."""
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def tool(name):
    """Its path; skips without it."""
    found = shutil.which(name) or shutil.which(f"/usr/local/cuda/bin/{name}")
    if not found:
        pytest.skip(f"no {name} on this machine")
    return found


@pytest.fixture
def small(client):
    """A small program with the runtime linked in."""
    return client("programs/small.cu", "small", "-cudart=static")


HELD = f"last=67108863 total_mib={LIMIT_MIB} large=2"

# Preloads as in a container, since profilers set LD_PRELOAD themselves: a tmpfs of links covers /etc.
PRELOADED = """
set -e
mount --make-rprivate /
mount --bind /etc "$0/etc"
mount -t tmpfs none /etc
ln -s "$0"/etc/* /etc/
cp "$0/preload" /etc/ld.so.preload
exec "$@"
"""


def preloaded(env, folder):
    """A command line's beginning, and its environment, where /etc/ld.so.preload names the library."""
    if os.geteuid() != 0:
        pytest.skip("a mount namespace needs root")
    made = env()
    (folder / "etc").mkdir()
    (folder / "preload").write_text(made.pop("LD_PRELOAD") + "\n")
    return ["unshare", "-m", "sh", "-c", PRELOADED, str(folder)], made


def reports(pattern, command, env, folder):
    """What a tool's report has of a pattern under the quota, where the program must be held, and bare."""
    inside, made = preloaded(env, folder)
    held, bare = run([*inside, *command], made), run(command, env(limit=None))
    assert HELD in held, held
    assert "large=0" in bare, bare
    return re.findall(pattern, held), re.findall(pattern, bare)


def test_small_program_alone(small, env):
    """The program itself: held under a quota, granted bare."""
    assert HELD in run([str(small)], env())
    assert "large=0" in run([str(small)], env(limit=None))


def test_compute_sanitizer(small, env, tmp_path):
    """compute-sanitizer finds nothing, as bare, and the program is held under it."""
    command = [tool("compute-sanitizer"), "--report-api-errors", "no", str(small)]
    held, bare = reports(r"ERROR SUMMARY: .*", command, env, tmp_path)
    assert held == bare == ["ERROR SUMMARY: 0 errors"]


def test_ncu(small, env, tmp_path):
    """ncu profiles the kernel of a held program, with the launch of a bare one."""
    command = [tool("ncu"), "--clock-control", "none", "--target-processes", "all", str(small)]
    held, bare = reports(r"fill\(int \*, int\) \(.*?\)x\(.*?\)|Threads .*?[\d,]+", command, env, tmp_path)
    assert held == bare and held


def smi(env, *arguments):
    """nvidia-smi's output under the quota."""
    return run([tool("nvidia-smi"), *arguments], env())


def test_smi_queries(env):
    """Each form of nvidia-smi's queries shows the quota as the card (B120)."""
    fields = "--query-gpu=memory.total,memory.used,memory.free"
    assert smi(env, fields, "--format=csv,noheader,nounits").split() == [
        f"{LIMIT_MIB},",
        "0,",
        str(LIMIT_MIB),
    ]
    assert f"{LIMIT_MIB} MiB, 0 MiB, {LIMIT_MIB} MiB" in smi(env, fields, "--format=csv")
    long = smi(env, "-q", "-d", "MEMORY")
    assert re.search(rf"FB Memory Usage\s+Total\s+: {LIMIT_MIB} MiB", long)
    assert f"<total>{LIMIT_MIB} MiB</total>" in smi(env, "-q", "-x")
    assert "NVIDIA" in smi(env, "-L")
    name = "--query-gpu=name,uuid,driver_version,utilization.gpu,temperature.gpu"
    bare = run([tool("nvidia-smi"), name, "--format=csv,noheader"], env(limit=None)).split(",")[:3]
    assert smi(env, name, "--format=csv,noheader").split(",")[:3] == bare


def test_smi_monitors(env):
    """pmon and dmon run and end."""
    assert "pid" in smi(env, "pmon", "-c", "1")
    assert "gpu" in smi(env, "dmon", "-c", "1")


HOLD = """
import ctypes, sys
cu = ctypes.CDLL("libcuda.so.1")
device, context, at = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
assert cu.cuInit(0) == cu.cuDeviceGet(ctypes.byref(device), 0) == 0
assert cu.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == cu.cuCtxSetCurrent(context) == 0
assert cu.cuMemAlloc_v2(ctypes.byref(at), ctypes.c_size_t(1 << 30)) == 0
print("ready", flush=True)
sys.stdin.read()
"""

# A container's PID namespace: a process that holds 1 GiB, and a command beside it.
BESIDE = """
import subprocess, sys
held = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=-1, stdout=-1, text=True)
assert held.stdout.readline() == "ready\\n"
print(held.pid, flush=True)
done = subprocess.run(sys.argv[2:], timeout=60).returncode
held.communicate("")
sys.exit(done)
"""


@pytest.fixture
def neighbour(env):
    """Another tenant that holds 1 GiB."""
    held = subprocess.Popen(
        [sys.executable, "-c", HOLD],
        env=env(tenant="b"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert held.stdout and held.stdout.readline() == "ready\n"
    yield held
    held.communicate("", timeout=60)


def beside(env, *command):
    """The holder's process id in its container, and what a command there prints."""
    if os.geteuid() != 0:
        pytest.skip("namespaces need root")
    container = ["unshare", "-p", "-f", "--mount-proc", sys.executable, "-c", BESIDE, HOLD]
    pid, _, out = run([*container, *command], env).partition("\n")
    return pid, out


def test_smi_lists_its_own_processes(env, neighbour):
    """In a container nvidia-smi lists its own processes with their bytes, and no neighbour."""
    pid, out = beside(
        env(), tool("nvidia-smi"), "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"
    )
    listed = out.split()
    assert listed[0] == f"{pid}," and len(listed) == 2
    assert 1024 < int(listed[1]) < 2048
    pid, out = beside(env(), tool("nvidia-smi"), "--query-gpu=memory.used", "--format=csv,noheader,nounits")
    assert abs(int(out) - int(listed[1])) <= 1
    pid, out = beside(env(), tool("nvidia-smi"), "pmon", "-c", "1")
    assert [row.split()[1] for row in out.splitlines() if not row.startswith("#")] == [pid]


ML = """
import json, pynvml as n
n.nvmlInit()
h = n.nvmlDeviceGetHandleByIndex(0)
def sampled():
    try:
        return sorted({s.pid for s in n.nvmlDeviceGetProcessUtilization(h, 0)})
    except n.NVMLError_NotFound:
        return []
v2 = n.nvmlDeviceGetMemoryInfo(h, version=n.nvmlMemory_v2)
m = n.nvmlDeviceGetMemoryInfo(h)
bar = n.nvmlDeviceGetBAR1MemoryInfo(h)
print(json.dumps({
    "total": m.total, "used": m.used, "free": m.free, "v2": [v2.total, v2.used, v2.free],
    "pids": {p.pid: p.usedGpuMemory for p in n.nvmlDeviceGetComputeRunningProcesses(h)},
    "sampled": sampled(),
    "graphics": len(n.nvmlDeviceGetGraphicsRunningProcesses(h)),
    "uuid": n.nvmlDeviceGetUUID(h), "name": n.nvmlDeviceGetName(h), "count": n.nvmlDeviceGetCount(),
    "bar": bar.bar1Total,
    "driver": n.nvmlSystemGetDriverVersion(), "cuda": n.nvmlSystemGetCudaDriverVersion(),
    "same": n.nvmlDeviceGetIndex(n.nvmlDeviceGetHandleByUUID(n.nvmlDeviceGetUUID(h))),
    "busy": n.nvmlDeviceGetUtilizationRates(h).gpu >= 0,
}))
n.nvmlShutdown()
"""


def test_nvidia_ml_py(env, neighbour):
    """Python's NVML shows the quota, this tenant's process, and everything else as it is."""
    if importlib.util.find_spec("pynvml") is None:
        pytest.skip("no nvidia-ml-py on this machine")
    pid, out = beside(env(), sys.executable, "-W", "ignore", "-c", ML)
    held = json.loads(out)
    bare = json.loads(run([sys.executable, "-W", "ignore", "-c", ML], env(limit=None)))
    assert held["total"] == LIMIT_MIB * MIB == held["used"] + held["free"]
    assert held["v2"][0] == LIMIT_MIB * MIB and held["v2"][1] == held["used"]
    assert held["pids"] == {pid: held["used"]}
    assert str(neighbour.pid) in bare["pids"]
    assert set(held["sampled"]) <= {int(pid)}
    same = ["graphics", "uuid", "name", "count", "bar", "driver", "cuda", "same", "busy"]
    assert [held[key] for key in same] == [bare[key] for key in same]
