"""A container's files, mounts and environment, as one of its processes sees them.

Seen from outside, links are followed within the container's root, never into our own; what a tenant put
there is read bounded and without blocking.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

PROC = Path("/proc")
_LINKS = 40
_READ = 1 << 16
_PROCESSES = 512


@dataclass(frozen=True)
class Mount:
    """One line of mountinfo: where, its own options and those of its file system."""

    point: str
    options: frozenset[str]
    super_options: frozenset[str]


@dataclass(frozen=True)
class Identity:
    """Whose rights a process has."""

    uid: int
    groups: frozenset[int]

    def may(self, found: os.stat_result, want: int) -> bool:
        """Whether mode bits allow `want`, of 4 read, 2 write, 1 execute; root may all."""
        if self.uid == 0:
            return True
        shift = 6 if found.st_uid == self.uid else 3 if found.st_gid in self.groups else 0
        return (found.st_mode >> shift) & want == want


def parse_mounts(text: str) -> list[Mount]:
    """The mounts of a /proc/<pid>/mountinfo; lines that are none are left out."""
    found = []
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        fields, behind = before.split(" "), after.split(" ")
        if len(fields) < 6 or len(behind) < 3:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4])
        found.append(Mount(point, frozenset(fields[5].split(",")), frozenset(behind[2].split(","))))
    return found


class Inside:
    """The view of process `pid` (below `proc`); None: this process's own."""

    def __init__(self, pid: int | None = None, proc: Path = PROC) -> None:
        self.pid, self._proc = pid, proc
        self.place = proc / ("self" if pid is None else str(pid))
        self.root = Path("/") if pid is None else self.place / "root"
        self.hidden = 0

    @property
    def name(self) -> str:
        """For messages."""
        return f"PID {os.getpid() if self.pid is None else self.pid}"

    def at(self, path: str | PurePosixPath) -> Path:
        """Where the container's absolute `path` is for us, links followed in its root.

        A missing last part is no error. Raises OSError: ELOOP, or what looking at a part says.
        """
        if self.pid is None:
            return Path(path)
        todo = [part for part in str(path).split("/") if part not in ("", ".")][::-1]
        done: list[str] = []
        links = 0
        while todo:
            part = todo.pop()
            if part == "..":
                done = done[:-1]
                continue
            here = self.root.joinpath(*done, part)
            try:
                target = os.readlink(here)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.ENOENT):
                    raise
                done.append(part)
                continue
            links += 1
            if links > _LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
            done = [] if target.startswith("/") else done
            todo += [step for step in target.split("/") if step not in ("", ".")][::-1]
        return self.root.joinpath(*done)

    def stat(self, path: str) -> os.stat_result | None:
        """Of what is at `path`; None where nothing is."""
        try:
            return os.stat(self.at(path))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def read(self, path: str, most: int = _READ) -> bytes:
        """At most `most` bytes of a regular file. Raises OSError."""
        return read_file(self.at(path), most)

    def listdir(self, path: str, most: int = 4096) -> list[str]:
        """Names in a folder; empty where it is not there."""
        found: list[str] = []
        try:
            with os.scandir(self.at(path)) as entries:
                for entry in entries:
                    found.append(entry.name)
                    if len(found) == most:
                        break
        except (FileNotFoundError, NotADirectoryError):
            return []
        return found

    @cached_property
    def mounts(self) -> list[Mount]:
        """Its mounts, the last of one point on top. Raises OSError."""
        text = read_file(self.place / "mountinfo", 16 << 20).decode("utf-8", "replace")
        return parse_mounts(text)

    def mount_at(self, point: str) -> Mount | None:
        """The mount with exactly this point, where it is one."""
        found = [mount for mount in self.mounts if mount.point == point]
        return found[-1] if found else None

    @cached_property
    def environment(self) -> dict[str, str]:
        """Its variables at its start. Raises OSError where they may not be read."""
        return environment_of(self.place) if self.pid is not None else dict(os.environ)

    @cached_property
    def identity(self) -> Identity:
        """Its effective user and groups, as this process numbers them."""
        return identity_of(self.place)

    def closed_to(self, path: str, want: int) -> str | None:
        """What keeps its user from `want` (see Identity.may) at `path`; None: nothing. Raises OSError."""
        real = self.at(path)
        parts = [parent for parent in real.parents if parent.is_relative_to(self.root)]
        for folder in reversed(parts):
            if not self.identity.may(os.stat(folder), 1):
                return f"folder {self.shown(folder)} is closed to uid {self.identity.uid}"
        found = os.stat(real)
        if self.identity.may(found, want):
            return None
        return f"mode {stat.S_IMODE(found.st_mode):o} of uid {found.st_uid} keeps uid {self.identity.uid} out"

    def shown(self, path: Path) -> str:
        """The container's own name of one of our paths."""
        return "/" + str(path.relative_to(self.root)).removeprefix(".")

    def neighbours(self) -> Iterator[int]:
        """Processes of its mount namespace, itself included; `hidden` counts those that may not be asked."""
        self.hidden = 0
        space = os.readlink(self.place / "ns/mnt")
        for number in sorted(int(name) for name in os.listdir(self._proc) if name.isdigit())[:_PROCESSES]:
            try:
                if os.readlink(self._proc / str(number) / "ns/mnt") == space:
                    yield number
            except PermissionError:
                self.hidden += 1
            except OSError:
                continue


def read_file(path: Path, most: int = _READ) -> bytes:
    """At most `most` bytes of a regular file; never blocks in a FIFO. Raises OSError."""
    opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        if not stat.S_ISREG(os.fstat(opened).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        parts = []
        while most > 0 and (part := os.read(opened, most)):
            parts.append(part)
            most -= len(part)
        return b"".join(parts)
    finally:
        os.close(opened)


def environment_of(place: Path) -> dict[str, str]:
    """The variables of the process of folder `place`, below /proc."""
    raw = read_file(place / "environ", 1 << 20).decode("utf-8", "replace")
    pairs = (entry.partition("=") for entry in raw.split("\0") if "=" in entry)
    found: dict[str, str] = {}
    for name, _, value in pairs:
        found.setdefault(name, value)
    return found


def identity_of(place: Path) -> Identity:
    """User and groups of the process of folder `place`, below /proc."""
    fields = dict(
        line.split(":", 1)
        for line in (place / "status").read_text("utf-8", "replace").splitlines()
        if ":" in line
    )
    groups = {int(word) for word in fields.get("Groups", "").split()} | {int(fields["Gid"].split()[1])}
    return Identity(int(fields["Uid"].split()[1]), frozenset(groups))
