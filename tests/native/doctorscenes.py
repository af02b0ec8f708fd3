"""The set-ups that the doctor is tried on: what is broken, and what it has to say."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import loaderbuild
import rootfs
from doctorroom import BARE, RO, WAIT, Scene, hold
from doctorscenes_quota import QUOTA

AARCH64 = Path(__file__).resolve().parents[2] / "isolator/lib/aarch64/libvgpu.so"


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
    **QUOTA,
}
