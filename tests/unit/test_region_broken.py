"""The region reader on files that are old, damaged, hostile or being written."""

from __future__ import annotations

import os
import random
import struct
import time
from pathlib import Path

import pytest
from region_files import (
    EXT,
    FIRST_SIZE,
    HAMI_SIZE,
    MAGIC,
    MIB,
    OUR_SIZE,
    SLOT_SIZE,
    SLOTS,
    TAIL,
    TRANSITIONAL_SIZE,
    V0_SIZE,
    RegionFile,
    Slot,
    Spec,
    uuid,
)

from isolator import region
from isolator.region import Why

HEAD = struct.pack("<iII", MAGIC, 1, 2)


def _why(path: Path) -> Why:
    with pytest.raises(region.RegionError) as raised:
        region.read(path)
    assert str(path) in str(raised.value)
    return raised.value.why


@pytest.mark.parametrize(
    ("head", "size", "why"),
    [
        (b"", 0, Why.EMPTY),
        (HEAD[:7], 7, Why.TRUNCATED),
        (HEAD, HAMI_SIZE - 1, Why.TRUNCATED),
        (HEAD, OUR_SIZE + 1, Why.TOO_BIG),
        (HEAD, 1 << 40, Why.TOO_BIG),
        (b"\0" * 12, OUR_SIZE, Why.UNFINISHED),
        (b"\x7fELF" + HEAD, OUR_SIZE, Why.NOT_REGION),
        (struct.pack("<iII", MAGIC, 0, 0), FIRST_SIZE + 1, Why.OLD_LAYOUT),
        (struct.pack("<iII", MAGIC, 0, 0), V0_SIZE + 1, Why.OLD_LAYOUT),
        (struct.pack("<iII", MAGIC, 1, 1), TRANSITIONAL_SIZE, Why.TRANSITIONAL),
        (struct.pack("<iII", MAGIC, 1, 1), TRANSITIONAL_SIZE + 1, Why.TRANSITIONAL),
        (struct.pack("<iII", MAGIC, 1, 3), HAMI_SIZE, Why.VERSION),
        (struct.pack("<iII", MAGIC, 2, 2), OUR_SIZE, Why.VERSION),
        (HEAD, OUR_SIZE, Why.UNFINISHED),
        (HEAD, HAMI_SIZE + 4096, Why.UNFINISHED),
    ],
)
def test_a_file_that_is_no_known_region_says_why(tmp_path: Path, head: bytes, size: int, why: Why) -> None:
    """B160: old, short, long, half-made and foreign files are told apart by size, magic and version."""
    path = tmp_path / "f"
    path.write_bytes(head)
    os.truncate(path, size)
    assert _why(path) is why


@pytest.mark.parametrize(
    ("at", "form", "value", "why"),
    [
        (56, "Q", 17, Why.BAD_COUNT),
        (56, "Q", 1 << 63, Why.BAD_COUNT),
        (TAIL, "i", -1, Why.BAD_COUNT),
        (TAIL, "i", 1025, Why.BAD_COUNT),
        (EXT, "I", 0, Why.UNFINISHED),
        (EXT, "I", 0x4952414C, Why.NOT_REGION),
        (EXT + 4, "I", 2, Why.VERSION),
        (EXT + 8, "Q", 0, Why.VERSION),
    ],
)
def test_a_word_that_cannot_be_refuses_the_file(
    tmp_path: Path, at: int, form: str, value: int, why: Why
) -> None:
    """Counts out of range and foreign extensions refuse the file, whatever else it says."""
    with RegionFile(tmp_path / "f") as file:
        region.read(file.path)
        file.put(at, form, value)
        assert _why(file.path) is why


def test_what_is_not_a_regular_file_is_never_opened(tmp_path: Path) -> None:
    """A FIFO without a writer, a folder and a link are refused at once."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    with RegionFile(tmp_path / "real"):
        (tmp_path / "link").symlink_to("real")
        start = time.monotonic()
        assert _why(tmp_path / "fifo") is Why.NOT_REGULAR
        assert _why(tmp_path / "folder") is Why.NOT_REGULAR
        with pytest.raises(OSError, match="symbolic links"):
            region.read(tmp_path / "link")
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    "text", ["", "GPU-", "GPU-xyz", 'GPU-"} 1\n', "\xff" * 96, uuid() + "é", "A" * 96, uuid()[:-1]]
)
def test_a_device_without_a_valid_uuid_is_left_out(tmp_path: Path, text: str) -> None:
    """Bytes that are no UUID never come out of the reader; the other devices keep their index."""
    with RegionFile(tmp_path / "f", Spec(uuids=[text, uuid(1)])) as file:
        found = region.read(file.path)
    assert [(d.index, d.uuid) for d in found.devices] == [(1, uuid(1))]
    assert found.invalid_uuids == 1


@pytest.mark.parametrize("word", [(1 << 64) - 4096, 1 << 44, (1 << 50) + 1])
def test_impossible_bytes_are_flagged_and_not_summed(tmp_path: Path, word: int) -> None:
    """Underflows (17 TB and 18 EB have been reported) are named as damaged and add nothing."""
    slots = [Slot(data=word, total=word), Slot(pid=8, context=0, data=5 * MIB)]
    with RegionFile(tmp_path / "f", Spec(slots=slots, limit=word)) as file:
        (device,) = region.read(file.path).devices
    assert device.damaged == {"used", "data", "limit"}
    assert (device.used, device.data, device.limit) == (5 * MIB, 5 * MIB, 0)
    assert device.context == 102 * MIB


def test_a_refusal_count_beyond_counting_is_flagged(tmp_path: Path) -> None:
    """A tenant's word of all ones is no number of refusals."""
    with RegionFile(tmp_path / "f", Spec(refused=(1 << 64) - 1)) as file:
        (device,) = region.read(file.path).devices
    assert (device.refused, device.damaged) == (0, {"refused"})


