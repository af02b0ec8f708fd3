"""Several devices: one identity, the UUID, for limit, ledger and report, whatever is made visible."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import RunClient, SimEnv

# Fills CUDA's device 0 to the limit; prints grants and the region's charge by UUID.
FILL = """
from simclient import *
import json
init(0)
step, granted = 256 << 20, 0
while alloc(step)[0] == 0:
    granted += 1
print(json.dumps([granted * 256, device_uuid(0), ok(total_mem(0)) >> 20]))
input()
"""


def _charges(region: Path) -> dict[str, int]:
    """UUID (hex digits) -> MiB charged, from HAMi's part of the region."""
    data = region.read_bytes()
    charged = {}
    for device in range(16):
        uuid = data[64 + 96 * device :].split(b"\0")[0].decode()
        offsets = (1856 + 1960 * slot + 8 + 64 * device + 32 for slot in range(1024))
        total = sum(struct.unpack_from("<Q", data, offset)[0] for offset in offsets)
        if uuid:
            charged[uuid[4:].replace("-", "")] = total >> 20
    return charged


def _fill(env: dict[str, str], region: Path) -> tuple[int, int, str, dict[str, int]]:
    """(MiB granted, total shown, UUID of CUDA's device 0, charges by UUID) while the memory is held."""
    process = subprocess.Popen(
        [sys.executable, "-c", FILL], env=env, stdin=-1, stdout=-1, stderr=-1, text=True
    )
    assert process.stdout
    line = process.stdout.readline()
    try:
        charges = _charges(region)
    finally:
        _, errors = process.communicate("\n")
    assert errors == ""
    granted, uuid, total = json.loads(line)
    return granted, total, uuid, charges


@pytest.mark.parametrize("visible", ["2,3", "3,1", "1", "0", None])
@pytest.mark.parametrize("order", ["", "reverse"])
def test_the_limit_follows_the_visible_device(
    sim_env: SimEnv, tmp_path: Path, visible: str | None, order: str
) -> None:
    """A subset or another order of devices: device 0 is limited and its own UUID is charged (B059, B061)."""
    env = sim_env(
        preload=True, limit="5800m", SIMGPU_COUNT="4", SIMGPU_CUDA_ORDER=order, CUDA_VISIBLE_DEVICES=visible
    )
    granted, total, uuid, charges = _fill(env, tmp_path / "usage.cache")
    assert total == 5800
    assert 5800 - 512 < granted <= 5800
    assert granted <= charges[uuid] <= 5800
    assert {other: mib for other, mib in charges.items() if other != uuid and mib} == {}


@pytest.mark.parametrize("model", ["T4", "A100-MIG3g"])
def test_devices_chosen_by_uuid_are_limited(
    sim_env: SimEnv, run_client: RunClient, tmp_path: Path, model: str
) -> None:
    """CUDA_VISIBLE_DEVICES with the UUID of a card or of a MIG instance names the same device (B059)."""
    machine = {"SIMGPU_COUNT": "2", "SIMGPU_MODEL": model}
    code = "from simclient import *; ok(cu_init()); print(device_uuid(ok(device_count()) - 1))"
    digits = run_client(code, sim_env(**machine)).stdout.strip()
    dashed = "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
    visible = ("MIG-" if "MIG" in model else "GPU-") + dashed
    env = sim_env(preload=True, limit="2g", CUDA_VISIBLE_DEVICES=visible, **machine)
    granted, total, uuid, charges = _fill(env, tmp_path / "usage.cache")
    assert (uuid, total) == (digits, 2048)
    assert 1024 <= granted <= 2048
    assert charges[digits] >= granted


def test_nvml_shows_a_mig_instance_its_own_use(sim_env: SimEnv, run_client: RunClient) -> None:
    """On a MIG instance CUDA and NVML agree, and the process is listed with its instance ids (B120, B123)."""
    code = """
from simclient import *
init(0)
ok(alloc(1 << 30))
parent, instance = nvml_handle(), ptr()
ok(nvml().nvmlDeviceGetMigDeviceHandleByIndex(parent, 0, C.byref(instance)))
r, free, total = mem_info()
print(nvml_memory(handle=instance)[1:] == (total, free, total - free), total >> 20)
rows, n = (ProcessInfo * 8)(), u32(8)
ok(nvml().nvmlDeviceGetComputeRunningProcesses_v3(instance, C.byref(n), rows))
print(n.value, rows[0].bytes == total - free, rows[0].gpu_instance < 100)
"""
    env = sim_env(preload=True, limit="4g", SIMGPU_MODEL="A100-MIG3g")
    assert run_client(code, env).stdout == "True 4096\n1 True True\n"


