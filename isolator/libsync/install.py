"""What a node needs to hold injected pods, as a list of small steps that each can be run again.

Nothing here truncates or rewrites a file in place: a running pod has the library mapped. A file mounted into
a pod keeps its inode even when its last name is gone, so no version is ever "in use" by name.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from isolator import names
from isolator.errors import ContractError, IsolatorError, UnavailableError
from isolator.libsync import elf, files

KEPT_VERSIONS: Final = 3
"""The current library and the two before it: enough to roll back twice and to compare after a fault."""
MOUNT_MODE: Final = 0o750
CONTAINERS_MODE: Final = 0o1777
FOLDER_MODE: Final = 0o755
LIBRARY_MODE: Final = 0o755
PRELOAD_MODE: Final = 0o644
_VERSION: Final = re.compile(r"[0-9A-Za-z][0-9A-Za-z.+_-]{0,63}")  # it names a folder too
_OURS: Final = frozenset(
    {
        names.CONTAINERS_DIRECTORY,
        names.LIBRARY_FILE,
        names.LIBSYNC_STATUS,
        names.PRELOAD_KEY,
        names.VERSIONS_DIRECTORY,
    }
)


@dataclass(frozen=True)
class Source:
    """The library of the image: what the node is compared with."""

    version: str
    data: bytes = field(repr=False)
    sha256: str

    @property
    def folder(self) -> str:
        """Name of its folder below <mount>/versions."""
        return f"{self.version}-{self.sha256[:12]}"


OWN: Final = ("the library of this image", "pull or build the image again")
OTHER: Final = (
    "the library of librarySync.libraryTag",
    'choose another tag, or "" for the library of this image',
)
"""Words for where a library comes from, and what to do where it cannot be used."""


def read_version(path: Path) -> str:
    """The version that a file of one line states. Raises ContractError where it states none."""
    try:
        text = path.read_bytes()[:4096].decode("utf-8", "replace").strip()
    except OSError as error:
        raise ContractError(f"{OTHER[0]} has no version: {path}: {error.strerror}; {OTHER[1]}") from error
    if not _VERSION.fullmatch(text):
        raise ContractError(f"{OTHER[0]} has no version: {path} says {text[:80]!r}; {OTHER[1]}")
    return text


def load(path: Path, machine: str, version: str, words: tuple[str, str] = OWN) -> Source:
    """Reads and checks the library to install. Raises ContractError where tenants could not load it; `words`
    name it there and say what to do."""
    try:
        with path.open("rb") as file:
            data = file.read(files.LARGEST)
        elf.check(data, machine)
    except (OSError, ContractError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ContractError(f"{words[0]} ({path}) cannot be used: {reason}; {words[1]}") from error
    return Source(version, data, hashlib.sha256(data).hexdigest())


def preload_content(mount: Path) -> bytes:
    """The one line that the loader of a container reads: the path is the same there and on the host."""
    return f"{mount / names.LIBRARY_FILE}\n".encode()


def check_preload(path: Path, mount: Path) -> None:
    """Compares the configured preload file (a ConfigMap's) with the mount: with two paths nothing is loaded.

    Raises ContractError where it does not name exactly our library.
    """
    try:
        found = path.read_bytes()[:4096]
    except OSError as error:
        raise ContractError(f"the preload file {path} cannot be read: {error.strerror}") from error
    if found.split() != preload_content(mount).split():
        shown = found.decode("utf-8", "replace").strip()
        raise ContractError(
            f"the preload file {path} says {shown!r}, but the library is {mount / names.LIBRARY_FILE}:"
            f" both come from {files.VALUE}"
        )


@dataclass
class Site:
    """One node's folder and what is done to it. `fd` is the folder's descriptor, `path` is for messages;
    `group` is the one group that may look into it, None for anyone."""

    path: Path
    fd: int
    source: Source
    alone: bool = True
    group: int | None = None
    changes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Outcome:
    """`verified`: every byte was read back and is right. `problems`: one line each, first things first."""

    verified: bool
    problems: tuple[str, ...]
    changes: tuple[str, ...]
    installed_at: float | None


def tell(changes: Sequence[str]) -> str:
    """A first installation in one line: what was created, then what was there and is another now."""
    missing = " was missing"
    created = [change.removesuffix(missing) for change in changes if change.endswith(missing)]
    others = [change for change in changes if not change.endswith(missing)]
    parts = (("created", created), ("replaced", others))
    return "; ".join(f"{word}: {', '.join(what)}" for word, what in parts if what)


def containers(site: Site) -> None:
    """The folder of all cache folders, first: a pod that finds the library must find this too."""
    site.changes += files.ensure_folder(site.fd, names.CONTAINERS_DIRECTORY, CONTAINERS_MODE, site.path)


def mounted(site: Site) -> None:
    """The loader maps the library executable, and every tenant's folder is made here."""
    flags = os.fstatvfs(site.fd).f_flag
    if flags & os.ST_RDONLY:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))
    if flags & os.ST_NOEXEC:
        raise UnavailableError(
            f"{site.path} is mounted noexec, so no container can load the library from it: {files.ELSEWHERE}"
        )


def closed(site: Site) -> None:
    """Lets nobody but root and one group in: root of a container may leave a setuid program in its cache.

    A folder with anything else in it is somebody else's too and keeps its mode.
    """
    if site.group is None:
        return
    if any(name not in _OURS and not name.startswith(files.TEMPORARY) for name in os.listdir(site.fd)):
        return
    found = os.fstat(site.fd)
    if (found.st_mode & 0o7777, found.st_gid) != (MOUNT_MODE, site.group):
        os.fchown(site.fd, -1, site.group)
        os.fchmod(site.fd, MOUNT_MODE)
        site.changes.append(f"{site.path} was open to others")


