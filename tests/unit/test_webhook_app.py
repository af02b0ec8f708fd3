"""The webhook's HTTP side, in process: reviews in and out, HTTP errors, health and metrics."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from webhookkit import PATCH, app_of, patch_of, pod, review, verdict

from isolator import names
from isolator.errors import ContractError
from isolator.webhook import app as app_module
from isolator.webhook.health import Health
from isolator.webhook.metrics import Metrics
from isolator.webhook.review import MAX_BODY

JSON = {"content-type": "application/json"}


def ask(app: FastAPI, method: str, path: str, **options: Any) -> httpx.Response:
    """One request, in process."""

    async def call() -> httpx.Response:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="https://hook") as client:
            return await client.request(method, path, **options)

    return asyncio.run(call())


def send(app: FastAPI, body: Any) -> httpx.Response:
    """Posts `body` (bytes as they are, anything else as JSON) to /mutate."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return ask(app, "POST", "/mutate", content=content, headers=JSON)


def stream(app: FastAPI, body: AsyncIterator[bytes]) -> int:
    """The status of a POST whose body comes in pieces, which the in-process client would read whole first."""
    statuses = []

    async def receive() -> dict[str, Any]:
        piece = await anext(body, None)
        kind = "http.disconnect" if piece is None else "http.request"
        return {"type": kind, "body": piece, "more_body": True}

    async def reply(message: Any) -> None:
        statuses.append(message.get("status"))

    scope = {"type": "http", "method": "POST", "path": "/mutate", "raw_path": b"/mutate", "query_string": b""}
    asyncio.run(app({**scope, "headers": [(b"content-type", b"application/json")]}, receive, reply))
    return int(statuses[0])


def count(metrics: Metrics, action: str, reason: str) -> float | None:
    labels = {"action": action, "reason": reason}
    return metrics.registry.get_sample_value("kai_isolator_admissions_total", labels)


def test_answers_a_creation_with_the_patch_and_the_uid() -> None:
    """A pod's creation is allowed with a base64 JSONPatch under the request's uid, and counted."""
    metrics = Metrics()
    asked = review()
    answer = send(app_of(metrics=metrics), asked).json()
    assert (answer["apiVersion"], answer["kind"]) == ("admission.k8s.io/v1", "AdmissionReview")
    assert answer["response"]["uid"] == asked["request"]["uid"]
    assert answer["response"]["allowed"] is True
    assert patch_of(answer) == PATCH
    assert count(metrics, "inject", "because-inject") == 1
    assert metrics.registry.get_sample_value("kai_isolator_admission_duration_seconds_count") == 1


def test_gives_the_rule_the_namespace_of_the_request() -> None:
    """The namespace is the request's: the object's own field is empty or a lie."""
    seen: list[str] = []
    lying = pod()
    lying["metadata"]["namespace"] = "elsewhere"
    app = app_of(decide=lambda _pod, namespace, _rule: seen.append(namespace) or verdict("inject"))
    send(app, review(lying))
    assert seen == ["team"]


def test_leaves_patch_and_type_out_where_nothing_changes() -> None:
    """An empty patch is left out: the API server takes patchType and patch only together."""
    answer = send(app_of(build_patch=lambda *_: []), review()).json()
    assert answer["response"] == {"uid": review()["request"]["uid"], "allowed": True}


def test_denies_with_a_status_and_one_line() -> None:
    """A denial carries code 403 and the rule's message on one line, and no patch is asked for."""
    app = app_of(decide=lambda *_: verdict("deny", "mount /x\nis ours"), build_patch=lambda *_: 1 / 0)
    response = send(app, review()).json()["response"]
    assert response["allowed"] is False
    assert response["status"] == {
        "code": 403,
        "reason": "Forbidden",
        "message": "kai-resource-isolator: mount /x is ours",
    }


