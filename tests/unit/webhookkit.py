"""What the webhook's transport tests share: reviews, a stand-in rule, a server, a small API server."""

from __future__ import annotations

import base64
import copy
import datetime as dt
import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import jsonpatch
from fastapi import FastAPI
from kubernetes.client.configuration import Configuration

from isolator import kube
from isolator.address import listen
from isolator.webhook import certs
from isolator.webhook.app import create_app
from isolator.webhook.health import Health
from isolator.webhook.kube import Api
from isolator.webhook.metrics import Metrics
from isolator.webhook.server import Server
from isolator.webhook.settings import load
from isolator.webhook.tls import ReloadingContext

NOW = dt.datetime.now(dt.UTC).replace(microsecond=0)
HOSTS = certs.service_names("hook", "test")
PATCH = [{"op": "add", "path": "/metadata/annotations/touched", "value": "yes"}]


def pod(**annotations: str) -> dict[str, Any]:
    """The lab's pod, with these annotations on top."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"generateName": "a-", "annotations": {"gpu-memory": "4096", **annotations}},
        "spec": {
            "schedulerName": "kai-scheduler",
            "containers": [{"name": "main", "image": "i", "env": [{"name": "PASSWORD", "value": "hunter2"}]}],
        },
    }


def review(content: Any = None, **request: Any) -> dict[str, Any]:
    """An AdmissionReview for the creation of a pod in namespace `team`; None leaves a field out."""
    fields = {
        "uid": "705ab4f5-6393-11e8-b7cc-42010a800002",
        "kind": {"group": "", "version": "v1", "kind": "Pod"},
        "resource": {"group": "", "version": "v1", "resource": "pods"},
        "requestKind": {"group": "", "version": "v1", "kind": "Pod"},
        "requestResource": {"group": "", "version": "v1", "resource": "pods"},
        "namespace": "team",
        "operation": "CREATE",
        "userInfo": {"username": "admin"},
        "object": pod() if content is None else content,
        "oldObject": None,
        "dryRun": False,
        **request,
    }
    kept = {key: value for key, value in fields.items() if value is not None}
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": kept}


def verdict(action: str, message: str = "", warnings: tuple[str, ...] = ()) -> SimpleNamespace:
    """What a rule answers, as far as the transport looks at it."""
    return SimpleNamespace(action=action, reason=f"because-{action}", message=message, warnings=warnings)


def app_of(
    decide: Callable[..., Any] | None = None,
    build_patch: Callable[..., Any] | None = None,
    health: Health | None = None,
    metrics: Metrics | None = None,
) -> FastAPI:
    """The application with a stand-in rule that injects PATCH, unless others are given."""
    rule = load(namespace="test").rule()
    return create_app(
        rule,
        health or Health(None, None),
        metrics or Metrics(),
        decide=decide or (lambda *_: verdict("inject")),
        build_patch=build_patch or (lambda *_: PATCH),
    )


def patch_of(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """The operations in a review's answer."""
    assert answer["response"]["patchType"] == "JSONPatch"
    operations: list[dict[str, Any]] = json.loads(
        base64.b64decode(answer["response"]["patch"], validate=True)
    )
    return operations


