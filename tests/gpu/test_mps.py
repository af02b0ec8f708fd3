"""Tenants that are clients of MPS: quota, sizes and the driver's figure hold there too."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from conftest import LIMIT_MIB, nvml_held
from tenants import MIB, Tenant, Watch, agrees, charged, context_mib, filled, recorded_context, told

SLACK = 4
# A client with half the multiprocessors has a context of half the size (276 MiB for 518 on an H200).
HALF = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50"}


@pytest.fixture(scope="module")
def mps(driver):
    """The environment of a client of an MPS daemon of our own."""
    control = shutil.which("nvidia-cuda-mps-control") or "/usr/local/nvidia/bin/nvidia-cuda-mps-control"
    if not Path(control).exists():
        pytest.skip("no nvidia-cuda-mps-control on this machine")
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        client = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        env = {**os.environ, **client, "LD_LIBRARY_PATH": driver}
        env["PATH"] = f"{Path(control).parent}:{env['PATH']}"
        if subprocess.run([control, "-d"], env=env, timeout=30).returncode:
            pytest.skip("the MPS daemon does not start here")
        try:
            yield client
        finally:
            subprocess.run([control], env=env, input="quit\n", text=True, timeout=60)
            time.sleep(1)


@pytest.fixture(scope="module")
def sizes(driver, mps) -> dict[str, int]:
    """MiB of a primary context, by kind."""
    env = {**os.environ, "LD_LIBRARY_PATH": driver}
    kinds = {"client": mps, "half": mps | HALF, "bare": {}}
    return {name: context_mib(env | kind) for name, kind in kinds.items()}


SIZES = """
assert start() == 0
total, handle = C.c_size_t(), C.c_void_p()
assert cu.cuDeviceTotalMem_v2(C.byref(total), 0) == 0
nvml, memory = C.CDLL("libnvidia-ml.so.1"), (C.c_ulonglong * 3)()
assert nvml.nvmlInit_v2() == 0 and nvml.nvmlDeviceGetHandleByIndex_v2(0, C.byref(handle)) == 0
first, more = alloc(3072), alloc(2048)
assert nvml.nvmlDeviceGetMemoryInfo(handle, memory) == 0
say(first, more, *info(), total.value // MIB, memory[0] // MIB, memory[2] // MIB)
hold()
"""


def test_quota_sizes_and_truth(env, mps, sizes):
    """Two containers get 3 GiB each and no more, see their limit, and their account is what NVML lists."""
    tenants = {name: env(tenant=name) | mps for name in "ab"}
    with ExitStack() as stack:
        both = {name: stack.enter_context(Tenant(made, SIZES)) for name, made in tenants.items()}
        for name, one in both.items():
            first, more, used, *totals, shown = one.numbers()
            assert (first, more) == (0, 2)
            assert totals == [LIMIT_MIB] * 3
            assert used == shown
            assert abs(used - 3072 - sizes["client"]) <= 16
            assert agrees(tenants[name], one.pid)


def test_nvidia_smi_beside_mps(env, mps):
    """nvidia-smi shows the quota, and what the container has of it, to a client of MPS."""
    query = ["nvidia-smi", "--query-gpu=memory.total,memory.used", "--format=csv,noheader,nounits"]
    with Tenant(env() | mps, "assert start() == 0\nsay(alloc(1000), info()[0])\nhold()") as one:
        code, used = one.numbers()
        assert code == 0
        done = subprocess.run(query, env=env() | mps, capture_output=True, text=True, timeout=60)
        assert [int(word) for word in done.stdout.split(",")] == [LIMIT_MIB, used]


@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(("half", "bare"), 2)))
def test_sizes_recorded_by_others_of_another_kind(env, mps, sizes, first, second):
    """In one container with a client of MPS and a bare program the size one recorded misleads nobody."""
    kinds = {"half": mps | HALF, "bare": {}}
    told(env() | kinds[first], "assert start() == 0 and alloc(64) == 0")
    assert abs(recorded_context(env()) // MIB - sizes[first]) <= 16
    with Tenant(env() | kinds[second], "say(start())\nhold()") as idle:
        assert idle.line() == "0"
        with Tenant(env() | kinds[second], "assert start() == 0\nsay(fill(2))\nhold()") as full:
            got = int(full.line())
            held = nvml_held({idle.pid, full.pid})
            print(f"{got} MiB, held {[value / MIB for value in held.values()]}, sizes {sizes}")
            assert sum(held.values()) <= LIMIT_MIB * MIB
            # The idle one may still be charged by the record, where that is the larger.
            assert got >= LIMIT_MIB - sizes[second] - max(sizes[first], sizes[second]) - SLACK
            assert agrees(env(), full.pid)


def test_eight_clients_fill_one_quota(env, mps):
    """Eight clients of one container that take all they can never hold more than the quota, and fill it."""
    held, limit_mib = env(limit="8g") | mps, 8 << 10
    fill = "say(start())\nsys.stdin.readline()\nsay(fill(8))\nhold()"
    with ExitStack() as stack:
        crowd = [stack.enter_context(Tenant(held, fill)) for _ in range(8)]
        assert [one.line() for one in crowd] == ["0"] * 8
        with Watch({one.pid for one in crowd}) as watch:
            for one in crowd:
                one.go()
            got = [int(one.line()) for one in crowd]
        now = sum(nvml_held({one.pid for one in crowd}).values()) // MIB
        print(f"{got} MiB, NVML {now} now, {watch.highest / MIB:g} at most in {watch.samples} samples")
        assert watch.highest <= limit_mib * MIB
        assert limit_mib - 16 - SLACK <= now <= limit_mib


def test_a_killed_client_gives_its_quota_back(env, mps, sizes):
    """After SIGKILL of a client another one has the quota, within 100 ms, and is charged what it holds."""
    again = """
assert start() == 0
say(alloc(16))
sys.stdin.readline()
import time
began = time.monotonic()
while (code := alloc(2500)) == 2 and time.monotonic() < began + 5:
    time.sleep(0.001)
say(code, int(1e6 * (time.monotonic() - began)))
hold()
"""
    with Tenant(env() | mps, again) as one:
        assert one.line() == "0"
        with Tenant(env() | mps, "assert start() == 0\nsay(alloc(2500))\nhold()") as victim:
            assert victim.line() == "0"
            victim.kill()
            victim.wait(timeout=30)
            one.go()
            code, micros = one.numbers()
            left = nvml_held({victim.pid, one.pid})
            dead = left.get(victim.pid, 0) // MIB
            print(f"code {code} after {micros / 1000:g} ms, the dead one still holds {dead} MiB")
            assert code == 0 and micros <= 100_000
            assert agrees(env(), one.pid)
            assert dead == 0
    assert charged(env())
    assert filled(env() | mps) >= LIMIT_MIB - sizes["client"] - SLACK


def test_settings_of_mps_keep_their_effect(env, mps, sizes):
    """A share of the multiprocessors, and a lower limit of MPS itself, work beside the quota."""
    code = """
assert start() == 0
count = C.c_int()
assert cu.cuDeviceGetAttribute(C.byref(count), 16, 0) == 0
say(count.value, fill(2), alloc(64))
"""

    def numbers(**more: str) -> list[int]:
        return [int(word) for word in told(env() | mps | more, code)[0].split()]

    everything, some = numbers(), numbers(**HALF)
    pinned = numbers(CUDA_MPS_PINNED_DEVICE_MEM_LIMIT="0=2G")
    print(everything, some, pinned, sizes)
    assert some[0] <= everything[0] / 2
    for got, kind in ((everything, "client"), (some, "half")):
        room = LIMIT_MIB - sizes[kind]
        assert room - SLACK <= got[1] <= room and got[2] == 2
    assert pinned[1] <= 2048 < everything[1] and pinned[2] == 2
