"""Starts that are refused: a quota is due and cannot be enforced, or a file cannot be the region."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest
from conftest import RunClient, SimEnv
from container import Container, why_not

needs_mounts = pytest.mark.skipif(bool(why_not()), reason=why_not())

# What a program meets whose cuInit was refused: no context, while NVML goes on.
CLIENT = """
from simclient import *
import json
r = [cu_init(), cu_init(), retain(0)[0] != 0, nvml_memory()[0], nvml_memory()[1] >> 20]
print(json.dumps(r))
"""
PYTHON = [sys.executable, "-c", CLIENT]
CARD = 15360

# Value of the limit, and what the one line must name.
MALFORMED = {
    "": "no memory limit is set",
    "\n": "no memory limit is set",
    "0": "malformed, zero or under 64 MiB",
    "0m": "malformed, zero or under 64 MiB",
    "-1": "malformed, zero or under 64 MiB",
    "abc": "malformed, zero or under 64 MiB",
    "1e9": "malformed, zero or under 64 MiB",
    "4x": "malformed, zero or under 64 MiB",
    "4 g": "malformed, zero or under 64 MiB",
    "4147": "malformed, zero or under 64 MiB",
    "63m": "malformed, zero or under 64 MiB",
    "99999999999g": "too large",
}


def _one_line(stderr: str, *names: str) -> None:
    lines = stderr.splitlines()
    assert len(lines) == 1, stderr
    assert re.match(r"isolator\[\d+\]: CUDA is refused: ", lines[0])
    assert [name for name in names if name not in lines[0]] == []


@needs_mounts
@pytest.mark.root
@pytest.mark.parametrize("value", MALFORMED)
def test_an_unusable_limit_file_refuses_cuda_and_nothing_else(
    tmp_path: Path, libvgpu: Path, sim_env: SimEnv, value: str
) -> None:
    """A missing, zero or malformed limit ends in one line and cuInit 800; NVML works (B090, B092)."""
    done = Container(tmp_path / "box", libvgpu, limit=value).run(PYTHON, sim_env())
    assert json.loads(done.stdout) == [800, 800, True, 0, CARD]
    _one_line(done.stderr, MALFORMED[value], "CUDA_DEVICE_MEMORY_LIMIT")


@needs_mounts
@pytest.mark.root
def test_an_injected_container_without_a_limit_is_refused(
    tmp_path: Path, libvgpu: Path, sim_env: SimEnv
) -> None:
    """A cache mount of its own and no limit anywhere: refused, not uncapped (B093, B031)."""
    done = Container(tmp_path / "box", libvgpu).run(PYTHON, sim_env())
    assert json.loads(done.stdout) == [800, 800, True, 0, CARD]
    _one_line(done.stderr, "no memory limit is set")


def test_a_malformed_variable_is_refused_where_it_is_the_authority(
    sim_env: SimEnv, run_client: RunClient
) -> None:
    """Also without mounts a limit that cannot be read is no reason to run uncapped (B090)."""
    for value, cause in MALFORMED.items():
        done = run_client(CLIENT, sim_env(preload=True, limit=value))
        if value.strip():
            assert json.loads(done.stdout) == [800, 800, True, 0, CARD], value
            _one_line(done.stderr, cause)
        else:
            assert (json.loads(done.stdout), done.stderr) == ([0, 0, False, 0, CARD], "")


def test_a_required_quota_without_a_limit_is_refused(sim_env: SimEnv, run_client: RunClient) -> None:
    """ISOLATOR_ENFORCE=required makes absence an error; a limit satisfies it (B093)."""
    done = run_client(CLIENT, sim_env(preload=True, ISOLATOR_ENFORCE="required"))
    assert json.loads(done.stdout) == [800, 800, True, 0, CARD]
    _one_line(done.stderr, "no memory limit is set")
    assert run_client(CLIENT, sim_env(preload=True, ISOLATOR_ENFORCE="yes")).stdout == done.stdout
    done = run_client(CLIENT, sim_env(preload=True, ISOLATOR_ENFORCE="required", limit="2g"))
    assert (json.loads(done.stdout), done.stderr) == ([0, 0, False, 0, 2048], "")


def test_the_line_can_be_silenced(sim_env: SimEnv, run_client: RunClient) -> None:
    """LIBCUDA_LOG_LEVEL=0 keeps standard error empty, the refusal stays (B188)."""
    done = run_client(CLIENT, sim_env(preload=True, limit="abc", LIBCUDA_LOG_LEVEL="0"))
    assert (json.loads(done.stdout)[0], done.stderr) == (800, "")


def test_a_program_that_only_prints_help_is_never_harmed(sim_env: SimEnv, run_client: RunClient) -> None:
    """Nothing is said or done before a driver call, whatever the limit variable holds (B031, B190)."""
    for limit in (None, "0m", "2g", "abc"):
        done = run_client("import ctypes; print('usage')", sim_env(preload=True, limit=limit))
        assert (done.stdout, done.stderr) == ("usage\n", "")


# ---- the region file -------------------------------------------------------------------------------------


def _damage(path: Path, kind: str) -> None:
    if kind == "directory":
        path.mkdir()
    elif kind == "foreign":
        path.write_bytes(b"#!/bin/sh\n" * 400)
    elif kind == "random":
        path.write_bytes(os.urandom(2183168))
    elif kind == "newer":
        path.write_bytes((19920718).to_bytes(4, "little") + b"\2\0\0\0" + bytes(2008953 - 8))
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        (path.parent / "elsewhere").write_bytes(b"x" * 100)
        path.symlink_to(path.parent / "elsewhere")
    elif kind == "no folder":
        path.parent.rmdir()


@pytest.mark.parametrize("kind", ["directory", "foreign", "random", "newer", "fifo", "link", "no folder"])
def test_a_file_that_is_no_region_refuses_cuda(
    sim_env: SimEnv, run_client: RunClient, tmp_path: Path, kind: str
) -> None:
    """What cannot be our region is left as it is, and the start is refused by name (B145, B146, B149)."""
    path = tmp_path / "cache" / "usage.cache"
    path.parent.mkdir()
    _damage(path, kind)
    before = path.read_bytes() if path.is_file() else None
    env = sim_env(preload=True, limit="2g", CUDA_DEVICE_MEMORY_SHARED_CACHE=str(path))
    done = run_client(CLIENT, env)
    assert json.loads(done.stdout) == [800, 800, True, 0, 2048]
    _one_line(done.stderr, str(path))
    assert (path.read_bytes() if path.is_file() else None) == before


@needs_mounts
@pytest.mark.root
def test_a_read_only_cache_refuses_cuda(tmp_path: Path, libvgpu: Path, sim_env: SimEnv) -> None:
    """Where the cache cannot be written the limit is still shown and nothing is granted (B146)."""
    done = Container(tmp_path / "box", libvgpu, limit="2g", cache_mount="ro").run(PYTHON, sim_env())
    assert json.loads(done.stdout) == [800, 800, True, 0, 2048]
    _one_line(done.stderr, "Read-only file system")


DELETED = """
from simclient import *
import os, subprocess, sys
init(0)
ok(alloc(3 << 30))
os.unlink(os.environ["REGION"])
code = "from simclient import *; init(0); print(alloc(2 << 30)[0], alloc(512 << 20)[0])"
print(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip())
print(alloc(2 << 30)[0], alloc(256 << 20)[0])
"""


@needs_mounts
@pytest.mark.root
def test_a_deleted_region_does_not_double_the_quota(tmp_path: Path, libvgpu: Path, sim_env: SimEnv) -> None:
    """A process that makes a new region is charged for what the others hold already (B145)."""
    box = Container(tmp_path / "box", libvgpu, limit="4g")
    done = box.run(
        [sys.executable, "-c", DELETED], sim_env(REGION=str(box.mount / "containers" / "usage.cache"))
    )
    assert (done.stdout, done.stderr) == ("2 0\n2 0\n", "")


@needs_mounts
@pytest.mark.root
@pytest.mark.parametrize("region", ["none", "old"])
def test_a_container_of_an_older_release_stays_capped(
    tmp_path: Path, libvgpu: Path, sim_env: SimEnv, region: str
) -> None:
    """Mounts and variables of release 1.1 with our library: its folder, its region, its limit (B082)."""
    box = Container(tmp_path / "box", libvgpu)
    folder = box.cache / "0a1b_main"
    if region == "old":
        folder.mkdir()
        folder.chmod(0o777)
        head = bytearray(2008953)
        head[0:12] = (19920718).to_bytes(4, "little") + b"\1\0\0\0" + b"\1\0\0\0"
        head[1600:1608] = (2 << 30).to_bytes(8, "little")
        (folder / "usage.cache").write_bytes(head)
    env = sim_env(
        CONTAINER_VGPU_MOUNT=str(box.mount),
        POD_UID="0a1b",
        CONTAINER_NAME="main",
        CUDA_DEVICE_MEMORY_LIMIT="3g",
    )
    code = (
        "from simclient import *; init(0); print(ok(total_mem()) >> 20, alloc(4 << 30)[0], alloc(1 << 30)[0])"
    )
    done = box.run([sys.executable, "-c", code], env)
    assert done.stdout == ("2048 2 0\n" if region == "old" else "3072 2 0\n")
    warned = ["a limit of 3072 MiB was asked for, but 2048 MiB are recorded in"] if region == "old" else []
    assert [text in line for text, line in zip(warned, done.stderr.splitlines(), strict=True)] == [
        True
    ] * len(warned)
    assert (folder / "usage.cache").stat().st_size == 2183168
