"""Walks through folders that a tenant can write to while we look.

By descriptor, one name at a time: no link is followed, no other mount entered, ".." never opened, no device
or FIFO opened. Work, depth and memory are bounded whatever the tenant built; what is left waits for the next
pass. A tenant can rename within its own mount only, so nothing reached here is anybody else's.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from isolator.libsync import files

MOST_ENTRIES: Final = 1000
"""A folder with more is oversized without counting on."""
MOST_DEPTH: Final = 8
MOST_OPEN: Final = 256
TRUNCATED_FROM: Final = 1 << 20
"""Bytes from which a removed file is emptied first: a tenant that keeps it open would keep its blocks."""

Keep = Callable[[str, os.stat_result], bool]


@dataclass(frozen=True)
class Size:
    """Allocated bytes (not the length, which a sparse file can claim); `complete` is False at a bound."""

    bytes: int
    complete: bool


def mount_of(fd: int) -> int:
    """The kernel's number of the mount that an open folder is on; the device's where /proc is missing."""
    with contextlib.suppress(OSError), open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("mnt_id:"):
                return int(line.split()[1])
    return os.fstat(fd).st_dev


def entries(fd: int) -> Iterator[tuple[str, os.stat_result]]:
    """Names and own status of a folder's entries; one that goes meanwhile is left out."""
    with os.scandir(fd) as found:
        for entry in found:
            with contextlib.suppress(OSError):
                yield entry.name, entry.stat(follow_symlinks=False)


def measure(top: int) -> Size:
    """Blocks of a folder and all below it, each file once, as far as the bounds allow."""
    total, mount = os.fstat(top).st_blocks, mount_of(top)
    links: set[tuple[int, int]] = set()
    seen = 0
    waiting = [(os.dup(top), 0)]
    try:
        while waiting:
            fd, depth = waiting.pop()
            try:
                for name, found in entries(fd):
                    seen += 1
                    if seen > MOST_ENTRIES:
                        return Size(total * 512, False)
                    if (found.st_dev, found.st_ino) not in links:
                        total += found.st_blocks
                    links.add((found.st_dev, found.st_ino))
                    if stat.S_ISDIR(found.st_mode):
                        if depth >= MOST_DEPTH or len(waiting) >= MOST_OPEN:
                            return Size(total * 512, False)
                        _enter(fd, name, mount, waiting, depth + 1)
            finally:
                os.close(fd)
    finally:
        for fd, _ in waiting:
            os.close(fd)
    return Size(total * 512, True)


def _enter(fd: int, name: str, mount: int, waiting: list[tuple[int, int]], depth: int) -> None:
    with contextlib.suppress(OSError), files.folder(name, fd) as child:
        if mount_of(child) == mount:
            waiting.append((os.dup(child), depth))


def _empty(fd: int, name: str) -> None:
    """Gives back the blocks of a regular file with one name, even where a process has it open."""
    path = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
    try:
        # By O_PATH first: opening what took the name meanwhile (a device) could do something.
        found = os.fstat(path)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
            return
        opened = os.open(f"/proc/self/fd/{path}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            os.ftruncate(opened, 0)
        finally:
            os.close(opened)
    finally:
        os.close(path)


def _drop(fd: int, name: str, found: os.stat_result) -> bool:
    """Removes one entry that is no folder; False where the kernel refuses (immutable, busy)."""
    if stat.S_ISREG(found.st_mode) and found.st_blocks * 512 >= TRUNCATED_FROM:
        with contextlib.suppress(OSError):
            _empty(fd, name)
    try:
        os.unlink(name, dir_fd=fd)
    except OSError:
        return False
    return True


def _level(fd: int, top: int, until: float, keep: Keep) -> tuple[int, int]:
    """Empties one folder of files; a folder in it moves up to `top`, so that no depth holds us.

    Answers how many entries went and how many moved.
    """
    removed = moved = 0
    for name, found in entries(fd):
        if time.monotonic() >= until:
            break
        if not stat.S_ISDIR(found.st_mode):
            removed += not keep(name, found) and _drop(fd, name, found)
        elif fd != top:
            # No rmdir first: refused for a folder with a deep tree in it, it takes a millisecond.
            with contextlib.suppress(OSError):
                aside = f"{files.TEMPORARY}{os.urandom(8).hex()}"
                os.rename(name, aside, src_dir_fd=fd, dst_dir_fd=top)
                moved += 1
    return removed, moved


def clear(top: int, until: float, keep: Keep, nested: str = "") -> int:
    """Removes what `keep` does not want, until the monotonic time `until`; answers how many entries went.

    `keep` is asked for what is no folder, in `top` and in its folder `nested`; every other folder goes.
    """
    mount, total = mount_of(top), 0
    while time.monotonic() < until:
        removed, progress = _level(top, top, until, keep)
        for name, found in entries(top):
            if time.monotonic() >= until:
                break
            if not stat.S_ISDIR(found.st_mode):
                continue
            with contextlib.suppress(OSError):
                with files.folder(name, top) as child:
                    if mount_of(child) != mount:
                        continue
                    gone, moved = _level(child, top, until, keep if name == nested else nothing)
                removed += gone
                progress += moved
                os.rmdir(name, dir_fd=top)
                removed += 1
        total += removed
        if not removed + progress:
            break
    return total


def nothing(name: str, found: os.stat_result) -> bool:
    """Keeps nothing."""
    return False
