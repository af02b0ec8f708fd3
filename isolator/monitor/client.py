"""Asks a node's monitor for its status document, for `top` and for `doctor`."""

from __future__ import annotations

import http.client
import os
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any, Final

from isolator import names
from isolator.address import split_address
from isolator.errors import ContractError, UnavailableError, UsageError
from isolator.monitor import document
from isolator.monitor.document import Document

TIMEOUT_S: Final = 5.0
_MOST: Final = 32 << 20


class _Here(urllib.request.HTTPRedirectHandler):
    """What answers here is asked, and not what it names in its place."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


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
    known = parts.scheme in ("http", "https") and parts.hostname and port != 0 and parts.username is None
    if not known or not all("!" <= mark <= "~" for mark in url):
        raise UsageError(f"{option} {url!r} is no address: write http://HOST:{names.MONITOR_PORT}")
    path = parts.path.rstrip("/")
    return parts._replace(
        path=path if path.endswith(names.STATUS_PATH) else path + names.STATUS_PATH, fragment=""
    ).geturl()


def ask(url: str, *, direct: bool = False, timeout: float = TIMEOUT_S) -> Document:
    """The document of the monitor at `url`; `direct` leaves the environment's proxies out.

    `timeout` in seconds, for the whole answer. Raises NothingReachableError with one line without one.
    """
    address = status_url(url)
    got: list[Document | Exception] = []
    # A thread: a name server and an answer that comes byte by byte know no time.
    asking = threading.Thread(target=_into, args=(got, address, direct, timeout), daemon=True)
    asking.start()
    asking.join(timeout)
    found = got[0] if got else TimeoutError(f"no whole answer within {timeout:g} s")
    if isinstance(found, Document):
        return found
    if isinstance(found, ContractError):
        raise NothingReachableError(f"{address}: {found}") from found
    raise NothingReachableError(f"no monitor answers at {url}: {words(found)}") from found


def _into(got: list[Document | Exception], address: str, direct: bool, timeout: float) -> None:
    try:
        got.append(_fetch(address, direct, timeout))
    except Exception as error:  # raised again by the one who waits
        got.append(error)


def _fetch(address: str, direct: bool, timeout: float) -> Document:
    """Raises ContractError for what is no document; OSError, ValueError or HTTPException for no answer."""
    handlers = [_Here(), *([urllib.request.ProxyHandler({})] if direct else [])]
    asked = urllib.request.Request(address, headers={"Accept": "application/json"})
    try:
        with urllib.request.build_opener(*handlers).open(asked, timeout=timeout) as answer:
            text = answer.read(_MOST + 1)
    except urllib.error.HTTPError as error:
        error.close()
        old = ": it may be older than 1.2" if error.code == 404 else ""
        raise ContractError(f"it answers {error.code}{old}") from error
    if len(text) > _MOST:
        raise ContractError(f"it answers more than {_MOST >> 20} MiB")
    return document.load(text)


def words(error: object) -> str:
    """What an error says, without its number."""
    error = getattr(error, "reason", None) or error
    if isinstance(error, http.client.HTTPException) and not isinstance(error, OSError):
        return "what answers does not speak HTTP"
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
