"""Making and joining a region: runs of a container, its devices, locks, rights, a full disk."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from corelib import EXT, GIB, MIB, Core, check, client, ffi, lib, refusal

INIT_LOCK = EXT + ffi.offsetof("struct vgpu_ext", "init_lock")
SLOT_LOCK = EXT + ffi.offsetof("struct vgpu_ext", "slot_lock")


@pytest.fixture
def path(tmp_path):
    """Where the region is to be."""
    return tmp_path / "region"


def lock(fd: int, at: int) -> None:
    """OFD write lock of one byte, as another program would take it."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, at, 1, 0))


def test_new_run_of_the_container_starts_afresh(path):
    """With another instance and nobody alive, limits, refusals and the dead of the last run are gone."""
    with Core(path, instance=7, claim=True) as core:
        core.limit(4 * GIB)
        assert not core.charge(5 * GIB)
        core.ext.ghost[0] = GIB
        core.ext.state = lib.VGPU_STATE_REFUSED
        core.ext.context_bytes[0] = 300 * MIB
        core.ext.word[0][9] = 77
        core.ext.slot_high = 10
        check(lib.vgpu_core_device(core.handle, b"GPU-a", 1))
    with Core(path, instance=8, claim=True) as core:
        assert not core.creator
        assert core.ext.instance == 8
        assert (core.region.limit[0], core.ext.refused[0], core.ext.refused_bytes[0]) == (0, 0, 0)
        assert (core.ext.state, core.used(), core.ext.peak[0]) == (0, 0, 0)
        assert core.ext.context_bytes[0] == 300 * MIB, "a measured size holds for the next run too"
        core.limit(8 * GIB)
        assert core.charge(8 * GIB)


@pytest.mark.parametrize("instance", [7, 0])
def test_same_run_keeps_its_limit(path, instance):
    """A later process of the same run, or one that cannot tell, finds what the first one recorded."""
    with Core(path, instance=7) as core:
        core.limit(4 * GIB)
    with Core(path, instance=instance) as core:
        assert core.ext.instance == 7
        assert lib.vgpu_core_limit(core.handle, 0) == 4 * GIB


def test_live_processes_keep_their_run(path):
    """While somebody of the recorded run lives, another instance changes nothing."""
    with Core(path, instance=7, claim=True) as core:
        core.limit(4 * GIB)
        core.charge(GIB)
        with Core(path, instance=8, claim=True) as other:
            assert other.ext.instance == 7
            assert lib.vgpu_core_limit(other.handle, 0) == 4 * GIB
            assert other.used() == GIB


def test_initialisation_lock_is_waited_for(path):
    """A creator that stands still is told apart after a bounded wait, one that is slow is waited for."""
    path.touch()
    with open(path, "r+b") as held:
        lock(held.fileno(), INIT_LOCK)
        begun = time.monotonic()
        assert refusal(path) == "EBUSY"
        assert 0.8 < time.monotonic() - begun < 5
        release = threading.Timer(0.03, held.close)
        release.start()
        Core(path).close()
        release.join()


def test_complete_region_needs_no_initialisation_lock(path):
    """Who joins a finished region does not wait for whoever holds that lock."""
    Core(path).close()
    with open(path, "r+b") as held:
        lock(held.fileno(), INIT_LOCK)
        with Core(path, claim=True) as core:
            assert core.slot == 0


def test_foreign_locks_are_respected(path):
    """A slot whose byte somebody else holds is taken by nobody, and is not swept."""
    with Core(path) as core, open(path, "r+b") as held:
        lock(held.fileno(), SLOT_LOCK)
        core.ext.word[0][0] = 77
        assert core.claim() == 1
        assert core.sweep() == 0
        assert core.live(0)
        assert core.used() == 77 * 4096
    # The slot of the foreign lock has no process: with the lock it is free.
    with Core(path, claim=True) as core:
        assert core.slot == 0
        assert core.used() == 0


def test_replaced_file_is_noticed(path):
    """While files come and go at the path, everybody who got in shares the one that stayed."""
    stop = threading.Event()

    def replace() -> None:
        while not stop.is_set():
            path.unlink(missing_ok=True)
            time.sleep(0.0003)

    thread = threading.Thread(target=replace)
    thread.start()
    try:
        for _ in range(300):
            try:
                Core(path, claim=True).close()
            except OSError as error:
                assert error.errno in (errno.EBUSY, errno.ESTALE)
    finally:
        stop.set()
        thread.join()
    with Core(path, claim=True) as one, Core(path, claim=True) as two:
        one.force(GIB)
        assert two.used() == GIB


UUID = b"GPU-%08d-0000-0000-0000-000000000000"


