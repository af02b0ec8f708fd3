"""Many processes of one container that start at once."""

from __future__ import annotations

import subprocess
import sys

import pytest
from conftest import RunClient, SimEnv

MIB = 1 << 20

# Says what the driver answered and holds what it got until told to end.
MEMBER = """
import sys
from simclient import *
ok(cu_init())
result, ctx = retain()
print(result, flush=True)
sys.stdin.readline()
"""

LOOK = """
from simclient import *
from contextcalls import *
start()
print(used(), sim_device_used())
"""


@pytest.mark.parametrize("measured", [False, True], ids=["first", "later"])
def test_contexts_of_a_crowd_stay_under_the_limit(
    sim_env: SimEnv, run_client: RunClient, measured: bool
) -> None:
    """24 processes start where five contexts fit: the others are refused, nothing is lost (B001, B176)."""
    env = sim_env(preload=True, limit="600m")
    if measured:
        run_client("from simclient import *\ninit()", env)
    members = [
        subprocess.Popen(
            [sys.executable, "-c", MEMBER], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(24)
    ]
    try:
        answers = [int(member.stdout.readline()) for member in members if member.stdout]
        assert set(answers) == {0, 2}
        charged, held = (int(word) for word in run_client(LOOK, env).stdout.split())
        assert charged == held == answers.count(0) * 106_954_752 <= 600 * MIB
        assert answers.count(0) >= (5 if measured else 1)
    finally:
        for member in members:
            member.communicate("\n")
    assert [member.returncode for member in members] == [0] * 24
