"""Files by directory descriptor: no path is walked twice, no link is followed, no file is half there.

A file is put by writing a temporary one in the same folder, fsync, rename, fsync of the folder. What runs
keeps the inode it has mapped; what opens the name sees the whole old or the whole new file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from isolator.errors import UnavailableError

TEMPORARY: Final = ".libsync-"
"""What a temporary file's name begins with; a killed run may leave one."""
LARGEST: Final = 64 << 20
"""Bytes; no file of ours is larger, so more is never read."""
VALUE: Final = "paths.containerVgpuMount"
ELSEWHERE: Final = (
    f"set {VALUE} to a writable folder on an executable file system"
    " (/home/kubernetes/bin/nvidia/vgpu on Container-Optimized OS,"
    " /var/lib/kai-resource-isolator/vgpu elsewhere)"
)
_NO_LINKS: Final = frozenset(
    (errno.EPERM, errno.EACCES, errno.EMLINK, errno.EXDEV, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
)
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def explain(error: OSError, path: Path) -> str:
    """One line on what to do about `error`, met at `path` or below it."""
    if error.errno == errno.EROFS:
        return f"{path} is on a read-only file system: {ELSEWHERE}"
    if error.errno in (errno.EACCES, errno.EPERM):
        return (
            f"{path} is not writable for uid {os.geteuid()}: libsync needs root with CHOWN, DAC_OVERRIDE and"
            f" FOWNER (librarySync.securityContext); where a security module refuses it, {ELSEWHERE}"
        )
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no space left at {path}: free disk space or inodes on the node; what is installed stays"
    if error.errno == errno.ELOOP:
        return f"{path}, or a name in it, is a symbolic link, which is never followed: remove the link"
    where = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else str(path)
    return f"{path}{'' if where == str(path) else f' ({where})'}: {error.strerror or error}"


@contextlib.contextmanager
def folder(path: str | Path, dir_fd: int | None = None) -> Iterator[int]:
    """The descriptor of a folder; the last part of `path` is not followed where it is a symbolic link."""
    try:
        opened = os.open(path, _FOLDER, dir_fd=dir_fd)
    except NotADirectoryError as error:
        # With O_DIRECTORY the kernel says ENOTDIR for a symbolic link too.
        if stat.S_ISLNK(os.lstat(path, dir_fd=dir_fd).st_mode):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path)) from error
        raise
    try:
        yield opened
    finally:
        os.close(opened)


@contextlib.contextmanager
def locked(fd: int, patience: float = 3.0) -> Iterator[bool]:
    """Holds the folder's advisory lock, so that two installers take turns; False after `patience` seconds.

    Every step is whole without the lock too: a stopped holder must not keep the node from being repaired.
    """
    until = time.monotonic() + patience
    alone = False
    while not alone:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            alone = True
        except OSError:
            if time.monotonic() >= until:
                break
            time.sleep(0.02)
    try:
        yield alone
    finally:
        if alone:
            fcntl.flock(fd, fcntl.LOCK_UN)


def ensure_folder(fd: int, name: str, mode: int, shown: Path) -> list[str]:
    """Makes folder `name` with exactly `mode`, ours; answers what had to change. `shown` is for messages.

    Raises UnavailableError where something else has the name: only its owner knows whether it may go.
    """
    changes = []
    try:
        os.mkdir(name, 0o700, dir_fd=fd)
        changes.append(f"{name} was missing")
    except FileExistsError:
        kind = os.lstat(name, dir_fd=fd).st_mode
        if not stat.S_ISDIR(kind):
            what = "a symbolic link, which is never followed" if stat.S_ISLNK(kind) else "not a folder"
            raise UnavailableError(f"{shown / name} is {what}: remove it from the node") from None
    with folder(name, fd) as opened:
        found = os.fstat(opened)
        if found.st_uid != os.geteuid():
            os.fchown(opened, os.geteuid(), os.getegid())
            changes.append(f"{name} belonged to uid {found.st_uid}")
        if stat.S_IMODE(found.st_mode) != mode:
            os.fchmod(opened, mode)
            if not changes:
                changes.append(f"{name} had mode {stat.S_IMODE(found.st_mode):o}")
    if changes:
        os.fsync(fd)
    return changes


def read(fd: int, name: str) -> tuple[bytes, os.stat_result] | None:
    """Bytes and status of regular file `name`; None where it is missing, something else, or unreadable."""
    try:
        opened = os.open(name, _FILE, dir_fd=fd)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP, errno.EACCES, errno.ENXIO, errno.EISDIR, errno.ENODEV):
            return None
        raise
    with os.fdopen(opened, "rb") as file:
        found = os.fstat(opened)
        if not stat.S_ISREG(found.st_mode):
            return None
        return file.read(LARGEST), found


def fault(fd: int, name: str, data: bytes, mode: int) -> str | None:
    """What keeps `name` from being a regular file of ours with these bytes and mode; None: nothing does."""
    try:
        there = os.lstat(name, dir_fd=fd)
    except FileNotFoundError:
        return "was missing"
    if stat.S_ISDIR(there.st_mode):
        return "was a folder"
    if not stat.S_ISREG(there.st_mode):
        return "was not a regular file"
    got = read(fd, name)
    if got is None:
        return "was unreadable"
    if got[0] != data:
        return "had other content"
    if got[1].st_uid != os.geteuid():
        return f"belonged to uid {got[1].st_uid}"
    found = stat.S_IMODE(got[1].st_mode)
    return None if found == mode else f"had mode {found:o}"


def _temporary() -> str:
    return f"{TEMPORARY}{os.getpid()}-{os.urandom(6).hex()}"


def make_room(fd: int, name: str, shown: Path) -> None:
    """Removes an empty folder from a file's place: container runtimes make one where the file is missing."""
    try:
        if stat.S_ISDIR(os.lstat(name, dir_fd=fd).st_mode):
            os.rmdir(name, dir_fd=fd)
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY):
            raise
        raise UnavailableError(
            f"{shown / name} is a folder with something in it where a file belongs: remove it from the node"
        ) from error


def write(fd: int, name: str, data: bytes, mode: int, durable: bool = True) -> None:
    """Puts file `name` in one step; on any error the old file stays as it is. OSError says why."""
    temporary = _temporary()
    opened = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=fd)
    try:
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(opened, rest) :]
            os.fchmod(opened, mode)
            if durable:
                os.fsync(opened)
                # So that reading it back reads the disk.
                os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(opened)
        os.rename(temporary, name, src_dir_fd=fd, dst_dir_fd=fd)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=fd)
        raise
    if durable:
        os.fsync(fd)


def link(source: int, name: str, target: int) -> bool:
    """Makes `name` of folder `target` the same file as in folder `source`; False where links are refused."""
    temporary = _temporary()
    try:
        os.link(name, temporary, src_dir_fd=source, dst_dir_fd=target, follow_symlinks=False)
    except OSError as error:
        if error.errno in _NO_LINKS:
            return False
        raise
    try:
        os.rename(temporary, name, src_dir_fd=target, dst_dir_fd=target)
    finally:
        # Also after success: rename of two names of one file does nothing and leaves both.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=target)
    os.fsync(target)
    return True


def clean(fd: int) -> None:
    """Removes the temporary files that killed runs left; only under the lock."""
    for name in os.listdir(fd):
        if name.startswith(TEMPORARY):
            with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                os.unlink(name, dir_fd=fd)
