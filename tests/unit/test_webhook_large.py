"""Large reviews: whatever pod the API server can send is judged, and many at once do not take our memory."""

from __future__ import annotations

import json
import socket
import threading
from typing import Any

import httpx
from webhookkit import app_of, pod, review, serving, until

from isolator.webhook.app import LARGE_BODY, create_app
from isolator.webhook.health import Health
from isolator.webhook.metrics import Metrics
from isolator.webhook.review import MAX_BODY
from isolator.webhook.settings import load

OBJECT = 3 << 20
"""Bytes of the largest object that the API server takes."""
JSON = {"content-type": "application/json"}


def _as_go_writes(thing: Any) -> bytes:
    """JSON as encoding/json makes it: what could end a script in HTML is escaped."""
    text = json.dumps(thing, ensure_ascii=False, separators=(",", ":"))
    for letter in "<>&":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text.encode()


def test_the_largest_object_is_judged_in_the_worst_way_to_write_it() -> None:
    """A pod of 3 MiB of `<`, six times as long in a review, is injected: size is no way past the webhook."""
    body = _as_go_writes(review(pod(script="<&>" * (OBJECT // 3))))
    assert 6 * OBJECT < len(body) < MAX_BODY
    app = create_app(load(namespace="test").rule(), Health(None, None), Metrics())
    with serving(app) as served, served.client() as client:
        answer = client.post("/mutate", content=body, headers=JSON, timeout=60)
    assert answer.status_code == 200
    assert answer.json()["response"]["allowed"] and answer.json()["response"]["patch"]


def _stalled(port: int, trusting: Any) -> Any:
    """A connection that has sent the better part of a large review and waits."""
    body = _as_go_writes(review(pod(text="x" * (LARGE_BODY + 4096))))
    plain = socket.create_connection(("127.0.0.1", port), 5)
    connection = trusting.wrap_socket(plain, server_hostname="localhost")
    head = (
        f"POST /mutate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    )
    connection.sendall(head.encode() + b"\r\n\r\n" + body[:-1])
    return connection, body[-1:]


def test_large_bodies_come_one_at_a_time() -> None:
    """While one is being sent the next one waits and small reviews do not; then it has its turn."""
    large = _as_go_writes(review(pod(text="x" * (LARGE_BODY + 4096))))
    answers: list[httpx.Response] = []
    app = app_of()
    turn = next(route.endpoint.__self__._turn for route in app.routes if route.path == "/mutate")
    with serving(app) as served, served.client() as client:
        first, rest = _stalled(served.port, served.trusting())

        def send() -> None:
            with served.client() as other:
                answers.append(other.post("/mutate", content=large, headers=JSON))

        for _ in range(3):
            assert client.post("/mutate", json=review()).status_code == 200
        until(turn.locked)
        second = threading.Thread(target=send)
        second.start()
        second.join(0.5)
        assert second.is_alive() and not answers
        assert client.post("/mutate", json=review()).status_code == 200
        first.sendall(rest)
        assert first.recv(4096).startswith(b"HTTP/1.1 200")
        second.join(10)
        first.close()
        assert [answer.status_code for answer in answers] == [200]
