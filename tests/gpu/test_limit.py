"""The lab's proof on a real device, through every way to take memory."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from conftest import LIMIT_MIB

MIB = 1 << 20
GIB = 1 << 30


def run(command, env, timeout=120, check=True):
    """A finished client; its output is the message when it failed."""
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout)
    if check:
        assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.mark.parametrize("runtime", ["static", "shared"])
def test_lab_program_is_held_to_its_quota(client, env, runtime):
    """The lab's program gets 3 GiB, is refused 2 GiB more, and sees the limit as the size (B022, B129)."""
    program = client("lab.cu", f"lab-{runtime}", f"-cudart={runtime}")
    done = run([program], env())
    assert "PASS" in done.stdout
    assert f"total={LIMIT_MIB * MIB} properties={LIMIT_MIB * MIB}" in done.stdout
    assert done.stderr == ""


def test_control_bare_program_is_not_held(client, env):
    """Without the library the same program fails its second step: interception is what refuses."""
    done = run([client("lab.cu", "lab-static", "-cudart=static")], env(limit=None), check=False)
    assert "allocate another 2 GiB: no error" in done.stdout


def test_every_path_is_refused_over_the_quota(client, env):
    """8 GiB through each allocating call is refused with code 2 under 4147 MiB (B001, B005, B009, B012)."""
    done = run([client("paths.c"), str(8 * GIB)], env(), timeout=300)
    got = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert len(got) == 18
    assert {name: result for name, result in got.items() if result != "2"} == {}


def test_paths_are_granted_without_the_library(client, env):
    """The same requests succeed bare, so each refusal above is the library's."""
    done = run([client("paths.c"), str(8 * GIB)], env(limit=None), timeout=300)
    got = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert {name: result for name, result in got.items() if result != "0"} == {}


def test_two_tenants_at_once(client, env):
    """Two tenants on one card each get their own 3 GiB at the same time."""
    program = client("lab.cu", "lab-static", "-cudart=static")
    both = [subprocess.Popen([program], env=env(tenant=t), stdout=subprocess.PIPE, text=True) for t in "ab"]
    assert all("PASS" in tenant.communicate(timeout=120)[0] for tenant in both)


def test_nvidia_smi_shows_the_limit(env):
    """nvidia-smi's total is the limit, in the query and in the table (B120)."""
    query = ["nvidia-smi", "--query-gpu=memory.total,memory.used", "--format=csv,noheader,nounits"]
    assert run(query, env()).stdout.split() == [f"{LIMIT_MIB},", "0"]
    assert f"0MiB / {LIMIT_MIB:>6}MiB".replace(" ", "") in run(["nvidia-smi"], env()).stdout.replace(" ", "")


TORCH = """
import json, torch
def attempt(gib):
    try:
        return torch.empty(gib << 30, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        return None
seen = {"total": torch.cuda.get_device_properties(0).total_memory}
first = attempt(3)
seen["first"] = first is not None
seen["more"] = attempt(2) is not None
seen["info"] = torch.cuda.mem_get_info()
if first is not None:
    first.fill_(1)
del first
torch.cuda.synchronize(); torch.cuda.empty_cache()
again = attempt(3)
seen["again"] = again is not None
print(json.dumps(seen))
"""


@pytest.mark.parametrize("allocator", ["", "expandable_segments:True", "backend:cudaMallocAsync"])
def test_torch_allocators_are_held(env, allocator):
    """PyTorch gets 3 GiB, raises OutOfMemoryError for 2 GiB more, and gets freed memory back (B022)."""
    pytest.importorskip("torch")
    done = run([sys.executable, "-c", TORCH], env(PYTORCH_CUDA_ALLOC_CONF=allocator), timeout=180)
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["total"] == LIMIT_MIB * MIB
    assert (seen["first"], seen["more"], seen["again"]) == (True, False, True)
    assert seen["info"][1] == LIMIT_MIB * MIB
