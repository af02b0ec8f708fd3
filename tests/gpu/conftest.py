"""Tests on a real GPU: they need the built library, pytest and the driver; torch for some.

Run by `make test-gpu` with the system's Python. Without a GPU each is skipped with the reason.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.gpu.quota import Truth
from bench.gpu.report import driver_folder

CLIENTS = Path(__file__).parent / "clients"
LIMIT_MIB = 4147

Environment = Callable[..., dict[str, str]]


@pytest.fixture(scope="session")
def driver() -> str:
    """The folder of the real driver's libraries, with a GPU behind them."""
    found = driver_folder()
    if found is None:
        pytest.skip("no libcuda.so.1: this machine has no NVIDIA driver")
    folder = str(found)
    probe = "import ctypes; c = ctypes.CDLL('libcuda.so.1'); raise SystemExit(c.cuInit(0))"
    env = {**os.environ, "LD_LIBRARY_PATH": folder}
    if subprocess.run(["python3", "-c", probe], env=env).returncode:
        pytest.skip("cuInit fails: this machine has no usable GPU")
    return folder


@pytest.fixture(scope="session")
def libvgpu() -> Path:
    """The library under test, $LIBVGPU."""
    path = Path(os.environ.get("LIBVGPU", ""))
    if not path.is_file():
        pytest.skip("LIBVGPU names no library: run 'make build' first")
    return path


@pytest.fixture
def env(tmp_path: Path, driver: str, libvgpu: Path) -> Environment:
    """Makes environments of one tenant, or (with limit=None) of a bare program."""

    def make(limit: str | None = f"{LIMIT_MIB}m", tenant: str = "a", **more: str) -> dict[str, str]:
        made = {
            name: value for name, value in os.environ.items() if not name.startswith(("CUDA_D", "LD_PRE"))
        }
        made["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, [driver, made.get("LD_LIBRARY_PATH")]))
        if limit is not None:
            made["LD_PRELOAD"] = str(libvgpu)
            made["CUDA_DEVICE_MEMORY_LIMIT"] = limit
            made["CUDA_DEVICE_MEMORY_SHARED_CACHE"] = str(tmp_path / f"{tenant}.cache")
        return made | more

    return make


def _toolkit() -> Path:
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    if not Path(nvcc).exists():
        pytest.skip("no nvcc: the clients cannot be built")
    return Path(nvcc).resolve().parent.parent


@pytest.fixture(scope="session")
def client(tmp_path_factory: pytest.TempPathFactory, driver: str) -> Callable[[str], Path]:
    """Builds a client of tests/gpu/clients: NAME.c linked to libcuda, NAME.cu with a static runtime."""
    folder = tmp_path_factory.mktemp("clients")

    def build(name: str, output: str | None = None, *flags: str) -> Path:
        source, target = CLIENTS / name, folder / (output or Path(name).stem)
        if target.exists():
            return target
        toolkit = _toolkit()
        if source.suffix == ".cu":
            command = [str(toolkit / "bin/nvcc"), "-O2", str(source), "-o", str(target), *flags]
        else:
            include = next(p.parent for p in toolkit.rglob("cuda.h") if p.name == "cuda.h")
            link = [f"{driver}/libcuda.so.1", f"{driver}/libnvidia-ml.so.1", "-lpthread"]
            command = ["gcc", "-O2", "-g", f"-I{include}", str(source), "-o", str(target), *link, *flags]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return target

    return build


def nvml_held(pids: set[int]) -> dict[int, int]:
    """Bytes of processes by the real NVML, which this (bare) process asks."""
    folder = driver_folder()
    assert folder
    return {pid: used for pid, used in Truth(folder).held().items() if pid in pids}
