"""The set-ups of the doctor's trial that concern limit, cache file, quota and driver."""

from __future__ import annotations

import sys
from pathlib import Path

from doctorroom import BARE, RO, WAIT, Scene, hold

LIMIT = "$M/limit/CUDA_DEVICE_MEMORY_LIMIT"
_WRITE = (
    f"{sys.executable} -c \"import sys; sys.path.insert(0, '{Path(__file__).resolve().parents[1] / 'unit'}');"
)


def _region(spec: str, path: str = "$C/usage.cache") -> str:
    """A step that writes a region file."""
    write = f"RegionFile(Path('{path}'), Spec({spec})).close()"
    return f'{_WRITE} from region_files import *; {write}"; chmod 666 {path}'


_TAMPER = (
    "import struct; r = open(os.environ['C'] + '/usage.cache', 'r+b'); r.seek(1600);"
    " r.write(struct.pack('<Q', 12 << 30)); r.flush(); alloc(1 << 20); alloc(1 << 20)"
)
_HIDE = "rm $C/usage.cache; " + _region("limit=4 << 30, slots=[]")


QUOTA: dict[str, Scene] = {
    # ---- limit
    "no limit": Scene("injected, no limit anywhere", "limit_missing", parts={"limit": ""}),
    "empty limit": Scene("empty limit file", "limit_missing", limit=""),
    "withheld": Scene(
        "KAI gave no limit (hamicore off)", "limit_missing", limit="0f9e8d7c-1111-2222-3333-444455556666"
    ),
    "writable limit": Scene(
        "limit file that the container may write", "limit_missing", parts={"limit": f"cp $W/limit {LIMIT}"}
    ),
    "by hand": Scene(
        "preloaded by hand, no limit",
        "limit_missing",
        parts=BARE,
        env={"LD_PRELOAD": "$W/libvgpu.so", "CUDA_DEVICE_MEMORY_SHARED_CACHE": "$W/cache/usage.cache"},
    ),
    "zero": Scene("limit 0m", "limit_zero", limit="0m\n"),
    "malformed": Scene("limit abc", "limit_malformed", limit="abc\n"),
    "no unit": Scene("limit 4147, no unit", "limit_malformed", limit="4147\n"),
    "malformed variable": Scene(
        "malformed variable, no file",
        "limit_malformed",
        parts={"limit": ""},
        env={"CUDA_DEVICE_MEMORY_LIMIT": "4x"},
    ),
    "lowered": Scene(
        "the environment lowers the limit",
        "limit_below_file",
        env={"CUDA_DEVICE_MEMORY_LIMIT": "2g"},
        notice=True,
    ),
    "lowered by itself": Scene(
        "a program was started with a lower limit",
        "limit_below_file",
        program=("env", "CUDA_DEVICE_MEMORY_LIMIT=2g", *hold(64)),
        notice=True,
    ),
    "lowered late": Scene(
        "a program lowered its limit itself, seen from the node",
        "limit_below_file",
        program=(*hold(64)[:2], "import os; os.environ['CUDA_DEVICE_MEMORY_LIMIT'] = '2g'\n" + hold(64)[2]),
        where="outside",
        notice=True,
    ),
    # ---- cache file
    "garbage": Scene("cache file of another kind", "region_unusable", before="seq 1 9999 >$C/usage.cache"),
    "version": Scene("cache file of version 9", "region_unusable", before=_region("version=(9, 0)")),
    "cut": Scene(
        "cache file cut short", "region_unusable", before=_region("") + "; truncate -s 99999 $C/usage.cache"
    ),
    "link": Scene(
        "a link in the cache file's place", "region_unusable", before="ln -s /etc/passwd $C/usage.cache"
    ),
    "read-only": Scene(
        "cache folder mounted read-only",
        "region_unusable",
        parts={"containers": f"mount --bind $C $M/containers; {RO} $M/containers"},
    ),
    "other user": Scene(
        "cache file of another user",
        "region_unusable",
        before=_region("") + "; chmod 600 $C/usage.cache",
        program=(*WAIT,),
        user=1024,
        where="program",
    ),
    "closed folder": Scene(
        "cache folder closed to the program",
        "region_unusable",
        before="chmod 700 $C",
        program=(*WAIT,),
        user=1024,
        where="program",
    ),
    "full": Scene(
        "cache folder on a full file system",
        "region_unusable",
        parts={"containers": "mount -t tmpfs -o size=64k,mode=1777 none $M/containers"},
    ),
    # ---- what it says
    "refused": Scene(
        "17 devices are visible",
        "refused_start",
        program=(
            *hold(1)[:2],
            "from simclient import *\nimport os, time\ncu_init()\n"
            "open(os.environ['READY'], 'w').close()\ntime.sleep(60)",
        ),
        env={"SIMGPU_COUNT": "17"},
    ),
    "tampered": Scene("the container wrote a higher limit", "tampered", program=(*hold(1024, _TAMPER),)),
    "mismatch": Scene("a recorded limit above the file's", "limit_mismatch", before=_region("limit=8 << 30")),
    "over": Scene("a request was refused", "over_limit", program=(*hold(3072, "expect(2, alloc(2 << 30))"),)),
    "near": Scene("98 % of the limit used", "near_limit", program=(*hold(3900),), notice=True),
    # ---- NVIDIA's side
    "no devices": Scene("no /dev/nvidia*", "no_devices", parts={"cards": ""}),
    "no control device": Scene(
        "no /dev/nvidiactl", "no_devices", parts={"cards": "mknod $W/dev/nvidia0 c 195 0"}
    ),
    "no driver": Scene("no libcuda.so.1", "no_driver", env={"LD_LIBRARY_PATH": ""}),
    "old driver": Scene(
        "image of CUDA 13, driver 535",
        "driver_too_old",
        before="mkdir $W/driver; cp $SIM/libcuda.so.1 $W/driver/libcuda.so.535.183.01;"
        " ln -s libcuda.so.535.183.01 $W/driver/libcuda.so.1",
        env={"CUDA_VERSION": "13.0.1", "LD_LIBRARY_PATH": "$W/driver"},
    ),
    "MPS": Scene(
        "MPS pins 2 GiB below the limit",
        "driver_limit_active",
        env={"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=2G"},
    ),
    "clamped": Scene(
        "the driver shows less than the limit", "driver_limit_active", limit="20g\n", program=(*hold(64),)
    ),
    "hidden": Scene(
        "cache file replaced while 1 GiB is held",
        "ledger_below_nvml",
        program=(*hold(1024),),
        late=_HIDE,
        where="outside",
    ),
}
