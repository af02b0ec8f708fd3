"""The one door to the Kubernetes API.

The official client finds the API server, its CA and the credentials, and renews them; its generated classes
stay unloaded, because those of the core group alone take 20 MiB on every node for the few calls made here.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast
from urllib.parse import urlencode

import urllib3
from kubernetes import config
from kubernetes.client.configuration import Configuration
from kubernetes.client.rest import RESTClientObject

from isolator import __version__, names
from isolator.errors import UnavailableError


class ApiError(Exception):
    """The API server's refusal, by its HTTP status and reason; `said` is its message, for people alone."""

    def __init__(self, status: int, reason: str, said: str = "") -> None:
        super().__init__(f"HTTP {status} {reason}")
        self.status, self.reason, self.said = status, reason, said


FAILURES: Final = (ApiError, urllib3.exceptions.HTTPError, OSError, ValueError)
"""What a call or a stream raises when the API server is away, refuses, or sends no JSON."""
TIMEOUTS: Final = (urllib3.exceptions.TimeoutError, TimeoutError)
"""Those of them that only waiting longer could have helped."""
_ADDRESS: Final = re.compile(r" at 0x[0-9a-f]+")
_MOST_SAID: Final = 1 << 16
_CONNECTIONS: Final = 64
"""Of an administrator's tool, which asks everything at once."""

# A peer that is gone without a word (node cut off) is noticed after 15 + 3 * 5 seconds.
_KEEPALIVE: Final = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
]


class Api:
    """Raw calls to one API server; safe to use from several threads."""

    def __init__(self, configuration: Any | None = None, pool: Any | None = None) -> None:
        """Of `configuration`, else of $KUBECONFIG, else of this pod's service account.

        `pool` takes the place of the client's connections. Raises UnavailableError where no API server is
        named.
        """
        self._settings: Any = configuration or _configuration()
        self._settings.socket_options = _KEEPALIVE
        self._pool: Any = pool or RESTClientObject(self._settings).pool_manager

    @property
    def host(self) -> str:
        """The server's URL."""
        return str(self._settings.host).rstrip("/")

    def open(
        self,
        path: str,
        query: Mapping[str, str] | None = None,
        *,
        connect: float = 5.0,
        read: float = 30.0,
        **sent: Any,
    ) -> urllib3.BaseHTTPResponse:
        """An answer that is still to be read and closed; `read` is the longest silence in seconds.

        `sent`: method, body (an object), content_type, accept. Raises one of FAILURES.
        """
        headers = {
            "Accept": sent.get("accept", "application/json"),
            "User-Agent": f"{names.RELEASE}/{__version__}",
            "Content-Type": sent.get("content_type", "application/json"),
        }
        # Asked each time: the client reads a projected token anew when it is due.
        for way in self._settings.auth_settings().values():
            if way["in"] == "header" and way["value"]:
                headers[way["key"]] = way["value"]
        answer: urllib3.BaseHTTPResponse = self._pool.request(
            sent.get("method", "GET"),
            f"{self.host}{path}" + (f"?{urlencode(query)}" if query else ""),
            headers=headers,
            body=json.dumps(sent["body"]) if "body" in sent else None,
            timeout=urllib3.Timeout(connect=connect, read=read),
            preload_content=False,
            retries=False,  # the callers wait between attempts, and say what failed
            redirect=False,
        )
        if not 200 <= answer.status < 300:
            said = _said(answer)
            answer.drain_conn()
            answer.release_conn()
            raise ApiError(answer.status, answer.reason or "", said)
        return answer

    def ask(self, path: str, query: Mapping[str, str] | None = None, **options: Any) -> Any:
        """One whole answer, decoded; options as of `open`. Raises one of FAILURES."""
        answer = self.open(path, query, **options)
        try:
            return json.loads(answer.data)
        finally:
            answer.release_conn()


def _said(answer: urllib3.BaseHTTPResponse) -> str:
    """The message of a refusal: of a Status, else the text itself, which a proxied pod may have sent."""
    try:
        raw = answer.read(_MOST_SAID)
    except (urllib3.exceptions.HTTPError, OSError):
        return ""
    try:
        return str(json.loads(raw)["message"])
    except (ValueError, KeyError, TypeError):
        return raw.decode("utf-8", "replace").strip()


def chosen(kubeconfig: Path | None = None, context: str | None = None) -> Api:
    """An administrator's API server: of `kubeconfig`, $KUBECONFIG or ~/.kube/config, in that order, else, and
    only where no context is asked for, this pod's own. Credentials by certificate, token or a program are the
    client's to get. Raises UnavailableError with one line.
    """
    settings, loaders = Configuration(), cast(Any, config)
    default = loaders.kube_config.KUBE_CONFIG_DEFAULT_LOCATION
    files = str(kubeconfig) if kubeconfig else os.environ.get("KUBECONFIG") or default
    there = any(Path(name).expanduser().is_file() for name in files.split(os.pathsep) if name)
    try:
        if kubeconfig and not there:
            raise FileNotFoundError(f"no file {kubeconfig}")
        if there or context or os.environ.get("KUBECONFIG"):
            loaders.load_kube_config(files, context, client_configuration=settings, persist_config=False)
        else:
            loaders.load_incluster_config(client_configuration=settings)
    except Exception as error:  # the loaders raise whatever the file made them stumble over
        raise UnavailableError(
            f"no access to the API server ({_line(error)}): name a kubeconfig by --kubeconfig or KUBECONFIG, "
            "and one of its contexts by --context"
        ) from error
    settings.connection_pool_maxsize = _CONNECTIONS
    return Api(settings)


def _configuration() -> Any:
    settings = Configuration()
    loaders: Any = config
    try:
        if os.environ.get("KUBECONFIG"):
            loaders.load_kube_config(client_configuration=settings)
        else:
            loaders.load_incluster_config(client_configuration=settings)
    except Exception as error:  # the loaders raise whatever the file made them stumble over
        raise UnavailableError(
            f"no access to the API server ({_line(error)}): give the pod its service account's token, "
            "or set KUBECONFIG"
        ) from error
    return settings


def _line(error: BaseException) -> str:
    """The error's first line, the same for the same cause: without addresses of objects."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return _ADDRESS.sub("", lines[0])[:200]


def reason(error: BaseException) -> str:
    """One line for a log; an HTTP refusal says its status and never the server's whole answer."""
    if isinstance(error, ApiError):
        return _line(error)
    return f"{type(error).__name__}: {_line(error)}"
