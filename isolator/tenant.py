"""The lab's program, as one tenant runs it: 3 GiB in, 2 GiB more refused, 3 GiB held.

The sizes are arguments, in bytes; the quota and the reason to believe it are not its business.

It runs in a process of its own, on the standard library and our names, and knows the CUDA driver API only:
the library that holds it to its quota is loaded under it without its doing. Events go to standard output,
a JSON object a line; it holds its memory until standard input ends.

    python -m isolator.tenant FIRST MORE
        plain process; the caller has set LD_PRELOAD
    python -m isolator.tenant FIRST MORE ROOM LIBRARY CACHE
        in a container first: mounts of its own, the preload file, a limit file
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from isolator import names


class DriverError(Exception):
    """A driver call failed where the lab expects success."""


def say(event: str, **values: object) -> None:
    """One event for the demo."""
    print(json.dumps({"event": event, "at": time.time(), **values}), flush=True)


class Driver:
    """The few driver calls the lab needs."""

    def __init__(self) -> None:
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self.context = ctypes.c_void_p()

    def call(self, name: str, *arguments: Any) -> int:
        """The CUresult of one call."""
        return int(getattr(self.cuda, name)(*arguments))

    def need(self, name: str, *arguments: Any) -> None:
        """One call that must succeed."""
        result = self.call(name, *arguments)
        if result:
            raise DriverError(f"{name} answered {result}")

    def start(self) -> None:
        """A current context on the first device."""
        device = ctypes.c_int()
        self.need("cuInit", 0)
        self.need("cuDeviceGet", ctypes.byref(device), 0)
        self.need("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), device)
        self.need("cuCtxSetCurrent", self.context)

    def allocate(self, size: int) -> tuple[int, int]:
        """CUresult and address of `size` bytes."""
        address = ctypes.c_uint64()
        result = self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        return result, address.value

    def memory(self) -> tuple[int, int]:
        """Free and total bytes, as the program is told."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.need("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value


def show_smi() -> None:
    """What nvidia-smi says in here."""
    query = ["nvidia-smi", "--query-gpu=name,uuid,memory.used,memory.total", "--format=csv,noheader"]
    for kind, command in (("query", query), ("table", ["nvidia-smi"])):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired) as error:
            say("smi", kind=kind, text=f"nvidia-smi: {error}")
            continue
        say("smi", kind=kind, text=done.stdout or done.stderr)


def prove(first: int, more: int) -> None:
    """The lab's steps, each told as it happens."""
    show_smi()
    driver = Driver()
    driver.start()
    say("start", pid=os.getpid())
    for step, size in (("first", first), ("more", more)):
        result, _ = driver.allocate(size)
        say("allocate", step=step, bytes=size, result=result)
    free, total = driver.memory()
    show_smi()
    say("holding", free=free, total=total)
    sys.stdin.read()
    say("end")


# ---- the container -----------------------------------------------------------------------------------


def _mount(*arguments: str) -> None:
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise DriverError(f"mount {' '.join(arguments)}: {done.stderr.strip()}")


def contain(room: Path, library: Path, cache: Path, limit: str) -> None:
    """Lays out what the webhook would: library, preload file, limit file, cache folder.

    Runs in mount and PID namespaces of its own, whose mounts nobody else sees. `room` is an empty folder.
    """
    _mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", str(room))
    mount = room / "vgpu"
    limit_file = mount / names.LIMIT_FILE
    for folder in (mount / names.CONTAINERS_DIRECTORY, limit_file.parent, room / "etc"):
        folder.mkdir(parents=True)
    limit_source = room / "limit"
    limit_source.write_text(limit + "\n")
    for target in (mount / library.name, limit_file):
        target.touch()
    for source, target, mode in (
        (library, mount / library.name, "ro"),
        (limit_source, limit_file, "ro"),
        (cache, mount / names.CONTAINERS_DIRECTORY, "rw"),
    ):
        _mount("--bind", str(source), str(target))
        if mode == "ro":
            _mount("-o", "remount,bind,ro", str(target))
    # The host has no /etc/ld.so.preload to mount over, so the container gets an /etc of its own.
    shutil.copytree("/etc", room / "etc", symlinks=True, dirs_exist_ok=True, ignore=_unreadable)
    (room / "etc" / "ld.so.preload").write_text(f"{mount / library.name}\n")
    _mount("--bind", str(room / "etc"), "/etc")


def _unreadable(folder: str, entries: list[str]) -> set[str]:
    """Names that cannot be copied: not readable, or neither file nor folder."""
    paths = {name: Path(folder) / name for name in entries}
    return {
        name
        for name, path in paths.items()
        if not os.access(path, os.R_OK) or not (path.is_file() or path.is_dir())
    }


def main() -> int:
    """Runs the proof; 0 when every step could be run, whatever it showed."""
    first, more, *container = sys.argv[1:]
    try:
        if container:
            room, library, cache = (Path(argument) for argument in container)
            contain(room, library, cache, os.environ[names.ENV_MEMORY_LIMIT])
            # Loaded anew, so that this time the loader finds the preload file.
            os.execv(sys.executable, [sys.executable, "-m", "isolator.tenant", first, more])
        prove(int(first), int(more))
    except (DriverError, OSError, shutil.Error) as error:
        say("error", text=str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
