"""Takes everything of ours off a node, or nothing: an injected pod needs all of it to restart."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from isolator import names
from isolator.libsync import cache, files, install, status


def reason_to_keep(report: cache.Report) -> str | None:
    """Why the installation has to stay, in one line; None where no injected pod is left on the node."""
    if report.unknown and report.caches:
        return f"kept: {report.unknown}, so {report.caches} cache folder(s) may be in use"
    if report.live:
        some = ", ".join(sorted(report.live)[:3])
        more = f" and {len(report.live) - 3} more" if len(report.live) > 3 else ""
        return f"kept: {len(report.live)} injected container(s) of this node's pods are left ({some}{more})"
    return None


def run(mount: Path, caches: cache.Caches, state: status.Status) -> tuple[bool, str]:
    """One pass: everything goes where no injected pod is left, else nothing does; with the outcome in a line.

    True either way, because the hook that waits has its outcome; False where something could not be removed.
    """
    try:
        with files.folder(mount) as fd, files.locked(fd):
            keep = None
            with (
                contextlib.suppress(FileNotFoundError),
                files.folder(names.CONTAINERS_DIRECTORY, fd) as opened,
            ):
                keep = reason_to_keep(caches.sweep(opened))
            if keep:
                _record(fd, keep, state)
                return True, keep
            left = remove(fd, mount)
            return not left, "; ".join(left) or "removed"
    except FileNotFoundError:
        return True, "removed"


def _record(fd: int, reason: str, state: status.Status) -> None:
    """Tells the monitor, beside what the last installing run found."""
    before = status.read(fd)
    own = {"problem": reason, "node": state.node, "agent_started": state.agent_started}
    kept = {key: value for key, value in before.items() if key in vars(state)} | own
    with contextlib.suppress(OSError):
        status.Status(**kept).write(fd)


def remove(fd: int, mount: Path) -> list[str]:
    """Removes library, preload file, versions, cache folder and status of the folder `fd`; answers what could
    not go and why."""
    left: list[str] = []
    # The library first: from here on no new pod starts, and none finds half of it.
    for step in (_library, _preload, _versions, _containers, _status):
        try:
            step(fd)
        except FileNotFoundError:
            continue
        except OSError as error:
            left.append(f"{step.__name__.lstrip('_')} is left: {files.explain(error, mount)}")
    return left


def _library(fd: int) -> None:
    os.unlink(names.LIBRARY_FILE, dir_fd=fd)


def _preload(fd: int) -> None:
    os.unlink(names.PRELOAD_KEY, dir_fd=fd)


def _versions(fd: int) -> None:
    with files.folder(names.VERSIONS_DIRECTORY, fd) as versions:
        files.clean(versions)
        for name in os.listdir(versions):
            with contextlib.suppress(NotADirectoryError):
                install.remove_version(versions, name)
    os.rmdir(names.VERSIONS_DIRECTORY, dir_fd=fd)


def _containers(fd: int) -> None:
    os.rmdir(names.CONTAINERS_DIRECTORY, dir_fd=fd)


def _status(fd: int) -> None:
    files.clean(fd)
    os.unlink(names.LIBSYNC_STATUS, dir_fd=fd)