def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    """Waits for `condition`; fails after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def material(hosts: tuple[str, ...] = ("localhost",), now: dt.datetime = NOW) -> dict[str, bytes]:
    """Data of a Secret with a new CA and a serving pair."""
    return certs.mend({}, hosts, now)


@dataclass
class Served:
    """A running server and what it was made of."""

    port: int
    context: ReloadingContext
    health: Health
    server: Server
    data: dict[str, bytes]

    def trusting(self, ca: bytes | None = None) -> ssl.SSLContext:
        return ssl.create_default_context(cadata=(ca or self.data[certs.CA]).decode())

    def client(self, ca: bytes | None = None) -> httpx.Client:
        base = f"https://localhost:{self.port}"
        return httpx.Client(base_url=base, verify=self.trusting(ca), trust_env=False, timeout=10)


@contextmanager
def serving(app: FastAPI | None = None, health: Health | None = None, drain: float = 0) -> Iterator[Served]:
    """A server over TLS on a port of its own, in a thread."""
    health = health or Health(None, None)
    data = material()
    context = ReloadingContext(data[certs.CERTIFICATE], data[certs.KEY])
    server = Server(app or app_of(health=health), context, health, drain)
    bound = listen("127.0.0.1:0", "X")
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    try:
        until(lambda: server.started)
        yield Served(bound.getsockname()[1], context, health, server, data)
    finally:
        server.handle_exit(0, None)
        thread.join(15)
        bound.close()
        assert not thread.is_alive()


@dataclass
class FakeApi:
    """An API server with one Secret and one configuration, at the pool of connections of the official client.

    `refuse` maps a call ("get secret") to a status; `before` is called with each write, to let others race.
    """

    secret: dict[str, Any] | None = None
    configuration: dict[str, Any] | None = None
    refuse: dict[str, int] = field(default_factory=dict)
    before: Callable[[str], None] = lambda name: None
    calls: list[str] = field(default_factory=list)
    _version: int = 100

    def api(self) -> Api:
        options = Configuration(host="https://api")
        options.api_key["BearerToken"] = "bearer token"
        return Api(kube.Api(options, self))

    def request(
        self, method: str, url: str, *, headers: dict[str, str], body: str | None, timeout: Any, **_: Any
    ) -> SimpleNamespace:
        assert timeout.read_timeout == 5 and headers["authorization"] == "bearer token"
        kind = "secret" if "/secrets" in url else "configuration"
        base = {
            "secret": "https://api/api/v1/namespaces/test/secrets",
            "configuration": "https://api/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations",
        }[kind]
        assert url == (base if method == "POST" else f"{base}/{'tls' if kind == 'secret' else 'c'}")
        call = f"{method.lower()} {kind}"
        self.calls.append(call)
        if method != "GET":
            self.before(call)
        status = self.refuse.get(call) or self._do(
            method, kind, headers["Content-Type"], json.loads(body or "{}")
        )
        found = getattr(self, kind) if status < 300 else {"kind": "Status"}
        quiet = {"drain_conn": lambda: None, "release_conn": lambda: None}
        data = json.dumps(found).encode()
        return SimpleNamespace(
            status=status, reason="Something", data=data, read=lambda most: data[:most], **quiet
        )

    def _do(self, method: str, kind: str, content_type: str, body: Any) -> int:
        found = getattr(self, kind)
        if method == "POST":
            if found is not None:
                return 409
            self._put(kind, body)
        elif found is None:
            return 404
        elif content_type == "application/merge-patch+json":
            version = body["metadata"].get("resourceVersion")
            if version not in (None, found["metadata"]["resourceVersion"]):
                return 409
            self._put(kind, {**found, "data": {**(found.get("data") or {}), **body["data"]}})
        elif content_type == "application/json-patch+json":
            try:
                self._put(kind, jsonpatch.apply_patch(found, body))
            except jsonpatch.JsonPatchException:
                return 422
        return 200

    def _put(self, kind: str, thing: dict[str, Any]) -> None:
        self._version += 1
        stamped = copy.deepcopy(thing)
        stamped["metadata"]["resourceVersion"] = str(self._version)
        setattr(self, kind, stamped)

    def put_secret(self, data: dict[str, bytes], **metadata: Any) -> None:
        encoded = {key: base64.b64encode(value).decode() for key, value in data.items()}
        self._put("secret", {"metadata": {"name": "tls", **metadata}, "data": encoded})

    def secret_data(self) -> dict[str, bytes]:
        assert self.secret is not None
        return {key: base64.b64decode(value) for key, value in self.secret["data"].items()}

    def bundles(self) -> list[bytes | None]:
        """caBundle of each webhook."""
        assert self.configuration is not None
        found = [entry["clientConfig"].get("caBundle") for entry in self.configuration["webhooks"]]
        return [base64.b64decode(value) if value else None for value in found]


def configuration(*names: str) -> dict[str, Any]:
    """A MutatingWebhookConfiguration with a webhook of each name and no caBundle."""
    service = {"service": {"name": "hook", "namespace": "test", "path": "/mutate"}}
    return {
        "metadata": {"name": "c", "resourceVersion": "1"},
        "webhooks": [{"name": name, "clientConfig": copy.deepcopy(service)} for name in names],
    }


def write_generation(folder: Path, number: int, data: dict[str, bytes]) -> None:
    """Puts files into `folder` as the kubelet does: a new generation, then the link `..data` exchanged."""
    generation = folder / f"..generation_{number}"
    generation.mkdir(parents=True)
    for name, content in data.items():
        (generation / name).write_bytes(content)
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(f"..data/{name}")
    (folder / "..new").symlink_to(generation.name)
    (folder / "..new").rename(folder / "..data")
