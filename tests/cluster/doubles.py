"""An admission webhook that runs in the test process, for what a real one cannot be made to do."""

from __future__ import annotations

import base64
import json
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from harness import Cluster

# From the request of an AdmissionReview to a JSON patch; an exception denies with its text.
Mutate = Callable[[dict[str, Any]], list[dict[str, Any]]]


@dataclass
class Double:
    """A running webhook: where it listens, the CA it is trusted by, the requests it got."""

    address: str
    port: int
    ca_bundle: str
    requests: list[dict[str, Any]] = field(default_factory=list)

    @property
    def url(self) -> str:
        """For a `clientConfig` that names no Service."""
        return f"https://{self.address}:{self.port}/"


def _answer(request: dict[str, Any], mutate: Mutate) -> dict[str, Any]:
    response: dict[str, Any] = {"uid": request["uid"], "allowed": True}
    try:
        patch = mutate(request)
    except Exception as error:
        response |= {"allowed": False, "status": {"message": str(error)}}
    else:
        if patch:
            response["patchType"] = "JSONPatch"
            response["patch"] = base64.b64encode(json.dumps(patch).encode()).decode()
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}


@contextmanager
def admission(cluster: Cluster, mutate: Mutate, names: Sequence[str] = ()) -> Iterator[Double]:
    """Serves `mutate` over TLS where the API server and pods reach it; `names` are further host names of its
    certificate (`svc.namespace.svc`)."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            request = json.loads(body)["request"]
            double.requests.append(request)
            data = json.dumps(_answer(request, mutate)).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            """Says nothing: the API server's log has it."""

    server = ThreadingHTTPServer((cluster.host_address, 0), Handler)
    server.daemon_threads = True
    authority = cluster.control.ca
    port = server.server_address[1]
    crt, key = authority.sign(f"double-{port}", "double", hosts=[cluster.host_address, *names])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(crt, key)
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    bundle = base64.b64encode(authority.path.read_bytes()).decode()
    double = Double(cluster.host_address, port, bundle)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield double
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
