"""The monitor's one door to the Kubernetes API.

The official client finds the API server, its CA and the credentials, and renews them; its generated classes
stay unloaded, because CoreV1Api alone takes 20 MiB on every node for the five calls that are made here.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlencode

import urllib3
from kubernetes import client, config

from isolator import __version__, names
from isolator.errors import UnavailableError


class ApiError(Exception):
    """The API server's refusal, by its HTTP status."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"HTTP {status} {reason}")
        self.status = status


FAILURES: Final = (ApiError, urllib3.exceptions.HTTPError, OSError, ValueError)
"""What a call or a stream raises when the API server is away, refuses, or sends no JSON."""
_CONNECT_S: Final = 5.0

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

    def __init__(self, configuration: Any | None = None) -> None:
        """Of `configuration`, else of this pod's service account, else of $KUBECONFIG.

        Raises UnavailableError where none of them is there.
        """
        self._settings: Any = configuration or _configuration()
        self._settings.socket_options = _KEEPALIVE
        made: Any = client.ApiClient(self._settings)
        self._pool = made.rest_client.pool_manager

    def open(
        self, path: str, query: Mapping[str, str] | None = None, read: float = 30.0, **sent: Any
    ) -> urllib3.BaseHTTPResponse:
        """An answer that is still to be read and closed; `read` is the longest silence in seconds.

        `sent`: method, body (an object), content_type. Raises one of FAILURES.
        """
        headers = {
            "Accept": "application/json",
            "User-Agent": f"{names.RELEASE}-monitor/{__version__}",
            "Content-Type": sent.get("content_type", "application/json"),
        }
        for way in self._settings.auth_settings().values():
            if way["in"] == "header" and way["value"]:
                headers[way["key"]] = way["value"]
        answer: urllib3.BaseHTTPResponse = self._pool.request(
            sent.get("method", "GET"),
            f"{self._settings.host}{path}" + (f"?{urlencode(query)}" if query else ""),
            headers=headers,
            body=json.dumps(sent["body"]) if "body" in sent else None,
            timeout=urllib3.Timeout(connect=_CONNECT_S, read=read),
            preload_content=False,
            retries=False,  # the callers wait between attempts, and say what failed
            redirect=False,
        )
        if not 200 <= answer.status < 300:
            answer.drain_conn()
            answer.release_conn()
            raise ApiError(answer.status, answer.reason or "")
        return answer

    def ask(self, path: str, query: Mapping[str, str] | None = None, **sent: Any) -> Any:
        """One whole answer, decoded. Raises one of FAILURES."""
        answer = self.open(path, query, **sent)
        try:
            return json.loads(answer.data)
        finally:
            answer.release_conn()


def _configuration() -> Any:
    settings: Any = client.Configuration()
    loaders: Any = config
    try:
        if os.environ.get("KUBERNETES_SERVICE_HOST") and not os.environ.get("KUBECONFIG"):
            loaders.load_incluster_config(client_configuration=settings)
        else:
            loaders.load_kube_config(client_configuration=settings)
    except Exception as error:  # the loaders raise whatever the file made them stumble over
        raise UnavailableError(
            f"no Kubernetes API to watch pods with ({_line(error)}): run in a pod with a service account, "
            "or set KUBECONFIG"
        ) from error
    return settings


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def reason(error: BaseException) -> str:
    """One line for a log; an HTTP refusal says its status and never the server's whole answer."""
    if isinstance(error, ApiError):
        return _line(error)
    return f"{type(error).__name__}: {_line(error)}"
