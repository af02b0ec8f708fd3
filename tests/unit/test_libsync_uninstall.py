"""The hook that takes the installation off all nodes, against a double of the API server."""

from __future__ import annotations

import datetime
import ipaddress
import json
import logging
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from isolator.errors import UnavailableError
from isolator.libsync import uninstall

PATH = "/apis/apps/v1/namespaces/iso/daemonsets/iso-libsync"
COMMAND = ["isolator", "libsync", "--mount=/usr/local/vgpu"]


class Server(ThreadingHTTPServer):
    """One DaemonSet whose controller needs `polls` looks to finish; every request is kept."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        container: dict[str, Any] = {"name": "libsync", "command": list(COMMAND)}
        self.daemonset: dict[str, Any] | None = {
            "metadata": {"generation": 1},
            "spec": {
                "selector": {"matchLabels": {"app": "libsync"}},
                "template": {"spec": {"containers": [{"name": "side", "command": ["sleep"]}, container]}},
            },
            "status": self.state(1, 3, 3),
        }
        self.polls = 2
        self.failures: list[int] = []
        self.pods: list[dict[str, Any]] = [{"spec": {"nodeName": "n1"}, "status": {}}]
        self.seen: list[tuple[str, str, str, Any]] = []

    @staticmethod
    def state(generation: int, updated: int, ready: int) -> dict[str, int]:
        return {
            "observedGeneration": generation,
            "desiredNumberScheduled": 3,
            "updatedNumberScheduled": updated,
            "numberReady": ready,
        }


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self._answer(None)

    def do_PATCH(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _answer(self, body: Any) -> None:
        kept = self.server
        kept.seen.append((self.command, self.path, self.headers.get("Authorization", ""), body))
        if kept.failures:
            return self._send(kept.failures.pop(0), {"message": "not now"})
        if self.path.startswith("/api/v1/namespaces/iso/pods"):
            return self._send(200, {"items": kept.pods})
        if kept.daemonset is None or self.path != PATH:
            return self._send(404, {"message": "no such thing"})
        if body is not None:
            assert self.headers["Content-Type"] == uninstall.STRATEGIC
            kept.daemonset["metadata"]["generation"] = 2
            for new in body["spec"]["template"]["spec"]["containers"]:
                for old in kept.daemonset["spec"]["template"]["spec"]["containers"]:
                    old.update(new if old["name"] == new["name"] else {})
        elif kept.daemonset["metadata"]["generation"] == 2:
            kept.polls -= 1
            kept.daemonset["status"] = kept.state(2, 3, 3 if kept.polls <= 0 else 1)
        return self._send(200, kept.daemonset)

    def _send(self, code: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def api(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> uninstall.Api:
    monkeypatch.setattr(uninstall, "POLL", 0.05)
    (tmp_path / "token").write_text("secret\n")
    return uninstall.Api(f"http://127.0.0.1:{server.server_address[1]}", tmp_path)


def test_every_node_is_asked_to_remove_and_waited_for(
    server: Server, api: uninstall.Api, caplog: pytest.LogCaptureFixture
) -> None:
    """One word more in the installer's command, its token sent, one line a node."""
    with caplog.at_level(logging.INFO):
        assert uninstall.run(api, "iso", "iso-libsync", 10) == 0
    assert server.daemonset
    side, container = server.daemonset["spec"]["template"]["spec"]["containers"]
    assert (["sleep"], [*COMMAND, "--remove"]) == (side["command"], container["command"])
    patch = next(body for method, _, _, body in server.seen if method == "PATCH")
    assert patch["spec"]["updateStrategy"]["rollingUpdate"] == {"maxUnavailable": "100%", "maxSurge": 0}
    assert {"Bearer secret"} == {token for _, _, token, _ in server.seen}
    assert server.polls <= 0
    assert "node n1: no installer runs there" in caplog.text and "all 3 node(s)" in caplog.text


def test_an_installer_is_asked_on_its_own_port(
    server: Server, api: uninstall.Api, caplog: pytest.LogCaptureFixture
) -> None:
    """librarySync.port moves the probes: the pod's port of that name is asked, not the default one."""
    ports = [{"name": "other", "containerPort": 1}, {"name": "health", "containerPort": server.server_port}]
    spec = {"nodeName": "n2", "containers": [{"name": "side"}, {"name": "libsync", "ports": ports}]}
    server.pods = [{"spec": spec, "status": {"podIP": "127.0.0.1"}}]
    with caplog.at_level(logging.INFO):
        assert uninstall.run(api, "iso", "iso-libsync", 10) == 0
    assert ("GET", "/readyz", "", None) in server.seen
    assert 'node n2: {"message": "no such thing"}' in caplog.text


def test_a_second_run_patches_nothing(server: Server, api: uninstall.Api) -> None:
    """Helm may run the hook again."""
    uninstall.run(api, "iso", "iso-libsync", 10)
    server.seen.clear()
    assert uninstall.run(api, "iso", "iso-libsync", 10) == 0
    assert "PATCH" not in {method for method, *_ in server.seen}


