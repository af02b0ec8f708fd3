"""Life and death of slots: fork, exec, kill, PID reuse, PID namespaces, users, deleted files."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
from corelib import GIB, MIB, Client, Core, client, lib

LIMIT = 4 * GIB
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


def forge(core: Core, slot: int, pid: int, started: int, size: int = GIB) -> None:
    """Writes an unlocked slot that claims to be of `pid`."""
    core.region.procs[slot].pid = pid
    core.region.procs[slot].status = 1
    core.ext.info[slot].start_time = started
    core.ext.info[slot].pid_ns = os.stat("/proc/self/ns/pid").st_ino
    core.ext.word[0][slot] = size // 4096
    core.ext.slot_high = max(core.ext.slot_high, slot + 1)


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
        assert core.sweep() == 1
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


def test_table_of_dead_slots_is_used_again(core, path):
    """1,024 dead slots hold nobody up (W-B6)."""
    for slot in range(1, 1024):
        forge(core, slot, 4_000_000 + slot, 77, MIB)
    core.region.proc_num = 1024
    core.charge(GIB)
    with Core(path, claim=True) as other:
        assert other.slot == 1
        other.limit(LIMIT)
        assert other.charge(3 * GIB)
        assert not other.charge(1)
    assert core.used() == GIB


def test_full_table_is_told(path):
    """With 1,024 live slots the next process is told so, and a freed one is found."""
    held = [Core(path, claim=True) for _ in range(1024)]
    assert sorted(core.slot for core in held) == list(range(1024))
    with Core(path) as late:
        with pytest.raises(OSError) as caught:
            late.claim()
        assert caught.value.errno == errno.EUSERS
        held.pop(500).close()
        assert late.claim() == 500
        with pytest.raises(OSError) as caught:
            late.claim()
        assert caught.value.errno == errno.EALREADY
    for core in held:
        core.close()


def test_settle_lock_of_a_former_owner_goes_with_its_slot(core, path):
    """Who claims a slot is not taken for the holder of a lock that its predecessor left."""
    core.ext.lock = 2
    with Core(path, claim=True) as other:
        assert other.slot == 1
        assert core.ext.lock == 0


@root
@pytest.mark.root
@pytest.mark.skipif(not shutil.which("unshare"), reason="needs unshare")
def test_nested_pid_namespace_is_a_neighbour(core, path):
    """Processes that cannot see each other's PIDs count each other, live and dead (B040)."""
    if subprocess.run(["unshare", "-pf", "--mount-proc", "true"], capture_output=True).returncode:
        pytest.skip("PID namespaces are not allowed here")
    core.charge(GIB)
    with client("unshare", "-pf", "--mount-proc", "--kill-child") as other:
        assert other.pid == 1
        assert other.join(path, LIMIT) == 1
        assert core.region.procs[1].pid == 1
        assert other("core.charge(2 * GIB)")
        assert core.sweep() == other("core.sweep()") == 0
        assert core.live(1)
        assert other("core.live(0)")
        assert core.used() == other("core.used()") == 3 * GIB
    deadline = time.monotonic() + 2
    while core.used() != GIB and time.monotonic() < deadline:
        time.sleep(0.01)
    assert core.used() == GIB


@root
@pytest.mark.root
@pytest.mark.parametrize("users", [(0, 1024), (1024, 0), (1024, 1025)])
def test_users_share_one_file(users):
    """Whoever makes the region, every user of the container can use it, whatever the umask (B141)."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o1777)
        path = Path(folder) / "region"
        with client() as first, client() as second:
            for number, (user, one) in enumerate(zip(users, (first, second), strict=True)):
                one("os.umask(0o077)")
                one(f"os.setuid({user})")
                assert one.join(path, LIMIT) == number
                assert one("core.charge(GIB)")
            assert first("core.used()") == second("core.used()") == 2 * GIB
            first.end()
            assert second("core.sweep()") == 1
            assert second("core.used()") == GIB
        assert path.stat().st_mode & 0o777 == 0o666
