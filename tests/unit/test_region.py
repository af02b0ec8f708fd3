"""The region reader on files that are right: recorded ones, ours, HAMi-core's older ones."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from isolator._core import ffi, lib
from region_files import MIB, RegionFile, Slot, Spec, uuid

from isolator import region

DATA = Path(__file__).resolve().parents[1] / "data"


def _recorded(tmp_path: Path, name: str) -> region.Region:
    path = tmp_path / "usage.cache"
    path.write_bytes(gzip.decompress((DATA / f"hamicore-1.2-{name}.cache.gz").read_bytes()))
    return region.read(path)


def test_reads_a_recorded_file_of_one_process(tmp_path: Path) -> None:
    """HAMi-core's file of one process with one 3,072 MiB block says what that process held."""
    found = _recorded(tmp_path, "one-process-3072MiB")
    (device,) = found.devices
    assert (device.limit, device.used) == (4_348_444_672, 3_764_387_840)
    assert (device.data, device.context, device.module) == (3_221_225_472, 543_162_368, 0)
    assert device.uuid == "GPU-864f41ea-375a-4f49-ea86-e21b28edc5ec"
    assert [(p.pid, p.used) for p in found.processes] == [(696, (3_764_387_840,))]
    assert (found.extended, found.version, found.created) == (False, "1.2", None)


def test_reads_a_recorded_file_of_two_processes(tmp_path: Path) -> None:
    """The bytes of both processes are added up, and each is shown with its own."""
    found = _recorded(tmp_path, "two-processes")
    (device,) = found.devices
    assert (device.limit, device.sm_limit) == (8_589_934_592, 50)
    assert device.used == 2_690_646_016 + 1_616_904_192
    assert [p.used for p in found.processes] == [(2_690_646_016,), (1_616_904_192,)]


def test_slots_that_only_kept_their_bytes_do_not_count(tmp_path: Path) -> None:
    """B162: after both processes have ended the file still holds their bytes, and nothing is used."""
    found = _recorded(tmp_path, "after-exit")
    assert found.processes == ()
    assert [(d.used, d.context, d.data, d.limit) for d in found.devices] == [(0, 0, 0, 8_589_934_592)]


@pytest.mark.parametrize("slot", [Slot(status=0), Slot(pid=0), Slot(pid=-1)])
@pytest.mark.parametrize("ours", [True, False])
def test_a_slot_without_status_or_process_is_dead(tmp_path: Path, slot: Slot, ours: bool) -> None:
    """Status 0 or PID 0 is a dead slot, in either kind of file."""
    with RegionFile(tmp_path / "f", Spec(ours=ours, slots=[slot, Slot(pid=9, data=5 * MIB)])) as file:
        found = region.read(file.path)
    assert [(p.slot, p.pid) for p in found.processes] == [(1, 9)]
    assert found.devices[0].data == 5 * MIB


def test_a_slot_of_ours_lives_as_long_as_its_lock(tmp_path: Path) -> None:
    """A killed process leaves its words behind; without the lock they do not count."""
    spec = Spec(slots=[Slot(data=3 * MIB), Slot(pid=8, data=5 * MIB, alive=False)], ghost=MIB)
    with RegionFile(tmp_path / "f", spec) as file:
        found = region.read(file.path)
    assert [p.slot for p in found.processes] == [0]
    assert found.devices[0].used == 102 * MIB + 3 * MIB + MIB
    ended = region.read(tmp_path / "f")
    assert (ended.processes, ended.devices[0].used) == ((), MIB)


def test_hami_slots_live_by_their_words_alone(tmp_path: Path) -> None:
    """HAMi-core's processes hold no lock, so status and PID are all there is; 2 is suspended."""
    with RegionFile(tmp_path / "f", Spec(ours=False, slots=[Slot(status=2), Slot(pid=8)])) as file:
        assert [p.pid for p in region.read(file.path).processes] == [7, 8]