@pytest.mark.parametrize("visible", ["", "-1", "NoDevFiles", "9", "0,9", "GPU-nothing"])
def test_an_odd_visible_list_gives_the_drivers_answer(
    sim_env: SimEnv, run_client: RunClient, visible: str
) -> None:
    """Empty and invalid CUDA_VISIBLE_DEVICES: cuInit and the count as without the shim, silently (B063)."""
    code = "from simclient import *; print(cu_init(), device_count(), alloc(1 << 20)[0])"
    bare = run_client(code, sim_env(CUDA_VISIBLE_DEVICES=visible, SIMGPU_COUNT="2"))
    env = sim_env(preload=True, limit="1g", CUDA_VISIBLE_DEVICES=visible, SIMGPU_COUNT="2")
    shimmed = run_client(code, env)
    assert (shimmed.stdout, shimmed.stderr) == (bare.stdout, "")


def test_more_devices_than_the_region_holds_are_refused(sim_env: SimEnv, run_client: RunClient) -> None:
    """Seventeen visible devices end in a refusal that says what to do; sixteen of them work (B064)."""
    code = "from simclient import *; print(cu_init(), device_count()[1])"
    refused = run_client(code, sim_env(preload=True, limit="1g", SIMGPU_COUNT="17"))
    assert refused.stdout.startswith("800 ")
    assert "CUDA_VISIBLE_DEVICES" in refused.stderr and len(refused.stderr.splitlines()) == 1
    some = ",".join(map(str, range(1, 17)))
    full = """
from simclient import *
ok(cu_init())
for device in range(16):
    ok(set_current(ok(retain(device))))
    ok(alloc(512 << 20))
    assert alloc(600 << 20)[0] == 2, device
print("all")
"""
    env = sim_env(preload=True, limit="1g", SIMGPU_COUNT="17", CUDA_VISIBLE_DEVICES=some)
    done = run_client(full, env)
    assert (done.stdout, done.stderr) == ("all\n", "")


NO_CONTEXT = """
from simclient import *
import threading
ok(cu_init())
ok(retain(0))
p, q, s = u64(), size_t(), ptr()
prop = (C.c_uint64 * 8)()
desc = (C.c_uint64 * 8)(64, 64, 64, 0x20, 1)
calls = {
    "cuMemAlloc_v2": (C.byref(p), size_t(1 << 20)),
    "cuMemAllocManaged": (C.byref(p), size_t(1 << 20), u32(1)),
    "cuMemAllocPitch_v2": (C.byref(p), C.byref(q), size_t(512), size_t(512), u32(4)),
    "cuMemAllocAsync": (C.byref(p), size_t(1 << 20), ptr()),
    "cuArrayCreate_v2": (C.byref(s), desc),
    "cuArray3DCreate_v2": (C.byref(s), desc),
    "cuMipmappedArrayCreate": (C.byref(s), desc, u32(1)),
    "cuStreamCreate": (C.byref(s), u32(0)),
    "cuCtxSetLimit": (u32(0), size_t(4096)),
    "cuModuleLoadData": (C.byref(s), b"//simgpu\\n"),
    "cuMemFree_v2": (u64(0x1234),),
    "cuMemGetInfo_v2": (C.byref(q), C.byref(q)),
}
answers = {}
def work():
    for name, arguments in calls.items():
        answers[name] = getattr(cu, name)(*arguments)
thread = threading.Thread(target=work)
thread.start()
thread.join()
print(answers, p.value, s.value)
"""


def test_threads_without_a_context_get_the_drivers_error(
    sim_env: SimEnv, run_client: RunClient, tmp_path: Path
) -> None:
    """No current context: each allocating call answers as the driver, and nothing is charged (B065)."""
    bare = run_client(NO_CONTEXT, sim_env())
    assert "'cuMemAlloc_v2': 201" in bare.stdout
    used = "print(sim_process_used(os.getpid()) == nvml_memory()[3])"
    code = NO_CONTEXT.replace("import threading", "import os, threading") + used
    shimmed = run_client(code, sim_env(preload=True, limit="1g"))
    assert (shimmed.stdout, shimmed.stderr) == (bare.stdout + "True\n", "")


CROWD = """
from simclient import *
import os, threading
ok(cu_init())
results = []
def work(device):
    first = alloc(1 << 20)[0]
    ok(set_current(ok(retain(device))))
    pointer = ok(alloc(64 << 20))
    results.append((first, free(pointer)))
threads = [threading.Thread(target=work, args=(number % 8,)) for number in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(set(results), len(results))
"""


def test_many_processes_threads_and_devices_start_together(sim_env: SimEnv) -> None:
    """8 devices, 8 processes, 4 threads that first call without a context: no crash (B064, B068)."""
    env = sim_env(preload=True, limit="4g", SIMGPU_COUNT="8")
    processes = [
        subprocess.Popen([sys.executable, "-c", CROWD], env=env, stdout=-1, stderr=-1, text=True)
        for _ in range(8)
    ]
    done = [process.communicate(timeout=60) for process in processes]
    assert done == [("{(201, 0)} 4\n", "")] * 8