def device(core: Core, uuid: bytes, add: bool = True) -> int:
    """Index of the device, or a negative errno."""
    return lib.vgpu_core_device(core.handle, uuid, add)


def test_devices_are_found_by_uuid(path):
    """Processes agree on the index of a device whatever order they see them in (W-A4)."""
    with Core(path) as one, Core(path) as two:
        assert device(one, UUID % 5, add=False) == -errno.ENOENT
        assert [device(one, UUID % i) for i in (5, 3, 5)] == [0, 1, 0]
        assert [device(two, UUID % i) for i in (4, 3, 5)] == [2, 1, 0]
        assert one.region.device_num == 3
        assert ffi.string(one.region.uuids[2]) == UUID % 4


def test_more_devices_than_the_table_holds_are_refused(path):
    """The seventeenth device is refused and overwrites nothing."""
    with Core(path) as core:
        assert [device(core, UUID % i) for i in range(16)] == list(range(16))
        limits = bytes(ffi.buffer(core.region.limit))
        assert device(core, UUID % 16) == -errno.ENOSPC
        assert device(core, UUID % 15) == 15
        assert bytes(ffi.buffer(core.region.limit)) == limits
        core.region.device_num = (1 << 64) - 1
        assert device(core, UUID % 16) == -errno.ENOSPC


@pytest.mark.parametrize("uuid", [b"", b" ", b"GPU 1", b"x" * 96, b"x" * 5000, b"\xff", b"a\n"])
def test_malformed_uuid_is_refused(path, uuid):
    """Only a printable name that fits is a uuid."""
    with Core(path) as core:
        assert device(core, uuid) == -errno.EINVAL
        assert device(core, b"x" * 95) == 0


def test_processes_add_devices_at_once(path):
    """Devices that several processes add at the same time get one index each."""
    with client() as first, client() as second:
        code = "[lib.vgpu_core_device(core.handle, b'GPU-%d' % i, 1) for i in {}]"
        for one in (first, second):
            one.join(path)
        answers = {}
        ways = (("range(8)", range(8)), ("range(7, -1, -1)", range(7, -1, -1)))
        threads = [
            threading.Thread(target=lambda o=o, w=w: answers.update({o.pid: o(code.format(w[0]))}))
            for o, w in zip((first, second), ways, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert answers[first.pid] == answers[second.pid][::-1]
        assert sorted(answers[first.pid]) == list(range(8))


def test_unwritable_file_is_refused(path):
    """Without the right to write there is no shared count: the caller is told (D6)."""
    Core(path).close()
    path.chmod(0o444)
    with client() as other:
        if os.geteuid() == 0:
            path.parent.chmod(0o755)
            os.chmod(path.parent.parent, 0o755)
            other(f"os.chdir({str(path.parent)!r})")
            other("os.setuid(1024)")
        assert other(f"Core({path.name if os.geteuid() == 0 else str(path)!r})") == -errno.EACCES


FULL = """
import sys
sys.path[:0] = {path!r}
from corelib import *
open({folder!r} + "/filler", "wb").write(bytes({filler}))
try:
    Core({folder!r} + "/region")
    print("opened")
except OSError as error:
    print(errno.errorcode[error.errno])
os.unlink({folder!r} + "/filler")
with Core({folder!r} + "/region", claim=True) as core:
    core.limit(GIB)
    print(core.charge(GIB), core.charge(1))
"""


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="needs root and unshare")
@pytest.mark.parametrize("filler", [3 * MIB, 2 * MIB, 1 * MIB])
def test_full_disk_is_told_and_no_signal(tmp_path, filler):
    """Where the file has no room the start is refused, not killed later; with room again it works."""
    folder = tmp_path / "disk"
    folder.mkdir()
    search = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
    code = FULL.format(path=search, folder=str(folder), filler=filler)
    script = f'mount -t tmpfs -o size=3m none {folder} && exec "$0" -c "$1"'
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, sys.executable, code], capture_output=True, text=True
    )
    if "permission denied" in done.stderr.lower():
        pytest.skip("mounting is not allowed here")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == ["ENOSPC", "True", "False"]


def test_a_crowd_waits_for_one_maker_alone(path):
    """While the maker of the file takes its time many wait; once it is complete none needs the lock."""
    path.touch()
    other = path.with_suffix(".other")
    Core(other).close()
    answers = []

    def join() -> None:
        with Core(path):
            answers.append(True)

    with open(path, "r+b") as held:
        lock(held.fileno(), INIT_LOCK)
        crowd = [threading.Thread(target=join) for _ in range(30)]
        for one in crowd:
            one.start()
        time.sleep(0.2)
        assert not answers
        held.write(other.read_bytes())
        held.flush()
        for one in crowd:
            one.join(timeout=5)
        assert len(answers) == 30
