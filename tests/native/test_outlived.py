"""Memory that outlives its maker in another process of the container stays charged to the container."""

from __future__ import annotations

import pytest
from conftest import RunClient, SimEnv

# The maker: allocates, says the handle, and waits for the end of its input.
MAKER = """
import sys
from simclient import *
init(0)
p = ok(alloc(600 * MIB))
print(ok(ipc_get(p)).hex(), flush=True)
if sys.stdin.readline().strip() == "free":
    ok(free(p))
    print("freed", flush=True)
    sys.stdin.read()
"""

HOLDER = f"""
from simclient import *
from vmmcalls import used
import subprocess, sys, time
init(0)
base = used()
PIPE = subprocess.PIPE
maker = subprocess.Popen([sys.executable, "-c", {MAKER!r}], stdin=PIPE, stdout=PIPE, text=True)
held = ok(ipc_open(bytes.fromhex(maker.stdout.readline())))

def soon(condition):
    end = time.monotonic() + 1
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()

def granted():
    result, p = alloc(600 * MIB)
    if result == 0:
        ok(free(p))
    return result == 0
"""

ENDS = {
    "killed": "maker.kill(); maker.wait()",
    "freed": "print('free', file=maker.stdin, flush=True); assert maker.stdout.readline() == 'freed\\n'",
}


@pytest.mark.parametrize("end", ENDS)
def test_memory_whose_maker_is_gone_is_charged_to_the_container(
    sim_env: SimEnv, run_client: RunClient, end: str
) -> None:
    """A peer keeps 600 MiB open when its maker freed it or was killed: no more fits under 1 GiB (B057)."""
    code = f"""
{ENDS[end]}
time.sleep(0.1)
assert not granted()
assert used() >= base + 600 * MIB
ok(ipc_close(held))
assert soon(granted)
maker.kill(); maker.wait()
assert soon(lambda: used() == base)
"""
    done = run_client(HOLDER + code, sim_env(preload=True, limit="1g"))
    assert done.stderr == ""


def test_a_third_process_is_refused_too(sim_env: SimEnv, run_client: RunClient) -> None:
    """What one process keeps open of a maker that is gone also counts for a process that shares nothing."""
    third = "from simclient import *; init(0); print(alloc(600 * MIB)[0])"
    code = f"""
maker.kill(); maker.wait()
time.sleep(0.1)
done = subprocess.run([sys.executable, "-c", {third!r}], capture_output=True, text=True)
assert done.stdout == "2\\n", done
ok(ipc_close(held))
"""
    done = run_client(HOLDER + code, sim_env(preload=True, limit="1200m"))
    assert done.stderr == ""


def test_sharing_alone_charges_nothing_twice(sim_env: SimEnv, run_client: RunClient) -> None:
    """While the maker lives its memory is charged once, however often others look (B057)."""
    code = """
for _ in range(20):
    p = ok(alloc(64 * MIB))
    ok(free(p))
    time.sleep(0.01)
full = used()
assert full - base < 600 * MIB + 120 * MIB, full
assert alloc(200 * MIB)[0] == 0
ok(ipc_close(held))
maker.kill(); maker.wait()
"""
    done = run_client(HOLDER + code, sim_env(preload=True, limit="1200m"))
    assert done.stderr == ""
