"""The cache folders of a node: <mount>/containers/<podUID>_<container>, one for each injected container.

A folder goes only when the kubelet's own folder of that pod is gone, for a while, and the kubelet's folder is
plainly there to tell. A tenant that fills its folder loses everything in it but its region files.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import stat
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from isolator.libsync import files, tree
from isolator.names import CACHE_FILE, CACHE_SUFFIX

MOST_BYTES: Final = 16 << 20
"""Allocated bytes of one folder above which it is counted and foreign files are removed."""
REGION_BYTES: Final = 2_183_168
"""Largest region file: HAMi-core's layouts are smaller, ours is exactly this. A longer *.cache is no region:
the library refuses it, and a file that grew in a region's place is the same nuisance under another name."""
MOST_REGIONS: Final = 2
"""Region files kept in an oversized folder besides usage.cache."""
GRACE: Final = 60.0
"""Seconds that a pod must be gone."""
FOLDER_SECONDS: Final = 1.0
PASS_SECONDS: Final = 2.0
MOST_FOLDERS: Final = 10_000

_UID: Final = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{32}"  # the second: of a static pod
NAME: Final = re.compile(rf"({_UID})_([a-z0-9](?:[-a-z0-9]{{0,61}}[a-z0-9])?)")
"""A cache folder: UID of the pod, name of the container."""

log = logging.getLogger(__name__)


@dataclass
class Report:
    """One pass: folders there are, folders removed, folders above the bound, foreign entries removed.

    `live` are folders whose pod is on the node; `unknown` says why that cannot be told, else None.
    """

    caches: int = 0
    removed: int = 0
    oversized: int = 0
    foreign: int = 0
    live: list[str] = field(default_factory=list)
    unknown: str | None = None


@dataclass
class _Regions:
    """Tells a region file from what else a tenant put into its folder."""

    others: set[int] = field(default_factory=set)

    def __call__(self, name: str, found: os.stat_result) -> bool:
        if not name.endswith(CACHE_SUFFIX) or not stat.S_ISREG(found.st_mode):
            return False
        if found.st_size > REGION_BYTES:
            return False
        if name == CACHE_FILE:
            return True
        if len(self.others) < MOST_REGIONS:
            self.others.add(found.st_ino)
        return found.st_ino in self.others


class Caches:
    """Watches the folders of one node; `own` is the UID of the pod we run in, where known."""

    def __init__(self, pods: Path, own: str | None = None, grace: float = GRACE) -> None:
        self.pods = pods
        self.own = own
        self.grace = grace
        self._gone: dict[str, float] = {}
        self._said: str | None = None
        self._start = 0

    def _living(self) -> tuple[set[str], str | None]:
        """UIDs of the node's pods, and why they are not to be believed."""
        try:
            with os.scandir(self.pods) as entries:
                found = {entry.name for entry in entries if entry.is_dir(follow_symlinks=False)}
        except OSError as error:
            return set(), f"{self.pods} cannot be read ({error.strerror})"
        living = {name for name in found if re.fullmatch(_UID, name)}
        if not living:
            return living, f"{self.pods} holds no pod, not even this one"
        if self.own and self.own not in living:
            return living, f"{self.pods} does not hold this pod ({self.own}): another kubelet's folder?"
        return living, None

    def sweep(self, fd: int) -> Report:
        """One bounded pass over the folder of descriptor `fd` (<mount>/containers)."""
        report = Report()
        # Folders first, pods second: the kubelet makes the pod's own folder before this one.
        with os.scandir(fd) as entries:
            some = itertools.islice(entries, MOST_FOLDERS)
            folders = sorted(
                entry.name
                for entry in some
                if NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
            )
        living, report.unknown = self._living()
        if report.unknown and report.unknown != self._said:
            log.warning("%s: no cache folder is removed", report.unknown)
        self._said = report.unknown
        report.caches = len(folders)
        now, mount = time.monotonic(), tree.mount_of(fd)
        gone = {}
        # Begins elsewhere each time, so that one tenant's mess does not keep others from their turn.
        self._start = (self._start + 1) % max(1, len(folders))
        for name in folders[self._start :] + folders[: self._start]:
            dead = report.unknown is None and name.partition("_")[0] not in living
            if dead:
                gone[name] = self._gone.get(name, now)
            elif report.unknown is None:
                report.live.append(name)
            left = min(time.monotonic() + FOLDER_SECONDS, now + PASS_SECONDS)
            try:
                with files.folder(name, fd) as opened:
                    if tree.mount_of(opened) != mount:
                        continue  # somebody mounted something there: not the tenant's
                    if dead and now - gone[name] >= self.grace:
                        self._remove(fd, name, opened, left, report)
                    else:
                        self._bound(name, opened, left, report)
            except OSError as error:
                log.warning("cache folder %s: %s", name, error.strerror)
        self._gone = gone
        return report

    @staticmethod
    def _remove(fd: int, name: str, opened: int, until: float, report: Report) -> None:
        tree.clear(opened, until, tree.nothing)
        try:
            os.rmdir(name, dir_fd=fd)
        except OSError:
            if time.monotonic() < until:
                raise
            return  # more than one pass can take: the next goes on
        report.removed += 1
        report.caches -= 1
        log.info("cache folder %s removed: its pod is gone", name)

    @staticmethod
    def _bound(name: str, opened: int, until: float, report: Report) -> None:
        size = tree.measure(opened)
        if size.complete and size.bytes <= MOST_BYTES:
            return
        report.oversized += 1
        removed = tree.clear(opened, until, _Regions(), nested=name)
        report.foreign += removed
        if removed:
            log.warning(
                "cache folder above %d MiB: %d foreign entries removed from %s",
                MOST_BYTES >> 20,
                removed,
                name,
            )
