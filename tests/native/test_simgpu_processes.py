"""Processes on the simulated card: several at once, killed, stopped, forked, and in PID namespaces."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import time

import pytest
from conftest import SimEnv
from simgpu_ask import Client, ask, source

CONTEXT = 106_954_752

needs_namespaces = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("unshare"), reason="needs root and unshare"
)


def test_processes_share_one_card(sim_env: SimEnv) -> None:
    """What one takes the other sees, and what does not fit beside it is refused."""
    env = sim_env()
    with Client(env) as a, Client(env) as b:
        assert a("ok(alloc(10 * GIB)) > 0")
        assert b("[alloc(5 * GIB)[0], mem_info()[2] - mem_info()[1]]") == [2, 2 * CONTEXT + (10 << 30)]
        assert a("nvml_processes()") == {str(a.pid): CONTEXT + (10 << 30), str(b.pid): CONTEXT}
        a.kill()
        assert b("[ok(alloc(10 * GIB)) > 0, nvml_processes()]") == [True, {str(b.pid): CONTEXT + (10 << 30)}]


def test_a_killed_process_frees_everything_at_once(sim_env: SimEnv) -> None:
    """SIGKILL at random points of hammering children leaves nothing behind."""
    env = sim_env()
    hammer = source("""
        init(); print("go", flush=True)
        while True:
            p = ok(alloc(50 * MIB)); q = ok(alloc(4096)); ok(alloc_async(MIB)); ok(free(p)); ok(free(q))
            ok(mem_release(ok(mem_create(2 * MIB)))); ok(synchronize())
    """)
    with Client(env) as judge:
        for _ in range(12):
            child = subprocess.Popen(["python3", "-c", hammer], env=env, stdout=subprocess.PIPE)
            assert child.stdout and child.stdout.readline() == b"go\n"
            time.sleep(random.uniform(0, 0.05))
            child.kill()
            child.wait()
            child.stdout.close()
            assert judge("[sim_device_used(), len(nvml_processes())]") == [CONTEXT, 1]


def test_liveness_survives_closing_all_descriptors(sim_env: SimEnv) -> None:
    """An application that closes every descriptor keeps its memory."""
    env = sim_env()
    with Client(env, "init(); p = ok(alloc(GIB)); os.closerange(3, 256)") as a, Client(env) as b:
        assert b("sim_device_used()") == 2 * CONTEXT + (1 << 30)
        assert a("free(p)") == 0
        assert b("sim_device_used()") == 2 * CONTEXT


def test_a_stopped_process_blocks_nobody(sim_env: SimEnv) -> None:
    """SIGSTOP at random points of allocation: others go on, and its memory stays its own."""
    env = sim_env()
    loop = "init()\ndef spin():\n    while True: ok(free(ok(alloc(3 * MIB))))\n"
    with Client(env, loop) as a, Client(env) as b:
        assert a.process.stdin
        a.process.stdin.write("spin()\n")
        a.process.stdin.flush()
        for _ in range(30):
            time.sleep(random.uniform(0, 0.01))
            os.kill(a.pid, signal.SIGSTOP)
            start = time.monotonic()
            assert b("[free(ok(alloc(GIB))), len(nvml_processes())]") == [0, 2]
            assert time.monotonic() - start < 1
            os.kill(a.pid, signal.SIGCONT)


def test_a_forked_child_is_not_initialised_and_takes_nothing_along(sim_env: SimEnv) -> None:
    """In the child of an initialised process each call answers NOT_INITIALIZED, and its end frees nothing."""
    code = """
        init(); p = ok(alloc(GIB)); out, end = os.pipe()
        child = os.fork()
        if child == 0:
            r = (alloc(1)[0], cu_init(), device_count()[0], free(p), call("cuCtxSynchronize"))
            os.write(end, json.dumps(r).encode()); os._exit(0)
        os.waitpid(child, 0); say(json.loads(os.read(out, 99)), used(mib=False) - 106954752 >> 20, free(p))
    """
    assert ask(sim_env(), code) == [[3] * 5, 1024, 0]


def test_a_child_of_an_uninitialised_process_is_a_process_of_its_own(sim_env: SimEnv) -> None:
    """Loading the driver before the fork harms nobody."""
    code = """
        v = i32(); call("cuDriverGetVersion", C.byref(v)); child = os.fork()
        if child == 0:
            init(); ok(alloc(GIB)); os._exit(0 if sim_process_used(os.getpid()) > GIB else 1)
        status = os.waitpid(child, 0)[1]; init(); say(status, used(mib=False), sim_device_used())
    """
    assert ask(sim_env(), code) == [0, CONTEXT, CONTEXT]


def test_many_threads_keep_the_ledger(sim_env: SimEnv) -> None:
    """Eight threads allocating in one context end at nothing."""
    code = """
        ctx = init()
        def work():
            ok(set_current(ctx))
            for i in range(300): ok(free(ok(alloc(MIB + i)))); ok(free_async(ok(alloc_async(4096))))
        ts = [threading.Thread(target=work) for _ in range(8)]
        [t.start() for t in ts]; [t.join() for t in ts]; ok(synchronize())
        say(used(mib=False), sim_live_objects())
    """
    assert ask(sim_env(), code) == [CONTEXT, 2]


def test_two_that_fit_one_at_a_time_have_one_winner(sim_env: SimEnv) -> None:
    """Of four that ask 0.6 of the card at once exactly one gets it, in each of 60 rounds (B032)."""
    env = sim_env()
    clients = [Client(env) for _ in range(4)]
    try:
        for _ in range(60):
            at = time.clock_gettime(time.CLOCK_MONOTONIC) + 0.01
            for c in clients:
                assert c.process.stdin
                c.process.stdin.write(f"[time.sleep(max(0, {at} - time.monotonic())), alloc(9 * GIB)][1]\n")
                c.process.stdin.flush()
            won = []
            for c in clients:
                assert c.process.stdout
                result, p = eval(c.process.stdout.readline())
                won += [(c, p)] if result == 0 else []
            assert len(won) == 1
            assert won[0][0](f"free({won[0][1]})") == 0
    finally:
        for c in clients:
            c.__exit__()


@needs_namespaces
@pytest.mark.root
def test_nvml_lists_the_processes_of_the_namespace(sim_env: SimEnv) -> None:
    """Inside: its own, under its own PIDs, with true bytes. Outside: all, under the host's PIDs."""
    env = sim_env()
    inside = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", "python3", "-c"]
    loop = "\nfor line in sys.stdin: say(eval(line))\n"
    with Client(env) as host:
        host("ok(alloc(GIB)) > 0")
        box = subprocess.Popen(
            [*inside, source("init(); p = ok(alloc(2 * GIB))") + loop],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert box.stdin and box.stdout
            box.stdin.write("[me, nvml_processes()]\n")
            box.stdin.flush()
            pid, listed = eval(box.stdout.readline())
            assert listed == {str(pid): CONTEXT + (2 << 30)}
            seen = {int(p): n for p, n in host("nvml_processes()").items()}
            assert seen.pop(host.pid) == CONTEXT + (1 << 30)
            [(outer, size)] = seen.items()
            assert size == CONTEXT + (2 << 30)
            with open(f"/proc/{outer}/status") as status:
                assert f"NSpid:\t{outer}\t{pid}\n" in status.read()
        finally:
            assert box.stdin and box.stdout
            box.stdin.close()
            box.wait(timeout=20)
            box.stdout.close()


@needs_namespaces
@pytest.mark.root
def test_without_a_proc_of_its_own_nvml_lists_nothing(sim_env: SimEnv) -> None:
    """A namespace that still sees the host's /proc gets an empty list."""
    code = source("init(); say(nvml_processes())")
    done = subprocess.run(
        ["unshare", "--pid", "--fork", "python3", "-c", code],
        env=sim_env(),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "{}\n"


@needs_namespaces
@pytest.mark.root
def test_older_drivers_list_host_pids(sim_env: SimEnv) -> None:
    """SIMGPU_NVML_HOSTPIDS: the process does not find itself in the list of its container."""
    code = source("init(); say(me in nvml_processes(), len(nvml_processes()))")
    done = subprocess.run(
        ["unshare", "--pid", "--fork", "--mount-proc", "python3", "-c", code],
        env=sim_env(SIMGPU_NVML_HOSTPIDS="1"),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "[false, 1]\n"
