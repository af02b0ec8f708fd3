"""A first context charged as recorded: NVML is not started for it, and a wrong record breaks no quota."""

from __future__ import annotations

import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import RunClient, SimEnv
from test_contexts import CONTEXT, CONTEXT_BYTES

MIB = 1 << 20

HELD = """
import sys
from simclient import *
from contextcalls import *
MAPPED = lambda: "libnvidia-ml" in open("/proc/self/maps").read()
start()
{make}
print(int(MAPPED()), flush=True)
for line in sys.stdin:
    exec(line)
    print("done", flush=True)
"""

FILL = """
from simclient import *
from contextcalls import *
init()
got = 0
while (answer := alloc(2 * MIB))[0] == 0:
    got += 2
    assert sim_device_used() <= {limit} * MIB, (got, sim_device_used() / MIB)
assert answer[0] == OOM
print(got)
"""


def record(folder: Path, size: int) -> None:
    """Writes a size of a first context into the region."""
    with (folder / "usage.cache").open("r+b") as region:
        region.seek(CONTEXT_BYTES)
        region.write(struct.pack("<Q", size))


@contextmanager
def holder(env: dict[str, str], make: str) -> Iterator[tuple[subprocess.Popen[str], bool]]:
    """A process that made a context and waits for lines to run; whether it has NVML."""
    command = [sys.executable, "-c", HELD.format(make=make)]
    process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout and process.stdin
    try:
        yield process, process.stdout.readline() == "1\n"
    finally:
        process.communicate("", timeout=60)
    assert process.returncode == 0


def tell(process: subprocess.Popen[str], line: str) -> None:
    """Runs a line in a holder."""
    assert process.stdin and process.stdout
    process.stdin.write(line + "\n")
    process.stdin.flush()
    assert process.stdout.readline() == "done\n"


MAKES = ["ok(retain())", "ok(ctx_create())"]


@pytest.mark.parametrize("make", MAKES, ids=["primary", "created"])
def test_a_recorded_size_needs_no_nvml(sim_env: SimEnv, run_client: RunClient, make: str) -> None:
    """Only the first process of a container starts NVML for its context; others at their next charge."""
    env = sim_env(preload=True, limit="1g")
    with holder(env, make) as (_, first):
        assert first
    with holder(env, make) as (process, later):
        assert not later
        looked = run_client(
            "from contextcalls import *\nstart()\nprint(used(), sim_device_used())", env
        ).stdout
        assert looked.split() == [str(CONTEXT)] * 2
        tell(process, "ok(set_current(ok(retain()))); ok(alloc(MIB)); assert MAPPED()")


@pytest.mark.parametrize("question", ["mem_info()", "nvml_memory()"])
def test_a_question_for_sizes_settles(
    sim_env: SimEnv, run_client: RunClient, tmp_path: Path, question: str
) -> None:
    """What is shown as free and used is true also where the record is wrong (B100)."""
    env = sim_env(preload=True, limit="1g")
    run_client("from simclient import *\ninit()", env)
    record(tmp_path, 4 * MIB)
    with holder(env, "ok(set_current(ok(retain())))") as (process, has_nvml):
        assert not has_nvml
        tell(process, f"ok({question}); assert same() == {CONTEXT}")


@pytest.mark.parametrize("wrong", [4 * MIB, 90 * MIB, 120 * MIB])
def test_a_wrong_record_lets_nobody_past_the_limit(
    sim_env: SimEnv, run_client: RunClient, tmp_path: Path, wrong: int
) -> None:
    """Who comes near the limit counts what idle contexts of others really took (B046)."""
    env = sim_env(preload=True, limit="1000m")
    run_client("from simclient import *\ninit()", env)
    record(tmp_path, wrong)
    with holder(env, MAKES[0]) as (one, _), holder(env, MAKES[0]) as (two, has_nvml):
        assert not has_nvml
        got = int(run_client(FILL.format(limit=1000), env).stdout)
        room = (1000 * MIB - 3 * CONTEXT) // MIB
        # What idle contexts are charged too much stays charged until they do something.
        assert room - 2 * max(0, wrong - CONTEXT) // MIB - 6 <= got <= room
        for process in (one, two):
            tell(process, "ok(set_current(ok(retain()))); ok(alloc(MIB)); assert ok(mem_info())[0] > 0")
        assert int(run_client(FILL.format(limit=1000), env).stdout) >= room - 6 - 4


def test_contexts_made_while_others_fill_stay_under_the_limit(
    sim_env: SimEnv, run_client: RunClient, tmp_path: Path
) -> None:
    """With a record far too small, many starts and a full quota at once leave nothing behind (B046)."""
    env = sim_env(preload=True, limit="1500m")
    run_client("from simclient import *\ninit()", env)
    record(tmp_path, MIB)
    code = """
import random, sys
from simclient import *
from contextcalls import *
seed = random.Random(int(sys.argv[1]))
start()
for _ in range(60):
    result, context = retain()
    if result: continue
    ok(set_current(context))
    held = [alloc(seed.randrange(1, 60) * MIB)[1] for _ in range(seed.randrange(3))]
    assert sim_device_used() <= 1500 * MIB + 106_954_752 * MAKERS
    for p in held:
        if p: ok(free(p))
    ok(release())
""".replace("MAKERS", "6")
    runs = [
        subprocess.Popen([sys.executable, "-c", code, str(seed)], env=env, stderr=subprocess.PIPE, text=True)
        for seed in range(6)
    ]
    for run in runs:
        errors = run.communicate(timeout=120)[1]
        assert (run.returncode, errors) == (0, "")
    assert run_client("from contextcalls import *\nstart()\nprint(same())", env).stdout == "0\n"


@pytest.mark.parametrize("first", ["100", "25"])
def test_contexts_of_several_sizes_in_one_container(
    sim_env: SimEnv, run_client: RunClient, first: str
) -> None:
    """A client of MPS with a share has a smaller context; what one recorded lets the other past nothing."""
    share = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
    env = sim_env(preload=True, limit="4000m", SIMGPU_MODEL="H200")
    others = env | {share: "25" if first == "100" else "100"}
    run_client("from simclient import *\ninit()", env | {share: first})
    with holder(others, MAKES[0]) as (idle, has_nvml):
        assert not has_nvml
        got = int(run_client(FILL.format(limit=4000), others).stdout)
        assert got > 2000
        tell(idle, "ok(set_current(ok(retain()))); ok(alloc(MIB)); same()")


def test_memory_of_a_dead_maker_is_no_part_of_the_record(
    sim_env: SimEnv, run_client: RunClient, tmp_path: Path
) -> None:
    """What a process holds of one that is gone, when its context is settled, is not the context's (B057)."""
    env = sim_env(preload=True, limit="1g")
    run_client("from simclient import *\ninit()", env)
    maker = "import sys\nfrom simclient import *\ninit()\n"
    maker += "print(ok(ipc_get(ok(alloc(200 * MIB)))).hex(), flush=True)\nsys.stdin.read()"
    code = f"""
import subprocess, sys
from simclient import *
init()
maker = subprocess.Popen([sys.executable, "-c", {maker!r}], stdin=-1, stdout=-1, text=True)
ok(ipc_open(bytes.fromhex(maker.stdout.readline())))
maker.kill(); maker.wait()
ok(alloc(MIB))
"""
    run_client(code, env)
    with (tmp_path / "usage.cache").open("rb") as region:
        region.seek(CONTEXT_BYTES)
        assert struct.unpack("<Q", region.read(8)) == (CONTEXT,)
