"""Cache folders of this node -> region files: <mount>/containers/<podUID>_<container>/usage.cache.

A tenant owns what is below its folder, so everything is opened from the folder's own descriptor, no link
is followed, nothing but a regular file is opened, and every listing is bounded. What cannot be read is a
counted Skip of that container alone.
"""

from __future__ import annotations

import errno
import os
import re
import time
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

# Seconds of processor time: a folder's files in both depths; what makes a folder dear; a scan's for dear
# folders; a scan's for all others, which hostile folders that are new can use up once.
FOLDER_S = 0.03
DEAR_FROM_S = 0.004
DEAR_S = 0.06
NEW_S = 2.0

_FOLDER = re.compile(r"[0-9A-Za-z-]{1,64}_[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?")
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


class Scanner:
    """Reads every container folder of <mount>/containers.

    A folder that took long is dear from then on: of these a scan reads as many as DEAR_S allows, those not
    read for longest first, and serves the last reading of the others. So no number of hostile folders makes
    every scan slow, and none of them is forgotten.
    """

    def __init__(self, mount: Path) -> None:
        self._root = mount / names.CONTAINERS_DIRECTORY
        self._dear: dict[str, tuple[int, Cache]] = {}
        """Folder's name -> number of the scan that read it (0: none yet) and what it said."""
        self._scans = 0

    def scan(self) -> Scan:
        """One pass. Scans of several threads at once are no harm.

        Raises OSError where the directory itself cannot be read; one that is not there yet is empty, while a
        mount that is not there tells nothing: no installer ran, or the path is wrong.
        """
        try:
            descriptor = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            if not self._root.parent.is_dir():
                why = "no such folder: libsync has not made it yet, or the monitor's mount is another"
                raise FileNotFoundError(errno.ENOENT, why, str(self._root.parent)) from None
            return Scan((), Counter())
        skipped: Counter[str] = Counter()
        try:
            entries, crowded = _list(descriptor, MOST_FOLDERS)
            folders = [name for name in entries if _FOLDER.fullmatch(name)]
            skipped[Skip.CROWDED] += crowded
            skipped[Skip.NAME] += len(entries) - len(folders)
            caches = self._read(descriptor, folders)
        finally:
            os.close(descriptor)
        return Scan(tuple(caches), +skipped)

    def _read(self, descriptor: int, folders: list[str]) -> list[Cache]:
        self._scans += 1
        known = {name: self._dear[name] for name in folders if name in self._dear}
        dear, read = dict(known), {}
        for first, these, most in (
            (True, [name for name in folders if name not in known], NEW_S),
            (False, sorted(known, key=lambda name: known[name][0]), DEAR_S),
        ):
            began = time.thread_time()
            for name in these:
                before = time.thread_time()
                if before - began > most:
                    if first:
                        dear[name] = 0, _unread(str(self._root), name)
                    continue
                read[name] = _container(descriptor, str(self._root), name)
                dear.pop(name, None)
                if time.thread_time() - before > DEAR_FROM_S:
                    dear[name] = self._scans, read[name]
        self._dear = dear
        return [read[name] if name in read else dear[name][1] for name in folders]


def scan(mount: Path) -> Scan:
    """One pass of a new Scanner."""
    return Scanner(mount).scan()


class _Budget:
    """Processor time that is left for one folder; a busy node does not use it up."""

    def __init__(self) -> None:
        self._end = time.thread_time() + FOLDER_S

    def left(self) -> float:
        """Seconds, 0 when it is used up."""
        return max(0.0, self._end - time.thread_time())


def _unread(where: str, name: str) -> Cache:
    uid, _, container = name.partition("_")
    return Cache(uid, container, Path(f"{where}/{name}/{names.CACHE_FILE}"), skipped=Skip.SLOW)


def _container(root: int, where: str, name: str) -> Cache:
    uid, _, container = name.partition("_")
    extra: dict[str, int] = {}
    folder, budget = f"{where}/{name}", _Budget()
    try:
        directory = os.open(name, _FOLDER_FLAGS, dir_fd=root)
        try:
            found = _best(directory, extra, budget)
            if found.region is None:
                below = _nested(directory, name, extra, budget)
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


def _nested(directory: int, name: str, extra: dict[str, int], budget: _Budget) -> _Found | None:
    """The region one level below: where a library that derives the path itself puts it."""
    try:
        inner = os.open(name, _FOLDER_FLAGS, dir_fd=directory)
    except OSError:
        return None
    try:
        return _best(inner, extra, budget)
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


def _best(directory: int, extra: dict[str, int], budget: _Budget) -> _Found:
    """The folder's region: usage.cache where that is one, else the newest other *.cache that is one."""
    first = _file(directory, names.CACHE_FILE, budget)
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
    others = sorted(others)[:MOST_FILES]
    found += [read for name in others if (read := _file(directory, name, budget)) is not None]
    if not found:
        return _Found(None, Skip.NO_FILE)
    valid = [one for one in found if one.region is not None]
    best = max(valid, key=lambda one: one.modified) if valid else found[0]
    for one in found:
        if one is not best:
            _count(extra, one.skip or Skip.EXTRA_FILE)
    return best


def _file(directory: int, name: str, budget: _Budget) -> _Found | None:
    """What the file says; None where there is none."""
    if not budget.left():
        return _Found(None, Skip.SLOW, file=name)
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
        return _Found(region.read_descriptor(descriptor, budget.left()), None, modified, name)
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