def test_denies_a_malformed_pod_with_the_rules_line() -> None:
    """A pod that the rule cannot read is denied (422) with the rule's own line, not let in unlimited."""

    def decide(*_: Any) -> None:
        raise ContractError("spec.containers is not a list")

    metrics = Metrics()
    response = send(app_of(decide=decide, metrics=metrics), review()).json()["response"]
    assert (response["allowed"], response["status"]["code"]) == (False, 422)
    assert response["status"]["message"].endswith("spec.containers is not a list")
    assert count(metrics, "deny", "malformed") == 1


def test_bounds_warnings() -> None:
    """A warning is one line of at most 120 characters, none repeats, all are within 4096 characters."""
    texts = ("same", "same", "two\nlines", "x" * 500, *(f"{i:03d} " + "y" * 110 for i in range(60)))
    app = app_of(decide=lambda *_: verdict("inject", warnings=texts))
    warnings = send(app, review()).json()["response"]["warnings"]
    assert warnings[:2] == ["same", "two lines"]
    assert len(warnings[2]) == 120
    assert max(map(len, warnings)) <= 120
    assert 3900 < sum(map(len, warnings)) <= 4096


@pytest.mark.parametrize(
    "request_",
    [
        {"operation": "UPDATE"},
        {"operation": "DELETE", "object": None},
        {"subResource": "ephemeralcontainers"},
        {"kind": {"group": "apps", "version": "v1", "kind": "Deployment"}},
        {"resource": {"group": "", "version": "v1", "resource": "podtemplates"}},
        {"resource": None},
    ],
)
def test_allows_anything_else_unchanged(request_: dict[str, Any]) -> None:
    """Other operations, kinds and subresources are allowed as they are, without the rule, and counted."""
    metrics = Metrics()
    app = app_of(decide=lambda *_: 1 / 0, metrics=metrics)
    answer = send(app, review(**request_))
    assert (answer.status_code, answer.json()["response"]["allowed"]) == (200, True)
    assert "patch" not in answer.json()["response"]
    assert count(metrics, "skip", "not-pod-create") == 1


@pytest.mark.parametrize(("volume", "allowed"), [(names.VOLUME_CONTAINERS, False), ("tmp", True)])
def test_denies_a_debug_container_with_a_volume_of_ours(volume: str, allowed: bool) -> None:
    """It would see the folders of all tenants; any other debug container is let in, and never patched."""
    content = pod()
    mounts = [{"name": volume, "mountPath": "/seen"}]
    content["spec"]["ephemeralContainers"] = [{"name": "debug", "image": "i", "volumeMounts": mounts}]
    request = {"operation": "UPDATE", "subResource": "ephemeralcontainers"}
    app = app_of(decide=lambda *_: 1 / 0)
    response = send(app, review(content, **request)).json()["response"]
    assert response["allowed"] is allowed
    assert "patch" not in response
    assert allowed or '"debug"' in response["status"]["message"]


def test_answers_a_dry_run_alike() -> None:
    """A dry run gets the same patch: the webhook has no side effects."""
    assert patch_of(send(app_of(), review(dryRun=True)).json()) == PATCH


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe\xfa", "not JSON"),
        (b"[" * 200_000, "not JSON"),
        (b'{"a":' * 100_000, "not JSON"),
        (b"9" * 10_000, "not JSON"),
        (b"[]", "not an AdmissionReview"),
        (b"null", "not an AdmissionReview"),
        ({"kind": "Pod", "apiVersion": "v1"}, "not an AdmissionReview"),
        ({**review(), "apiVersion": "admission.k8s.io/v1beta1"}, "admissionReviewVersions"),
        ({**review(), "request": None}, "no request"),
        (review(uid=None), "no uid"),
        (review(uid=7), "uid is not a string"),
        (review(namespace=["a"]), "namespace is not a string"),
        (review("pod"), "no object"),
    ],
)
def test_answers_400_with_one_line(body: Any, said: str) -> None:
    """What is not a review gets HTTP 400 and one line, and the worker serves on."""
    metrics = Metrics()
    app = app_of(metrics=metrics)
    answer = send(app, body)
    assert answer.status_code == 400
    assert said in answer.text
    assert answer.text.count("\n") == 1
    assert metrics.registry.get_sample_value("kai_isolator_admission_errors_total") == 1
    assert send(app, review()).status_code == 200