def library(site: Site) -> None:
    """The version's own file, and <mount>/libvgpu.so as another name of it."""
    source = site.source
    site.changes += files.ensure_folder(site.fd, names.VERSIONS_DIRECTORY, FOLDER_MODE, site.path)
    with files.folder(names.VERSIONS_DIRECTORY, site.fd) as versions:
        shown = site.path / names.VERSIONS_DIRECTORY
        site.changes += files.ensure_folder(versions, source.folder, FOLDER_MODE, shown)
        with files.folder(source.folder, versions) as own:
            put(site, own, names.LIBRARY_FILE, source.data, LIBRARY_MODE, shown / source.folder)
            fault = files.fault(site.fd, names.LIBRARY_FILE, source.data, LIBRARY_MODE)
            if fault is None:
                return
            files.make_room(site.fd, names.LIBRARY_FILE, site.path)
            if not files.link(own, names.LIBRARY_FILE, site.fd):
                files.write(site.fd, names.LIBRARY_FILE, source.data, LIBRARY_MODE)
            site.changes.append(f"{names.LIBRARY_FILE} {fault}")
            # Its age is the time since it became the current one, also after a roll back.
            os.utime(own)


def preload(site: Site) -> None:
    """The file that is mounted at /etc/ld.so.preload."""
    put(site, site.fd, names.PRELOAD_KEY, preload_content(site.path), PRELOAD_MODE, site.path)


def put(site: Site, fd: int, name: str, data: bytes, mode: int, shown: Path) -> None:
    """Writes one file unless it is there, whole; whatever has its name is replaced, never followed."""
    fault = files.fault(fd, name, data, mode)
    if fault is None:
        return
    files.make_room(fd, name, shown)
    files.write(fd, name, data, mode)
    site.changes.append(f"{os.path.relpath(shown / name, site.path)} {fault}")


def prune(site: Site) -> None:
    """Removes the oldest versions; a pod that has one mapped or mounted keeps it without its name."""
    with files.folder(names.VERSIONS_DIRECTORY, site.fd) as versions:
        found = []
        with os.scandir(versions) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False) and entry.name != site.source.folder:
                    found.append((entry.stat(follow_symlinks=False).st_mtime, entry.name))
        for _, name in sorted(found, reverse=True)[KEPT_VERSIONS - 1 :]:
            remove_version(versions, name)


def remove_version(versions: int, name: str) -> None:
    """Removes one version's folder and what we put there; anything else in it keeps the folder."""
    with files.folder(name, versions) as old:
        files.clean(old)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(names.LIBRARY_FILE, dir_fd=old)
    with contextlib.suppress(OSError):
        os.rmdir(name, dir_fd=versions)


def leftovers(site: Site) -> None:
    """Removes the temporary files of killed runs; another installer's are its own while it runs."""
    if not site.alone:
        return
    files.clean(site.fd)
    with contextlib.suppress(FileNotFoundError), files.folder(names.VERSIONS_DIRECTORY, site.fd) as versions:
        files.clean(versions)
        with contextlib.suppress(FileNotFoundError), files.folder(site.source.folder, versions) as own:
            files.clean(own)


STEPS: Final[tuple[Callable[[Site], None], ...]] = (
    leftovers,
    containers,
    closed,
    mounted,
    library,
    preload,
    prune,
)


def verify(site: Site) -> list[str]:
    """Looks at the mount and reads everything back; answers what is wrong, one line each."""
    wrong = []
    mounted(site)
    for name, data, mode in (
        (names.LIBRARY_FILE, site.source.data, LIBRARY_MODE),
        (names.PRELOAD_KEY, preload_content(site.path), PRELOAD_MODE),
    ):
        fault = files.fault(site.fd, name, data, mode)
        if fault is not None:
            wrong.append(f"{site.path / name} is not as installed: it {fault}")
    with files.folder(names.CONTAINERS_DIRECTORY, site.fd) as opened:
        found = os.fstat(opened)
        if (found.st_mode & 0o7777, found.st_uid) != (CONTAINERS_MODE, os.geteuid()):
            shown = site.path / names.CONTAINERS_DIRECTORY
            wrong.append(f"{shown} has mode {found.st_mode & 0o7777:o} and belongs to uid {found.st_uid}")
    return wrong


def run(site: Site) -> Outcome:
    """All steps, whatever becomes of the one before, then the reading back."""
    problems: list[str] = []
    for step in STEPS:
        try:
            step(site)
        except OSError as error:
            problems.append(files.explain(error, site.path))
        except IsolatorError as error:
            problems.append(str(error))
    try:
        wrong = verify(site)
    except OSError as error:
        wrong = [files.explain(error, site.path)]
    except UnavailableError as error:
        wrong = [str(error)]
    # What could not be done explains what is wrong; alone, what is wrong speaks for itself.
    lines = tuple(dict.fromkeys(problems or wrong))
    return Outcome(not wrong, lines, tuple(site.changes), _installed_at(site))


def _installed_at(site: Site) -> float | None:
    try:
        path = f"{names.VERSIONS_DIRECTORY}/{site.source.folder}"
        return os.lstat(path, dir_fd=site.fd).st_mtime
    except OSError:
        return None
