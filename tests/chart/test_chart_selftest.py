"""The script of `helm test`, run as it is rendered, against a webhook and a monitor over real sockets."""

from __future__ import annotations

import base64
import datetime
import ipaddress
import json
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from charting import RELEASE, ROOT, Object, env_of
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from isolator import names

MOUNT = names.DEFAULT_VGPU_MOUNT
INJECTED = [{"op": "add", "path": "/x", "value": f"{MOUNT}/{names.LIBRARY_FILE}"}]


def certificate(folder: Path) -> Path:
    """A self-signed certificate for 127.0.0.1 with its key, in one PEM file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    file = folder / "tls.pem"
    file.write_bytes(made.public_bytes(pem) + private)
    return file


class Service:
    """Webhook and monitor in one: /mutate answers `patch`, /metrics `metrics`; keeps the reviews."""

    def __init__(self, tls: Path | None = None) -> None:
        self.patch: list[Object] = INJECTED
        self.metrics = "# TYPE kai_isolator_up gauge\nkai_isolator_up 1.0\n"
        self.reviews: list[Object] = []
        service = self

        class Handler(BaseHTTPRequestHandler):
            def _send(self, body: str) -> None:
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body.encode())

            def do_GET(self) -> None:
                self._send(service.metrics if self.path == names.METRICS_PATH else "ok")

            def do_POST(self) -> None:
                review = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                service.reviews.append(review)
                patch = base64.b64encode(json.dumps(service.patch).encode()).decode()
                answer = {"uid": review["request"]["uid"], "allowed": True, "patch": patch}
                self._send(json.dumps({"response": answer}))

            def log_message(self, *arguments: object) -> None:
                """Keeps the test's output clean."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        if tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(tls)
            self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.address = f"127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05})
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def services(tmp_path: Path) -> Iterator[tuple[Service, Service]]:
    """A webhook over TLS and a monitor."""
    both = (Service(certificate(tmp_path)), Service())
    yield both
    for service in both:
        service.close()


def run(
    render: Any, tmp_path: Path, webhook: str, monitor: str, patience: int = 0
) -> subprocess.CompletedProcess[str]:
    pod = render("monitor.enabled=true").one("Pod", f"{RELEASE}-test")["spec"]
    (container,) = pod["containers"]
    assert container["command"][:2] == ["/opt/isolator/bin/python", "-c"]
    env = {**env_of(container), "WEBHOOK": webhook, "MONITOR": monitor}
    env |= {"CA": str(tmp_path / "tls.pem"), "PATIENCE": str(patience)}
    command = [sys.executable, "-c", container["command"][2]]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)


def test_passes_where_all_answer(render: Any, tmp_path: Path, services: tuple[Service, Service]) -> None:
    """The lab's pod is asked for over verified TLS, and each monitor for its metrics."""
    done = run(render, tmp_path, *(service.address for service in services))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        f"webhook {services[0].address}: injects",
        "monitor 127.0.0.1: 1 answer",
    ]
    request = services[0].reviews[0]["request"]
    assert request["object"]["metadata"]["annotations"] == {names.ANNOTATION_MEMORY: "4096"}
    assert request["object"]["spec"]["schedulerName"] == "kai-scheduler"


def test_asks_every_monitor_at_its_own_port(render: Any) -> None:
    """They are found by the headless Service, whose addresses are pods: so the container's port counts."""
    rendered = render("monitor.enabled=true", "monitor.metricsPort=9500", "monitor.service.port=80")
    (container,) = rendered.one("Pod", f"{RELEASE}-test")["spec"]["containers"]
    host, _, port = env_of(container)["MONITOR"].partition(":")
    service = rendered.one("Service", host.partition(".")[0])
    assert service["spec"]["clusterIP"] == "None"
    assert port == "9500"


def test_fails_where_nothing_is_injected(
    render: Any, tmp_path: Path, services: tuple[Service, Service]
) -> None:
    """A webhook that answers without our library fails the test in one line."""
    services[0].patch = []
    done = run(render, tmp_path, *(service.address for service in services))
    assert done.returncode == 1
    assert done.stderr.startswith("webhook: the pod was not injected")
    assert len(done.stderr.splitlines()) == 1


def test_fails_on_a_foreign_certificate(
    render: Any, tmp_path: Path, services: tuple[Service, Service]
) -> None:
    """A server whose certificate the CA did not sign is not believed."""
    certificate(tmp_path)
    done = run(render, tmp_path, *(service.address for service in services))
    assert done.returncode == 1
    assert "CERTIFICATE_VERIFY_FAILED" in done.stderr


def test_fails_where_a_monitor_is_not_up(
    render: Any, tmp_path: Path, services: tuple[Service, Service]
) -> None:
    """A monitor that says 0 fails the test, and the line names it."""
    services[1].metrics = "kai_isolator_up 0.0\n"
    done = run(render, tmp_path, *(service.address for service in services))
    assert done.returncode == 1
    assert "127.0.0.1 serves no kai_isolator_up 1" in done.stderr


def test_passes_with_the_real_webhook(render: Any, tmp_path: Path, services: tuple[Service, Service]) -> None:
    """The product's own webhook, set up by the chart's own environment, injects the pod asked about."""
    certificate(tmp_path)
    pem = (tmp_path / "tls.pem").read_bytes()
    for name in ("tls.crt", "tls.key", "ca.crt"):
        (tmp_path / name).write_bytes(pem)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    pem = "-----BEGIN CERTIFICATE-----\\nAA==\\n-----END CERTIFICATE-----\\n"
    rendered = render('tls.existingSecret="mine"', f'tls.caBundle="{pem}"')
    env = env_of(rendered.pod("Deployment", f"{RELEASE}-webhook")["containers"][0])
    env |= {"ISOLATOR_WEBHOOK_LISTEN": address, "ISOLATOR_WEBHOOK_TLS_DIRECTORY": str(tmp_path)}
    env |= {"PYTHONPATH": str(ROOT), "ISOLATOR_WEBHOOK_DRAIN_SECONDS": "0"}
    webhook = subprocess.Popen([sys.executable, "-m", "isolator.cli", "webhook"], env=env)
    try:
        done = run(render, tmp_path, address, services[1].address, patience=20)
    finally:
        webhook.terminate()
        webhook.wait(timeout=30)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"webhook {address}: injects")
