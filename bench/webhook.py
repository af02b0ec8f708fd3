#!/usr/bin/env python3
"""What an admission costs: `isolator webhook` in its default mode, over TLS, against a recorded review.

    bench/webhook.py [--json] [--rate 50] [--seconds 20]

The server is a process of its own that makes its certificates; this process is the API server twice: it keeps
the Secret and the webhook configuration, and sends reviews at a steady rate over one kept connection.
`handler` is the server's own histogram (interpolated between its bounds), `end to end` what this client saw.
bench/admission-review.json was recorded from a Kubernetes 1.35 API server (the lab's pod).
Prints a table, or JSON; the exit status is 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import copy
import http.client
import http.server
import json
import re
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import child

ROOT = Path(__file__).resolve().parent.parent
REVIEW = json.loads((ROOT / "bench" / "admission-review.json").read_text())
# Name, unit, most allowed.
TARGETS = (
    ("handler p50", "ms", 1.0),
    ("handler p99", "ms", 5.0),
    ("end to end p50", "ms", None),
    ("end to end p99", "ms", None),
    ("1.5 MB pod, end to end", "ms", 50.0),
    ("110 containers, end to end", "ms", 10.0),
    ("time to ready", "s", 2.0),
    ("processor until ready", "s", None),
    ("resident set", "MiB", 96.0),
    ("resident set, highest", "MiB", None),
    ("idle processor", "milli", 1.0),
    ("errors", "", 0.0),
)


class Cluster(http.server.BaseHTTPRequestHandler):
    """The two objects that the webhook keeps, by plain HTTP."""

    protocol_version = "HTTP/1.1"
    secret: dict[str, Any] | None = None
    hook: dict[str, Any]

    def _reply(self, status: int, thing: Any) -> None:
        body = json.dumps(thing).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _body(self) -> Any:
        return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

    def do_GET(self) -> None:
        found = Cluster.secret if "/secrets" in self.path else Cluster.hook
        self._reply(200 if found else 404, found)

    def do_POST(self) -> None:
        Cluster.secret = self._body()
        Cluster.secret["metadata"]["resourceVersion"] = "1"
        self._reply(201, Cluster.secret)

    def do_PATCH(self) -> None:
        Cluster.hook["webhooks"][0]["clientConfig"]["caBundle"] = self._body()[-1]["value"]
        self._reply(200, Cluster.hook)

    def log_message(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def cluster() -> Iterator[int]:
    """Serves the two objects; gives the port."""
    Cluster.hook = {"metadata": {"name": "c"}, "webhooks": [{"name": "w", "clientConfig": {}}]}
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Cluster)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


class Webhook:
    """The server's process, and one kept connection to it."""

    def __init__(self, folder: Path, api: int) -> None:
        self.port = child.free_port()
        environment = child.environment(folder, f"http://127.0.0.1:{api}") | {
            "ISOLATOR_WEBHOOK_LISTEN": f"127.0.0.1:{self.port}",
            "ISOLATOR_WEBHOOK_NAMESPACE": "bench",
            "ISOLATOR_WEBHOOK_DRAIN_SECONDS": "0",
        }
        self.log = folder / "log"
        began = time.monotonic()
        with self.log.open("wb") as log:
            command = [sys.executable, "-m", "isolator.cli", "webhook"]
            self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=log)
        while not self._ready():
            if self.process.poll() is not None or time.monotonic() - began > 60:
                raise SystemExit(f"bench: the webhook does not get ready:\n{self.log.read_text()}")
            time.sleep(0.05)  # each look is a handshake that the webhook has to pay for
        self.ready_after, self.ready_cost = time.monotonic() - began, child.processor(self.process.pid)
        assert Cluster.secret is not None
        pem = base64.b64decode(Cluster.secret["data"]["ca.crt"]).decode()
        self.connection = self._connect(ssl.create_default_context(cadata=pem))

    def _connect(self, trusted: ssl.SSLContext) -> http.client.HTTPSConnection:
        connection = http.client.HTTPSConnection("127.0.0.1", self.port, context=trusted, timeout=10)
        plain = socket.create_connection(("127.0.0.1", self.port), 10)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        name = "kai-resource-isolator-webhook.bench.svc"
        connection.sock = trusted.wrap_socket(plain, server_hostname=name)
        return connection

    def _ready(self) -> bool:
        try:
            with contextlib.closing(self._connect_unverified()) as connection:
                connection.request("GET", "/readyz")
                return connection.getresponse().status == 200
        except OSError:
            return False

    def _connect_unverified(self) -> http.client.HTTPSConnection:
        context = ssl._create_unverified_context()
        return http.client.HTTPSConnection("127.0.0.1", self.port, context=context, timeout=10)

    def post(self, body: bytes) -> tuple[float, bool]:
        """Milliseconds that one review took, and whether it was answered with a patch."""
        began = time.perf_counter()
        self.connection.request("POST", "/mutate", body, {"Content-Type": "application/json"})
        answer = self.connection.getresponse()
        said = answer.read()
        took = (time.perf_counter() - began) * 1e3
        return took, answer.status == 200 and "patch" in json.loads(said)["response"]

    def histogram(self) -> dict[float, float]:
        """Cumulative counts by upper bound (seconds)."""
        self.connection.request("GET", "/metrics")
        text = self.connection.getresponse().read().decode()
        rows = re.findall(r'admission_duration_seconds_bucket\{le="([^"]+)"\} (\S+)', text)
        return {float(bound): float(count) for bound, count in rows}

    def end(self) -> None:
        """Closes the connection and stops the process."""
        self.connection.close()
        child.end(self.process)


