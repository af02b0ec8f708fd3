"""Stream-ordered allocations by several threads and processes at once, on the simulated GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from conftest import RunClient, SimEnv

# A call that is undone may be above the limit while it runs, so the figure is read where nobody is in one.
WORK = """
import fcntl, os, random, sys, threading
from simclient import *
from poolcalls import *
LIMIT = 1024 * MIB
ctx = init(0)
over, odd = [], []
class Calls:
    \"\"\"Shared by all calls of all processes; `alone` is between them.\"\"\"
    def __init__(self):
        self.file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
    def __enter__(self):
        fcntl.flock(self.file, fcntl.LOCK_SH)
    def __exit__(self, *_):
        fcntl.flock(self.file, fcntl.LOCK_UN)
    def alone(self):
        fcntl.flock(self.file, fcntl.LOCK_EX)
        used = sim_device_used()
        fcntl.flock(self.file, fcntl.LOCK_UN)
        return used
def work(seed, steps):
    ok(set_current(ctx))
    calls = Calls()
    rnd, s, live = random.Random(seed), stream(), []
    pool = ok(pool_create()) if seed % 2 else 0
    for step in range(steps):
        with calls:
            if rnd.random() < 0.55:
                size = rnd.choice([1, MIB, 5 * MIB, 31 * MIB, 33 * MIB, 100 * MIB, 300 * MIB])
                result, at = from_pool(size, pool, s) if pool else alloc_async(size, s)
                if result == 0:
                    live.append(at)
                elif result != OOM:
                    odd.append(result)
            elif live:
                ok(free_async(live.pop(rnd.randrange(len(live))), s))
            if rnd.random() < 0.05:
                ok(sync(s))
        if step % 10 == 0:
            over.extend(used for used in [calls.alone()] if used > LIMIT)
    for at in live:
        ok(free_async(at, s))
    ok(sync(s))
    if pool:
        ok(pool_destroy(pool))
def run(seeds, steps):
    threads = [threading.Thread(target=work, args=(seed, steps)) for seed in seeds]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    ok(synchronize())
    assert not odd and not over, (odd, over)
"""


def test_threads_of_one_process_converge(sim_env: SimEnv, run_client: RunClient, tmp_path: Path) -> None:
    """Threads that grow and free pools at once end with the driver's figure, never above the limit (B046)."""
    code = """
run(range(6), 800)
assert charged() == 0
assert refusals() > 0
"""
    done = run_client(WORK + code, sim_env(preload=True, limit="1g"), str(tmp_path / "calls"))
    assert done.stderr == ""


def test_processes_share_one_quota(sim_env: SimEnv, tmp_path: Path) -> None:
    """Processes of one container together stay under the limit, whatever each asks (B032)."""
    env = sim_env(preload=True, limit="1g")
    code = WORK + "print('ready', flush=True); sys.stdin.readline(); run([int(sys.argv[2])], 800)"
    peers = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path / "calls"), str(seed)],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for seed in range(4)
    ]
    assert [peer.stdout.readline() for peer in peers if peer.stdout] == ["ready\n"] * 4
    for peer in peers:
        assert peer.stdin
        peer.stdin.write("go\n")
        peer.stdin.flush()
    ends = [(peer.communicate(timeout=60)[1], peer.returncode) for peer in peers]
    assert ends == [("", 0)] * 4


def test_one_of_two_that_cannot_both_fit_wins(sim_env: SimEnv) -> None:
    """Two processes ask for more than half of the room at once: one is granted, each time (B040)."""
    code = """
import sys
from simclient import *
from poolcalls import *
init(0)
s = stream()
print("ready", flush=True)
for line in sys.stdin:
    result, at = alloc_async(int(line), s)
    print(result, flush=True)
    sys.stdin.readline()
    if result == 0:
        ok(free_async(at, s)); ok(sync(s))
    print("done", flush=True)
"""
    env = sim_env(preload=True, limit="1g")
    peers = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        for _ in range(2)
    ]

    def tell(text: str) -> list[str]:
        for peer in peers:
            assert peer.stdin
            peer.stdin.write(text + "\n")
        return hear()

    def hear() -> list[str]:
        return [peer.stdout.readline().strip() for peer in peers if peer.stdout]

    try:
        assert hear() == ["ready"] * 2
        for round_ in range(150):
            size = 500 + round_ % 32
            assert sorted(tell(str(size << 20))) == ["0", "2"]
            assert tell("free") == ["done"] * 2
    finally:
        for peer in peers:
            peer.communicate(timeout=20)
    assert [peer.returncode for peer in peers] == [0, 0]
