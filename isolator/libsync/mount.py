"""Whether <mount> is a folder that this product may have, before anything is written to it."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from pathlib import Path
from typing import Final

from isolator import mountpath, names
from isolator.errors import UnavailableError
from isolator.libsync import cache, files, install

_VERSION: Final = re.compile(r".+-[0-9a-f]{12}")


def check_place(path: Path) -> None:
    """Raises UnavailableError where a link on the way leads into a system folder: its name does not tell."""
    why = mountpath.fault(os.path.realpath(path))
    if why:
        raise UnavailableError(f"{path} cannot be the mount: {why}")


def make(path: Path) -> None:
    """Makes <mount> where it is missing. Raises UnavailableError with what to do where that cannot be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.ENAMETOOLONG):
            why = f"{error.strerror}; remove what is in its place from the node, or {files.ELSEWHERE}"
        else:
            why = files.explain(error, path)
        raise UnavailableError(f"cannot make the mount folder {path}: {why}") from error


def check_ours(fd: int, shown: Path) -> None:
    """Looks at a mount that no installer has reported in: a folder of somebody else's is not taken over.

    Releases 1.0 and 1.1 left caches and no report. Raises UnavailableError; nothing is changed.
    """
    for name, pattern in ((names.CONTAINERS_DIRECTORY, cache.NAME), (names.VERSIONS_DIRECTORY, _VERSION)):
        with contextlib.suppress(OSError), files.folder(name, fd) as opened:
            mode = stat.S_IMODE(os.fstat(opened).st_mode)
            if name == names.CONTAINERS_DIRECTORY and mode == install.CONTAINERS_MODE:
                continue
            with os.scandir(opened) as entries:
                for entry in entries:
                    if not pattern.fullmatch(entry.name) and not entry.name.startswith(files.TEMPORARY):
                        raise UnavailableError(
                            f"{shown / name} is somebody else's folder (it holds {entry.name!r}), so nothing"
                            f" is installed in {shown}: set {files.VALUE} (--mount) to a folder of its own,"
                            " like /usr/local/vgpu"
                        )
