"""Tenants that are clients of MPS: quota, sizes and the driver's figure hold there too."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
from conftest import LIMIT_MIB, nvml_held
from test_processes import tenant, told

MIB = 1 << 20


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
        yield client
        subprocess.run([control], env=env, input="quit\n", text=True, timeout=60)
        time.sleep(1)


LAB = """
assert start() == 0
say(alloc(3072), alloc(2048), *info())
hold()
"""


def figures(process) -> list[int]:
    """What LAB said."""
    line = process.stdout.readline()
    assert line, process.communicate("")[1]
    return [int(word) for word in line.split()]


def test_quota_sizes_and_truth(env, mps):
    """Two clients get 3 GiB each and no more, see their limit, and their account is what NVML lists."""
    both = [tenant(env(tenant=name) | mps, LAB) for name in "ab"]
    try:
        for process in both:
            first, more, used, total = figures(process)
            assert (first, more, total) == (0, 2, LIMIT_MIB)
            own = nvml_held({process.pid})[process.pid] // MIB
            assert abs(used - own) <= max(16, own // 100)
    finally:
        for process in both:
            process.communicate("", timeout=60)


@pytest.mark.parametrize("first", ["client", "bare"])
def test_sizes_recorded_by_others_of_another_kind(env, mps, first):
    """In one container with a client of MPS and a bare program the size one recorded misleads nobody."""
    kinds = {"client": mps, "bare": {}}
    second = "bare" if first == "client" else "client"
    told(env() | kinds[first], "assert start() == 0 and alloc(64) == 0")
    idle = tenant(env() | kinds[second], "assert start() == 0\nsay(0)\nhold()")
    assert idle.stdout and idle.stdout.readline() == "0\n"
    try:
        full = tenant(env() | kinds[second], "assert start() == 0\nsay(fill(2))\nhold()")
        assert full.stdout and int(full.stdout.readline()) > 2500
        held = nvml_held({idle.pid, full.pid})
        assert sum(held.values()) <= LIMIT_MIB * MIB
        full.communicate("", timeout=60)
    finally:
        idle.communicate("", timeout=60)


def test_settings_of_mps_keep_their_effect(env, mps):
    """A share of the multiprocessors, and a lower limit of MPS itself, work beside the quota."""
    code = """
assert start() == 0
count = C.c_int()
assert cu.cuDeviceGetAttribute(C.byref(count), 16, 0) == 0
say(count.value, fill())
"""
    all_of_them = int(told(env() | mps, code)[0].split()[0])
    some = told(env() | mps | {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25"}, code)[0].split()
    assert int(some[0]) < all_of_them / 3
    pinned = told(env() | mps | {"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=2G"}, code)[0].split()
    assert int(pinned[1]) <= 2048 < int(some[1])


def test_nvidia_smi_beside_mps(env, mps):
    """nvidia-smi shows the quota to a client of MPS."""
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, env=env() | mps, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == [str(LIMIT_MIB)]
