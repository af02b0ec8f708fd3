"""Calls to the API server: credentials, refusals, and servers that are not there."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from kubernetes import client
from kubernetes.config import incluster_config
from monitor_apiserver import NODE, ApiServer

from isolator import kube
from isolator.errors import UnavailableError

NODE_PATH = f"/api/v1/nodes/{NODE}"


@pytest.fixture
def api() -> Iterator[ApiServer]:
    with ApiServer() as server:
        yield server


def test_answers_are_decoded(api: ApiServer) -> None:
    """One call, one object."""
    assert kube.Api(api.configuration()).ask(NODE_PATH)["metadata"]["name"] == NODE


def test_token_goes_with_every_call_and_is_renewed(api: ApiServer) -> None:
    """The kubelet replaces the service account's token: the client's hook is asked before each call."""
    configuration = api.configuration()
    tokens = iter(("one", "two"))

    def renew(settings: client.Configuration) -> None:
        settings.api_key["authorization"] = f"bearer {next(tokens)}"

    configuration.api_key["authorization"] = "bearer old"
    configuration.refresh_api_key_hook = renew
    made = kube.Api(configuration)
    made.ask(NODE_PATH)
    made.ask(NODE_PATH)

    assert api.tokens == ["bearer one", "bearer two"]


def test_service_account_is_used_in_a_pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a pod the address comes from the environment, token and CA from their files."""
    (tmp_path / "token").write_text("of-the-pod")
    (tmp_path / "ca.crt").write_text("not parsed before the first call")
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(tmp_path / "ca.crt"))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    settings = kube._configuration()

    assert settings.host == "https://10.96.0.1:443"
    assert settings.ssl_ca_cert == str(tmp_path / "ca.crt")
    assert settings.auth_settings()["BearerToken"]["value"].lower() == "bearer of-the-pod"


@pytest.mark.parametrize("status", [401, 403, 404, 410, 429, 500, 503])
def test_refusals_are_told_by_status(api: ApiServer, status: int) -> None:
    """Anything but success is an ApiError, and its line holds the status and no answer's body."""
    api.fail = status
    with pytest.raises(kube.ApiError) as raised:
        kube.Api(api.configuration()).ask(NODE_PATH)

    assert raised.value.status == status
    assert kube.reason(raised.value).startswith(f"HTTP {status}")
    assert "kind" not in kube.reason(raised.value)


def test_server_that_is_away_is_one_of_the_known_failures() -> None:
    """A refused connection raises what callers expect."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    settings = client.Configuration(host=f"http://127.0.0.1:{port}")
    settings.proxy = None

    with pytest.raises(kube.FAILURES) as raised:
        kube.Api(settings).ask("/")
    assert "\n" not in kube.reason(raised.value)


def test_silent_server_is_left_after_the_read_timeout() -> None:
    """A server that accepts and says nothing costs the time-out, not for ever."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        settings = client.Configuration(host=f"http://127.0.0.1:{listener.getsockname()[1]}")
        settings.proxy = None
        with pytest.raises(kube.FAILURES):
            kube.Api(settings).ask("/", read=0.2)


def test_answer_that_is_no_json_is_a_known_failure(api: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Proxies answer with pages."""
    monkeypatch.setattr(json, "loads", lambda _: (_ for _ in ()).throw(ValueError("no JSON")))

    with pytest.raises(kube.FAILURES):
        kube.Api(api.configuration()).ask(NODE_PATH)


def test_an_administrators_kubeconfig_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file that is named, else $KUBECONFIG, else the pod's own; a context chooses among its servers."""

    def file(name: str) -> Path:
        found = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": c, "cluster": {"server": f"http://{name}-{c}"}} for c in "ab"],
            "users": [{"name": "u", "user": {}}],
            "contexts": [{"name": c, "context": {"cluster": c, "user": "u"}} for c in "ab"],
            "current-context": "a",
        }
        path = tmp_path / name
        path.write_text(json.dumps(found))
        return path

    monkeypatch.setenv("KUBECONFIG", str(file("environment")))
    assert kube.chosen().host == "http://environment-a"
    assert kube.chosen(context="b").host == "http://environment-b"
    assert kube.chosen(file("named")).host == "http://named-a"
    for wrong in ({"context": "c"}, {"kubeconfig": tmp_path / "missing"}):
        with pytest.raises(UnavailableError, match="--kubeconfig or KUBECONFIG") as raised:
            kube.chosen(**wrong)  # type: ignore[arg-type]
        assert "\n" not in str(raised.value)


def test_a_refusal_carries_the_servers_words_for_people_alone(api: ApiServer) -> None:
    """A Status's message is kept beside the line that logs have, which is without it."""
    api.fail = 403
    with pytest.raises(kube.ApiError) as raised:
        kube.Api(api.configuration()).ask(NODE_PATH)
    assert raised.value.said and raised.value.said not in kube.reason(raised.value)
