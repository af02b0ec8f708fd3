"""The server as a whole: settings, TLS, connections that misbehave, the end by signal."""

from __future__ import annotations

import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from webhookkit import app_of, material, patch_of, review, serving, until, verdict, write_generation

from isolator import serving as bounds
from isolator.address import listen, split_address
from isolator.errors import UsageError
from isolator.webhook import certs
from isolator.webhook.settings import load

PREFIX = "ISOLATOR_WEBHOOK_"


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(PREFIX):
            monkeypatch.delenv(name)


def test_reads_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each variable reaches its setting, and the rule's part the rule."""
    given = {
        "LISTEN": ":9443",
        "MOUNT": "/opt/vgpu",
        "ON_NO_LIMIT": "deny",
        "POD_OPT_OUT": "false",
        "SCHEDULERS": "[]",
        "SANDBOX_CLASSES": '["runsc"]',
        "TLS_MODE": "files",
        "LOG_LEVEL": "debug",
        "LOG_JSON": "true",
    }
    for name, value in given.items():
        monkeypatch.setenv(PREFIX + name, value)
    settings = load()
    rule = settings.rule()
    assert (rule.mount, rule.on_no_limit, rule.pod_opt_out) == ("/opt/vgpu", "deny", False)
    assert (rule.schedulers, rule.sandbox_classes) == ((), ("runsc",))
    assert (settings.log_level, settings.log_json, settings.listen) == ("DEBUG", True, ":9443")


def test_has_the_contracts_defaults() -> None:
    """Without variables the names are those of the contract."""
    settings = load(namespace="n")
    assert settings.listen == "0.0.0.0:8443"
    assert settings.mount == "/usr/local/vgpu"
    assert settings.schedulers == ("kai-scheduler",)
    assert settings.sandbox_classes == ("gvisor", "kata*")
    assert settings.secret == "kai-resource-isolator-webhook-tls"
    assert settings.service == "kai-resource-isolator-webhook"
    assert settings.configuration == "kai-resource-isolator-mutating"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LISTEN", "8443"),
        ("LISTEN", "0.0.0.0:http"),
        ("LISTEN", "::8443"),
        ("LISTEN", "0.0.0.0:65536"),
        ("MOUNT", "usr/local"),
        ("MOUNT", "/usr/local/"),
        ("MOUNT", "/usr/../etc"),
        ("MOUNT", "/"),
        ("MOUNT", "/a b"),
        ("MOUNT", "/a:b"),
        ("ON_NO_LIMIT", "ignore"),
        ("POD_OPT_OUT", "perhaps"),
        ("SCHEDULERS", "kai-scheduler"),
        ("SCHEDULERS", '"kai-scheduler"'),
        ("SANDBOX_CLASSES", "[1]"),
        ("TLS_MODE", "none"),
        ("TLS_DIRECTORY", "tls"),
        ("SECRET", ""),
        ("DRAIN_SECONDS", "-1"),
        ("LOG_LEVEL", "loud"),
    ],
)
def test_names_the_variable_that_is_wrong(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    """A bad value is one line that names its variable."""
    monkeypatch.setenv(PREFIX + name, value)
    with pytest.raises(UsageError) as raised:
        load(namespace="n")
    assert str(raised.value).startswith(f"{PREFIX}{name}: ")
    assert "\n" not in str(raised.value)


def test_needs_its_namespace_for_its_own_certificates(monkeypatch: pytest.MonkeyPatch) -> None:
    """The built-in mode cannot name its Service without the namespace; files can."""
    with pytest.raises(UsageError, match="ISOLATOR_WEBHOOK_NAMESPACE is not set"):
        load()
    assert load(tls_mode="files").namespace == ""


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("0.0.0.0:8443", ("0.0.0.0", 8443)),
        ("[::]:8443", ("::", 8443)),
        (":1", ("", 1)),
        ("localhost:0", ("localhost", 0)),
    ],
)
def test_splits_addresses(value: str, expected: tuple[str, int]) -> None:
    """Hosts, bracketed IPv6 and the empty host are understood."""
    assert split_address(value) == expected


def test_says_when_the_port_is_taken() -> None:
    """A port in use is one line that names the variable."""
    with (
        listen("127.0.0.1:0", "X") as taken,
        pytest.raises(UsageError, match="ISOLATOR_WEBHOOK_LISTEN: cannot listen"),
    ):
        listen(f"127.0.0.1:{taken.getsockname()[1]}", f"{PREFIX}LISTEN")


def test_listens_on_both_families() -> None:
    """Without a host, and on [::], IPv4 and IPv6 clients get through (single-stack IPv6 clusters too)."""
    if not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    for address in (":0", "[::]:0"):
        with listen(address, "X") as bound:
            port = bound.getsockname()[1]
            for host in ("127.0.0.1", "::1"):
                socket.create_connection((host, port), 5).close()


