"""What many, slow and deaf clients can take of a port of ours: their own connections, nothing more."""

from __future__ import annotations

import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Request
from monitor_apiserver import ApiServer
from monitor_process import Monitor
from starlette.responses import PlainTextResponse, Response

from isolator import serving
from isolator.address import listen

BIG = b"x" * (16 << 20)
CROWD = """
import resource, socket, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
port, number = int(sys.argv[1]), int(sys.argv[2])
held = []
for index in range(number):
    held.append(socket.create_connection(("127.0.0.1", port), 30, ("127.0.0.2", 0)))
    if index % 2:
        held[-1].sendall(b"GET /metrics HTTP/1.1\\r\\n")
print("there", flush=True)
sys.stdin.read()
"""
"""A pod with an address of its own that opens connections and leaves them, half of them amid the headers."""


def _until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


async def _ok(request: Request) -> Response:
    return PlainTextResponse("ok\n")


async def _big(request: Request) -> Response:
    return Response(BIG)


@contextmanager
def _served(most: int) -> Iterator[tuple[int, uvicorn.Server]]:
    """A server of `most` connections in a thread: its port and itself."""
    app = FastAPI(openapi_url=None)
    app.add_route("/ok", _ok)
    app.add_route("/big", _big)
    kind = type("Few", (serving.Connection,), {"most": most})
    server = uvicorn.Server(serving.config(app, kind))
    bound = listen("127.0.0.1:0", "X")
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    try:
        _until(lambda: server.started)
        yield bound.getsockname()[1], server
    finally:
        server.should_exit = server.force_exit = True
        thread.join(15)
        bound.close()
        assert not thread.is_alive()


def test_two_thousand_idle_connections_stop_neither_scrape_nor_probe(tmp_path: Path) -> None:
    """A pod that fills the monitor's port pushes out its own connections; a scraper keeps the one it has.

    The monitor has 512 descriptors here, so holding them all would end it.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ApiServer() as api:
        monitor = Monitor(api, tmp_path)
        monitor.mount.mkdir(exist_ok=True)
        crowd = None
        try:
            resource.prlimit(monitor.process.pid, resource.RLIMIT_NOFILE, (512, limit[1]))
            kept = httpx.Limits(keepalive_expiry=None)
            with httpx.Client(base_url=monitor.url, timeout=20, trust_env=False, limits=kept) as scraper:
                before = scraper.get("/metrics").extensions["network_stream"]
                command = [sys.executable, "-c", CROWD, monitor.url.rpartition(":")[2], "2000"]
                crowd = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
                assert crowd.stdout is not None and crowd.stdout.readline() == b"there\n"
                answer = scraper.get("/metrics")
                assert "kai_isolator_up 1.0" in answer.text
                assert answer.extensions["network_stream"] is before
                for _ in range(3):
                    assert monitor.get("/healthz").status_code == 200
            descriptors = len(list(Path(f"/proc/{monitor.process.pid}/fd").iterdir()))
            assert descriptors < 64 + 40
            assert "Too many open files" not in monitor.log()
        finally:
            if crowd is not None:
                crowd.communicate()
            assert monitor.end() == 0, monitor.log()


def test_room_is_made_by_whoever_has_most() -> None:
    """With all places taken an idle connection of the greediest client goes, not that of another one."""
    with _served(4) as (port, server), ExitStack() as stack:
        quiet = stack.enter_context(socket.create_connection(("127.0.0.1", port), 5, ("127.0.0.3", 0)))
        _until(lambda: len(server.server_state.connections) == 1)
        for _ in range(12):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), 5, ("127.0.0.2", 0)))
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
            assert client.get("/ok").status_code == 200
        quiet.sendall(b"GET /ok HTTP/1.1\r\nHost: x\r\n\r\n")
        assert quiet.recv(4096).startswith(b"HTTP/1.1 200")


def test_answer_that_is_not_read_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that asks and does not read holds the answer's memory for a while, not for ever."""
    monkeypatch.setattr(serving, "UNREAD_SECONDS", 0.3)
    with _served(16) as (port, server), socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(("127.0.0.1", port))
        deaf.sendall(b"GET /big HTTP/1.1\r\nHost: x\r\n\r\n")
        _until(lambda: server.server_state.total_requests == 1)
        _until(lambda: not server.server_state.connections)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
            assert len(client.get("/big").content) == len(BIG)
