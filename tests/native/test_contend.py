"""Many processes under one quota, through the library, on the simulated GPU."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, SimEnv

CLIENT = Path(__file__).parent / "clients" / "contend.c"
ROUNDS = int(os.environ.get("CONTEND_ROUNDS", "10000"))
KILLS = int(os.environ.get("CONTEND_KILLS", "1000"))


@pytest.fixture(scope="module")
def contend(tmp_path_factory: pytest.TempPathFactory, sim_dir: Path) -> Path:
    """The client, linked to the simulated driver."""
    sys.path.insert(0, str(ROOT / "native"))
    import cffi_build

    target = tmp_path_factory.mktemp("contend") / "contend"
    include = f"-I{cffi_build.vendor_include()[0]}"
    command = [
        "gcc",
        "-O2",
        include,
        str(CLIENT),
        "-o",
        str(target),
        f"-L{sim_dir}",
        "-l:libcuda.so.1",
        "-lpthread",
    ]
    subprocess.run(command, check=True, capture_output=True)
    return target


def run(contend: Path, env: dict[str, str], *arguments: object) -> dict[str, float]:
    """The client's figures."""
    done = subprocess.run([contend, *map(str, arguments)], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return {key: float(value) for key, value in (pair.split("=") for pair in done.stdout.split())}


@pytest.mark.timeout(300)
def test_one_of_eight_wins_each_race(contend: Path, sim_env: SimEnv) -> None:
    """Of eight processes that ask for 0.6 of what is left at once, one is granted, each round (B032)."""
    seen = run(contend, sim_env(preload=True, limit="4147m"), "race", 8, ROUNDS)
    assert seen == {"none": 0, "one": ROUNDS, "more": 0, "bad": 0}


@pytest.mark.timeout(300)
def test_quota_of_the_killed_is_back_at_once(contend: Path, sim_env: SimEnv) -> None:
    """A process killed at random gives all back within 100 ms of its end; nobody waits (B033, B036, B044)."""
    seen = run(contend, sim_env(preload=True, limit="4147m"), "kill", KILLS, int(signal.SIGKILL))
    assert (seen["times"], seen["late"], seen["lost"]) == (KILLS, 0, 0)
    assert seen["longest_call_ms"] < 100


@pytest.mark.timeout(120)
def test_stopped_process_blocks_nobody(contend: Path, sim_env: SimEnv) -> None:
    """A process stopped at random, a lock held included, delays no other call beyond 100 ms (B037)."""
    seen = run(contend, sim_env(preload=True, limit="4147m"), "kill", 200, int(signal.SIGSTOP))
    assert (seen["times"], seen["late"], seen["lost"]) == (200, 0, 0)
    assert seen["longest_call_ms"] < 100