def test_serves_reviews_over_tls() -> None:
    """One keep-alive connection over verified TLS 1.2 or later carries many reviews."""
    with serving() as served, served.client() as client:
        quickest = 1.0
        for number in range(20):
            began = time.monotonic()
            answer = client.post("/mutate", json=review(uid=f"u{number}"))
            quickest = min(quickest, time.monotonic() - began)
            assert answer.json()["response"]["uid"] == f"u{number}"
            assert patch_of(answer.json())
        assert quickest < 0.03, "an answer waits for the client's delayed acknowledgement"
        stream = answer.extensions["network_stream"]
        assert stream.get_extra_info("ssl_object").version() in ("TLSv1.2", "TLSv1.3")
        assert "server" not in answer.headers


def test_a_large_body_in_chunks_is_cut_off() -> None:
    """A chunked body without an end gets 413 and the end of the connection."""

    def endless() -> Iterator[bytes]:
        for _ in range(4096):
            yield b" " * (1 << 14)

    with serving() as served, served.client() as client:
        headers = {"content-type": "application/json"}
        with suppress(httpx.TransportError):  # the server may close before this client looks for the answer
            assert client.post("/mutate", content=endless(), headers=headers).status_code == 413
        assert client.post("/mutate", json=review()).status_code == 200


def _closed_within(connection: ssl.SSLSocket, seconds: float) -> bool:
    connection.settimeout(seconds)
    try:
        while connection.recv(4096):
            pass
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


def _connect(served: Any) -> ssl.SSLSocket:
    plain = socket.create_connection(("127.0.0.1", served.port), 5)
    connection: ssl.SSLSocket = served.trusting().wrap_socket(plain, server_hostname="localhost")
    return connection


@pytest.mark.parametrize("sent", [b"", b"POST /mut", b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\nPOST /m"])
def test_drops_connections_that_send_no_headers(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    """Headers that never end do not hold a connection, new or used."""
    monkeypatch.setattr(bounds, "HEADER_SECONDS", 0.3)
    with serving() as served, _connect(served) as slow, served.client() as client:
        slow.sendall(sent)
        assert client.get("/healthz").status_code == 200
        assert _closed_within(slow, 5)
        until(lambda: len(served.server.server_state.connections) == 1)


def test_makes_room_for_new_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Past the bound an idle connection goes, and the newcomer is served."""
    monkeypatch.setattr(bounds.Connection, "most", 3)
    with serving() as served:
        idle = [_connect(served) for _ in range(3)]
        until(lambda: len(served.server.server_state.connections) == 3)
        with served.client() as client:
            assert client.post("/mutate", json=review()).status_code == 200
        until(lambda: len(served.server.server_state.connections) <= 3)
        for connection in idle:
            connection.close()


def test_drains_before_it_ends() -> None:
    """After the signal: not ready, still serving, connections sent elsewhere, what is in flight finishes."""
    entered, release = threading.Event(), threading.Event()

    def slow(*_: Any) -> Any:
        entered.set()
        release.wait(10)
        return verdict("inject")

    with serving(drain=0.5) as served, served.client() as client:
        assert client.get("/readyz").status_code == 200
        served.server.handle_exit(signal.SIGTERM, None)
        began = time.monotonic()
        assert client.get("/readyz").status_code == 503
        answer = client.post("/mutate", json=review())
        assert (answer.status_code, answer.headers["connection"]) == (200, "close")
        until(lambda: served.server.should_exit)
        assert time.monotonic() - began >= 0.4

    health_app = app_of(decide=slow)
    with serving(health_app) as served, ThreadPoolExecutor(1) as pool, served.client() as client:
        pending = pool.submit(client.post, "/mutate", json=review())
        assert entered.wait(5)
        served.server.handle_exit(signal.SIGTERM, None)
        release.set()
        assert pending.result(10).status_code == 200


def test_the_command_serves_and_ends_by_sigterm(tmp_path: Path) -> None:
    """`isolator webhook` with a mounted Secret: start-up line, ready, the lab's pod patched, status 0."""
    data = material()
    write_generation(tmp_path, 1, data)
    with listen("127.0.0.1:0", "X") as free:
        port = free.getsockname()[1]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(PREFIX)}
    own = {"LISTEN": f"127.0.0.1:{port}", "TLS_MODE": "files", "TLS_DIRECTORY": str(tmp_path)}
    own |= {"SET_CA_BUNDLE": "false", "DRAIN_SECONDS": "0"}
    environment |= {PREFIX + name: value for name, value in own.items()}
    command = [sys.executable, "-m", "isolator.cli", "webhook"]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        trusted = ssl.create_default_context(cadata=data[certs.CA].decode())
        with httpx.Client(base_url=f"https://localhost:{port}", verify=trusted, trust_env=False) as client:

            def ready() -> bool:
                try:
                    return client.get("/readyz").status_code == 200
                except httpx.TransportError:
                    return False

            until(ready, 30)
            answer = client.post("/mutate", json=review()).json()["response"]
            assert answer["allowed"] and answer["patch"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(15) == 0
    finally:
        if process.poll() is None:
            process.kill()
        _, said = process.communicate()
    assert re.search(r"webhook starting listen=\S+ mount=/usr/local/vgpu onNoLimit=refuse", said)
    assert "annotationKeys=gpu-fraction|gpu-memory" in said
    assert "Traceback" not in said
