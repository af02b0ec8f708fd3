"""The node's GPUs as NVML shows them: a thread asks, readers get its last answer at once.

Only NVML, never CUDA: a context of the monitor's own would take memory from the tenants. Each question
fails alone, so that one card or one unsupported figure does not hide the rest.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import logging
import time
from collections.abc import Callable
from typing import Any, Final

from isolator.monitor.model import NvmlDevice, NvmlProcess, NvmlView
from isolator.monitor.worker import Worker

log = logging.getLogger(__name__)

RETRY: Final = 60.0
"""Seconds until a library or driver that is not there is looked for again."""
_OLD_AFTER: Final = 3
"""Intervals without an answer after which the last one counts as old."""


def _binding() -> Any:
    return importlib.import_module("pynvml")


class Nvml(Worker):
    """NVML's last answer, refreshed every `interval` seconds by a thread of its own."""

    def __init__(
        self, interval: float = 5.0, retry: float = RETRY, binding: Callable[[], Any] = _binding
    ) -> None:
        super().__init__("nvml")
        self._interval, self._retry, self._binding = interval, retry, binding
        self._view = NvmlView(up=False, time=0.0)
        self._asked = 0.0
        self._said = ""
        self.problem = ""
        """Why NVML gave no answer to the last question; empty where it did, or where none came yet."""
        self._failed: set[str] = set()

    def view(self) -> NvmlView:
        """The last answer, never waiting; not `up` where NVML is absent, fails, or does not come back."""
        view = self._view
        if view.up and time.monotonic() - self._asked > _OLD_AFTER * self._interval + 1:
            if self._said != "hangs":
                log.warning("NVML does not answer; the last known figures stay")
                self._said = "hangs"
            return dataclasses.replace(view, up=False)
        return view

    def _run(self) -> None:
        ready = False
        nvml: Any = None
        while not self._stop.is_set():
            wait = self._interval
            try:
                if not ready:
                    nvml = nvml or self._binding()
                    nvml.nvmlInit()
                    ready = True
                devices = self._devices(nvml)
                self._view = NvmlView(up=True, time=time.time(), devices=devices)
                self._asked, self.problem = time.monotonic(), ""
                self._answered(len(devices))
            except Exception as error:  # absent library, driver or card: the monitor goes on without
                self._view = dataclasses.replace(self._view, up=False)
                self._absent(error)
                ready = self._shut(nvml) if ready else False
                wait = self._retry
            self._stop.wait(wait)
        if ready:
            self._shut(nvml)

    def _shut(self, nvml: Any) -> bool:
        """Lets the driver go, so that it can be upgraded."""
        try:
            nvml.nvmlShutdown()
        except Exception as error:
            log.debug("NVML does not shut down: %s", error)
        return False

    def _answered(self, count: int) -> None:
        if self._said != "up":
            log.info("NVML answers: %d device(s)", count)
        self._said = "up"

    def _absent(self, error: Exception) -> None:
        said = f"{type(error).__name__}: {error}"
        if said != self._said:
            log.warning("no NVML, host series are left out, tried again every %.0f s: %s", self._retry, said)
        self._said = self.problem = said

    def _try(self, what: str, ask: Callable[[], Any]) -> Any:
        """One figure, None where NVML does not give it; a new kind of failure is said once."""
        try:
            return ask()
        except Exception as error:
            if what not in self._failed:
                self._failed.add(what)
                log.info("NVML gives no %s: %s", what, error)
            return None

    def _devices(self, nvml: Any) -> tuple[NvmlDevice, ...]:
        """All devices that can be identified. Raises NVMLError where not even the count is given."""
        count = nvml.nvmlDeviceGetCount()
        found = (self._device(nvml, index) for index in range(count))
        devices = tuple(device for device in found if device is not None)
        if count and not devices:
            raise RuntimeError(f"none of {count} devices answers")
        return devices

    def _device(self, nvml: Any, index: int) -> NvmlDevice | None:
        handle = self._try(f"device {index}", lambda: nvml.nvmlDeviceGetHandleByIndex(index))
        uuid = handle and self._try(f"UUID of device {index}", lambda: nvml.nvmlDeviceGetUUID(handle))
        if not uuid:
            return None
        memory = self._try(f"memory of device {index}", lambda: _memory(nvml, handle))
        rates = self._try(
            f"utilisation of device {index}", lambda: nvml.nvmlDeviceGetUtilizationRates(handle)
        )
        power = self._try(f"power of device {index}", lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        return NvmlDevice(
            index=index,
            uuid=uuid,
            name=self._try(f"name of device {index}", lambda: nvml.nvmlDeviceGetName(handle)) or "",
            memory_total=None if memory is None else int(memory.total),
            memory_used=None if memory is None else int(memory.used),
            utilization=None if rates is None else float(rates.gpu),
            memory_utilization=None if rates is None else float(rates.memory),
            temperature=self._try(
                f"temperature of device {index}",
                lambda: float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
            ),
            power_watts=None if power is None else power / 1000,
            processes=self._processes(nvml, handle, index),
        )

    def _processes(self, nvml: Any, handle: Any, index: int) -> tuple[NvmlProcess, ...]:
        """Compute and graphics processes, each once: Vulkan memory is listed under graphics alone."""
        found: dict[int, int | None] = {}
        for what, ask in (
            ("compute", nvml.nvmlDeviceGetComputeRunningProcesses),
            ("graphics", nvml.nvmlDeviceGetGraphicsRunningProcesses),
        ):
            listed = self._try(f"{what} processes of device {index}", functools.partial(ask, handle))
            for process in listed or ():
                used, known = process.usedGpuMemory, found.get(process.pid)
                found[process.pid] = used if known is None else max(known, used or 0)
        return tuple(NvmlProcess(pid, used) for pid, used in sorted(found.items()))


def _memory(nvml: Any, handle: Any) -> Any:
    """Version 2 keeps what the driver reserves out of `used`, as nvidia-smi does; old drivers lack it."""
    try:
        return nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
    except (nvml.NVMLError, AttributeError):
        return nvml.nvmlDeviceGetMemoryInfo(handle)