def test_reads_what_only_our_files_say(tmp_path: Path) -> None:
    """Refusals, peak, state, flags and the file's age come from the extension."""
    spec = Spec(refused=3, refused_ns=1_800_000_000_500_000_000, refused_bytes=2 << 30, peak=7 * MIB)
    spec.flags, spec.state, spec.sm_limit = lib.VGPU_FLAG_TAMPERED | lib.VGPU_FLAG_SM_UNENFORCED, 2, 30
    with RegionFile(tmp_path / "f", spec) as file:
        found = region.read(file.path)
    (device,) = found.devices
    assert (device.refused, device.refused_last, device.refused_bytes) == (3, 1_800_000_000.5, 2 << 30)
    assert (device.peak, device.sm_limit, device.sm_util) == (7 * MIB, 30, None)
    assert (found.extended, found.state, found.created) == (True, lib.VGPU_STATE_UNSETTLED, 1_700_000_000.0)
    assert (found.tampered, found.sm_unenforced) == (True, True)


def test_reads_layout_1_1(tmp_path: Path) -> None:
    """1.1 has the offsets of 1.2; what is its sequence word there is spare here."""
    slots = [Slot(seqlock=1, sm_util=40, module=MIB), Slot(pid=8, sm_util=90)]
    spec = Spec(ours=False, version=(1, 1), slots=slots, last_kernel=1_750_000_000)
    with RegionFile(tmp_path / "f", spec) as file:
        found = region.read(file.path)
    (device,) = found.devices
    assert (found.version, found.last_kernel_time) == ("1.1", 1_750_000_000.0)
    assert (device.used, device.module) == (2 * (102 + 1024) * MIB + MIB, MIB)
    assert device.sm_util == 100


def test_every_device_has_its_own_figures(tmp_path: Path) -> None:
    """Sixteen devices, MIG ones among them, are read; their order is their index."""
    uuids = [uuid(i, "MIG" if i % 2 else "GPU") for i in range(15)] + [f"MIG-{uuid(15)}/7/0"]
    with RegionFile(tmp_path / "f", Spec(uuids=uuids)) as file:
        file.put(1600 + 8 * 15, "Q", 77 * MIB)
        found = region.read(file.path)
    assert [d.uuid for d in found.devices] == uuids
    assert [d.index for d in found.devices] == list(range(16))
    assert {d.limit for d in found.devices[:15]} == {4147 * MIB}
    assert found.devices[15].limit == 77 * MIB


def test_many_processes_are_read_in_parts(tmp_path: Path) -> None:
    """All 1,024 slots count, wherever the reader cuts them."""
    spec = Spec(slots=[Slot(pid=i + 1, context=0, data=i) for i in range(1024)])
    with RegionFile(tmp_path / "f", spec) as file:
        found = region.read(file.path)
    assert [p.pid for p in found.processes] == list(range(1, 1025))
    assert found.devices[0].used == sum(range(1024))


def test_reads_what_the_library_wrote(tmp_path: Path) -> None:
    """The core library's own file, seen by its own process, gives the charged bytes exactly."""
    out = ffi.new("vgpu_core **")
    path = tmp_path / "usage.cache"
    assert lib.vgpu_core_open(out, bytes(path), lib.VGPU_OPEN_CREATE, 1) == 0
    core = out[0]
    try:
        assert lib.vgpu_core_device(core, uuid().encode(), 1) == 0
        lib.vgpu_core_set_limit(core, 0, 4 << 30)
        lib.vgpu_core_record_limit(core, 0, 4 << 30)
        assert lib.vgpu_core_claim(core) == 0
        assert lib.vgpu_charge(core, 0, 3 << 30, lib.VGPU_KIND_DATA) == 0
        assert lib.vgpu_charge(core, 0, 2 << 30, lib.VGPU_KIND_DATA) < 0
        (device,) = region.read(path).devices
        assert (device.limit, device.used, device.data) == (4 << 30, lib.vgpu_used(core, 0), 3 << 30)
        assert (device.refused, device.refused_bytes) == (1, 2 << 30)
    finally:
        lib.vgpu_core_close(core)
    assert region.read(path).devices[0].used == 0