@pytest.mark.parametrize(("before", "moment"), [(4, 1), (5, 2)])
def test_an_unstable_slot_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int, moment: int
) -> None:
    """HAMi-core's sequence word moved after the slot was read, or was odd: what follows is what counts."""
    with RegionFile(tmp_path / "f", Spec(ours=False, slots=[Slot(seqlock=before, data=MIB)])) as file:
        real, reads = os.pread, 0

        def pread(descriptor: int, size: int, offset: int) -> bytes:
            nonlocal reads
            reads += (whole := offset == SLOTS and size == SLOT_SIZE)
            if whole and moment == 2 == reads:
                file.slot(0, Slot(seqlock=6, data=9 * MIB))
            raw = real(descriptor, size, offset)
            if whole and moment == 1 == reads:
                file.slot(0, Slot(seqlock=6, data=9 * MIB))
            return raw

        monkeypatch.setattr(os, "pread", pread)
        assert region.read(file.path).devices[0].data == 9 * MIB


def test_a_writer_killed_while_it_wrote_does_not_hide_its_bytes(tmp_path: Path) -> None:
    """A sequence word that stays odd ends in the last reading, not in a loop."""
    with RegionFile(tmp_path / "f", Spec(ours=False, slots=[Slot(seqlock=5, data=MIB)])) as file:
        start = time.monotonic()
        assert region.read(file.path).devices[0].data == MIB
    assert time.monotonic() - start < 5


def test_a_file_cut_while_it_is_read_is_changing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B160: a file that shrinks under the reader is refused, and nothing is killed by it."""
    with RegionFile(tmp_path / "f") as file:
        real = os.pread

        def pread(descriptor: int, size: int, offset: int) -> bytes:
            raw = real(descriptor, size, offset)
            if offset == 0:
                os.truncate(file.path, 100_000)
            return raw

        monkeypatch.setattr(os, "pread", pread)
        assert _why(file.path) is Why.CHANGING


def test_a_slow_file_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant that makes each look at its locks slow costs a scan its budget and no more."""
    looks = 0

    def slow(descriptor: int, slot: int) -> bool:
        nonlocal looks
        looks += 1
        end = time.thread_time() + 0.005
        while time.thread_time() < end:
            pass
        return True

    with RegionFile(tmp_path / "f", Spec(slots=[Slot(pid=i + 1) for i in range(200)])) as file:
        monkeypatch.setattr(region, "_locked", slow)
        assert _why(file.path) is Why.SLOW
    assert 1 < looks < 10


def test_waiting_does_not_make_a_file_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A monitor that is kept from running reads its files all the same."""
    with RegionFile(tmp_path / "f", Spec(slots=[Slot(pid=i + 1) for i in range(3)])) as file:
        monkeypatch.setattr(region, "_locked", lambda descriptor, slot: not time.sleep(0.05))
        assert len(region.read(file.path).processes) == 3


@pytest.mark.parametrize("seed", range(8))
def test_random_bytes_are_read_or_refused(tmp_path: Path, seed: int) -> None:
    """B149: random words behind a right header never raise anything else and stay within bounds."""
    rng = random.Random(seed)
    with RegionFile(tmp_path / "f", Spec(ours=bool(seed % 2))) as file:
        os.pwrite(file.descriptor, rng.randbytes(60_000), 64)
        os.pwrite(file.descriptor, rng.randbytes(40), TAIL + 16)
        file.put(TAIL, "i", 1024)
        if seed % 2:
            os.pwrite(file.descriptor, rng.randbytes(4096), EXT + 16)
        try:
            found = region.read(file.path)
        except region.RegionError:
            return
    assert found.devices == ()
    assert all(0 <= used <= region.PLAUSIBLE_BYTES for p in found.processes for used in p.used)
