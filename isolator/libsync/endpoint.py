"""The probes' port: /healthz and /readyz, a line of text each."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
import time
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from isolator.names import HEALTH_PATH, READY_PATH

Answer = Callable[[], tuple[bool, str]]
MOST_CONNECTIONS: Final = 16
MOST_OF_ONE: Final = 4
"""Of one client: a pod that floods the port leaves places for the kubelet."""
MOST_SECONDS: Final = 5.0
"""How long one connection may last, however slowly it is fed."""


class _Handler(BaseHTTPRequestHandler):
    timeout = 2
    server: Server

    def do_GET(self) -> None:
        answer = self.server.answers.get(self.path.partition("?")[0])
        good, line = answer() if answer else (False, "not found")
        status = 404 if answer is None else 200 if good else 503
        body = (line + "\n").encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def version_string(self) -> str:
        return "isolator"

    def log_message(self, format: str, *args: object) -> None:
        """Probes come every few seconds."""


class Server(ThreadingHTTPServer):
    """Answers from what the last pass left; bounded in connections and in their time."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], ready: Answer, healthy: Answer) -> None:
        self.answers = {READY_PATH: ready, HEALTH_PATH: healthy}
        self.open: dict[Any, tuple[float, str]] = {}
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        # HTTPServer's own looks the host's name up, which can wait for a name server.
        socketserver.TCPServer.server_bind(self)

    def process_request(self, request: Any, client_address: Any) -> None:
        held = Counter(host for _, host in list(self.open.values()))
        if held[client_address[0]] >= MOST_OF_ONE:
            self.shutdown_request(request)
            return
        if held.total() >= MOST_CONNECTIONS:
            self._make_room(max(held, key=lambda host: held[host]))
        self.open[request] = (time.monotonic(), client_address[0])
        super().process_request(request, client_address)

    def _make_room(self, client: str) -> None:
        """Ends the oldest connection of that client."""
        for request, (_, host) in list(self.open.items()):
            if host == client:
                self.open.pop(request, None)
                with contextlib.suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)
                return

    def shutdown_request(self, request: Any) -> None:
        self.open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        late = time.monotonic() - MOST_SECONDS
        for request, (since, _) in list(self.open.items()):
            if since < late:
                with contextlib.suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is no event."""

    def start(self) -> None:
        """Serves in a thread of its own that ends with the process."""
        threading.Thread(target=self.serve_forever, args=(2.0,), name="probes", daemon=True).start()
