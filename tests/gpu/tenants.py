"""Small tenants that run a few lines of Python, and what their region file and NVML say of them."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from conftest import CLIENTS, nvml_held

MIB = 1 << 20
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

# Offsets of native/core/region.h, for the first device.
SLOTS = 1024
SLOT_AT, SLOT_BYTES = 1856, 1960
EXTENSION_AT = 2031616
CONTEXT_AT, GHOST_AT, WORD_AT = EXTENSION_AT + 512, EXTENSION_AT + 640, EXTENSION_AT + 18304


class Tenant(subprocess.Popen[str]):
    """A process that runs `code` with the driver's calls of clients/cuda.py at hand."""

    def __init__(self, env: Mapping[str, str], code: str, prefix: tuple[str, ...] = ()) -> None:
        pipe = subprocess.PIPE
        super().__init__(
            [*prefix, sys.executable, "-c", "from cuda import *\n" + code],
            env={**env, "PYTHONPATH": str(CLIENTS)},
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            text=True,
        )

    def line(self, timeout: float = 60) -> str:
        """Its next line without the newline; AssertionError with what it said where none comes in s."""
        assert self.stdout
        limit = threading.Timer(timeout, self.kill)
        limit.start()
        said = self.stdout.readline()
        limit.cancel()
        if not said:
            self.kill()
            raise AssertionError(f"no line within {timeout:g} s: {self.communicate()[1]}")
        return said.rstrip("\n")

    def numbers(self, timeout: float = 60) -> list[int]:
        """The numbers of its next line."""
        return [int(word) for word in self.line(timeout).split()]

    def go(self) -> None:
        """Sends it a line."""
        assert self.stdin
        self.stdin.write("\n")
        self.stdin.flush()

    def end(self) -> None:
        """Lets it go and waits; kills it where it does not end."""
        try:
            self.communicate("", timeout=60)
        finally:
            self.kill()

    def __exit__(self, *details: object) -> None:
        self.end()


def told(env: Mapping[str, str], code: str, prefix: tuple[str, ...] = (), timeout: int = 90) -> list[str]:
    """Lines of a tenant that ran to its end and had nothing of ours on standard error."""
    done = Tenant(env, code, prefix)
    try:
        out, errors = done.communicate("", timeout=timeout)
    finally:
        done.kill()
    assert done.returncode == 0, out + errors
    assert "isolator" not in errors
    return out.splitlines()


def filled(env: Mapping[str, str], step: int = 2) -> int:
    """MiB that a tenant could have in steps of `step`."""
    return int(told(env, f"assert start() == 0\nsay(fill({step}))")[0])


def _word(env: Mapping[str, str], at: int) -> int:
    with Path(env["CUDA_DEVICE_MEMORY_SHARED_CACHE"]).open("rb") as file:
        file.seek(at)
        return int(struct.unpack("<Q", file.read(8))[0])


def charged(env: Mapping[str, str]) -> dict[int, int]:
    """Bytes granted to each process id in the tenant's region file, the dead included."""
    data = Path(env["CUDA_DEVICE_MEMORY_SHARED_CACHE"]).read_bytes()
    found = {}
    for slot in range(SLOTS):
        (pid,) = struct.unpack_from("<i", data, SLOT_AT + slot * SLOT_BYTES)
        (word,) = struct.unpack_from("<Q", data, WORD_AT + 8 * slot)
        if pid:
            found[pid] = (word & 0xFFFFFFFF) * 4096
    return found


def recorded_context(env: Mapping[str, str]) -> int:
    """Bytes that a first context took, as the region file says; 0: none was seen."""
    return _word(env, CONTEXT_AT)


def ghost(env: Mapping[str, str]) -> int:
    """Bytes charged for processes without a slot."""
    return _word(env, GHOST_AT)


def agrees(env: Mapping[str, str], pid: int) -> bool:
    """Whether the region's figure of a process is NVML's, to 16 MiB or 1 %."""
    region, driver = charged(env)[pid], nvml_held({pid})[pid]
    print(f"region {region / MIB:g} MiB, NVML {driver / MIB:g} MiB")
    return abs(region - driver) <= max(16 * MIB, driver // 100)


class Watch(threading.Thread):
    """Samples what NVML says that processes hold together; `highest` is in bytes."""

    def __init__(self, pids: set[int], every: float = 0.02) -> None:
        super().__init__(daemon=True)
        self.pids, self.every = pids, every
        self.highest = self.samples = 0
        self._over = threading.Event()

    def run(self) -> None:
        """Until the watch is left."""
        while not self._over.is_set():
            self.highest = max(self.highest, sum(nvml_held(self.pids).values()))
            self.samples += 1
            time.sleep(self.every)

    def __enter__(self) -> Watch:
        self.start()
        return self

    def __exit__(self, *details: object) -> None:
        self._over.set()
        self.join()


def context_mib(env: Mapping[str, str]) -> int:
    """MiB that a primary context takes, by NVML."""
    with Tenant(env, "say(start())\nhold()") as one:
        assert one.line() == "0"
        return nvml_held({one.pid})[one.pid] // MIB
