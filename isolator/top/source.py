"""Where `top` gets the status document: from the node's monitor, or from the cache folders themselves."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

from isolator import names
from isolator.errors import UsageError
from isolator.monitor import discovery, status, view
from isolator.monitor.client import NothingReachableError, ask, monitor_url, status_url, words
from isolator.monitor.document import Document
from isolator.monitor.model import Snapshot


def look(mount: Path) -> Document:
    """What the cache folders below <mount> say, by pod UID. Raises NothingReachableError with one line."""
    try:
        scan = discovery.scan(mount)
    except OSError as error:
        where = f"{mount}/{names.CONTAINERS_DIRECTORY}"
        raise NothingReachableError(f"{where} cannot be read: {words(error)}") from error
    found = Snapshot("", time.time(), caches=scan.caches, skipped=scan.skipped, listed=False)
    made = status.document(view.make(found, {}))
    note = f"read from {mount}, not from a monitor: tenants are shown by pod UID, devices by what they hold"
    return replace(made, node=replace(made.node, problems=(note,)))


class Source:
    """The place that was asked for; without one the monitor, and the cache folders where none answers."""

    def __init__(self, url: str | None, mount: Path | None) -> None:
        if url is not None and mount is not None:
            raise UsageError("--url and --mount name two sources: give one of them")
        self._url, self._mount = url, mount
        if url is not None:
            status_url(url)

    def read(self) -> Document:
        """The document as it is now. Raises NothingReachableError with one line."""
        if self._url is not None:
            return ask(self._url)
        if self._mount is not None:
            return look(self._mount)
        mount = Path(os.environ.get(names.ENV_MONITOR_MOUNT) or names.DEFAULT_VGPU_MOUNT)
        try:
            return ask(monitor_url(), direct=True)
        except NothingReachableError as absent:
            try:
                made = look(mount)
            except NothingReachableError as error:
                hint = "run it in the monitor's pod, or give --url or --mount"
                raise NothingReachableError(f"{absent}, and {error}; {hint}") from error
            node = replace(made.node, problems=(str(absent), *made.node.problems))
            return replace(made, node=node)
