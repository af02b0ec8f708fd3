"""Who says what the limit is in a container: the file on its read-only mount, then the environment."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import SimEnv
from container import Container, why_not

pytestmark = [pytest.mark.root, pytest.mark.skipif(bool(why_not()), reason=why_not())]

# Prints cuInit's result, the total CUDA and NVML show in MiB, and whether 64 GiB are granted.
CLIENT = """
from simclient import *
import json
r = cu_init()
ctx = retain(0)
set_current(ctx[1]) if ctx[0] == 0 else None
grant = alloc(12 << 30)[0]
print(json.dumps([r, ctx[0], ok(total_mem()) >> 20 if r == 0 else None, nvml_memory()[1] >> 20, grant]))
"""
PYTHON = [sys.executable, "-c", CLIENT]
STATE_AT = 2031616 + 64

Start = Callable[..., Any]


def _capped(mib: int) -> list[int]:
    return [0, 0, mib, mib, 2]


@pytest.fixture
def start(tmp_path: Path, libvgpu: Path, sim_env: SimEnv) -> Start:
    """Runs the client in a new container and returns what it printed; standard error stays empty."""

    def run(
        limit: str | None = None, *, first: str = 'exec "$@"', box: dict[str, Any] | None = None, **env: str
    ) -> Any:
        container = Container(
            tmp_path / f"box{len(list(tmp_path.iterdir()))}", libvgpu, limit=limit, **(box or {})
        )
        done = container.run(PYTHON, sim_env(**env), first=first)
        assert (done.returncode, done.stderr) == (0, "")
        return json.loads(done.stdout)

    return run


def test_the_limit_file_is_the_limit(start: Start) -> None:
    """A limit file on a read-only mount of its own counts, with no variable at all (B093, B129)."""
    assert start("4147m\n") == _capped(4147)


def test_the_environment_may_only_lower_the_file(start: Start) -> None:
    """Beside a limit file a lower variable is honoured, a higher or wrong one is not (B082)."""
    assert start("4g", CUDA_DEVICE_MEMORY_LIMIT="1g") == _capped(1024)
    for value in ("8g", "abc", "0", "-1", ""):
        assert start("4g", CUDA_DEVICE_MEMORY_LIMIT=value) == _capped(4096), value


def test_changed_variables_do_not_lift_the_limit(start: Start) -> None:
    """No variable that a tenant can set switches the quota off or sends its ledger elsewhere (B083, B149)."""
    tricks: list[dict[str, str]] = [
        {"CUDA_DEVICE_MEMORY_LIMIT_0": "100g", "CUDA_DEVICE_MEMORY_SHARED_CACHE": "/tmp/mine.cache"},
        {"CUDA_DEVICE_MEMORY_SHARED_CACHE": "/proc/nothing", "CONTAINER_VGPU_MOUNT": "/nowhere"},
        {"POD_UID": "other", "CONTAINER_NAME": "other", "CONTAINER_VGPU_MOUNT": "/tmp"},
        {"ISOLATOR_ENFORCE": "off", "GPU_CORE_UTILIZATION_POLICY": "DISABLE"},
        *({"CUDA_DISABLE_CONTROL": value} for value in ("true", "false", "FALSE", "0", "no", "")),
    ]
    for trick in tricks:
        assert start("4g", **trick) == _capped(4096), trick


def test_an_empty_environment_keeps_the_limit(start: Start) -> None:
    """A login without the container's environment (ssh, su, cron) is limited by the file (B080)."""
    names = ("LD_PRELOAD", "LD_LIBRARY_PATH", "SIMGPU_STATE", "PYTHONPATH")
    keep = " ".join(f"{name}=${name}" for name in names)
    assert start("4g", first=f'exec env -i {keep} "$@"') == _capped(4096)


def test_a_writable_limit_file_is_ignored(start: Start) -> None:
    """A file the tenant can write, or that lies on no mount of its own, is no authority."""
    for how in ("", "rw"):
        box = {"limit_mount": how, "containers": False}
        assert start("8g", box=box, CUDA_DEVICE_MEMORY_LIMIT="2g") == _capped(2048), how
        assert start("8g", box=box)[0:3] == [0, 0, start("8g", box=box)[2]]
        assert start("1g", box=box)[4] == 0, how


@pytest.mark.parametrize("variable", ["kept", "lost"])
def test_pid_1s_environment_stands_in_for_a_lost_one(start: Start, variable: str) -> None:
    """A process that lost its variables takes the limit of the container's first process (B080, B082)."""
    lost = "env -u CUDA_DEVICE_MEMORY_LIMIT" if variable == "lost" else ""
    first = f'{lost} "$@"; exit $?'
    assert start(first=first, box={"containers": False}, CUDA_DEVICE_MEMORY_LIMIT="3g") == _capped(3072)


RECORDED = """
import json, os, subprocess, sys
def client(limit, **more):
    env = dict(os.environ, **more)
    env.pop("CUDA_DEVICE_MEMORY_LIMIT", None)
    if limit:
        env["CUDA_DEVICE_MEMORY_LIMIT"] = limit
    command = [sys.executable, "-c", os.environ["CLIENT"]]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    warned = "8192 MiB was asked for, but 2048 MiB are recorded in" in done.stderr
    assert done.returncode == 0 and warned == (limit == "8g"), done.stderr
    assert warned or done.stderr == "", done.stderr
    return json.loads(done.stdout)
shown = [client("2g"), client(None), client("1g"), client("8g"), client(None, CUDA_VISIBLE_DEVICES="1")]
print(json.dumps(shown))
"""


def test_the_first_process_fixes_the_limit_of_the_container(
    tmp_path: Path, libvgpu: Path, sim_env: SimEnv
) -> None:
    """Without a file: the recorded limit holds for processes without the variable, on every device (B082)."""
    box = Container(tmp_path / "box", libvgpu, containers=False)
    cache = {"CUDA_DEVICE_MEMORY_SHARED_CACHE": str(tmp_path / "usage.cache"), "SIMGPU_COUNT": "2"}
    done = box.run([sys.executable, "-c", RECORDED], sim_env(CLIENT=CLIENT, **cache))
    assert done.stderr == ""
    shown = json.loads(done.stdout)
    assert shown == [_capped(2048), _capped(2048), _capped(1024), _capped(2048), [0, 0, 2048, 2048, 2]]


def test_another_run_of_the_container_has_its_own_limit(
    tmp_path: Path, libvgpu: Path, sim_env: SimEnv
) -> None:
    """A restarted container with a new limit is not held to the value its predecessor recorded."""
    box = Container(tmp_path / "box", libvgpu, containers=False)
    cache = {"CUDA_DEVICE_MEMORY_SHARED_CACHE": str(tmp_path / "usage.cache")}
    look = "from simclient import *; print(nvml_memory()[1] >> 20)"
    for limit, mib in (("1g", 1024), ("3g", 3072), ("2g", 2048)):
        env = sim_env(CUDA_DEVICE_MEMORY_LIMIT=limit, **cache)
        assert box.run([sys.executable, "-c", look], env).stdout == f"{mib}\n"
        assert json.loads(box.run(PYTHON, env).stdout) == _capped(mib)


def test_a_refused_start_is_in_the_region(tmp_path: Path, libvgpu: Path, sim_env: SimEnv) -> None:
    """A monitor can see that a process was refused and why (B093)."""
    box = Container(tmp_path / "box", libvgpu)
    done = box.run(PYTHON, sim_env())
    assert json.loads(done.stdout)[0] == 800
    state, reason = struct.unpack_from("<II", box.region.read_bytes(), STATE_AT)
    assert (state, reason) == (3, 61)
