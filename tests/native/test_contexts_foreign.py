"""Old drivers list processes by ids of the host, where ours may be somebody else's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import SimEnv

INITIAL = "pid:[4026531836]"

NEIGHBOUR = """
import sys
from simclient import *
init()
ok(alloc(1000 * MIB))
print("ready", flush=True)
sys.stdin.read()
"""

# Makes a process with a chosen id in a namespace of its own.
CHOSEN = """
import os, sys
with open("/proc/sys/kernel/ns_last_pid", "w") as last:
    last.write(str(int(sys.argv[1]) - 1))
child = os.fork()
if child == 0:
    assert os.getpid() == int(sys.argv[1])
    os.execv(sys.executable, [sys.executable, "-c", sys.argv[2]])
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""

TENANT = """
from simclient import *
from contextcalls import *
start()
ok(retain())
estimate = used()
assert 100 * MIB < estimate < 200 * MIB, estimate
ok(set_current(ok(retain())))
ok(alloc(50 * MIB))
assert used() == estimate + 50 * MIB, used()
ok(release()); ok(release())
assert used() == 0
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root for a PID namespace")
@pytest.mark.skipif(os.readlink("/proc/self/ns/pid") != INITIAL, reason="not in the initial PID namespace")
def test_a_strangers_figure_is_not_taken_for_ours(sim_env: SimEnv, tmp_path: Path) -> None:
    """Where a host process has our id in NVML's list, the estimates stay instead of its bytes (B125)."""
    neighbour = subprocess.Popen(
        [sys.executable, "-c", NEIGHBOUR],
        env=sim_env(SIMGPU_NVML_HOSTPIDS="1"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert neighbour.stdout and neighbour.stdout.readline() == "ready\n"
        command = [
            "unshare",
            "-p",
            "-f",
            "--mount-proc",
            sys.executable,
            "-c",
            CHOSEN,
            str(neighbour.pid),
            TENANT,
        ]
        tenant = subprocess.run(
            command,
            env=sim_env(preload=True, limit="1g", SIMGPU_NVML_HOSTPIDS="1"),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (tenant.returncode, tenant.stderr) == (0, "")
    finally:
        neighbour.communicate("")
