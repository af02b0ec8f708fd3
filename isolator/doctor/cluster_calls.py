"""Calls to an API server side by side, none of them waited for longer than the whole look may take."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from isolator import kube
from isolator.errors import UnavailableError

Call = Callable[[], Any]
LATE = TimeoutError("no answer in time: a larger --patience waits longer")


def together(calls: Mapping[str, Call], until: float) -> tuple[dict[str, Any], dict[str, BaseException]]:
    """(answers, failures) by name, at `until` (monotonic seconds) at the latest."""
    answers: dict[str, Any] = {}
    failures: dict[str, BaseException] = {}

    def one(name: str, call: Call) -> None:
        try:
            answers[name] = call()
        except Exception as error:  # an answer of another form is said like one that did not come
            failures[name] = error

    threads = [threading.Thread(target=one, args=(name, call), daemon=True) for name, call in calls.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    there, failed = dict(answers), dict(failures)
    late = {name: LATE for name in calls if name not in there and name not in failed}
    return there, {**failed, **late}


def why(error: BaseException) -> str:
    """One line for `unchecked`."""
    if isinstance(error, kube.ApiError):
        if error.status == 403:
            return f"forbidden to this user: {error.said or error.reason}"
        return f"HTTP {error.status} {error.said or error.reason}"
    return str(LATE) if isinstance(error, kube.TIMEOUTS) else kube.reason(error)


class Client:
    """One API server and the time until which it may answer."""

    def __init__(self, api: kube.Api, patience: float) -> None:
        self.api, self.until = api, time.monotonic() + patience

    def _left(self) -> float:
        return max(0.1, self.until - time.monotonic())

    def ask(self, path: str, **query: str) -> Any:
        """A decoded answer."""
        left = self._left()
        return self.api.ask(path, query, connect=left, read=left)

    def items(self, path: str, **query: str) -> tuple[list[Any], bool]:
        """The objects of a list; True: there are more of them."""
        found = self.ask(path, **query)
        more = bool((found.get("metadata") or {}).get("continue"))
        return [item for item in found.get("items") or [] if isinstance(item, dict)], more

    def text(self, path: str, most: int = 1 << 16, **query: str) -> str:
        """An answer that is no JSON, or too long for one, up to `most` bytes."""
        left = self._left()
        answer = self.api.open(path, query, connect=left, read=left, accept="*/*")
        try:
            return answer.read(most).decode("utf-8", "replace")
        finally:
            answer.close()

    def post(self, path: str, body: Any, **query: str) -> Any:
        """A decoded answer to a new object."""
        left = self._left()
        return self.api.ask(path, query, connect=left, read=left, method="POST", body=body)

    def reached(self, failures: Mapping[str, BaseException], among: int) -> None:
        """Raises UnavailableError where no server answered, or none that knows this user."""
        kinds = list(failures.values())
        gone = [each for each in kinds if not isinstance(each, kube.ApiError)]
        if len(gone) == among:
            raise UnavailableError(
                f"the API server {self.api.host} does not answer ({why(gone[0])}): is this the right "
                "kubeconfig and --context, and can this machine reach it?"
            )
        refused = [each for each in kinds if isinstance(each, kube.ApiError) and each.status == 401]
        if len(refused) >= among - 1 > 0:  # /version may be open to everyone
            raise UnavailableError(
                f"the API server {self.api.host} refuses these credentials (HTTP 401): log in again, or "
                "choose another --context"
            )
