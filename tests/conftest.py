"""What tests share: the built library, the simulated GPU, and clients that run on it.

A client is a Python program in a process of its own, with `tests/native` importable and, when asked for, the
library preloaded:

    def test_refuses(sim_env, run_client):
        done = run_client("from simclient import *; ...; print(free())", sim_env(preload=True, limit="4147m"))
        assert done.stdout == "..."
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NATIVE_TESTS = ROOT / "tests" / "native"
PACKAGE = ROOT / "isolator"

# What a developer's shell may carry and a tenant's environment must not inherit.
FOREIGN = ("CUDA_", "NVIDIA_", "ISOLATOR_", "SIMGPU_", "LIBCUDA_", "LD_", "POD_UID", "CONTAINER_", "PYTEST_")

TOOLS = "`make cluster-tools`"
"""What the reason of a test names that was skipped for want of what this builds."""
NO_TOOLS = "skipped without cluster tools"

SimEnv = Callable[..., dict[str, str]]
RunClient = Callable[..., "subprocess.CompletedProcess[str]"]


def _reason(report: object) -> str:
    found = getattr(report, "longrepr", None)
    return str(found[2]) if getattr(report, "skipped", False) and isinstance(found, tuple) else ""


def pytest_report_teststatus(report: object) -> tuple[str, str, str] | None:
    """A category of their own for these, so that the summary does not list each of them."""
    return (NO_TOOLS, "s", "SKIPPED") if TOOLS in _reason(report) else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line in place of one for each test."""
    skipped = terminalreporter.stats.get(NO_TOOLS, [])
    if skipped:
        short = {_reason(each).removeprefix("Skipped: ").partition(":")[0] for each in skipped}
        terminalreporter.write_line(
            f"{len(skipped)} chart and cluster tests skipped ({'; '.join(sorted(short))}):"
            " run 'make cluster-tools' (up to half an hour) as root"
        )


def _built(path: Path) -> Path:
    """`path`, built first where it is missing."""
    if not path.exists():
        command = [sys.executable, "-W", "ignore", "setup.py", "-q", "build_ext", "--inplace"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if not path.exists():
            pytest.fail(f"{path} is missing and 'make build' does not make it: {done.stderr[-800:]}")
    return path


@pytest.fixture(scope="session")
def libvgpu() -> Path:
    """The library of this machine's architecture; $LIBVGPU names another one."""
    named = os.environ.get("LIBVGPU")
    if named and not Path(named).is_file():
        pytest.fail(f"LIBVGPU={named}: no such file")
    return Path(named) if named else _built(PACKAGE / "lib" / platform.machine() / "libvgpu.so")


@pytest.fixture(scope="session")
def sim_dir() -> Path:
    """The folder of the simulated GPU: libcuda.so.1, libnvidia-ml.so.1, nvidia-smi, old/libcuda.so.1."""
    return _built(PACKAGE / "sim" / "nvidia-smi").parent


@pytest.fixture
def sim_env(tmp_path: Path, sim_dir: Path, libvgpu: Path) -> SimEnv:
    """Makes environments on one simulated machine of this test.

    `sim_env(preload=True, limit="4147m", SIMGPU_MODEL="H200")`: environments of one test share the GPU's
    state and, with `preload`, the region file `tmp_path/usage.cache`. A variable given as None is left out.
    """

    def make(*, preload: bool = False, limit: str | None = None, **more: str | None) -> dict[str, str]:
        env = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
        env["LD_LIBRARY_PATH"] = str(sim_dir)
        env["SIMGPU_STATE"] = str(tmp_path / "simgpu.state")
        env["PYTHONPATH"] = f"{NATIVE_TESTS}{os.pathsep}{ROOT}"
        if preload:
            env["LD_PRELOAD"] = str(libvgpu)
            env["CUDA_DEVICE_MEMORY_SHARED_CACHE"] = str(tmp_path / "usage.cache")
        if limit is not None:
            env["CUDA_DEVICE_MEMORY_LIMIT"] = limit
        for name, value in more.items():
            if value is None:
                env.pop(name, None)
            else:
                env[name] = value
        return env

    return make


@pytest.fixture
def run_client() -> RunClient:
    """Runs Python code as a client and returns the finished process; a failing one fails the test.

    `check=False` returns it whatever its status. Standard output and error come back as text.
    """

    def run(
        code: str,
        env: Mapping[str, str],
        *arguments: str,
        check: bool = True,
        timeout: float = 60,
        **options: object,
    ) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code, *arguments]
        done = subprocess.run(  # type: ignore[call-overload]
            command, env=dict(env), capture_output=True, text=True, timeout=timeout, **options
        )
        if check and done.returncode:
            pytest.fail(f"client ended with {done.returncode}\n{done.stdout}{done.stderr}")
        return done

    return run
