"""The layout of the region file, number by number: a changed number is a new VGPU_EXT_VERSION."""

from __future__ import annotations

import pytest
from corelib import EXT, Core, ffi, lib

# From the published layout 1.2; HAMi's monitor reads our file by these offsets.
HAMI = {
    "initialized_flag": 0,
    "major_version": 4,
    "minor_version": 8,
    "sm_init_flag": 12,
    "owner_pid": 16,
    "sem": 24,
    "device_num": 56,
    "uuids": 64,
    "limit": 1600,
    "sm_limit": 1728,
    "procs": 1856,
    "proc_num": 2008896,
    "utilization_switch": 2008900,
    "recent_kernel": 2008904,
    "priority": 2008908,
    "last_kernel_time": 2008912,
    "sem_postinit": 2008920,
}
SLOT = {
    "pid": 0,
    "hostpid": 4,
    "used": 8,
    "monitorused": 1032,
    "device_util": 1160,
    "status": 1928,
    "seqlock": 1936,
}
MEMORY = {"context_size": 0, "module_size": 8, "data_size": 16, "offset": 24, "total": 32}
UTIL = {"dec_util": 0, "enc_util": 8, "sm_util": 16}
OURS = {
    "magic": 0,
    "version": 4,
    "size": 8,
    "instance": 16,
    "created_ns": 24,
    "state": 64,
    "refuse_reason": 68,
    "flags": 72,
    "lock": 76,
    "slot_high": 80,
    "clamped": 88,
    "refused": 128,
    "refused_last_ns": 256,
    "refused_bytes": 384,
    "context_bytes": 512,
    "ghost": 640,
    "peak": 768,
    "info": 1920,
    "word": 18304,
    "slot_lock": 149376,
    "init_lock": 150400,
}


@pytest.mark.parametrize(
    ("struct", "size", "offsets"),
    [
        ("struct vgpu_hami_region", 2008952, HAMI),
        ("struct vgpu_hami_slot", 1960, SLOT),
        ("struct vgpu_hami_memory", 64, MEMORY),
        ("struct vgpu_hami_util", 48, UTIL),
        ("struct vgpu_ext", 151552, OURS),
        ("struct vgpu_slot_info", 16, {"start_time": 0, "pid_ns": 8}),
    ],
)
def test_layout_is_pinned(struct, size, offsets):
    """Sizes and offsets are the published ones and our own of version 1."""
    assert size == ffi.sizeof(struct)
    assert offsets == {field: ffi.offsetof(struct, field) for field in offsets}


def test_constants_are_pinned():
    """The numbers that another process or another language repeats."""
    assert (lib.VGPU_HAMI_MAGIC, lib.VGPU_HAMI_MAJOR, lib.VGPU_HAMI_MINOR) == (19920718, 1, 2)
    assert (lib.VGPU_MAX_DEVICES, lib.VGPU_MAX_SLOTS, lib.VGPU_UUID_LEN) == (16, 1024, 96)
    assert (EXT, lib.VGPU_REGION_SIZE, lib.VGPU_UNIT) == (2031616, 2183168, 4096)
    assert (lib.VGPU_EXT_MAGIC, lib.VGPU_EXT_VERSION) == (0x4952414B, 1)
    assert EXT % 65536 == 0


def test_new_file_is_what_hami_readers_expect(tmp_path):
    """A fresh region carries HAMi's magic, version and defaults, and nothing that could be misread as use."""
    with Core(tmp_path / "r", claim=True) as core:
        region = core.region
        assert (region.initialized_flag, region.major_version, region.minor_version) == (19920718, 1, 2)
        assert (region.utilization_switch, region.recent_kernel, region.priority) == (1, 2, 1)
        assert (region.owner_pid, region.device_num, region.proc_num) == (0, 0, 1)
        assert region.procs[0].status == 1
        assert region.procs[0].seqlock % 2 == 0
    assert (tmp_path / "r").stat().st_size == 2183168
    assert (tmp_path / "r").stat().st_blocks * 512 >= 2183168, "a hole would be a SIGBUS on a full disk"
