"""Life and death of slots: fork, exec, kill, PID reuse, PID namespaces, users, deleted files."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from corelib import GIB, LIMIT, Client, Core, client, forge, lib

root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture
def path(tmp_path):
    """Where the region is."""
    return tmp_path / "region"


@pytest.fixture
def core(path):
    """This process's slot, number 0."""
    with Core(path, claim=True) as made:
        made.limit(LIMIT)
        yield made


def start_time(pid: int | str) -> int:
    """Field 22 of /proc/<pid>/stat."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def test_slots_are_seen_by_each_other(core, path):
    """A later process sees what earlier ones hold, and its own (B034)."""
    core.charge(GIB)
    with client() as other:
        assert other.join(path, LIMIT) == 1
        assert other("core.used()") == GIB
        assert other("core.charge(2 * GIB)")
        assert core.used() == 3 * GIB
        assert lib.vgpu_used_slot(core.handle, 1, 0) == 2 * GIB
        assert core.region.procs[1].pid == other.pid
        assert core.live(1)
    assert not core.live(1)
    assert core.sweep() == 1
    assert core.used() == GIB
    assert core.region.procs[1].status == core.region.procs[1].pid == 0
    assert core.region.proc_num == 2, "slots never move"


def test_refused_process_finds_the_dead(core, path):
    """A charge that needs the room of a killed process gets it by itself (B033)."""
    for _ in range(20):
        with client() as other:
            other.join(path, LIMIT)
            assert other("core.charge(3 * GIB)")
        ended = time.monotonic()
        while not core.charge(2 * GIB):
            time.sleep(0.002)
        assert time.monotonic() - ended < 0.1
        core.give_back(2 * GIB)


def test_clean_end_frees_the_slot(core, path):
    """Closing gives slot and bytes up without a sweep."""
    with Core(path, claim=True) as second:
        second.charge(GIB)
        assert core.used() == GIB
    assert core.used() == 0
    assert not core.live(1)


def test_child_has_a_stale_handle_and_a_slot_of_its_own(core, path):
    """A forked child neither uses nor keeps its parent's slot, and may attach anew (W-B24)."""
    core.charge(GIB)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        answers = [lib.vgpu_core_is_stale(core.handle)]
        core.close()
        own = Core(path)
        answers += [lib.vgpu_core_is_stale(own.handle), own.claim(), own.charge(GIB), own.used() // GIB]
        os.write(write, repr(answers).encode())
        signal.pause()
    try:
        assert eval(os.read(read, 100)) == [1, 0, 1, True, 2]
        assert not lib.vgpu_core_is_stale(core.handle)
        assert core.used() == 2 * GIB
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(read)
        os.close(write)
    assert core.sweep() == 1
    assert core.used() == GIB


def test_child_does_not_keep_its_parents_slot(core, path):
    """The slot dies with the process that claimed it, not with the last of its children."""
    with client() as other:
        other.join(path)
        other("core.force(GIB)")
        other("child = os.fork() or __import__('time').sleep(60)")
        child = other("child")
    try:
        assert not core.live(1)
        assert core.sweep() == 1
        assert core.used() == 0
    finally:
        os.kill(child, signal.SIGKILL)


def test_closing_every_descriptor_keeps_the_slot(core, path):
    """A program that closes all descriptors at start, as daemons do, stays counted."""
    with client() as other:
        other.join(path)
        other("core.force(GIB)")
        other("os.closerange(3, 4096)")
        assert core.live(1)
        assert core.sweep() == 0
        assert core.used() == GIB


def test_region_leaves_no_descriptor(core, path):
    """Neither opening nor claiming leaves a descriptor to the program (W-B24)."""
    before = sorted(os.listdir("/proc/self/fd"))
    with Core(path, claim=True) as other:
        other.sweep()
        assert sorted(os.listdir("/proc/self/fd")) == before


def test_exec_frees_the_slot(core, path):
    """A process that becomes another program gave its memory up: same pid and start time, no slot."""
    with client() as other:
        other.join(path)
        other("core.force(GIB)")
        assert core.used() == GIB
        print("os.execvp('sleep', ['sleep', '60'])", file=other.process.stdin, flush=True)
        while Path(f"/proc/{other.pid}/comm").read_text() != "sleep\n":
            time.sleep(0.005)
        # The kernel drops the old address space, and the lock with it, a moment after the name changes.
        end = time.monotonic() + 1
        while (swept := core.sweep()) == 0 and time.monotonic() < end:
            time.sleep(0.005)
        assert swept == 1
        assert core.used() == 0


def test_reused_pid_is_not_its_predecessor(core):
    """A slot whose pid now belongs to another program is freed, and that program is left alone (B040)."""
    sleeper = subprocess.Popen(["sleep", "60"])
    try:
        forge(core, 5, sleeper.pid, start_time(sleeper.pid) - 1)
        assert core.used() == 0
        assert core.region.procs[5].pid == 0
        assert sleeper.poll() is None
    finally:
        sleeper.kill()
        sleeper.wait()


DYING = """
import ctypes, os, sys, threading, time
libc = ctypes.CDLL(None)
def stay():
    while open(f"/proc/{os.getpid()}/stat").read().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.001)
    print("zombie", flush=True)
    time.sleep(60)
threading.Thread(target=stay).start()
libc.syscall(60 if os.uname().machine == "x86_64" else 93, 0)
"""


def test_slot_stays_while_its_process_is_dying(core):
    """The address space and lock are gone, GPU memory may not be: counted until the process is over."""
    dying = subprocess.Popen(["python3", "-c", DYING], stdout=subprocess.PIPE, text=True)
    try:
        assert dying.stdout.readline() == "zombie\n"
        forge(core, 1, dying.pid, start_time(dying.pid))
        assert core.sweep() == 0
        assert core.used() == GIB
        with Core(core_path(core), claim=True) as other:
            assert other.slot == 2, "a dying slot is not given on"
    finally:
        dying.kill()
        dying.wait()
        dying.stdout.close()
    assert core.sweep() == 1
    assert core.used() == 0


def core_path(core: Core) -> str:
    """The region's path, as the kernel knows it."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith("/region"):
            return line.split()[-1]
    raise AssertionError("not mapped")


def test_zombie_does_not_keep_its_slot(core, path):
    """A killed process that nobody waits for is dead: its bytes are back before it is reaped."""
    other = Client()
    other.join(path)
    other("core.force(GIB)")
    other.process.kill()
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
    assert core.sweep() == 1
    assert core.used() == 0
    other.end()


@pytest.mark.parametrize("name", ["a Z", "x) Z 1 (", "Z", ") X"])
def test_process_name_does_not_kill(core, path, name):
    """A live process stays counted whatever it calls itself, also when only /proc can tell (W-A17)."""
    with client() as other:
        other.join(path)
        other("core.force(GIB)")
        other(f"open('/proc/self/comm', 'w').write({name!r})")
        path.unlink()
        assert core.live(1)
        assert core.sweep() == 0
        assert core.used() == GIB
    assert not core.live(1)
    assert core.sweep() == 1
    assert core.used() == 0


def test_deleted_file_goes_on(core, path):
    """Attached processes go on over a deleted file and one that takes its place; claiming in it fails."""
    late = Core(path)
    core.charge(GIB)
    path.unlink()
    assert core.charge(GIB)
    for _ in range(2):
        with pytest.raises(OSError) as caught:
            late.claim()
        assert caught.value.errno == errno.ESTALE
        with Core(path, claim=True) as fresh:
            assert fresh.used() == 0, "the second time it is another file"
            assert core.used() == 2 * GIB
            assert core.live(core.slot)
    late.close()
