"""NVML aside of the scrapes: present, absent, failing in parts, hanging; and on the simulated GPU."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from isolator.monitor.model import NvmlDevice, NvmlProcess
from isolator.monitor.nvml import Nvml


def until(true: Callable[[], object]) -> None:
    """Waits for the thread."""
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


class Error(Exception):
    """Stands for pynvml.NVMLError."""


class Binding:
    """Stands for pynvml: two cards, with what each test breaks."""

    NVMLError = Error
    NVML_TEMPERATURE_GPU = 0
    nvmlMemory_v2 = 2

    def __init__(self) -> None:
        self.broken: set[str] = set()
        self.gate = threading.Event()
        self.gate.set()
        self.inits = 0
        self.compute = {0: [(11, 100), (12, None)], 1: []}
        self.graphics: dict[int, list[tuple[int, int | None]]] = {0: [(11, 700), (13, 5)], 1: []}

    def _check(self, name: str) -> None:
        self.gate.wait(20)
        if name in self.broken:
            raise Error(f"{name} broken")

    def nvmlInit(self) -> None:
        self.inits += 1
        self._check("init")

    def nvmlShutdown(self) -> None:
        pass

    def nvmlDeviceGetCount(self) -> int:
        self._check("count")
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        self._check(f"handle{index}")
        return f"h{index}"

    def nvmlDeviceGetUUID(self, handle: str) -> str:
        return f"GPU-{handle}"

    def nvmlDeviceGetName(self, handle: str) -> str:
        return "Tesla T4"

    def nvmlDeviceGetMemoryInfo(self, handle: str, version: int | None = None) -> Any:
        self._check("memory2" if version else "memory1")
        return SimpleNamespace(total=1000, used=300 if version else 400)

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        self._check("rates")
        return SimpleNamespace(gpu=50, memory=20)

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        return 40

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        return 70500

    def _listed(self, found: list[tuple[int, int | None]]) -> list[Any]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in found]

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:
        self._check("compute")
        return self._listed(self.compute[int(handle[1])])

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: str) -> list[Any]:
        return self._listed(self.graphics[int(handle[1])])


@pytest.fixture
def binding() -> Binding:
    return Binding()


@pytest.fixture
def nvml(binding: Binding) -> Iterator[Nvml]:
    made = Nvml(interval=0.02, retry=0.1, binding=lambda: binding)
    yield made
    binding.gate.set()
    made.stop()


def test_devices_are_read_whole(nvml: Nvml) -> None:
    """Every figure of a card, with compute and graphics processes each once (B086)."""
    nvml.start()
    until(lambda: nvml.view().up)

    first, second = nvml.view().devices
    processes = (NvmlProcess(11, 700), NvmlProcess(12, None), NvmlProcess(13, 5))
    assert first == NvmlDevice(0, "GPU-h0", "Tesla T4", 1000, 300, 50.0, 20.0, 40.0, 70.5, processes)
    assert (second.index, second.processes) == (1, ())


@pytest.mark.parametrize(
    ("broken", "seen"),
    [
        ({"handle0"}, [(1, 300, 50.0, 0)]),
        ({"rates"}, [(0, 300, None, 3), (1, 300, None, 0)]),
        ({"memory2"}, [(0, 400, 50.0, 3), (1, 400, 50.0, 0)]),
        ({"memory1", "memory2"}, [(0, None, 50.0, 3), (1, None, 50.0, 0)]),
        ({"compute"}, [(0, 300, 50.0, 2), (1, 300, 50.0, 0)]),
    ],
)
def test_each_question_fails_alone(nvml: Nvml, binding: Binding, broken: set[str], seen: list[Any]) -> None:
    """A card or a figure that fails leaves the rest, and NVML counts as up (B164)."""
    binding.broken = broken
    nvml.start()
    until(lambda: nvml.view().up)

    found = [(d.index, d.memory_used, d.utilization, len(d.processes)) for d in nvml.view().devices]
    assert seen == found


@pytest.mark.parametrize("broken", [{"init"}, {"count"}, {"handle0", "handle1"}])
def test_absent_driver_is_looked_for_again(nvml: Nvml, binding: Binding, broken: set[str]) -> None:
    """Without a driver NVML is not up; it comes up when the driver does (B164)."""
    binding.broken = broken
    nvml.start()
    until(lambda: binding.inits >= 2)
    assert not nvml.view().up

    binding.broken = set()
    until(lambda: nvml.view().up)


def test_missing_library_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    """Where the Python binding or the library is not there, the view says so, with one line."""

    def missing() -> Any:
        raise ImportError("no NVML here")

    nvml = Nvml(interval=0.02, retry=0.02, binding=missing)
    nvml.start()
    time.sleep(0.3)
    nvml.stop()

    assert not nvml.view().up
    assert nvml.view().devices == ()
    assert len(caplog.records) == 1


def test_driver_that_goes_away_leaves_the_last_view(nvml: Nvml, binding: Binding) -> None:
    """An upgrade of the driver ends "up" at once and keeps what was known."""
    nvml.start()
    until(lambda: nvml.view().up)
    binding.broken = {"count", "init"}
    until(lambda: not nvml.view().up)

    assert len(nvml.view().devices) == 2


def test_hung_driver_holds_nobody_up(nvml: Nvml, binding: Binding) -> None:
    """While NVML hangs a reader still gets the last view within 100 ms, soon marked as old."""
    nvml.start()
    until(lambda: nvml.view().up)
    binding.gate.clear()
    until(lambda: not nvml.view().up)

    began = time.monotonic()
    assert len(nvml.view().devices) == 2
    assert time.monotonic() - began < 0.1


_ON_SIMULATED = """
import json, time
from isolator.monitor.nvml import Nvml
nvml = Nvml()
nvml.start()
end = time.monotonic() + 20
while not nvml.view().up and time.monotonic() < end:
    time.sleep(0.01)
view = nvml.view()
print(json.dumps([view.up] + [[d.uuid, d.name, d.memory_total, d.memory_used] for d in view.devices]))
nvml.stop()
"""


def test_simulated_gpu_is_read_by_the_real_binding(sim_env: Callable[..., dict[str, str]]) -> None:
    """nvidia-ml-py finds libnvidia-ml.so.1 as on a node, and the T4 of the lab is there."""
    done = subprocess.run(
        [sys.executable, "-c", _ON_SIMULATED],
        env=sim_env(preload=False),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    up, first, *_ = json.loads(done.stdout)

    assert up
    assert first[0].startswith("GPU-")
    assert "T4" in first[1]
    assert first[2] == 15360 << 20
