"""Asks a node's monitor for its status document, for `top` and for `doctor`."""

from __future__ import annotations

import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Final

from isolator import names
from isolator.address import split_address
from isolator.errors import ContractError, UnavailableError, UsageError
from isolator.monitor import document
from isolator.monitor.document import Document

TIMEOUT_S: Final = 5.0
_MOST: Final = 32 << 20


class NothingReachableError(UnavailableError):
    """Neither a monitor nor cache folders: nothing can be shown."""

    exit_status = 69  # EX_UNAVAILABLE of sysexits.h


def monitor_url(environment: Mapping[str, str] | None = None) -> str:
    """The monitor of this pod or machine: http://host:port, by ISOLATOR_MONITOR_LISTEN where that is set.

    Raises UsageError where that is no address.
    """
    given = os.environ if environment is None else environment
    try:
        host, port = split_address(given.get(names.ENV_MONITOR_LISTEN) or f":{names.MONITOR_PORT}")
    except ValueError as error:
        raise UsageError(f"{names.ENV_MONITOR_LISTEN}: {error}") from error
    if host in ("", "0.0.0.0", "::"):  # a socket on every address of IPv6 takes IPv4 too
        host = "127.0.0.1"
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def status_url(url: str, option: str = "--url") -> str:
    """The document's address below a monitor's. Raises UsageError where `option` gave no address."""
    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise UsageError(f"{option} {url!r}: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise UsageError(f"{option} {url!r} is no address: write http://HOST:{names.MONITOR_PORT}")
    path = parts.path.rstrip("/")
    return parts._replace(
        path=path if path.endswith(names.STATUS_PATH) else path + names.STATUS_PATH, fragment=""
    ).geturl()


def ask(url: str, *, direct: bool = False, timeout: float = TIMEOUT_S) -> Document:
    """The document of the monitor at `url`; `direct` leaves the environment's proxies out.

    `timeout` in seconds of silence. Raises NothingReachableError with one line where there is none.
    """
    handlers = [urllib.request.ProxyHandler({})] if direct else []
    asked = urllib.request.Request(status_url(url), headers={"Accept": "application/json"})
    try:
        with urllib.request.build_opener(*handlers).open(asked, timeout=timeout) as answer:
            text = answer.read(_MOST + 1)
    except urllib.error.HTTPError as error:
        error.close()
        old = ": it may be older than 1.2" if error.code == 404 else ""
        raise NothingReachableError(f"{asked.full_url} answers {error.code}{old}") from error
    except (OSError, ValueError) as error:
        why = getattr(error, "reason", None) or error
        raise NothingReachableError(f"no monitor answers at {url}: {words(why)}") from error
    if len(text) > _MOST:
        raise NothingReachableError(f"{asked.full_url} answers more than {_MOST >> 20} MiB")
    try:
        return document.load(text)
    except ContractError as error:
        raise NothingReachableError(f"{asked.full_url}: {error}") from error


def words(error: object) -> str:
    """What an error says, without its number."""
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
