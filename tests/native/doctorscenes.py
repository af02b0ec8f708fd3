"""The set-ups that the doctor is tried on: what is broken, and what it has to say."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import loaderbuild
import rootfs
from doctorroom import BARE, RO, WAIT, Scene, hold

sys.path.append(str(Path(__file__).resolve().parents[1] / "unit"))
LIMIT = "$M/limit/CUDA_DEVICE_MEMORY_LIMIT"
AARCH64 = Path(__file__).resolve().parents[2] / "isolator/lib/aarch64/libvgpu.so"
_WRITE = (
    f"{sys.executable} -c \"import sys; sys.path.insert(0, '{Path(__file__).resolve().parents[1] / 'unit'}');"
)


def _region(spec: str, path: str = "$C/usage.cache") -> str:
    """A step that writes a region file."""
    write = f"RegionFile(Path('{path}'), Spec({spec})).close()"
    return f'{_WRITE} from region_files import *; {write}"; chmod 666 {path}'


def _built(target: str, *flags: str) -> tuple[str, ...]:
    return (str(loaderbuild.client("doctor_wait", target, *flags)),)


def _static() -> Scene:
    program = _built("x86_64-linux-musl", "-static")
    return Scene("static program", "program_static", program=program, where="program")


def _static_outside() -> Scene:
    program = _built("x86_64-linux-musl", "-static")
    return Scene("static program, seen from the node", "program_static", program=program, where="outside")


def _foreign() -> Scene:
    program = _built("x86-linux-musl", "-static")
    return Scene("32-bit program", "program_foreign_arch", program=program, where="program")


def _musl() -> Scene:
    root = rootfs.get("bookworm")
    libc, starts = root / "lib/x86_64-linux-musl/libc.so", root / "usr/lib/x86_64-linux-musl"
    build = (
        f"gcc -O1 -nostdlib -no-pie -fno-stack-protector -Wl,-dynamic-linker,$W/ld-musl-x86_64.so.1"
        f" -o $W/waits {starts}/crt1.o {starts}/crti.o -x c - -x none"
        f" -L$W -l:libc.so {starts}/crtn.o <<'END'\n"
        "int pause(void);\nint main(void) { return pause(); }\nEND"
    )
    copies = f"for n in libc.so ld-musl-x86_64.so.1; do cp {libc} $W/$n; chmod 755 $W/$n; done"
    program = ("sh", "-c", "exec $W/waits")
    return Scene(
        "musl program", "program_musl", before=f"{copies}\n{build}", program=program, where="program"
    )


_OLD = f"{sys.executable} - $W/libvgpu.so <<'END'\nimport re, sys\nraw = open(sys.argv[1], 'rb').read()\n" + (
    "new = re.sub(rb'GLIBC_2\\.17\\0|GLIBC_2\\.14\\0', b'GLIBC_2.97\\0', raw)\nassert new != raw\n"
    "open(sys.argv[1], 'wb').write(new)\nEND"
)
_TAMPER = (
    "import struct; r = open(os.environ['C'] + '/usage.cache', 'r+b'); r.seek(1600);"
    " r.write(struct.pack('<Q', 12 << 30)); r.flush(); alloc(1 << 20); alloc(1 << 20)"
)
_HIDE = "rm $C/usage.cache; " + _region("limit=4 << 30, slots=[]")

SCENES: dict[str, Scene | Callable[[], Scene]] = {
    # ---- nothing wrong
    "idle": Scene("sound, CUDA not started"),
    "running": Scene("sound, 1 GiB held", program=(*hold(1024),)),
    "running from the node": Scene(
        "sound, 1 GiB held, seen from the node", program=(*hold(1024),), where="outside"
    ),
    "running from a debug container": Scene(
        "sound, seen from a debug container", program=(*hold(1024),), where="debug"
    ),
    "near empty": Scene("sound, 1 MiB held", program=(*hold(1),)),
    "user": Scene("sound, the program is no root", program=(*WAIT,), user=1024, where="program"),
    "by variable": Scene(
        "sound, preloaded by LD_PRELOAD with a limit in the environment",
        parts=BARE,
        env={
            "LD_PRELOAD": "$W/libvgpu.so",
            "CUDA_DEVICE_MEMORY_LIMIT": "4g",
            "CUDA_DEVICE_MEMORY_SHARED_CACHE": "$W/cache/usage.cache",
        },
    ),
    "init process": Scene("sound, a static child that uses no GPU", program=("busybox", "sleep", "60")),
    # ---- nothing there
    "nothing": Scene("nothing of ours", "not_installed", parts=BARE),
    "no process": Scene("a process that is not there", "no_such_process", arguments=("--pid", "999999")),
    "not injected": Scene(
        "KAI's variables, no library",
        "not_injected",
        parts=BARE,
        env={"CUDA_DEVICE_MEMORY_LIMIT": "4g"},
        arguments=("pod",),
    ),
    "opted out": Scene(
        "CUDA_DISABLE_CONTROL=true",
        "control_disabled",
        parts=BARE,
        env={"CUDA_DEVICE_MEMORY_LIMIT": "4g", "CUDA_DISABLE_CONTROL": "true"},
        arguments=("pod",),
    ),
    # ---- loading
    "no preload file": Scene("no preload file", "preload_missing", parts={"preload": ""}),
    "empty preload file": Scene(
        "empty preload file", "preload_missing", parts={"preload": ": >/etc/ld.so.preload"}
    ),
    "other preload file": Scene(
        "preload file names another library",
        "preload_missing",
        parts={"preload": "echo /opt/other/libother.so >/etc/ld.so.preload"},
    ),
    "other path": Scene(
        "preload file names another path",
        "preload_missing",
        parts={"preload": "echo /usr/local/vgpu/libvgpu.so >/etc/ld.so.preload"},
    ),
    "no library": Scene("no library at its path", "library_missing", parts={"library": ""}),
    "folder": Scene(
        "a folder in the library's place", "library_missing", parts={"library": "mkdir $M/libvgpu.so"}
    ),
    "closed": Scene(
        "library of mode 0600, program of uid 1024",
        "library_unreadable",
        before="chmod 600 $W/libvgpu.so",
        program=(*WAIT,),
        user=1024,
        where="program",
    ),
    "noexec": Scene(
        "library on a noexec mount",
        "library_noexec",
        parts={
            "library": "mkdir $W/ne; mount -t tmpfs -o noexec none $W/ne; cp $W/libvgpu.so $W/ne;"
            f" touch $M/libvgpu.so; mount --bind $W/ne/libvgpu.so $M/libvgpu.so; {RO} $M/libvgpu.so"
        },
    ),
    # Every program that starts afterwards dies, so it is seen from the node.
    "truncated": Scene(
        "library cut short",
        "library_damaged",
        before="truncate -s 20000 $W/libvgpu.so",
        parts={"preload": ""},
        program=(*WAIT,),
        late="printf '%s\\n' $M/libvgpu.so >/etc/ld.so.preload",
        where="outside",
    ),
    "text": Scene("a text in the library's place", "library_damaged", before="echo hello >$W/libvgpu.so"),
    "aarch64": Scene(
        "library of another machine", "library_foreign_arch", before=f"cp {AARCH64} $W/libvgpu.so"
    ),
    "static": _static,
    "static outside": _static_outside,
    "32 bits": _foreign,
    "musl": _musl,
    "old glibc": Scene(
        "library needs a newer glibc",
        "glibc_too_old",
        before=_OLD,
        parts={"preload": ""},
        program=(*WAIT,),
        late="printf '%s\\n' $M/libvgpu.so >/etc/ld.so.preload",
        where="outside",
    ),
    "older process": Scene(
        "program older than the preload file",
        "not_intercepting",
        parts={"preload": ""},
        program=(*WAIT,),
        late="printf '%s\\n' $M/libvgpu.so >/etc/ld.so.preload",
        where="outside",
    ),
    "bypass": Scene(
        "program without the library holds 1 GiB",
        "not_intercepting",
        parts={"preload": ""},
        program=(*hold(1024),),
        late="printf '%s\\n' $M/libvgpu.so >/etc/ld.so.preload",
        where="outside",
        also=frozenset({"ledger_below_nvml"}),
    ),
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
