"""The cluster's side of the certificates: the Secret, and caBundle in the webhook configuration."""

from __future__ import annotations

import base64
import binascii
import datetime as dt
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from isolator.errors import UnavailableError
from isolator.webhook import certs

log = logging.getLogger(__name__)

ATTEMPTS: Final = 4
CHECK: Final = 600.0
"""Seconds after which data that did not change are judged again: certificates end by themselves."""
_RACES: Final = (409, 422)
"""Somebody else was quicker: a conflict, or a `test` of ours that no longer holds."""


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

    def __init__(self, api: Asking, namespace: str, name: str, hosts: Sequence[str]) -> None:
        self._api, self._name, self._hosts = api, name, hosts
        self._path = f"/api/v1/namespaces/{namespace}/secrets"
        self._what = f"Secret {namespace}/{name}"
        self._served: dict[str, bytes] = {}
        self._checked = 0.0

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
            if (
                self._served
                and self._served.items() <= data.items()
                and time.monotonic() - self._checked < CHECK
            ):
                return self._served
            now = dt.datetime.now(dt.UTC)
            wrong = certs.fault(data, self._hosts, now) if found else "does not exist"
            if wrong is None:
                self._served, self._checked = {key: data[key] for key in certs.DATA}, time.monotonic()
                return self._served
            if certs.fault(self._served, self._hosts, now) is None:
                wanted = self._served
            else:
                wanted = certs.mend(data, self._hosts, now)
            try:
                self._write(wanted, version)
            except ApiError as error:
                if error.status != 409:
                    raise
                continue
            log.info("%s %s: written anew", self._what, wrong)
        raise ApiError(409, f"{self._what} is changed by somebody else each time it is written")


def bundle_patch(configuration: Mapping[str, Any], pem: bytes) -> list[dict[str, Any]]:
    """The JSON patch that gives each webhook of `configuration` the CA bundle `pem`; empty where all have it.

    Each `add` is guarded by a `test` of the name at that index, because entries may move meanwhile.
    """
    wanted = base64.b64encode(pem).decode()
    operations: list[dict[str, Any]] = []
    for index, entry in enumerate(configuration.get("webhooks") or []):
        if (entry.get("clientConfig") or {}).get("caBundle") != wanted:
            path = f"/webhooks/{index}"
            operations += [
                {"op": "test", "path": f"{path}/name", "value": entry.get("name")},
                {"op": "add", "path": f"{path}/clientConfig/caBundle", "value": wanted},
            ]
    return operations


class BundleWriter:
    """Keeps caBundle of one MutatingWebhookConfiguration."""

    def __init__(self, api: Asking, name: str) -> None:
        self._api = api
        self._path = f"/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/{name}"
        self._what = f"MutatingWebhookConfiguration {name}"

    def ensure(self, pem: bytes) -> bool:
        """Sets caBundle to `pem` where it is not; says whether something had to be set. Raises ApiError."""
        for _ in range(ATTEMPTS):
            found = self._api.ask("get", self._path, self._what)
            if not found.get("webhooks"):
                raise ApiError(404, f"{self._what} has no webhooks: install the chart's")
            operations = bundle_patch(found, pem)
            if not operations:
                return False
            try:
                self._api.ask("patch", self._path, self._what, operations)
            except ApiError as error:
                if error.status not in _RACES:
                    raise
                continue
            return True
        raise ApiError(409, f"{self._what} is changed by somebody else each time it is patched")
