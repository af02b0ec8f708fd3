"""Causes that show in a container: codes 11 to 39."""

from __future__ import annotations

from typing import Final

from isolator.doctor.cause import Cause

_RECREATE = "recreate the pod"


def _row(identity: str, code: int, title: str, fix: str, notice: bool = False) -> Cause:
    return Cause(identity, code, title, fix, "pod", notice)


POD: Final[tuple[Cause, ...]] = (
    _row(
        "no_such_process",
        11,
        "the process to look at is not there",
        "name a process of the container: --pid, a number below /proc",
    ),
    _row(
        "not_injected",
        12,
        "the container carries nothing of the webhook's",
        "see the pod's annotation kai-resource-isolator.io/status; remove the opt-out, or " + _RECREATE,
    ),
    _row(
        "control_disabled",
        13,
        "CUDA_DISABLE_CONTROL switches the quota off",
        "take CUDA_DISABLE_CONTROL out of the container's env, or set webhook.podOptOut=false",
    ),
    _row(
        "preload_missing",
        14,
        "the loader is told to preload nothing, or another library",
        "{file} must hold {library} alone: take away what is mounted there, and " + _RECREATE,
    ),
    _row(
        "library_missing",
        15,
        "the library is not where the preload file says",
        "is libsync ready on this node? take away what is mounted over {library}, and " + _RECREATE,
    ),
    _row(
        "library_unreadable",
        16,
        "the loader cannot read the library",
        "let every user read {library} and its folders: mode 0755, or a path without a closed folder",
    ),
    _row(
        "library_noexec",
        17,
        "the library's file system does not allow programs",
        "set paths.containerVgpuMount to a folder on an executable file system, and " + _RECREATE,
    ),
    _row(
        "library_damaged",
        18,
        "the library is no whole shared library",
        "restart libsync on this node: it puts the library back; then " + _RECREATE,
    ),
    _row(
        "library_foreign_arch",
        19,
        "the library is built for another machine",
        "use the image of this architecture for libsync on this node, and " + _RECREATE,
    ),
    _row(
        "program_static",
        20,
        "the program is linked statically: no library can be preloaded",
        "link it dynamically (nvcc: -cudart shared, no -static), or give it a whole GPU",
    ),
    _row(
        "program_musl",
        21,
        "the program's C library is not glibc: ours cannot be preloaded",
        "use a glibc image (Debian, Ubuntu, UBI) in place of {loader}",
    ),
    _row(
        "program_foreign_arch",
        22,
        "the program is built for another machine than the library",
        "use a program of the node's own 64-bit architecture",
    ),
    _row(
        "glibc_too_old",
        23,
        "the image's glibc is older than the library needs",
        "use an image with glibc {floor} or newer",
    ),
    _row(
        "not_intercepting",
        24,
        "the program runs without the library",
        "start the program again (it is older than the preload file, or lost LD_PRELOAD); else " + _RECREATE,
    ),
    _row(
        "limit_missing",
        25,
        "there is no limit where one is required",
        "switch hamicore on in KAI (global.gpuSharingMode=HamiCore), and " + _RECREATE,
    ),
    _row(
        "limit_zero",
        26,
        "the limit is zero",
        "correct gpu-fraction or the node's label nvidia.com/gpu.memory (MiB), and " + _RECREATE,
    ),
    _row(
        "limit_malformed",
        27,
        "the limit cannot be understood, or is under 64 MiB",
        "write it like 4147m or 4Gi (KAI: correct the node's label nvidia.com/gpu.memory), and " + _RECREATE,
    ),
    _row(
        "region_unusable",
        28,
        "the cache file cannot be used",
        "{action}",
    ),
    _row(
        "refused_start",
        29,
        "CUDA was refused at its start",
        "do what the program's line on standard error says; the errno names the cause: {meaning}",
    ),
    _row(
        "tampered",
        30,
        "somebody wrote into the cache file",
        "the limit holds; find out which program of the container writes to {file}",
    ),
    _row(
        "limit_mismatch",
        31,
        "the limit in force is above the limit file's",
        "a program of the container took another limit: start it again, with the library at its own path",
    ),
    _row(
        "no_devices",
        32,
        "the container has no NVIDIA device",
        "set the runtime class nvidia (or CDI, or NRI with KAI 0.18); see docs/troubleshooting.md",
    ),
    _row(
        "no_driver",
        33,
        "no libcuda.so.1 on the loader's ways",
        "let the runtime mount the driver, or set LD_LIBRARY_PATH=/usr/local/nvidia/lib64 where it is there",
    ),
    _row(
        "driver_too_old",
        34,
        "the image asks for a newer CUDA than the driver has",
        "use an image of CUDA {have} or older, or upgrade the node's driver",
    ),
    _row(
        "driver_limit_active",
        35,
        "a limit of the driver's own is in force below ours",
        "take away {what}, or ask KAI for that much",
    ),
    _row(
        "ledger_below_nvml",
        36,
        "the driver counts more than the library has charged",
        "a program of the container goes around the library: look for one that is static, musl or of 32 bits",
    ),
    _row(
        "over_limit",
        37,
        "requests are refused: the quota is used up",
        "ask for a larger gpu-fraction or gpu-memory, or let the program hold less ({largest})",
    ),
    _row(
        "limit_below_file",
        38,
        "the environment lowers the limit",
        "unset {variable} where the whole quota is wanted",
        notice=True,
    ),
    _row(
        "near_limit",
        39,
        "most of the quota is used",
        "ask for a larger gpu-fraction or gpu-memory before requests are refused",
        notice=True,
    ),
)