def quantile(before: dict[float, float], after: dict[float, float], share: float) -> float:
    """Milliseconds, interpolated in the bucket that holds the quantile."""
    counts = {bound: after[bound] - before[bound] for bound in after}
    wanted = share * counts[float("inf")]
    low, below = 0.0, 0.0
    for bound, count in sorted(counts.items()):
        if count >= wanted:
            if bound == float("inf"):
                return low * 1e3
            return (low + (bound - low) * (wanted - below) / max(count - below, 1)) * 1e3
        low, below = bound, count
    return low * 1e3


def large_pods() -> dict[str, bytes]:
    """Reviews of a 1.5 MB pod and of a pod with 110 containers."""
    big, many = copy.deepcopy(REVIEW), copy.deepcopy(REVIEW)
    spec = big["request"]["object"]["spec"]
    spec["containers"][0]["env"] = [{"name": f"V{i}", "value": "x" * 200} for i in range(6400)]
    spec = many["request"]["object"]["spec"]
    for i in range(109):
        spec["containers"].append({**spec["containers"][0], "name": f"c{i}"})
    reviews = {"1.5 MB pod": big, "110 containers": many}
    return {name: json.dumps(review, separators=(",", ":")).encode() for name, review in reviews.items()}


def measure(hook: Webhook, rate: int, seconds: float) -> dict[str, float]:
    """All figures of TARGETS."""
    figures = {"time to ready": hook.ready_after, "processor until ready": hook.ready_cost}
    body = json.dumps(REVIEW, separators=(",", ":")).encode()
    for _ in range(rate):
        hook.post(body)
    idle, began = child.processor(hook.process.pid), time.monotonic()
    time.sleep(20 if seconds >= 20 else seconds)
    figures["idle processor"] = (child.processor(hook.process.pid) - idle) / (time.monotonic() - began) * 1e3
    before, took, errors = hook.histogram(), [], 0
    start = time.monotonic()
    for number in range(int(rate * seconds)):
        time.sleep(max(0.0, start + number / rate - time.monotonic()))
        ms, good = hook.post(body)
        took.append(ms)
        errors += not good
    after = hook.histogram()
    figures |= {"handler p50": quantile(before, after, 0.5), "handler p99": quantile(before, after, 0.99)}
    cuts = statistics.quantiles(took, n=100)
    figures |= {"end to end p50": cuts[49], "end to end p99": cuts[98]}
    figures["resident set"] = child.mib(hook.process.pid, "VmRSS")
    for name, review in large_pods().items():
        runs = [hook.post(review) for _ in range(15)]
        errors += sum(not good for _, good in runs)
        figures[f"{name}, end to end"] = statistics.median(ms for ms, _ in runs)
    return figures | {"resident set, highest": child.mib(hook.process.pid, "VmHWM"), "errors": float(errors)}


def main() -> int:
    """Measures, prints, and says by the status whether the targets are met."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--rate", type=int, default=50, help="reviews a second")
    parser.add_argument("--seconds", type=float, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, cluster() as api:
        hook = Webhook(Path(folder), api)
        try:
            figures = measure(hook, options.rate, options.seconds)
        finally:
            hook.end()
    missed = [name for name, _, most in TARGETS if most is not None and figures[name] > most]
    if options.json:
        rows = {n: {"value": round(figures[n], 3), "unit": u, "target": m} for n, u, m in TARGETS}
        print(json.dumps({"rate": options.rate, "seconds": options.seconds, "figures": rows}, indent=1))
    else:
        for name, unit, most in TARGETS:
            allowed = "" if most is None else f"(at most {most:g})"
            mark = "  MISSED" if name in missed else ""
            print(f"{name:28} {figures[name]:9.2f} {unit:5} {allowed}{mark}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
