"""What is found in the region's place: foreign, older, newer, cut, special files; limits of old regions."""

from __future__ import annotations

import errno
import fcntl
import gzip
import os
import random
import socket
import struct
from pathlib import Path

import pytest
from corelib import CREATE, EXT, GIB, READ, Core, ffi, lib, refusal

DATA = Path(__file__).resolve().parents[1] / "data"
SIZE = lib.VGPU_REGION_SIZE
HAMI_SIZE = lib.VGPU_HAMI_SIZE


@pytest.fixture
def path(tmp_path):
    """Where the region is to be."""
    return tmp_path / "region"


def made(path: Path) -> bytearray:
    """The bytes of a fresh region; the file is gone again."""
    Core(path).close()
    data = bytearray(path.read_bytes())
    path.unlink()
    return data


def hami(major: int = 1, minor: int = 2, size: int = HAMI_SIZE + 1) -> bytearray:
    """A HAMi-core file with one device of 4 GiB and one process of 1 GiB."""
    data = bytearray(size)
    struct.pack_into("<iII", data, 0, 19920718, major, minor)
    struct.pack_into("<QQ", data, 16, 4321, 1)
    struct.pack_into("<Q96s", data, 56, 1, b"GPU-11111111-2222-3333-4444-555555555555")
    struct.pack_into("<Q", data, 1600, 4 * GIB)
    struct.pack_into("<Q", data, 1728, 50)
    struct.pack_into("<ii", data, 1856, 4321, 99)
    struct.pack_into("<QQQQQ", data, 1856 + 8, 0, 0, GIB, 0, GIB)
    struct.pack_into("<i", data, 1856 + 1928, 1)
    if size >= HAMI_SIZE:
        struct.pack_into("<iiii", data, 2008896, 1, 1, 2, 1)
    return data


def usable(path: Path) -> None:
    """Fails unless the region at `path` charges and refuses."""
    with Core(path, claim=True) as core:
        core.limit(4 * GIB)
        assert core.charge(4 * GIB)
        assert not core.charge(1)


def test_reader_needs_a_file(path):
    """Reading makes nothing."""
    assert refusal(path, READ) == "ENOENT"
    assert not path.exists()
    assert refusal(path.parent / "none" / "region") == "ENOENT"
    assert refusal(Path("")) in ("ENOENT", "EISDIR")
    assert refusal(path.parent / ("x" * 5000)) == "ENAMETOOLONG"


def test_reader_attaches_and_changes_nothing(path):
    """A reader sees sums and limits, takes no slot, and leaves the file as it was."""
    with Core(path, claim=True) as core:
        core.limit(4 * GIB)
        core.charge(GIB)
        before = path.read_bytes()
        with Core(path, READ) as reader:
            assert reader.used() == GIB
            assert lib.vgpu_core_limit(reader.handle, 0) == 4 * GIB
            assert reader.live(0)
            assert not reader.live(1)
            assert lib.vgpu_used_slot(reader.handle, 0, 0) == GIB
            assert reader.sweep() == 0
            assert not reader.creator
            for call in (reader.claim, lambda: reader.charge(1)):
                with pytest.raises(OSError) as caught:
                    call()
                assert caught.value.errno == errno.EBADF
        assert path.read_bytes() == before


@pytest.mark.parametrize(("minor", "size"), [(1, 0), (1, 1), (2, 0), (2, 1)])
def test_old_region_keeps_its_limit(path, minor, size):
    """A file of HAMi-core 1.1 or 1.2 becomes ours: limit and uuid stay, its processes go (W-A19, W-A20)."""
    path.write_bytes(hami(minor=minor, size=HAMI_SIZE + size))
    assert refusal(path, READ) == "EPROTO"
    with Core(path, claim=True) as core:
        assert core.creator
        assert core.region.limit[0] == lib.vgpu_core_limit(core.handle, 0) == 4 * GIB
        assert core.region.sm_limit[0] == 50
        assert lib.vgpu_core_device(core.handle, b"GPU-11111111-2222-3333-4444-555555555555", 0) == 0
        assert (core.region.owner_pid, core.region.device_num) == (0, 1)
        assert core.used() == 0
        assert core.region.proc_num == 1
        assert core.region.procs[0].pid == os.getpid()
        assert core.region.procs[0].used[0].total == 0
        assert core.charge(4 * GIB)
        assert not core.charge(1)
    assert path.stat().st_size == SIZE
    with Core(path) as core:
        assert not core.creator
        assert core.region.limit[0] == 4 * GIB


RECORDED = {
    "hamicore-1.2-one-process-3072MiB": (4_348_444_672, 0),
    "hamicore-1.2-two-processes": (8_589_934_592, 50),
    "hamicore-1.2-after-exit": (8_589_934_592, 50),
}


@pytest.mark.parametrize(("name", "limits"), RECORDED.items())
def test_recorded_region_keeps_its_limit(path, name, limits):
    """Files that HAMi-core wrote on a real GPU hold the next process to their limit."""
    path.write_bytes(gzip.decompress((DATA / f"{name}.cache.gz").read_bytes()))
    with Core(path, claim=True) as core:
        assert core.region.limit[0] == limits[0]
        assert core.region.sm_limit[0] in (limits[1], 100 if limits[1] == 0 else limits[1])
        assert core.region.device_num >= 1
        assert core.used() == 0
        assert core.charge(limits[0])
        assert not core.charge(1)


