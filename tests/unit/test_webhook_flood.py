"""Bodies that are sent slowly on many connections take neither all places nor the memory."""

from __future__ import annotations

import json
import socket
import ssl

import pytest
from webhookkit import Served, review, serving, until

from isolator.webhook import app as app_module

BODY = json.dumps(review()).encode()


def half_sent(served: Served) -> ssl.SSLSocket:
    """A connection whose body has come by half."""
    plain = socket.create_connection(("127.0.0.1", served.port), 5)
    connection = served.trusting().wrap_socket(plain, server_hostname="localhost")
    length = f"Content-Length: {len(BODY)}\r\n\r\n"
    head = f"POST /mutate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{length}"
    connection.sendall(head.encode() + BODY[: len(BODY) // 2])
    return connection


def status_of(connection: ssl.SSLSocket) -> int:
    connection.settimeout(5)
    return int(connection.recv(4096).split()[1])


@pytest.mark.parametrize(("patience", "served_at_last"), [(0.0, False), (60.0, True)])
def test_slow_bodies_make_room(
    monkeypatch: pytest.MonkeyPatch, patience: float, served_at_last: bool
) -> None:
    """Past the bound the oldest slow body is answered 503 and the newcomer served; a burst that is only just
    coming is waited for."""
    monkeypatch.setattr(app_module, "MOST_WAITING", 3)
    monkeypatch.setattr(app_module, "PATIENCE", patience)
    with serving() as served, served.client() as client:
        slow = []
        for number in range(3):
            slow.append(half_sent(served))
            until(lambda wanted=number + 1: len(served.server.server_state.connections) == wanted)
        assert client.get("/healthz").status_code == 200
        slow.append(half_sent(served))
        if not served_at_last:
            assert status_of(slow[0]) == 503
        for connection in slow[0 if served_at_last else 1 :]:
            connection.sendall(BODY[len(BODY) // 2 :])
            assert status_of(connection) == 200
        assert client.post("/mutate", json=review()).status_code == 200
        for connection in slow:
            connection.close()


def test_a_large_body_that_stalls_gives_its_turn_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large bodies come one at a time; one that never ends keeps the next waiting for a moment only."""
    monkeypatch.setattr(app_module, "LARGE_BODY", len(BODY) // 4)
    monkeypatch.setattr(app_module, "TURN_SECONDS", 0.3)
    with serving() as served, served.client() as client:
        stalled = half_sent(served)
        until(lambda: len(served.server.server_state.connections) == 1)
        assert client.post("/mutate", json=review(), timeout=5).status_code == 200
        assert status_of(stalled) == 408
        stalled.close()
