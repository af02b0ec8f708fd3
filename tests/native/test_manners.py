"""What the library does in a program without a GPU (nothing), and in the hot calls of one that has it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from loaderbuild import client

pytestmark = pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")

SimEnv = Callable[..., dict[str, str]]

PLAIN = {
    "true": ["true"],
    "sh": ["sh", "-c", ":"],
    "ls": ["ls", "/"],
    "bash": ["bash", "-c", "x=1; echo $((x + 1)) >&2"],
    "python": [sys.executable, "-SEs", "-c", "import sys; sys.stdout.write('1')"],
}
OURS = re.compile(r'openat\([^"]*"(?:[^"]*/)?(?:libvgpu|libdl|libpthread|librt|libc)\.so[.\d]*"')
# How the loader maps a file.
LOADING = re.compile(r"(openat|read|pread64|fstat|newfstatat|mmap|mprotect|munmap|close|access|readlink)\(")


def _trace(argv: list[str], env: dict[str, str], log: Path) -> list[str]:
    """The system calls of a program, one a line, addresses blotted out."""
    variables = [word for key in sorted(env) for word in ("-E", f"{key}={env[key]}")]
    done = subprocess.run(
        ["strace", "-f", "-s", "512", "-o", str(log), *variables, *argv],
        env={"PATH": env["PATH"]},
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )
    if "ptrace" in done.stderr and not log.stat().st_size:
        pytest.skip(f"strace: {done.stderr.strip()}")
    return [_blotted(line) for line in log.read_text().splitlines()]


def _blotted(line: str) -> str:
    """A call without what differs from run to run: addresses, random bytes and process numbers."""
    pid, _, call = line.partition(" ")
    call = re.sub(r"0x[0-9a-f]+", "0x", call.strip())
    call = re.sub(r'(?<=getrandom\()"[^"]*"|(?<=sysinfo\().*', "", call)
    return re.sub(rf"\b{pid}\b|(?<=getppid\(\)).*", "", call)


def _start(calls: list[str]) -> int:
    """Where the loader is done: it gives its list of libraries back last."""
    opened = next(i for i, call in enumerate(calls) if '"/etc/ld.so.cache"' in call)
    size = next(
        found.group(1)
        for call in calls[opened + 1 : opened + 4]
        if (found := re.search(r"mmap\(NULL, (\d+),|st_size=(\d+)", call)) and found.group(1)
    )
    return next(i for i, call in enumerate(calls) if call.startswith(f"munmap(0x, {size})")) + 1


@pytest.mark.parametrize("label", PLAIN)
def test_a_program_without_gpu_makes_no_call_more(
    label: str, libvgpu: Path, tmp_path: Path, sim_env: SimEnv
) -> None:
    """After the loader has mapped the library, system calls are those of a bare process: no file is opened,
    no /proc read, nothing written (B021)."""
    bare = _trace(PLAIN[label], sim_env(), tmp_path / "bare")
    env = sim_env() | {"LD_PRELOAD": str(libvgpu), "CUDA_DEVICE_MEMORY_LIMIT": "4147m"}
    loaded = _trace(PLAIN[label], env, tmp_path / "loaded")
    assert any(f'"{libvgpu}"' in call for call in loaded)
    before, after = loaded[: _start(loaded)], loaded[_start(loaded) :]
    assert after == bare[_start(bare) :]
    more = Counter(before) - Counter(bare[: _start(bare)])
    assert [call for call in more if not LOADING.match(call) and not call.startswith("execve(")] == []
    assert [call for call in more if call.startswith("openat(") and not OURS.match(call)] == []


def _between(calls: list[str]) -> Counter[str]:
    """Names and numbers of the system calls between the client's two marks."""
    marks = [i for i, call in enumerate(calls) if call.startswith("write(-1, ")]
    assert len(marks) == 2
    return Counter(call.partition("(")[0] for call in calls[marks[0] + 1 : marks[1]])


@pytest.mark.parametrize("how", ["dlsym", "proc"])
def test_a_warm_allocation_makes_no_system_call(how: str, sim_env: SimEnv, tmp_path: Path) -> None:
    """1,000 allocations and frees take the system calls of the bare driver and none more (B190)."""
    verbs = "init context pairs:100 mark:begin pairs:1000 mark:end".split()
    counts = []
    for preload in (False, True):
        env = sim_env(preload=preload, limit="4147m", CLIENT_FIND=how, LIBCUDA_LOG_LEVEL="2")
        env["SIMGPU_STATE"] = str(tmp_path / f"state-{preload}")
        counts.append(
            _between(_trace([str(client("loader_client")), *verbs], env, tmp_path / f"{how}-{preload}"))
        )
    assert counts[1] == counts[0]


def test_a_refusal_makes_no_system_call(sim_env: SimEnv, tmp_path: Path) -> None:
    """Once dead processes have been looked for, an over-quota request is refused without any call (B190)."""
    verbs = ["init", "context", "alloc:5000", "mark:begin", *["over:5000"] * 500, "mark:end"]
    env = sim_env(preload=True, limit="4147m")
    calls = _trace([str(client("loader_client")), *verbs], env, tmp_path / "log")
    assert any(call.startswith('write(1, "alloc 5000 2') for call in calls)
    # A search takes a handful of calls, and one is made every 50 ms at most.
    assert sum(_between(calls).values()) <= 50
