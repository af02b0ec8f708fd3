"""The monitor's HTTP."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator

import httpx
import pytest
import uvicorn
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from isolator.monitor.app import create_app


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def client(registry: CollectorRegistry) -> Iterator[httpx.Client]:
    """The app behind a real server on a port of its own."""
    config = uvicorn.Config(create_app(registry), port=0, log_config=None, lifespan="off", ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=20) as made:
        yield made
    server.should_exit = True
    thread.join(10)


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
def test_probes_answer_with_nothing_there(client: httpx.Client, path: str) -> None:
    """Ready without NVML, cache or API server."""
    assert client.get(path).status_code == 200


def test_metrics_are_the_registrys(client: httpx.Client, registry: CollectorRegistry) -> None:
    """What is registered is served."""
    Gauge("answer", "An answer.", registry=registry).set(42)

    assert "answer 42.0\n" in client.get("/metrics").text


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("", "text/plain"),
        ("*/*", "text/plain"),
        ("text/html", "text/plain"),
        ("application/openmetrics-text; version=1.0.0", "application/openmetrics-text"),
        ("application/openmetrics-text;version=rubbish", ""),
    ],
)
def test_format_follows_the_accept_header(client: httpx.Client, accept: str, kind: str) -> None:
    """The client's wish decides; an odd wish still gets an answer."""
    answer = client.get("/metrics", headers={"Accept": accept})

    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith(kind)


class _Slow(Collector):
    """A scan that waits until it is let go."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        self.gate.wait(20)
        return []


def test_probes_are_answered_while_a_scan_runs(client: httpx.Client, registry: CollectorRegistry) -> None:
    """A slow scan never makes the kubelet restart the monitor."""
    slow = _Slow()
    registry.register(slow)
    base = str(client.base_url)
    scrape = threading.Thread(target=lambda: httpx.get(f"{base}/metrics", trust_env=False, timeout=20))
    scrape.start()
    try:
        assert client.get("/healthz").status_code == 200
        assert scrape.is_alive()
    finally:
        slow.gate.set()
        scrape.join(20)


@pytest.mark.parametrize("path", ["/metrics", "/healthz", "/readyz"])
def test_head_answers_without_a_body(client: httpx.Client, path: str) -> None:
    """As `curl -I` and some uptime checks ask."""
    asked, told = client.get(path), client.head(path)
    assert (told.status_code, told.content) == (200, b"")
    assert told.headers["content-length"] == str(len(asked.content))


@pytest.mark.parametrize(("method", "path", "status"), [("POST", "/metrics", 405), ("GET", "/docs", 404)])
def test_nothing_else_is_served(client: httpx.Client, method: str, path: str, status: int) -> None:
    """No documentation pages, no other methods."""
    assert client.request(method, path).status_code == status