def test_refuses_other_content() -> None:
    """Another content type, or a compressed body, gets 415."""
    body = json.dumps(review()).encode()
    for headers in ({"content-type": "text/plain"}, {}, {**JSON, "content-encoding": "gzip"}):
        assert ask(app_of(), "POST", "/mutate", content=body, headers=headers).status_code == 415
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    assert ask(app_of(), "POST", "/mutate", content=body, headers=headers).status_code == 200


def test_refuses_a_large_body_while_it_comes() -> None:
    """A body over 20 MiB gets 413: when announced before it is read, in chunks as soon as it is over."""
    sent = 0

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 1 << 16
            yield b" " * (1 << 16)

    assert stream(app_of(), chunks()) == 413
    assert sent <= MAX_BODY + (2 << 16)
    assert send(app_of(), b" " * (MAX_BODY + 1)).status_code == 413
    assert send(app_of(), b" " * MAX_BODY).status_code == 400


@pytest.mark.parametrize(("seconds", "status"), [(30, 408), (0, 400)])
def test_gives_up_on_a_body_that_never_comes(
    seconds: int, status: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A body that stalls gets 408 and holds no connection; one that breaks off is no fault of ours."""
    monkeypatch.setattr(app_module, "BODY_SECONDS", 0.05)

    async def stalled() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(seconds)

    assert stream(app_of(), stalled()) == status
    assert "internal error" not in caplog.text


@pytest.mark.parametrize("at", ["decide", "build_patch"])
def test_a_fault_of_ours_is_500_and_never_quotes_the_pod(at: str, caplog: pytest.LogCaptureFixture) -> None:
    """An internal error is HTTP 500: the failure policy decides (B074); the log names the pod alone."""

    def broken(content: dict[str, Any], *_: Any) -> Any:
        raise KeyError(json.dumps(content))

    metrics = Metrics()
    with caplog.at_level(logging.DEBUG):
        answer = send(app_of(**{at: broken}, metrics=metrics), review())
    assert answer.status_code == 500
    assert metrics.registry.get_sample_value("kai_isolator_admission_errors_total") == 1
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1
    assert "team/a-*" in errors[0].getMessage() and "KeyError" in errors[0].getMessage()
    assert "hunter2" not in caplog.text + answer.text


def test_says_why_it_is_not_ready() -> None:
    """/readyz is 503 with the first problem's line, 200 without one, 503 again while draining."""
    health = Health()
    app = app_of(health=health)
    assert (ask(app, "GET", "/readyz").status_code, ask(app, "GET", "/readyz").text) == (
        503,
        "no serving certificate yet\n",
    )
    health.certificate = None
    assert "caBundle" in ask(app, "GET", "/readyz").text
    health.bundle = None
    assert ask(app, "GET", "/readyz").status_code == 200
    assert "connection" not in send(app, review()).headers
    health.draining = True
    assert ask(app, "GET", "/readyz").text == "shutting down\n"
    assert ask(app, "GET", "/healthz").status_code == 200
    assert send(app, review()).headers["connection"] == "close"


def test_exports_its_own_and_the_processs_metrics() -> None:
    """/metrics shows admissions, errors, duration, certificate expiry, and what the process uses."""
    app = app_of()
    send(app, review())
    text = ask(app, "GET", "/metrics").text
    for name in (
        'kai_isolator_admissions_total{action="inject",reason="because-inject"} 1.0',
        "kai_isolator_admission_errors_total 0.0",
        "kai_isolator_admission_duration_seconds_bucket",
        "kai_isolator_certificate_expiry_timestamp_seconds 0.0",
        'kai_isolator_certificate_loads_total{result="failed"} 0.0',
        "process_resident_memory_bytes",
    ):
        assert name in text


def test_offers_nothing_else() -> None:
    """No documentation pages, and /mutate takes POST alone."""
    for path in ("/docs", "/openapi.json", "/", "/redoc"):
        assert ask(app_of(), "GET", path).status_code == 404
    assert ask(app_of(), "GET", "/mutate").status_code == 405
