"""The cluster's side of the certificates: the Secret, and caBundle in the webhook configuration.

The one module of the webhook that imports `kubernetes`; imported only by modes that need it.
"""

from __future__ import annotations

import base64
import binascii
import datetime as dt
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import urllib3
from kubernetes import config
from kubernetes.client.api.admissionregistration_v1_api import AdmissionregistrationV1Api
from kubernetes.client.api.core_v1_api import CoreV1Api
from kubernetes.client.api_client import ApiClient
from kubernetes.client.configuration import Configuration
from kubernetes.client.exceptions import ApiException

from isolator.errors import UnavailableError
from isolator.webhook import certs

log = logging.getLogger(__name__)

TIMEOUT: Final = (3.0, 5.0)
"""Seconds to connect and to wait for an answer."""
ATTEMPTS: Final = 4
_RACES: Final = (409, 422)
"""Somebody else was quicker: a conflict, or a `test` of ours that no longer holds."""


class ApiError(UnavailableError):
    """The API server said no, or nothing. `status` is 0 where it did not answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def _explain(error: ApiException, verb: str, what: str) -> str:
    match error.status:
        case 401:
            return f"cannot {verb} {what}: the API server does not accept the service account's token"
        case 403:
            return f"not allowed to {verb} {what}: grant that to the webhook's service account (rbac.create)"
        case 404:
            return f"{what} does not exist"
    return f"cannot {verb} {what}: the API server answered {error.status} {error.reason}"


@contextmanager
def _asking(verb: str, what: str) -> Iterator[None]:
    try:
        yield
    except ApiException as error:
        if not error.status:
            raise ApiError(0, f"cannot {verb} {what}: {str(error.reason).splitlines()[-1]}") from error
        raise ApiError(error.status, _explain(error, verb, what)) from error
    except (urllib3.exceptions.HTTPError, OSError) as error:
        raise ApiError(
            0, f"cannot {verb} {what}: no answer from the API server ({type(error).__name__})"
        ) from error
    except ValueError as error:
        raise ApiError(0, f"cannot {verb} {what}: the API server's answer is not JSON") from error


class Clients(NamedTuple):
    """The two parts of the API that are used; raw answers, because typed ones cost memory and say no more."""

    core: CoreV1Api
    admission: AdmissionregistrationV1Api


def connect() -> Clients:
    """Clients for the cluster this pod is in, or for the one that KUBECONFIG names.

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
    client = ApiClient(options)
    return Clients(CoreV1Api(client), AdmissionregistrationV1Api(client))


class SecretStore:
    """The Secret that CA and serving pair are kept in."""

    def __init__(self, core: Any, namespace: str, name: str, hosts: Sequence[str]) -> None:
        self._core, self._namespace, self._name, self._hosts = core, namespace, name, hosts
        self._what = f"Secret {namespace}/{name}"
        self._served: dict[str, bytes] = {}

    def _read(self) -> tuple[dict[str, bytes], str] | None:
        """Data and resourceVersion; None where there is no such Secret."""
        try:
            with _asking("get", self._what):
                answer = self._core.read_namespaced_secret(
                    self._name, self._namespace, _preload_content=False, _request_timeout=TIMEOUT
                )
                secret = json.loads(answer.data)
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
            body: dict[str, Any] = {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {"name": self._name},
                "type": "kubernetes.io/tls",
                "data": encoded,
            }
            with _asking("create", self._what):
                self._core.create_namespaced_secret(
                    self._namespace, body, _preload_content=False, _request_timeout=TIMEOUT
                )
            return
        # A patch leaves labels, annotations and other keys to whoever rendered the Secret.
        body = {"metadata": {"resourceVersion": version}, "data": encoded}
        with _asking("patch", self._what):
            self._core.patch_namespaced_secret(
                self._name, self._namespace, body, _preload_content=False, _request_timeout=TIMEOUT
            )

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
            wrong = certs.fault(data, self._hosts, now) if found else "does not exist"
            if wrong is None:
                self._served = {key: data[key] for key in certs.DATA}
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

    def __init__(self, admission: Any, name: str) -> None:
        self._admission, self._name = admission, name
        self._what = f"MutatingWebhookConfiguration {name}"

    def ensure(self, pem: bytes) -> bool:
        """Sets caBundle to `pem` where it is not; says whether something had to be set. Raises ApiError."""
        for _ in range(ATTEMPTS):
            with _asking("get", self._what):
                answer = self._admission.read_mutating_webhook_configuration(
                    self._name, _preload_content=False, _request_timeout=TIMEOUT
                )
                found = json.loads(answer.data)
            if not found.get("webhooks"):
                raise ApiError(404, f"{self._what} has no webhooks: install the chart's")
            operations = bundle_patch(found, pem)
            if not operations:
                return False
            try:
                with _asking("patch", self._what):
                    self._admission.patch_mutating_webhook_configuration(
                        self._name, operations, _preload_content=False, _request_timeout=TIMEOUT
                    )
            except ApiError as error:
                if error.status not in _RACES:
                    raise
                continue
            return True
        raise ApiError(409, f"{self._what} is changed by somebody else each time it is patched")
