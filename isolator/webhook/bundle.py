"""The cluster's side of the certificates: the Secret, and caBundle in the webhook configuration."""

from __future__ import annotations

import base64
import binascii
import datetime as dt
import logging
import time
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, Final, Protocol

from isolator.errors import UnavailableError
from isolator.webhook import certs

log = logging.getLogger(__name__)

ATTEMPTS: Final = 4
CHECK: Final = 600.0
"""Seconds after which data that did not change are judged again: certificates end by themselves."""
_RACES: Final = (409, 422)
"""Somebody else was quicker: a conflict, or a `test` of ours that no longer holds."""


class Change(Enum):
    """What became of caBundle."""

    NONE = "none"
    FIRST = "first"  # nobody was trusted before
    CHANGED = "changed"


class ApiError(UnavailableError):
    """The API server said no, or nothing. `status` is 0 where it did not answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Asking(Protocol):
    """The API server (`kube.Api`)."""

    def ask(self, verb: str, path: str, what: str, body: Any = None) -> dict[str, Any]:
        """Gets, creates or patches. Raises ApiError."""


class SecretStore:
    """The Secret that CA and serving pair are kept in."""

    def __init__(
        self,
        api: Asking,
        namespace: str,
        name: str,
        hosts: Sequence[str],
        lives: certs.Lives = certs.LIVES,
    ) -> None:
        self._api, self._name, self._hosts, self._lives = api, name, hosts, lives
        self._path = f"/api/v1/namespaces/{namespace}/secrets"
        self._what = f"Secret {namespace}/{name}"
        self._served: dict[str, bytes] = {}
        self._checked = 0.0
        self._due = dt.datetime.max.replace(tzinfo=dt.UTC)

    def _read(self) -> tuple[dict[str, bytes], str] | None:
        """Data and resourceVersion; None where there is no such Secret."""
        try:
            secret = self._api.ask("get", f"{self._path}/{self._name}", self._what)
        except ApiError as error:
            if error.status == 404:
                return None
            raise
        data: dict[str, bytes] = {}
        for key, value in (secret.get("data") or {}).items():
            try:
                data[key] = base64.b64decode(value or "")
            except binascii.Error:
                data[key] = b""
        return data, secret["metadata"]["resourceVersion"]

    def _write(self, data: Mapping[str, bytes], version: str | None) -> None:
        """Creates the Secret, or puts `data` into the one whose resourceVersion is still `version`."""
        encoded = {key: base64.b64encode(value).decode() for key, value in data.items()}
        if version is None:
            body = {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {"name": self._name},
                "type": "kubernetes.io/tls",
                "data": encoded,
            }
            self._api.ask("create", self._path, self._what, body)
            return
        # A patch leaves labels, annotations and other keys to whoever rendered the Secret.
        body = {"metadata": {"resourceVersion": version}, "data": encoded}
        self._api.ask("patch", f"{self._path}/{self._name}", self._what, body)

    def read(self) -> dict[str, bytes]:
        """The Secret's data, made or mended where they cannot be served.

        Of two replicas that write at once one wins, and the other reads what that one wrote. Data that were
        served and are lost or spoilt in the Secret are put back, so that no replica changes its CA.
        Raises ApiError.
        """
        for _ in range(ATTEMPTS):
            found = self._read()
            data, version = found or ({}, None)
            now = dt.datetime.now(dt.UTC)
            if self._served and self._served.items() <= data.items() and not self._is_time(now):
                return self._served
            wrong = certs.fault(data, self._hosts, now, self._lives) if found else "does not exist"
            if wrong is None:
                self._served, self._checked = {key: data[key] for key in certs.DATA}, time.monotonic()
                self._due = certs.due_first(data, self._lives)
                return self._served
            if certs.fault(self._served, self._hosts, now, self._lives) is None:
                wanted = self._served
            else:
                wanted = certs.mend(data, self._hosts, now, self._lives)
            try:
                self._write(wanted, version)
            except ApiError as error:
                if error.status != 409:
                    raise
                continue
            log.info("%s %s: written anew", self._what, wrong)
        raise ApiError(409, f"{self._what} is changed by somebody else each time it is written")

    def _is_time(self, now: dt.datetime) -> bool:
        """Whether data that did not change are to be judged again."""
        return now >= self._due or time.monotonic() - self._checked >= CHECK


def bundle_patch(configuration: Mapping[str, Any], pem: bytes, now: dt.datetime) -> list[dict[str, Any]]:
    """The JSON patch that lets each webhook of `configuration` trust the CAs in `pem`; empty where all do.

    CAs that are there already stay until they end (certs.joined): another replica may serve a pair of theirs.
    A `test` of the resourceVersion guards them: a patch that an API server takes late must neither take back
    what another replica has added since nor meet entries that have moved.
    """
    operations: list[dict[str, Any]] = []
    version = (configuration.get("metadata") or {}).get("resourceVersion")
    for index, entry in enumerate(configuration.get("webhooks") or []):
        found = _bundle_of(entry)
        wanted = certs.joined(pem, found, now)
        if wanted != found:
            value = base64.b64encode(wanted).decode()
            path = f"/webhooks/{index}/clientConfig/caBundle"
            operations.append({"op": "add", "path": path, "value": value})
    same = {"op": "test", "path": "/metadata/resourceVersion", "value": version}
    return [same, *operations] if operations else []


def _bundle_of(entry: Mapping[str, Any]) -> bytes:
    try:
        return base64.b64decode((entry.get("clientConfig") or {}).get("caBundle") or "")
    except binascii.Error:
        return b""


class BundleWriter:
    """Keeps caBundle of one MutatingWebhookConfiguration."""

    def __init__(self, api: Asking, name: str) -> None:
        self._api = api
        self._path = f"/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/{name}"
        self._what = f"MutatingWebhookConfiguration {name}"

    def ensure(self, pem: bytes) -> Change:
        """Lets the API server trust the CAs in `pem`; says what had to be done for it. Raises ApiError."""
        for _ in range(ATTEMPTS):
            found = self._api.ask("get", self._path, self._what)
            if not found.get("webhooks"):
                raise ApiError(404, f"{self._what} has no webhooks: install the chart's")
            operations = bundle_patch(found, pem, dt.datetime.now(dt.UTC))
            if not operations:
                return Change.NONE
            try:
                self._api.ask("patch", self._path, self._what, operations)
            except ApiError as error:
                if error.status not in _RACES:
                    raise
                continue
            trusted_before = any(_bundle_of(entry) for entry in found["webhooks"])
            return Change.CHANGED if trusted_before else Change.FIRST
        raise ApiError(409, f"{self._what} is changed by somebody else each time it is patched")
