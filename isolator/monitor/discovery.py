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
                caches.append(_container(descriptor, str(root), name, uid, container))
            else:
                skipped[Skip.NAME] += 1
    finally:
        os.close(descriptor)
    return Scan(tuple(caches), +skipped)


def _container(root: int, where: str, name: str, uid: str, container: str) -> Cache:
    extra: dict[str, int] = {}
    folder = f"{where}/{name}"
    try:
        directory = os.open(name, _FOLDER_FLAGS, dir_fd=root)
        try:
            found = _best(directory, extra)
            if found.region is None:
                below = _nested(directory, name, extra)
                if below is not None and (below.region is not None or found.skip is Skip.NO_FILE):
                    if found.skip is not None and found.skip is not Skip.NO_FILE:
                        _count(extra, found.skip)
                    found, folder = below, f"{folder}/{name}"
        finally:
            os.close(directory)
    except OSError as error:
        found = _Found(None, _skip(error, folder=True))
    path = Path(f"{folder}/{found.file or names.CACHE_FILE}")
    return Cache(uid, container, path, found.region, found.skip, found.modified, extra)


def _nested(directory: int, name: str, extra: dict[str, int]) -> _Found | None:
    """The region one level below: where a library that derives the path itself puts it."""
    try:
        inner = os.open(name, _FOLDER_FLAGS, dir_fd=directory)
    except OSError:
        return None
    try:
        return _best(inner, extra)
    finally:
        os.close(inner)


def _count(extra: dict[str, int], skip: Skip, number: int = 1) -> None:
    if number:
        extra[skip] = extra.get(skip, 0) + number


def _list(directory: int, most: int) -> tuple[list[str], bool]:
    """The first `most` names, and whether there are more."""
    found: list[str] = []
    with os.scandir(directory) as entries:
        for entry in entries:
            if len(found) == most:
                return found, True
            found.append(entry.name)
    return found, False


def _best(directory: int, extra: dict[str, int]) -> _Found:
    """The folder's region: usage.cache where that is one, else the newest other *.cache that is one."""
    first = _file(directory, names.CACHE_FILE)
    try:
        entries, crowded = _list(directory, MOST_ENTRIES)
    except OSError:
        # A folder that may be entered and not listed still shows the file of the known name.
        return first or _Found(None, Skip.PERMISSION)
    _count(extra, Skip.CROWDED, crowded)
    others = [name for name in entries if name.endswith(names.CACHE_SUFFIX) and name != names.CACHE_FILE]
    if first is not None and first.region is not None:
        _count(extra, Skip.EXTRA_FILE, len(others))
        return first
    _count(extra, Skip.CROWDED, len(others) > MOST_FILES)
    found = [first] if first is not None else []
    found += [read for name in sorted(others)[:MOST_FILES] if (read := _file(directory, name)) is not None]
    if not found:
        return _Found(None, Skip.NO_FILE)
    valid = [one for one in found if one.region is not None]
    best = max(valid, key=lambda one: one.modified) if valid else found[0]
    for one in found:
        if one is not best:
            _count(extra, one.skip or Skip.EXTRA_FILE)
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
