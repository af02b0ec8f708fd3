"""The webhook's questions to the API server, and its refusals as one line that says what to do.

Imported only by modes that need it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from isolator import kube
from isolator.webhook.bundle import ApiError

CONNECT_S: Final = 3.0
ANSWER_S: Final = 5.0
"""Seconds to wait for an answer."""
_METHODS: Final = {"get": "GET", "create": "POST", "patch": "PATCH"}


def _refused(error: kube.ApiError, verb: str, what: str) -> str:
    match error.status:
        case 401:
            return f"cannot {verb} {what}: the API server does not accept the service account's token"
        case 403:
            return f"not allowed to {verb} {what}: grant that to the webhook's service account (rbac.create)"
        case 404:
            return f"{what} does not exist"
        case _:
            return f"cannot {verb} {what}: the API server answered {error.status} {error.reason}"


class Api:
    """One API server, this pod's own unless another is given (kube.Api)."""

    def __init__(self, api: kube.Api | None = None) -> None:
        """Raises UnavailableError where no API server is named."""
        self._api = api or kube.Api()

    def ask(self, verb: str, path: str, what: str, body: Any = None) -> dict[str, Any]:
        """The object that the API server answers to get, create or patch; `what` names it for a reader.

        A list patches by RFC 6902, a mapping by merge. Raises ApiError.
        """
        sent: dict[str, Any] = {} if verb == "get" else {"body": body}
        if verb == "patch":
            kind = "merge" if isinstance(body, Mapping) else "json"
            sent["content_type"] = f"application/{kind}-patch+json"
        try:
            found = self._api.ask(path, method=_METHODS[verb], connect=CONNECT_S, read=ANSWER_S, **sent)
        except kube.ApiError as error:
            raise ApiError(error.status, _refused(error, verb, what)) from error
        except ValueError as error:
            raise ApiError(0, f"cannot {verb} {what}: the API server's answer is not JSON") from error
        except kube.FAILURES as error:
            cause = f"no answer from the API server ({kube.reason(error)})"
            raise ApiError(0, f"cannot {verb} {what}: {cause}") from error
        if not isinstance(found, dict):
            raise ApiError(0, f"cannot {verb} {what}: the API server's answer is not an object")
        return found