def test_without_the_daemonset_there_is_nothing_to_do(server: Server, api: uninstall.Api) -> None:
    """An uninstall that was cut off goes on."""
    server.daemonset = None
    assert uninstall.run(api, "iso", "iso-libsync", 10) == 0


def test_nodes_that_do_not_come_are_told_after_the_time(
    server: Server, api: uninstall.Api, caplog: pytest.LogCaptureFixture
) -> None:
    """Bounded: a dead node must not hold an uninstall for ever."""
    server.polls = 10**6
    assert uninstall.run(api, "iso", "iso-libsync", 1.5) == 1
    assert "1 of 3 node(s) have their outcome" in caplog.text and "by hand" in caplog.text


def test_an_api_server_that_fails_meanwhile_is_asked_again(server: Server, api: uninstall.Api) -> None:
    """The first answers must come; while waiting, errors are waited out."""
    real = server.state
    server.polls = 4

    def fail_once(generation: int, updated: int, ready: int) -> dict[str, int]:
        if server.polls == 2:
            server.failures = [500, 503]
        return real(generation, updated, ready)

    server.state = fail_once  # type: ignore[method-assign]
    assert uninstall.run(api, "iso", "iso-libsync", 10) == 0
    assert server.failures == []


@pytest.mark.parametrize("code", [401, 403, 409, 500])
def test_a_refusal_is_one_line_with_the_servers_reason(
    server: Server, api: uninstall.Api, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the service account lacks is in the line."""
    server.failures = [code]
    words = ["--namespace", "iso", "--daemonset", "iso-libsync", "--api", api.base]
    assert uninstall.main([*words, "--account", str(api.account)]) == 1
    assert f"{PATH}: {code} not now" in capsys.readouterr().err


def test_a_server_that_is_not_there_is_one_line(api: uninstall.Api, server: Server) -> None:
    """Refused connections and certificates that do not match end the same way."""
    with pytest.raises(UnavailableError, match="GET /x"):
        uninstall.Api("http://127.0.0.1:1", api.account).call("GET", "/x")
    with pytest.raises(UnavailableError, match="GET /x"):
        uninstall.Api(api.base.replace("http:", "https:"), api.account).call("GET", "/x")


def test_the_api_servers_address_is_that_of_every_pod() -> None:
    """IPv6 in brackets; outside of a pod one line."""
    asked = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}
    assert uninstall.api_of(asked).base == "https://[fd00::1]:6443"
    assert uninstall.api_of({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}).base == "https://10.0.0.1:443"
    with pytest.raises(UnavailableError, match="runs in a pod"):
        uninstall.api_of({})


@pytest.mark.parametrize("key", ["command", "args"])
def test_the_word_goes_where_the_others_are(key: str) -> None:
    """Whichever of the two lists a chart uses."""
    container = {"name": "c", "command": ["isolator"], "args": ["libsync"]}
    if key == "command":
        container = {"name": "c", "command": ["isolator", "libsync"]}
    found = uninstall.patch_of({"spec": {"template": {"spec": {"containers": [container]}}}})
    assert found
    assert [{"name": "c", key: [*container[key], "--remove"]}] == found["spec"]["template"]["spec"][
        "containers"
    ]
    with pytest.raises(UnavailableError, match="no container"):
        uninstall.patch_of({"spec": {"template": {"spec": {"containers": [{"name": "x"}]}}}})


def _certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """A self-signed pair for 127.0.0.1."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    built = x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
    built = built.not_valid_before(now).not_valid_after(now + datetime.timedelta(days=1))
    built = built.add_extension(x509.SubjectAlternativeName([address]), critical=False)
    signed = built.sign(key, hashes.SHA256())
    pem = serialization.Encoding.PEM
    paths = folder / f"{name}.crt", folder / f"{name}.key"
    paths[0].write_bytes(signed.public_bytes(pem))
    form = serialization.PrivateFormat.PKCS8
    paths[1].write_bytes(key.private_bytes(pem, form, serialization.NoEncryption()))
    return paths


def test_the_api_server_must_show_the_clusters_certificate(server: Server, tmp_path: Path) -> None:
    """The token goes to no server that the service account's CA does not vouch for."""
    certificate, key = _certificate(tmp_path, "cluster")
    other, _ = _certificate(tmp_path, "other")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    api = uninstall.Api(f"https://127.0.0.1:{server.server_address[1]}", tmp_path)
    (tmp_path / "token").write_text("secret")
    (tmp_path / "ca.crt").write_bytes(other.read_bytes())
    with pytest.raises(UnavailableError, match="CERTIFICATE_VERIFY_FAILED"):
        api.call("GET", PATH)
    assert server.seen == []
    (tmp_path / "ca.crt").write_bytes(certificate.read_bytes())
    assert api.call("GET", PATH)["metadata"]
    assert [token for _, _, token, _ in server.seen] == ["Bearer secret"]
