"""Cache folders of this node -> region files: <mount>/containers/<podUID>_<container>/usage.cache.

A tenant owns what is below its folder, so everything is opened from the folder's own descriptor, no link
is followed, nothing but a regular file is opened, and every listing is bounded. What cannot be read is a
counted Skip of that container alone.
"""

from __future__ import annotations

import errno
import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from isolator import names, region
from isolator.monitor.model import Cache, Skip
from isolator.region import Region, RegionError

# Far more than a node has containers, and than a container has files.
MOST_FOLDERS = 8192
MOST_ENTRIES = 256
MOST_FILES = 16

_POD_UID = re.compile(r"[0-9A-Za-z-]{1,64}")
_CONTAINER = re.compile(r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?")
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True)
class Scan:
    """One pass over the node: a Cache a container folder, and counts by Skip of what is no such folder."""

    caches: tuple[Cache, ...]
    skipped: Counter[str]


@dataclass(frozen=True)
class _Found:
    region: Region | None
    skip: Skip | None
    modified: float = 0.0
    file: str = ""


def scan(mount: Path) -> Scan:
    """Reads every container folder of <mount>/containers.

    Raises OSError where that directory itself cannot be read; a directory that is not there yet is empty.
    """
    root = mount / names.CONTAINERS_DIRECTORY
    try:
        descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return Scan((), Counter())
    skipped: Counter[str] = Counter()
    caches = []
    try:
        entries, crowded = _list(descriptor, MOST_FOLDERS)
        skipped[Skip.CROWDED] += crowded
        for name in entries:
            uid, separator, container = name.partition("_")
            if separator and _POD_UID.fullmatch(uid) and _CONTAINER.fullmatch(container):
                caches.append(_container(descriptor, root, name, uid, container))
            else:
                skipped[Skip.NAME] += 1
    finally:
        os.close(descriptor)
    return Scan(tuple(caches), +skipped)


def _container(root: int, where: Path, name: str, uid: str, container: str) -> Cache:
    extra: Counter[str] = Counter()
    folder = where / name
    try:
        with _opened(name, root) as directory:
            found = _best(directory, extra)
            if found.region is None:
                # A library that derives the path itself nests one level in its container's folder.
                with _opened(name, directory, absent_ok=True) as inner:
                    below = _best(inner, extra) if inner >= 0 else found
                if below.region is not None or found.skip is Skip.NO_FILE:
                    found, folder = below, folder / name if below is not found else folder
    except OSError as error:
        found = _Found(None, _skip(error, folder=True))
    path = folder / (found.file or names.CACHE_FILE)
    return Cache(uid, container, path, found.region, found.skip, found.modified, dict(+extra))


@contextmanager
def _opened(name: str, parent: int, absent_ok: bool = False) -> Iterator[int]:
    """The folder's descriptor; -1 where it may be absent and is."""
    try:
        descriptor = os.open(name, _FOLDER_FLAGS, dir_fd=parent)
    except OSError:
        if not absent_ok:
            raise
        descriptor = -1
    try:
        yield descriptor
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _list(directory: int, most: int) -> tuple[list[str], bool]:
    """The first `most` names, and whether there are more."""
    found: list[str] = []
    with os.scandir(directory) as entries:
        for entry in entries:
            if len(found) == most:
                return found, True
            found.append(entry.name)
    return found, False


def _best(directory: int, extra: Counter[str]) -> _Found:
    """The folder's region: usage.cache where that is one, else the newest other *.cache that is one."""
    first = _file(directory, names.CACHE_FILE)
    try:
        entries, crowded = _list(directory, MOST_ENTRIES)
    except OSError:
        # A folder that may be entered and not listed still shows the file of the known name.
        return first or _Found(None, Skip.PERMISSION)
    extra[Skip.CROWDED] += crowded
    others = [name for name in entries if name.endswith(names.CACHE_SUFFIX) and name != names.CACHE_FILE]
    if first is not None and first.region is not None:
        extra[Skip.EXTRA_FILE] += len(others)
        return first
    extra[Skip.CROWDED] += len(others) > MOST_FILES
    found = [first] if first is not None else []
    found += [read for name in sorted(others)[:MOST_FILES] if (read := _file(directory, name)) is not None]
    if not found:
        return _Found(None, Skip.NO_FILE)
    valid = [one for one in found if one.region is not None]
    best = max(valid, key=lambda one: one.modified) if valid else found[0]
    for one in found:
        if one is not best:
            extra[one.skip or Skip.EXTRA_FILE] += 1
    return best


def _file(directory: int, name: str) -> _Found | None:
    """What the file says; None where there is none."""
    try:
        descriptor = region.open_file(name, directory)
    except FileNotFoundError:
        return None
    except RegionError as error:
        return _Found(None, Skip(error.why), file=name)
    except OSError as error:
        return _Found(None, _skip(error), file=name)
    modified = 0.0
    try:
        modified = os.fstat(descriptor).st_mtime
        return _Found(region.read_descriptor(descriptor), None, modified, name)
    except RegionError as error:
        return _Found(None, Skip(error.why), modified, name)
    except OSError as error:
        return _Found(None, _skip(error), modified, name)
    finally:
        os.close(descriptor)


def _skip(error: OSError, folder: bool = False) -> Skip:
    if error.errno in (errno.EACCES, errno.EPERM):
        return Skip.PERMISSION
    if error.errno == errno.ELOOP:
        return Skip.LINK
    return Skip.NOT_DIRECTORY if folder and error.errno == errno.ENOTDIR else Skip.UNREADABLE
