"""The monitor's one door to the Kubernetes API: a client, and which errors mean that it did not answer."""

from __future__ import annotations

import os
import socket
from typing import Any, Final

import urllib3
from kubernetes import client, config
from kubernetes.client import ApiException as ApiException

from isolator.errors import UnavailableError

FAILURES: Final = (ApiException, urllib3.exceptions.HTTPError, OSError, ValueError)
"""What a call or a stream raises when the API server is away, refuses, or sends no JSON."""

# A peer that is gone without a word (node cut off) is noticed after 15 + 3 * 5 seconds.
_KEEPALIVE: Final = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
]


def core_api(configuration: Any | None = None) -> Any:
    """A CoreV1Api: of `configuration`, else of this pod's service account, else of $KUBECONFIG.

    Raises UnavailableError where none of them is there.
    """
    settings: Any = configuration or _configuration()
    settings.socket_options = _KEEPALIVE
    settings.retries = False  # the callers wait between attempts, and say what failed
    return client.CoreV1Api(client.ApiClient(settings))


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
    if isinstance(error, ApiException):
        return f"HTTP {error.status} {error.reason}"
    return f"{type(error).__name__}: {_line(error)}"
