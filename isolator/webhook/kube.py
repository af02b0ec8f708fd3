"""Requests to the API server through the official client, and its refusals as one line.

The one module of the webhook that imports `kubernetes`; imported only by modes that need it. It uses the
client's configuration and transport without its typed API classes: those of the core group alone take 21 MiB
and half a second to import, for two calls.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, Final

import urllib3
from kubernetes import config
from kubernetes.client.configuration import Configuration
from kubernetes.client.exceptions import ApiException
from kubernetes.client.rest import RESTClientObject

from isolator import __version__, names
from isolator.errors import UnavailableError
from isolator.webhook.bundle import ApiError

TIMEOUT: Final = (3.0, 5.0)
"""Seconds to connect and to wait for an answer."""
_METHODS: Final = {"get": "GET", "create": "POST", "patch": "PATCH"}


def _refused(status: int, reason: object, verb: str, what: str) -> ApiError:
    match status:
        case 401:
            said = f"cannot {verb} {what}: the API server does not accept the service account's token"
        case 403:
            said = f"not allowed to {verb} {what}: grant that to the webhook's service account (rbac.create)"
        case 404:
            said = f"{what} does not exist"
        case _:
            said = f"cannot {verb} {what}: the API server answered {status} {reason}"
    return ApiError(status, said)


class Api:
    """One API server. Safe to use from one thread."""

    def __init__(self, options: Configuration, rest: Any = None) -> None:
        self._options = options
        self._rest = RESTClientObject(options) if rest is None else rest

    def _headers(self, content_type: str | None) -> dict[str, str]:
        headers = {"Accept": "application/json", "User-Agent": f"{names.RELEASE}/{__version__}"}
        if content_type:
            headers["Content-Type"] = content_type
        # Asked each time: the client reads a projected token anew when it is due.
        settings: dict[str, Any] = dict(self._options.auth_settings())
        for method in settings.values():
            if method.get("value") and method["key"]:
                headers[method["key"]] = str(method["value"])
        return headers

    def ask(self, verb: str, path: str, what: str, body: Any = None) -> dict[str, Any]:
        """The object that the API server answers to get, create or patch; `what` names it for a reader.

        A list patches by RFC 6902, a mapping by merge. Raises ApiError.
        """
        content_type = None
        if verb == "create":
            content_type = "application/json"
        elif verb == "patch":
            content_type = f"application/{'merge' if isinstance(body, Mapping) else 'json'}-patch+json"
        url = f"{str(self._options.host).rstrip('/')}{path}"
        try:
            answer = self._rest.request(
                _METHODS[verb], url, headers=self._headers(content_type), body=body, _request_timeout=TIMEOUT
            )
            data = answer.read() if answer.data is None else answer.data
        except ApiException as error:
            if error.status:
                raise _refused(error.status, error.reason, verb, what) from error
            raise ApiError(0, f"cannot {verb} {what}: {str(error.reason).splitlines()[-1]}") from error
        except (urllib3.exceptions.HTTPError, OSError) as error:
            cause = f"no answer from the API server ({type(error).__name__})"
            raise ApiError(0, f"cannot {verb} {what}: {cause}") from error
        if not 200 <= answer.status <= 299:
            raise _refused(answer.status, answer.reason, verb, what)
        try:
            found = json.loads(data)
        except ValueError as error:
            raise ApiError(0, f"cannot {verb} {what}: the API server's answer is not JSON") from error
        if not isinstance(found, dict):
            raise ApiError(0, f"cannot {verb} {what}: the API server's answer is not an object")
        return found


def connect() -> Api:
    """The API server of the cluster this pod is in, or of the one that KUBECONFIG names.

    Raises UnavailableError where there is neither.
    """
    options = Configuration()
    try:
        if os.environ.get("KUBECONFIG"):
            config.load_kube_config(client_configuration=options)  # type: ignore[no-untyped-call]
        else:
            config.load_incluster_config(client_configuration=options)  # type: ignore[no-untyped-call]
    except (config.ConfigException, OSError) as error:
        raise UnavailableError(
            f"no access to the API server ({error}): give the pod its service account's token"
        ) from error
    # The keeper tries again by itself; hidden retries would only stretch the timeouts.
    options.retries = False
    options.connection_pool_maxsize = 1
    return Api(options)