def test_senseless_values_of_an_old_region_are_dropped(path):
    """Limits past 2^63, shares past 100 and unprintable uuids are not taken over."""
    data = hami()
    struct.pack_into("<QQ", data, 1600, (1 << 64) - 1, 5 * GIB)
    struct.pack_into("<QQ", data, 1728, 101, 100)
    struct.pack_into("<Q", data, 56, 3)
    data[64 + 96 : 64 + 192] = b"\xff" * 96
    path.write_bytes(data)
    with Core(path) as core:
        assert list(core.region.limit)[:3] == [0, 5 * GIB, 0]
        assert list(core.region.sm_limit)[:3] == [0, 100, 0]
        assert core.region.device_num == 1
        assert ffi.string(core.region.uuids[1]) == b""


@pytest.mark.parametrize(
    ("major", "minor", "size"),
    [
        (1, 1, 2008984),
        (1, 1, 2008985),
        (1, 2, 2008984),
        (1, 3, HAMI_SIZE + 1),
        (2, 0, HAMI_SIZE + 1),
        (0, 0, HAMI_SIZE + 1),
        (1, 0, HAMI_SIZE),
        (1, 2, HAMI_SIZE - 1),
        (1, 2, 1197896),
        (1, 2, SIZE + 1),
    ],
)
def test_other_versions_are_refused(path, major, minor, size):
    """A layout that we do not share is refused and left as it is, never misread."""
    data = bytes(hami(major, minor, size))
    path.write_bytes(data)
    for mode in (CREATE, READ):
        assert refusal(path, mode) == "EPROTO"
    assert path.read_bytes() == data


@pytest.mark.parametrize("offset", [EXT + 8, EXT])
def test_other_extensions_are_refused(path, offset):
    """Another size or magic of our own part."""
    data = made(path)
    data[offset] ^= 2
    path.write_bytes(data)
    for mode in (CREATE, READ):
        assert refusal(path, mode) == "EBADF"
    assert path.read_bytes() == data


def test_another_version_of_ours_is_replaced_when_nobody_holds_it(path):
    """A region of another layout is left as it is while a lock in it is held, wherever; then a new one
    takes its place. A reader never replaces anything."""
    data = made(path)
    data[EXT + 4] ^= 2
    path.write_bytes(data)
    with path.open("r+b") as held:
        fcntl.lockf(held, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, SIZE - 1)
        for mode in (CREATE, READ):
            assert refusal(path, mode) == "EPROTO"
        assert path.read_bytes() == data
    assert refusal(path, READ) == "EPROTO"
    assert path.read_bytes() == data
    assert refusal(path, CREATE) == ""
    assert path.read_bytes()[EXT + 4] == data[EXT + 4] ^ 2


@pytest.mark.parametrize("seed", range(40))
def test_random_files_are_refused(path, seed):
    """Bytes that are not a region stay untouched."""
    dice = random.Random(seed)
    data = dice.randbytes(dice.choice([1, 3, 64, 4096, HAMI_SIZE, HAMI_SIZE + 1, EXT + 64, SIZE, SIZE + 999]))
    path.write_bytes(data)
    for mode in (CREATE, READ):
        assert refusal(path, mode) == "EBADF"
    assert path.read_bytes() == data


@pytest.mark.parametrize("size", [SIZE - 1, SIZE + 1, EXT + 64, EXT + 8])
def test_cut_region_is_refused(path, size):
    """A region of ours that lost its end, or got a longer one, is refused before it is mapped."""
    data = made(path)
    path.write_bytes(bytes(data.ljust(size, b"\0")[:size]))
    assert refusal(path, READ) in ("EBADF", "EPROTO")
    assert refusal(path) == "EBADF"


@pytest.mark.parametrize("size", [0, 1, 63, 4096, HAMI_SIZE, EXT, EXT + 4096, SIZE])
def test_half_made_file_is_finished(path, size):
    """What a creator leaves when it is killed before its first word: zeros of any length."""
    path.write_bytes(bytes(size))
    assert refusal(path, READ) == "EBADF"
    with Core(path) as core:
        assert core.creator
    usable(path)


@pytest.mark.parametrize("cleared", [(EXT, 4), (EXT, 64), (EXT, 4096), (0, 4)])
def test_half_written_file_is_finished(path, cleared):
    """A file killed between its first word and its last is made anew."""
    data = made(path)
    at, length = cleared
    data[at : at + length] = bytes(length)
    if at == 0:
        data[EXT : EXT + 4] = bytes(4)
    path.write_bytes(data)
    with Core(path) as core:
        assert core.creator
    usable(path)


def test_special_files_are_refused(path):
    """Nothing but a regular file is opened, and none of them holds us up."""
    path.mkdir()
    assert refusal(path) == refusal(path, READ) == "EISDIR"
    path.rmdir()
    os.mkfifo(path)
    assert refusal(path) == refusal(path, READ) == "EBADF"
    path.unlink()
    path.symlink_to(path.parent / "elsewhere")
    assert refusal(path) == refusal(path, READ) == "ELOOP"
    assert not (path.parent / "elsewhere").exists()
    path.unlink()
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(path))
        assert refusal(path) == "ENXIO"
    assert refusal(Path("/dev/null")) == "EBADF"
    assert refusal(path / "below") == "ENOTDIR"
