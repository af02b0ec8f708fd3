"""The probes' port under a flood: the kubelet is answered, and the work stays bounded."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from isolator.libsync import endpoint


@pytest.fixture
def server() -> Iterator[endpoint.Server]:
    made = endpoint.Server(("127.0.0.1", 0), lambda: (True, "ok"), lambda: (True, "ok"))
    made.start()
    yield made
    made.shutdown()
    made.server_close()


def ready(server: endpoint.Server) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=5)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.parametrize(
    "clients", [["127.0.0.2"] * 40, [f"127.0.0.{n}" for n in range(2, 8) for _ in range(6)]]
)
def test_a_flood_from_elsewhere_leaves_the_probe_its_place(
    server: endpoint.Server, clients: list[str]
) -> None:
    """Connections that send nothing, from one pod or from several, renewed all the time."""
    with ExitStack() as opened:
        for client in clients:
            target = server.server_address[0], server.server_address[1]
            flood = socket.create_connection(target, 5, source_address=(client, 0))
            opened.callback(flood.close)
            assert ready(server) == 200
            assert len(server.open) <= endpoint.MOST_CONNECTIONS
