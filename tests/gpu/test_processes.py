"""Several processes under one quota, in the ways that programs make them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from conftest import CLIENTS, LIMIT_MIB, nvml_held

CONTEXT_MIB = 518
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def tenant(env, code: str, prefix: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """A process that runs `code` with the driver's calls at hand."""
    return subprocess.Popen(
        [*prefix, sys.executable, "-c", "from cuda import *\n" + code],
        env={**env, "PYTHONPATH": str(CLIENTS)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def told(env, code: str, prefix: tuple[str, ...] = (), timeout: int = 90) -> list[str]:
    """Lines of a process that ran to its end."""
    done = tenant(env, code, prefix)
    out, errors = done.communicate("", timeout=timeout)
    assert done.returncode == 0, out + errors
    assert "isolator" not in errors
    return out.splitlines()


@pytest.mark.parametrize(("count", "limit_gib"), [(64, 40), (256, 60)])
def test_many_start_together(env, count, limit_gib):
    """All whose contexts fit start, the others are refused with 2, nobody hangs, and all quota comes back."""
    held = env(limit=f"{limit_gib}g")
    crowd = [tenant(held, "hold_at = start()\nsay(hold_at)\nhold()") for _ in range(count)]
    try:
        codes = [int(one.stdout.readline()) for one in crowd if one.stdout]
        sums = nvml_held({one.pid for one in crowd})
        assert set(codes) <= {0, 2}
        assert sum(sums.values()) <= limit_gib << 30
        fits = (limit_gib << 10) // CONTEXT_MIB
        # While contexts are being made each may be charged by a higher estimate.
        assert codes.count(0) >= min(count, fits - 2)
    finally:
        for one in crowd:
            one.communicate("", timeout=120)
    got = int(told(held, "assert start() == 0\nsay(fill())")[0])
    assert got >= (limit_gib << 10) - CONTEXT_MIB - 64


FORK = """
assert start() == 0 and alloc(1024) == 0
say(in_child(lambda: say("child", cu.cuInit(0), alloc(16))))
say("parent", alloc(1024))
assert in_child(lambda: os._exit(3)) == 3
"""


def test_a_parent_with_a_context_forks(env):
    """A forked child gets the driver's own answer, and its end gives nothing of its parent's back."""
    held, bare = told(env(), FORK + "say(fill())"), told(env(limit=None), FORK + "say(0)")
    assert held[:-1] == bare[:-1]
    assert LIMIT_MIB - CONTEXT_MIB - 2048 - 64 <= int(held[-1]) <= LIMIT_MIB - CONTEXT_MIB - 2048


def test_fork_and_exec_share_the_quota(env):
    """A program that a process with a context starts has a slot of its own in the same quota."""
    code = """
import subprocess
assert start() == 0 and alloc(1024) == 0
inner = "from cuda import *\\nassert start() == 0\\nsay(fill())"
say(subprocess.run([sys.executable, "-c", inner], capture_output=True, text=True).stdout.strip())
say(fill())
"""
    inner, outer = (int(line) for line in told(env(), code))
    room = LIMIT_MIB - 2 * CONTEXT_MIB - 1024
    assert room - 64 <= inner <= room
    assert room + CONTEXT_MIB - 64 <= outer <= room + CONTEXT_MIB


def test_exec_over_itself_starts_anew(env):
    """A process that becomes another program gives its quota back and has all of it again."""
    code = """
if len(sys.argv) == 1:
    assert start() == 0 and alloc(3000) == 0
    os.execv(sys.executable, [sys.executable, "-c", ORIGINAL, "again"])
"""
    inner = "from cuda import *\nassert start() == 0\nsay(fill())"
    got = int(told(env(), code.replace("ORIGINAL", repr(inner)))[0])
    assert LIMIT_MIB - CONTEXT_MIB - 64 <= got <= LIMIT_MIB - CONTEXT_MIB


def test_a_daemon_is_held(env):
    """A process that forked twice and left its session is held like any other."""
    code = """
read, write = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        assert start() == 0
        os.write(write, str(fill()).encode())
    os._exit(0)
os.close(write)
say(os.read(read, 100).decode())
"""
    got = int(told(env(), code)[0])
    assert LIMIT_MIB - CONTEXT_MIB - 64 <= got <= LIMIT_MIB - CONTEXT_MIB


def test_closing_all_descriptors_keeps_the_quota(env):
    """A process that closed every descriptor keeps its charge: another one cannot have what it holds."""
    one = tenant(
        env(), "assert start() == 0 and alloc(2048) == 0\nos.closerange(3, 4096)\nsay(alloc(2048))\nhold()"
    )
    assert one.stdout and one.stdout.readline().strip() in ("2", "999")
    try:
        got = int(told(env(), "assert start() == 0\nsay(fill())")[0])
        assert got <= LIMIT_MIB - 2048 - 2 * CONTEXT_MIB
    finally:
        one.communicate("", timeout=60)


@root_only
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_change_of_user_changes_nothing(env, when):
    """A process that becomes another user before or after its first call is held, and others see its charge."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o1777)
        held = env() | {"CUDA_DEVICE_MEMORY_SHARED_CACHE": f"{folder}/usage.cache"}
        change = "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        code = (
            (change if when == "before" else "")
            + "assert start() == 0\n"
            + (change if when == "after" else "")
        )
        one = tenant(held, code + "say(alloc(3000), alloc(1000))\nhold()")
        assert one.stdout and one.stdout.readline() == "0 2\n"
        try:
            got = int(told(held, "assert start() == 0\nsay(fill())")[0])
            assert got <= LIMIT_MIB - 3000 - 2 * CONTEXT_MIB
        finally:
            one.communicate("", timeout=60)


@root_only
def test_a_nested_pid_namespace_shares_the_quota(env):
    """A process in a PID namespace inside the container's has the same quota, from either side."""
    inside = ("unshare", "-p", "-f", "--mount-proc")
    code = """
import subprocess
assert start() == 0 and alloc(2048) == 0
inner = "from cuda import *\\nassert start() == 0\\nsay(fill())"
nested = ["unshare", "-p", "-f", "--mount-proc", sys.executable, "-c", inner]
say(subprocess.run(nested, capture_output=True, text=True).stdout.strip())
say(info()[0])
"""
    inner, used = (int(line) for line in told(env(), code, inside))
    room = LIMIT_MIB - 2 * CONTEXT_MIB - 2048
    assert room - 64 <= inner <= room
    assert used == 2048 + CONTEXT_MIB


TORCH = {
    "fork": """
import torch, torch.multiprocessing as mp
def work(q):
    try:
        q.put(float(torch.ones(8, device="cuda").sum()))
    except RuntimeError as error:
        q.put(str(error)[:60])
torch.ones(1, device="cuda")
context = mp.get_context("fork"); q = context.Queue()
p = context.Process(target=work, args=(q,)); p.start(); print(q.get(timeout=60)); p.join()
""",
    "loader": """
import torch
class Data(torch.utils.data.Dataset):
    def __len__(self): return 256
    def __getitem__(self, i): return torch.full((64,), float(i)), torch.tensor(float(i % 3))
torch.manual_seed(0)
model = torch.nn.Linear(64, 1).cuda(); optimiser = torch.optim.SGD(model.parameters(), lr=1e-7)
loader = torch.utils.data.DataLoader(Data(), batch_size=32, num_workers=4, pin_memory=True)
for _ in range(2):
    for x, y in loader:
        loss = (model(x.cuda(non_blocking=True))[:, 0] - y.cuda()).square().mean()
        optimiser.zero_grad(); loss.backward(); optimiser.step()
print(loss.item())
""",
}


@pytest.mark.parametrize("name", [*TORCH, "spawn"])
def test_torch_multiprocessing(env, name, tmp_path):
    """Forked and spawned children, and the workers of a loader, end as they do bare."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("no torch on this machine")
    script = Path(CLIENTS) / "programs" / "torch_spawn.py"
    if name != "spawn":
        script = tmp_path / f"{name}.py"
        script.write_text(TORCH[name])
    runs = [
        subprocess.run(
            [sys.executable, str(script)], env=env(limit=limit), capture_output=True, text=True, timeout=180
        )
        for limit in ("8g", None)
    ]
    assert [run.returncode for run in runs] == [0, 0], runs[0].stderr + runs[1].stderr
    assert runs[0].stdout == runs[1].stdout and runs[0].stdout
    assert "isolator" not in runs[0].stderr
