"""The monitor beside the real NVML: what it says of a tenant is what the driver says."""

from __future__ import annotations

import subprocess
import sys
import time
import uuid

import pytest

pytest.importorskip(
    "isolator._core", reason="the monitor's reader is not built for this Python", exc_type=ImportError
)
pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
pytest.importorskip("prometheus_client")

from conftest import LIMIT_MIB

from isolator.monitor.collector import MonitorCollector
from isolator.monitor.model import Container, PodView
from isolator.monitor.nvml import Nvml
from isolator.monitor.snapshot import Composer

MIB = 1 << 20
HOLD = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
context, block = ctypes.c_void_p(), ctypes.c_uint64()
assert cuda.cuInit(0) == 0
assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert cuda.cuCtxSetCurrent(context) == 0
assert cuda.cuMemAlloc_v2(ctypes.byref(block), ctypes.c_size_t(3 << 30)) == 0
print("held", flush=True)
sys.stdin.readline()
"""


class Pods:
    """One pod of this node, in place of the watch."""

    listed = up = True
    label = None

    def __init__(self, pod: PodView) -> None:
        self._pods = {pod.uid: pod}

    def pods(self):
        return self._pods


def _pod(uid, container_id):
    main = Container("team", "train", uid, "main", injected=True, running=True, fraction=True)
    main = type(main)(**{**vars(main), "container_id": container_id, "limit_configmap": "c-0"})
    return PodView("team", "train", uid, (main,), {"gpu-memory": "4096"}, {}, "kai-scheduler")


def _samples(collector):
    return {
        (sample.name, sample.labels.get("container", "")): sample.value
        for family in collector.collect()
        for sample in family.samples
    }


def test_monitor_agrees_with_nvml_about_a_tenant(env, tmp_path):
    """Limit and use from the region, the card and the container's bytes from NVML, within 16 MiB (S4)."""
    uid, container_id = str(uuid.uuid4()), "ab" * 32
    folder = tmp_path / "containers" / f"{uid}_main"
    folder.mkdir(parents=True)
    proc = tmp_path / "proc"
    tenant_env = env(CUDA_DEVICE_MEMORY_SHARED_CACHE=str(folder / "usage.cache"))
    nvml = Nvml(interval=0.5)
    nvml.start()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", HOLD], env=tenant_env, **pipes) as tenant:
        assert tenant.stdout.readline() == "held\n"
        group = proc / str(tenant.pid)
        group.mkdir(parents=True)
        (group / "cgroup").write_text(f"0::/kubepods/pod{uid}/{container_id}\n")
        composer = Composer("here", tmp_path, Pods(_pod(uid, container_id)), nvml, host_pid=True, proc=proc)
        collector = MonitorCollector(composer.snapshot, update_interval=0)
        deadline = time.monotonic() + 20
        while ("kai_isolator_container_nvml_bytes", "main") not in (seen := _samples(collector)):
            assert time.monotonic() < deadline, sorted(seen)
            time.sleep(0.5)
        time.sleep(1.2)
        seen = _samples(collector)
        tenant.communicate("\n")
    nvml.stop()
    used = seen["hami_vgpu_memory_used_bytes", "main"]
    assert seen["hami_vgpu_memory_limit_bytes", "main"] == LIMIT_MIB * MIB
    assert 3072 * MIB < used < LIMIT_MIB * MIB
    assert abs(seen["kai_isolator_container_nvml_bytes", "main"] - used) <= 16 * MIB
    assert seen["kai_isolator_nvml_up", ""] == 1
    assert seen["kai_isolator_container_bypass", "main"] == 0
    assert seen["kai_isolator_device_used_bytes", ""] >= used
    assert seen["hami_host_gpu_memory_used_bytes", ""] >= used
    assert seen["kai_isolator_device_ledger_bytes", ""] == used
    print({f"{name} {container}".strip(): value for (name, container), value in sorted(seen.items())})
