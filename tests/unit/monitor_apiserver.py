"""An API server small enough to misbehave on order: pods (list, watch), one node, Events; over real HTTP."""

from __future__ import annotations

import copy
import json
import queue
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from kubernetes import client

NODE = "node-1"


class ApiServer:
    """State and faults. `requests` holds (method, path, query) of every call."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.pods: dict[str, dict[str, Any]] = {}
        self.labels: dict[str, str] = {"nvidia.com/gpu.memory": "15360"}
        self.events: dict[str, dict[str, Any]] = {}
        self.version = 10
        self.oldest = 0
        """A watch from before this version is answered with 410."""
        self.fail: int | None = None
        self.fail_events: int | None = None
        self.refuse_events: set[str] = set()
        """Namespaces without the right to make Events."""
        self.slow = 0.0
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.tokens: list[str | None] = []
        """The authorisation of every call."""
        self._history: list[tuple[int, bytes]] = []
        self._watches: list[queue.Queue[bytes | None]] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    def __enter__(self) -> ApiServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.drop()
        self._server.shutdown()
        self._server.server_close()

    def configuration(self) -> Any:
        """How a client reaches it."""
        made = client.Configuration(host=f"http://127.0.0.1:{self._server.server_port}")
        made.proxy = None
        return made

    def put(self, pod: dict[str, Any]) -> None:
        """Adds or changes a pod and tells the watches."""
        with self.lock:
            uid = pod["metadata"]["uid"]
            kind = "MODIFIED" if uid in self.pods else "ADDED"
            self.pods[uid] = copy.deepcopy(pod)
            self._tell(kind, self.pods[uid])

    def delete(self, uid: str) -> None:
        """Removes a pod and tells the watches."""
        with self.lock:
            self._tell("DELETED", self.pods.pop(uid))

    def bookmark(self) -> None:
        """Tells the watches a version that no pod has."""
        with self.lock:
            self._tell("BOOKMARK", {"kind": "Pod", "metadata": {}})

    def say(self, line: bytes) -> None:
        """Sends a raw line to every open watch."""
        with self.lock:
            for watch in self._watches:
                watch.put(line)

    def drop(self) -> None:
        """Cuts every open watch in the middle of its answer."""
        with self.lock:
            for watch in self._watches:
                watch.put(None)

    def expire(self) -> None:
        """Forgets all changes so far, and cuts the watches."""
        with self.lock:
            self.version += 1
            self.oldest = self.version
            self.drop()

    def silently(self, pod: dict[str, Any]) -> None:
        """Adds a pod without telling: only a list finds it."""
        with self.lock:
            self.pods[pod["metadata"]["uid"]] = pod

    def watching(self) -> int:
        """Number of open watches."""
        with self.lock:
            return len(self._watches)

    def count(self, watch: bool) -> int:
        """Number of lists or watches asked for so far."""
        return sum(path == "/api/v1/pods" and ("watch" in q) == watch for _, path, q in self.requests)

    def _tell(self, kind: str, item: dict[str, Any]) -> None:
        self.version += 1
        item.setdefault("metadata", {})["resourceVersion"] = str(self.version)
        line = json.dumps({"type": kind, "object": item}).encode() + b"\n"
        if kind != "BOOKMARK":
            self._history.append((self.version, line))
        self.say(line)

    def subscribe(self, since: int) -> queue.Queue[bytes | None]:
        """A watch that first gets what happened after `since`."""
        lines: queue.Queue[bytes | None] = queue.Queue()
        with self.lock:
            if since < self.oldest:
                gone = {"kind": "Status", "code": 410, "reason": "Expired"}
                lines.put(json.dumps({"type": "ERROR", "object": gone}).encode() + b"\n")
            for version, line in self._history:
                if version > since >= self.oldest:
                    lines.put(line)
            self._watches.append(lines)
        return lines

    def unsubscribe(self, lines: queue.Queue[bytes | None]) -> None:
        """Ends a watch."""
        with self.lock:
            self._watches.remove(lines)


def _handler(api: ApiServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # else head and body are 40 ms apart

        def log_message(self, *_: object) -> None:
            pass

        def _answer(self, status: int, body: Any) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def _begin(self) -> tuple[str, dict[str, str], Any] | None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            split = urlsplit(self.path)
            query = {key: values[0] for key, values in parse_qs(split.query).items()}
            api.tokens.append(self.headers.get("Authorization"))
            api.requests.append((self.command, split.path, query))
            time.sleep(api.slow)
            if api.fail is not None:
                self._answer(api.fail, {"kind": "Status", "code": api.fail})
                return None
            return split.path, query, json.loads(body) if body else None

        def do_GET(self) -> None:
            begun = self._begin()
            if begun is None:
                return
            path, query, _ = begun
            if path == f"/api/v1/nodes/{NODE}":
                self._answer(200, {"metadata": {"name": NODE, "labels": api.labels}})
            elif path == "/api/v1/pods" and "watch" in query:
                self._watch(query)
            elif path == "/api/v1/pods":
                with api.lock:
                    meta = {"resourceVersion": str(api.version)}
                    self._answer(200, {"metadata": meta, "items": list(api.pods.values())})
            else:
                self._answer(404, {"code": 404})

        def _watch(self, query: dict[str, str]) -> None:
            lines = api.subscribe(int(query["resourceVersion"]))
            end = time.monotonic() + float(query["timeoutSeconds"])
            try:
                self.send_response(200)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                while (left := end - time.monotonic()) > 0:
                    try:
                        line = lines.get(timeout=left)
                    except queue.Empty:
                        break
                    if line is None:
                        self.close_connection = True
                        return
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
                self.wfile.write(b"0\r\n\r\n")
            except OSError:
                self.close_connection = True
            finally:
                api.unsubscribe(lines)

        def do_POST(self) -> None:
            begun = self._begin()
            if begun is None:
                return
            _, _, event = begun
            name = event["metadata"]["name"]
            if api.fail_events is not None:
                self._answer(api.fail_events, {"code": api.fail_events})
            elif event["metadata"]["namespace"] in api.refuse_events:
                self._answer(403, {"code": 403})
            elif name in api.events:
                self._answer(409, {"code": 409})
            else:
                api.events[name] = event
                self._answer(201, event)

        def do_PATCH(self) -> None:
            begun = self._begin()
            if begun is None:
                return
            path, _, change = begun
            event = api.events.get(path.rpartition("/")[2])
            if event is None:
                self._answer(404, {"code": 404})
            else:
                event.update(change)
                self._answer(200, event)

    return Handler
