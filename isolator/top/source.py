"""Where `top` gets the status document: from the node's monitor, or from the cache folders themselves."""

from __future__ import annotations

import os
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from isolator import names
from isolator.address import split_address
from isolator.errors import ContractError, UnavailableError, UsageError
from isolator.monitor import discovery, document, status, view
from isolator.monitor.document import Document
from isolator.monitor.model import Snapshot

TIMEOUT_S: Final = 5.0
_MOST: Final = 32 << 20
_LISTEN: Final = "ISOLATOR_MONITOR_LISTEN"
_MOUNT: Final = "ISOLATOR_MONITOR_MOUNT"


class NothingReachableError(UnavailableError):
    """Neither a monitor nor cache folders: nothing can be shown."""

    exit_status = 69  # EX_UNAVAILABLE of sysexits.h


def monitor_url(environment: Mapping[str, str] | None = None) -> str:
    """The monitor of this pod or machine: http://host:port, by ISOLATOR_MONITOR_LISTEN where that is set.

    Raises UsageError where that is no address.
    """
    text = (os.environ if environment is None else environment).get(_LISTEN) or f":{names.MONITOR_PORT}"
    try:
        host, port = split_address(text)
    except ValueError as error:
        raise UsageError(f"{_LISTEN}: {error}") from error
    if host in ("", "0.0.0.0", "::"):  # a socket on every address of IPv6 takes IPv4 too
        host = "127.0.0.1"
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def status_url(url: str) -> str:
    """The document's address below a monitor's; raises UsageError for what is no HTTP address."""
    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise UsageError(f"--url {url!r}: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise UsageError(f"--url {url!r} is no address: write http://HOST:{names.MONITOR_PORT}")
    path = parts.path.rstrip("/")
    return parts._replace(
        path=path if path.endswith(names.STATUS_PATH) else path + names.STATUS_PATH, fragment=""
    ).geturl()


def ask(url: str, *, direct: bool = False) -> Document:
    """The document of the monitor at `url`; `direct` leaves the environment's proxies out.

    Raises NothingReachableError with one line where there is none.
    """
    handlers = [urllib.request.ProxyHandler({})] if direct else []
    asked = urllib.request.Request(status_url(url), headers={"Accept": "application/json"})
    try:
        with urllib.request.build_opener(*handlers).open(asked, timeout=TIMEOUT_S) as answer:
            text = answer.read(_MOST + 1)
    except urllib.error.HTTPError as error:
        error.close()
        old = ": it may be older than 1.2" if error.code == 404 else ""
        raise NothingReachableError(f"{asked.full_url} answers {error.code}{old}") from error
    except (OSError, ValueError) as error:
        why = getattr(error, "reason", None) or error
        raise NothingReachableError(f"no monitor answers at {url}: {_words(why)}") from error
    if len(text) > _MOST:
        raise NothingReachableError(f"{asked.full_url} answers more than {_MOST >> 20} MiB")
    try:
        return document.load(text)
    except ContractError as error:
        raise NothingReachableError(f"{asked.full_url}: {error}") from error


def _words(error: object) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)


def look(mount: Path) -> Document:
    """What the cache folders below <mount> say, by pod UID. Raises NothingReachableError with one line."""
    try:
        scan = discovery.scan(mount)
    except OSError as error:
        where = f"{mount}/{names.CONTAINERS_DIRECTORY}"
        raise NothingReachableError(f"{where} cannot be read: {_words(error)}") from error
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
        mount = Path(os.environ.get(_MOUNT) or names.DEFAULT_VGPU_MOUNT)
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
